// All ranks of a large job at a glance: a square for each, in blocks by host, shaded by state or by a number.

import { duration, plural, ranges } from "./format.js";
import { $, make, setText } from "./table.js";

const MANY = 16, SHADES = 5, UNKNOWN = "host unknown";
const hosts = new Map(), late = new Map();  // by rank: its last known host; how late it is on average, in seconds
let blocks = "", cells = new Map();

const lastStep = rank => rank.steps?.[0]?.latest.at(-1);
const MEASURES = {
  wait: { title: "waiting share of the last step", of: rank => { const step = lastStep(rank); return step && step.waited_s / step.step_s; }, text: value => `${Math.round(100 * value)} %` },
  age: { title: "age of the last step", of: rank => { const step = lastStep(rank); return step && Math.max(0, rank.at_s - step.ended_s); }, text: duration },
  late: { title: "lateness", of: rank => late.get(rank.rank), text: duration },
};

export function noteLateness(ranking) {
  late.clear();
  for (const each of ranking) late.set(each.rank, Math.max(each.late_s, late.get(each.rank) ?? 0));
}

function shaded(job, measure) {
  const values = job.ranks.map(rank => rank.state === "silent" ? undefined : measure.of(rank));
  const known = values.filter(value => value !== undefined), low = Math.min(...known), high = Math.max(...known);
  const level = value => high > low ? Math.min(SHADES - 1, Math.floor(SHADES * (value - low) / (high - low))) : 0;
  setText($("map-scale"), known.length ? `${measure.text(low)} (faint) to ${measure.text(high)} (strong)` : "no rank has told it");
  return values.map(value => value === undefined ? ["none", "unknown"] : [`h${level(value)}`, measure.text(value)]);
}

// All ranks of a group break together: the one that is the cause looks like one that is waited for.
const ofStates = (job, causes) => job.ranks.map(rank => rank.state === "broken" && causes.has(rank.rank) ? ["waited-for", "broken, the cause"]
  : [rank.state.replaceAll(" ", "-"), rank.state]);

function arrange(job) {
  const byHost = new Map();
  for (const rank of job.ranks) {
    if (rank.host) hosts.set(rank.rank, rank.host);
    const host = hosts.get(rank.rank) ?? UNKNOWN;
    byHost.set(host, [...(byHost.get(host) ?? []), rank.rank]);
  }
  const key = JSON.stringify([...byHost].map(([host, ranks]) => [host, ranks.length, ranks[0]]));
  if (key === blocks) return;
  blocks = key;
  cells = new Map();
  $("hosts").replaceChildren(...[...byHost].map(([host, ranks]) => {
    const block = make("div", undefined, "host"), squares = make("div", undefined, "squares");
    block.title = `${host}: ranks ${ranges(ranks)}`;  // all that names it where many hosts leave no room
    block.append(make("span", `${host} `, "mono"), make("span", ranges(ranks), "dim"), squares);
    for (const rank of ranks) {
      const square = make("i");
      square.dataset.rank = rank;
      squares.append(square);
      cells.set(rank, square);
    }
    return block;
  }));
}

export function showHeat(job, causes, chosen) {
  $("map").hidden = job.ranks.length <= MANY;
  if ($("map").hidden) return;
  arrange(job);
  const shade = $("shade").value, shown = shade === "state" ? ofStates(job, causes) : shaded(job, MEASURES[shade]);
  if (shade === "state") setText($("map-scale"), "");
  job.ranks.forEach((rank, index) => {
    const square = cells.get(rank.rank), [tone, text] = shown[index], kind = `${tone}${rank.rank === chosen ? " chosen" : ""}`;
    if (square.className !== kind) square.className = kind;
    const title = `rank ${rank.rank} on ${hosts.get(rank.rank) ?? UNKNOWN}: ${text}`;
    if (square.title !== title) square.title = title;
  });
  const trouble = job.ranks.filter(rank => rank.state !== "ok");
  setText($("map-note"), `${plural(new Set(hosts.values()).size, "host")}; ${trouble.length ? `not at work: ${plural(trouble.length, "rank")}` : "all at work"}`);
}
