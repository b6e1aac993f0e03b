// The whole job: the banner with the culprit, ranks x groups, operations in flight, errors.

import { duration, grouped, named, plural, ranges } from "./format.js";
import { showHeat } from "./heat.js";
import { $, list, setText, table } from "./table.js";

const ROWS = 32, MANY = 16, COLUMNS = 16, LARGE = 32, CROWDED = 512, OLD_S = 1;
const STATES = {
  ok: ["✓", "good"], waiting: ["◷", "warn"], "waited for": ["◀", "bad"], broken: ["✕", "bad"], silent: ["?", "bad"],
};
const answered = job => job.ranks.filter(rank => rank.state !== "silent");
const keyOf = (work, rank) => JSON.stringify([work.uid, work.seq, work.p2p, work.p2p ? rank : -1]);

// Operations in flight of all ranks, merged by group and number, the oldest first; those that wait with the ranks they miss.
export function inFlight(job) {
  const found = new Map(), waiting = new Map(job.waiting.map(each => [keyOf(each, each.caller), each]));
  for (const rank of answered(job)) {
    for (const work of rank.in_flight) {
      const key = keyOf(work, rank.rank), known = found.get(key);
      if (known) { known.inside.push(rank.rank); known.age_s = Math.max(known.age_s, work.age_s); }
      else found.set(key, { ...work, inside: [rank.rank], waits: waiting.get(key), missing: waiting.get(key)?.missing.map(each => each.rank) ?? [] });
    }
  }
  return [...found.values()].sort((a, b) => b.age_s - a.age_s);
}

function cellOf(rank, groups, late, broken) {
  const group = groups.find(each => each.state !== "closed") ?? groups[0];
  if (!group) return { text: "·", tone: "dim", spoken: "not a member" };
  if (group.state === "broken") return { text: "✕ broken", tone: "bad" };
  if (group.state === "closed") return { text: "– closed", tone: "dim" };
  const work = rank.in_flight.find(each => each.uid === group.uid);
  if (work) {
    const old = work.age_s > OLD_S;
    return { text: `${old ? "◷" : "▸"} ${work.op} #${work.seq}, ${duration(work.age_s)}`, tone: old ? "warn" : "" };
  }
  const waits = late.find(each => each.uid === group.uid && each.missing.includes(rank.rank));
  if (waits) return { text: `◀ missing in #${waits.seq}`, tone: "bad" };
  if (broken?.uid === group.uid && broken.missing.includes(rank.rank)) return { text: `◀ not in ${broken.op}`, tone: "bad" };
  return { text: group.last ? `✓ ${group.last.op} #${group.last.seq}` : "✓ nothing yet", tone: "good" };
}

// The last step of a rank: its time, and the shares of operations and of waiting for other ranks.
function stepOf(rank) {
  const step = rank.steps?.[0]?.latest.at(-1);
  if (!step) return "";
  const percent = part => `${Math.round(100 * part / step.step_s)} %`;
  const loop = rank.steps.length > 1 ? `${rank.steps[0].name} ` : "";
  return `${loop}#${step.number} ${duration(step.step_s)}, ${percent(step.operations_s)} operations, ${percent(step.waited_s)} waiting`;
}

// Groups of one dimension share a column, such as tp-0 and tp-1: their names differ in numbers, and they are disjoint.
function columnsOf(job) {
  const merged = name => name.replace(/\([\d,:\s-]*\)/g, "(…)"), wild = name => merged(name).replace(/\d+/g, "*");
  const members = new Map();  // by the name with numbers left out: the names, and those in which a rank is twice
  for (const rank of answered(job)) {
    const mine = new Set();
    for (const name of new Set(rank.groups.filter(group => group.state !== "closed").map(group => merged(group.name)))) {
      const known = members.get(wild(name)) ?? { names: new Set(), overlap: false };
      known.names.add(name);
      known.overlap ||= mine.has(wild(name));
      mine.add(wild(name));
      members.set(wild(name), known);
    }
  }
  const together = ({ names, overlap } = { names: new Set() }) => names.size > 1 && !overlap;
  return group => together(members.get(wild(group.name))) ? wild(group.name) : merged(group.name);
}

function showGrid(job, works, causes, chosen, choose) {
  const columnOf = columnsOf(job), groups = answered(job).flatMap(rank => rank.groups);
  const loops = job.ranks.some(rank => rank.steps?.length);
  const broken = brokenGroup(job), late = works.filter(work => work.age_s > OLD_S && !work.p2p);
  const troubled = new Set(late.map(work => work.uid).concat(broken ? [broken.uid] : []));
  const place = group => group.state === "closed" ? 2 : Number(!troubled.has(group.uid) && group.state !== "broken");  // in trouble first
  const names = [...new Set(groups.sort((a, b) => place(a) - place(b)).map(columnOf))].slice(0, COLUMNS);
  const urgency = rank => causes.has(rank.rank) ? -1 : ["waited for", "broken", "silent", "waiting", "ok"].indexOf(rank.state);  // where not all are on the screen
  const some = job.ranks.length <= MANY ? job.ranks : [...job.ranks].sort((a, b) => urgency(a) - urgency(b) || a.rank - b.rank);
  $("grid").classList.toggle("dense", job.ranks.length > MANY);
  table("grid", [
    { title: "Rank", header: true }, { title: "State" }, ...names.map(name => ({ title: name, mono: true })),
    { title: "Main thread", mono: true, wide: true }, ...(loops ? [{ title: "Last step", wide: true }] : []), { title: "Process", mono: true }, { title: "Clock offset", hint: "Against the asked rank" },
  ], some.map(rank => () => {
    const [sign, tone] = STATES[rank.state], state = { text: `${sign} ${rank.state}`, tone, spoken: rank.state };
    const button = { text: String(rank.rank), spoken: `Show rank ${rank.rank}`, press: () => choose(rank.rank), pressed: rank.rank === chosen };
    if (rank.state === "silent") return [button, state, ...names.map(() => "?"), rank.silence, ...(loops ? [""] : []), rank.host ?? "", ""];
    return [button, state, ...names.map(name => cellOf(rank, rank.groups.filter(group => columnOf(group) === name), late, broken)), rank.main.place, ...(loops ? [stepOf(rank)] : []),
      `${rank.host}:${rank.pid}`, `${(rank.clock_offset_s * 1e3).toFixed(2)} ± ${(rank.clock_error_s * 1e3).toFixed(2)} ms`];
  }), "No answer yet.");
  setText($("ranks-note"), job.ended ? "as they were at the last answer, before the end"
    : `${grouped(job.answered)} of ${plural(job.world_size, "rank")} answered within ${duration(job.took_s)}`);
}

function missingOf({ missing, waits }) {
  if (!missing.length) return waits ? "none: all are inside" : "";
  return named(missing) + (waits.more ? ` and ${grouped(waits.more)} more` : "");
}

function showInFlight(works) {
  table("waits", [
    { title: "Operation", header: true, mono: true }, { title: "Group", mono: true }, { title: "Age of its timeout" }, { title: "Inside" },
    { title: "Missing" }, { title: "Call", mono: true, wide: true }, { title: "Called at", mono: true },
  ], [...works].sort((a, b) => (b.missing.length > 0) - (a.missing.length > 0)).slice(0, ROWS).map(work => {
    const old = work.age_s > OLD_S, tone = old ? "warn" : "";
    const timeout = work.timeout_s === undefined ? "" : ` of ${duration(work.timeout_s)}`;
    return [`${work.op} #${work.seq}`, work.group,
      { text: `${duration(work.age_s)}${timeout}`, tone, part: Math.round(50 * Math.min(1, work.age_s / (work.timeout_s || 60))) / 50 },
      ranges(work.inside), { text: missingOf(work), tone: work.missing.length && old ? "bad" : "" },
      work.call, work.where];
  }), "Nothing is in flight: no rank waits for another one.");
  const old = works.filter(work => work.age_s > OLD_S).length;
  setText($("flying-note"), old ? `${grouped(old)} older than a second${works.length > ROWS ? `; ${ROWS} are shown, those that miss a rank first` : ""}` : "");
  setText($("tile-flying"), String(works.length));
  setText($("tile-flying-note"), works.length ? `oldest: ${works[0].op} #${works[0].seq}, ${duration(works[0].age_s)}` : "nothing waits");
}

function showErrors(job) {
  const rows = answered(job).flatMap(rank => rank.failures.map(failure => [String(rank.rank), { text: failure.error, tone: "bad" }, failure.group, failure.call, failure.message]));
  table("failed", [
    { title: "Rank", header: true }, { title: "Error", mono: true }, { title: "Group", mono: true }, { title: "Call", mono: true, wide: true }, { title: "Message", wide: true },
  ], rows.slice(0, ROWS), "No operation of these groups has failed.");
  setText($("errors-note"), rows.length ? "the last ones of each rank" : "");
  const lines = [...job.events ?? []].reverse();
  table("log", [{ title: "Time", header: true }, { title: "Level" }, { title: "Message", wide: true }], lines.map(line => [
    new Date(line.at_s * 1000).toLocaleTimeString(), { text: line.level, tone: line.level === "ERROR" ? "bad" : "warn" }, line.message,
  ]), "The job has not waited for a rank.");
}

// A broken group, with the members that had not entered the operation that failed; null where none is broken.
function brokenGroup(job) {
  const all = answered(job).flatMap(rank => rank.groups.map(group => ({ ...group, at: rank.rank })));
  const broken = all.filter(group => group.state === "broken" && group.last);
  if (!broken.length) return null;
  const first = broken.reduce((most, group) => group.begun > most.begun ? group : most);
  const missing = all.filter(group => group.uid === first.uid && group.begun < first.begun).map(group => group.at);
  // Ranks whose operation in another group failed waited as well: others are the reason, if there are any.
  const failed = new Set(broken.map(group => group.at)), culprits = missing.filter(rank => !failed.has(rank));
  return { name: first.name, uid: first.uid, op: `${first.last.op} #${first.begun}`, missing, culprits: culprits.length ? culprits : missing };
}

// Failures with one message, as "OperationTimeoutError on ranks 0, 1, 3: ...".
function merged(broken) {
  const found = new Map();
  for (const rank of broken) {
    const failure = rank.failures[0];  // the newest
    if (!failure) continue;
    const key = `${failure.error} ${failure.message.replace(/\d[\d.]* s\b/g, "")}`;  // each waited a little longer or shorter
    found.set(key, { failure, ranks: [...(found.get(key)?.ranks ?? []), rank] });
  }
  return [...found.values()].map(each => `${each.failure.error} on ${ranks(each.ranks)}: ${each.failure.message}`);
}

// The sentence of the banner, and what tells one trouble from another: without ages, which change every second.
function judged(job) {
  const broken = job.ranks.filter(rank => rank.state === "broken"), silent = job.ranks.filter(rank => rank.state === "silent");
  const group = brokenGroup(job), culprits = job.culprits, fates = silent.filter(rank => rank.process).slice(0, 3)
    .map(rank => `rank ${rank.rank} ${rank.process.words.replace(/^process \d+ /, "")}`).join(", ");
  const lines = job.verdict.length ? [...job.verdict] : merged(broken).slice(0, 3);
  if (!job.verdict.length) lines.push(...silent.slice(0, 3).map(rank => `rank ${rank.rank}: ${rank.silence}`));
  const at = [...new Set([...culprits, ...silent.map(rank => rank.rank)])];
  if (job.ended?.incident) lines.push(`Incident: dist2 why ${job.ended.incident}`);
  if (job.headline) return { sign: "■", tone: job.tone ?? "warn", title: job.headline, lines, at };  // of the launcher
  if (group?.missing.length) return { sign: "✕", tone: "bad", title: `Group ${group.name} is broken: ${named(group.culprits)} did not enter ${group.op}${fates && `, ${fates}`}`, lines, at: group.culprits };
  if (broken.length) return { sign: "✕", tone: "bad", title: `A group is broken on ${ranks(broken)}${culprits.length ? ` because of ${named(culprits)}` : ""}${fates && `: ${fates}`}`, lines, at: at.length ? at : [broken[0].rank] };
  if (culprits.length) return { sign: "◀", tone: "bad", title: `The job waits for ${named(culprits)}${fates && `: ${fates}`}`, lines, at };
  if (silent.length) return { sign: "?", tone: "bad", title: `No answer from ${ranks(silent)}${fates && `: ${fates}`}`, lines, at };
  if (lines.length) return { sign: "◷", tone: "warn", title: "Operations wait", lines, at: [] };
  return { sign: "✓", tone: "good", title: job.world_size === 1 ? "The rank works" : `All ${grouped(job.world_size)} ranks work`, lines: job.slow_step ? [`Slow: ${job.slow_step}`] : [], at: [] };
}

const ranks = some => named(some.map(rank => rank.rank));
const withoutAges = text => text.replace(/ for \d+(\.\d+)? s\b/g, "");

// Shows the banner; returns the ranks that it names as the cause.
function showState(job, look) {
  const { sign, tone, title, lines, at } = judged(job);
  $("state").className = `banner ${tone}`;
  setText($("state-title"), `${sign} ${title}`);
  list("verdict", lines);
  setText($("announce"), [title, ...lines.slice(0, 1).map(withoutAges)].join(". "));
  const next = $("next"), key = JSON.stringify([at.slice(0, 3), tone]);
  next.hidden = tone === "good";
  if (next.shown === key) return new Set(at);
  next.shown = key;
  const buttons = at.slice(0, 3).map(rank => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `Stacks of rank ${rank}`;
    button.addEventListener("click", () => look(rank));
    return button;
  });
  const links = [["/desync", "Diagnosis"], ["/trace?seconds=60", "Trace of the last minute"], ["/flight_recorder", "Flight recorder"]].map(([path, text]) => {
    const link = document.createElement("button");
    link.type = "button";
    link.className = "link";
    link.dataset.path = path;
    link.textContent = text;
    return link;
  });
  next.replaceChildren(...buttons, ...links);
  return new Set(at);
}

export function showJob(job, chosen, choose, look) {
  const works = inFlight(job), well = job.ranks.filter(rank => rank.state === "ok").length;
  const causes = showState(job, look);
  setText($("tile-ranks"), `${grouped(job.ended ? 0 : well)} of ${grouped(job.world_size)}`);
  const others = Object.keys(STATES).slice(1).map(state => [state, job.ranks.filter(rank => rank.state === state).length]).filter(([, n]) => n);
  setText($("tile-ranks-note"), others.map(([state, n]) => `${grouped(n)} ${state}`).join(", ") || (job.ended ? "at the end, all worked" : "none waits"));
  showGrid(job, works, causes, chosen, choose);
  showInFlight(works);
  showErrors(job);
  setText($("who"), `${job.name ? `${job.name}: ` : ""}job of ${plural(job.world_size, "rank")}, asked rank ${job.asked_rank}`);
  document.body.classList.toggle("large", job.ranks.length > LARGE);
  document.body.classList.toggle("crowded", job.ranks.length > CROWDED);
  showHeat(job, causes, chosen);
  document.title = $("state").classList.contains("good") ? `${job.name ?? "dist2"}, ${plural(job.world_size, "rank")}`
    : `⚠ ${job.name ?? "dist2"}: ${$("state-title").textContent.slice(2)}`;
}
