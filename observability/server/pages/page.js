// The page of the job. The state of the job comes as server-sent events; if the stream breaks, the page polls,
// and if that fails as well, it goes to the page of another rank. Where none answers, it says that what it shows is old, and goes on trying.

import { showHistory } from "./charts.js";
import { duration, plural } from "./format.js";
import { noteLateness } from "./heat.js";
import { showJob } from "./job.js";
import { answering, others } from "./others.js";
import { forget, showProcess } from "./process.js";
import { before, events, get, open } from "./session.js";
import { $, list, setText, table } from "./table.js";

const RECENT_MS = 60000, FRESH_MS = 10000, POLL_MS = 1000, SLOW_MS = 5000, QUIET_MS = 6000, DEAD_MS = 30000;
let stream = null, chosen = null, asked = null, job = null, past = null, lastHeard = 0, looked = 0, streamHeard = 0, patience = QUIET_MS;
let polling = false, op = "all";

// The link to the server: live, polling or stale.

function heard(how) {
  lastHeard = Date.now();
  document.body.classList.remove("stale");
  $("lost").hidden = true;
  setText($("link"), how);
  $("link").className = `pill ${how === "live" ? "good" : "warn"}`;
  setText($("updated"), `updated ${new Date().toLocaleTimeString()}`);
}

function lost(what) {
  document.body.classList.add("stale");
  setText($("link"), "no answer");
  $("link").className = "pill bad";
  const old = lastHeard ? ` What the page shows is from ${new Date(lastHeard).toLocaleTimeString()}.` : "";
  $("lost").hidden = false;
  const elsewhere = offerOthers() || !lastHeard ? "" : " On the host of the job, dist2 ps lists the jobs that still run.";
  setText($("lost-text"), `${what}${old} Trying again every second.${elsewhere}`);
  if (lastHeard) document.title = document.title.replace(/^(No answer: )?/, "No answer: ");
}

const othersWithin = limit => Date.now() - lastHeard < limit ? others(job, asked) : [];

function offerOthers() {
  const links = othersWithin(RECENT_MS), key = JSON.stringify(links);
  if ($("lost-links").shown === key) return links.length;
  $("lost-links").shown = key;
  $("lost-links").replaceChildren(...links.flatMap(([rank, link]) => {
    const anchor = document.createElement("a");
    anchor.href = link;
    anchor.textContent = `Page of rank ${rank}`;
    return [anchor, " "];
  }));
  return links.length;
}

// Go to the page of another rank, in this tab: that page tells so.
async function goElsewhere() {
  const link = await answering(othersWithin(FRESH_MS + patience));
  if (link) location.replace(`${link}&before=${asked}`);
}

function takeJob(now, how) {
  if (!job && before !== null) tellMoved(now.asked_rank);
  job = now;
  asked = now.asked_rank;
  chosen ??= asked;
  patience = QUIET_MS + 6000 * now.took_s;
  heard(how);
  showJob(now, chosen, choose, look);
  showRanks(now);
}

function tellMoved(rank) {
  $("moved").hidden = false;
  setText($("moved"), `Rank ${rank} answers now: rank ${before}, whose page this tab showed, did not answer any more at ${new Date().toLocaleTimeString()}.`);
}

function takeSummary(now, how) {
  heard(how);
  if (chosen === null || chosen === now.identity.rank || now.identity.rank === null) showProcess(now);
}

async function listen() {
  if (stream || document.hidden) return;
  const mine = stream = new AbortController();
  streamHeard = Date.now();
  try {
    for await (const [name, now] of events("/events", mine.signal)) {
      streamHeard = Date.now();
      if (name === "summary") takeSummary(now, "live");
      else if (name === "job") { polling = false; takeJob(now, "live"); }
    }
  } catch { /* the page polls */ }
  if (stream === mine) { stream = null; polling = true; }
}

function hangUp() {
  stream?.abort();
  stream = null;
}

function renew() {
  if (Date.now() - streamHeard > DEAD_MS + patience) hangUp();
  listen();
}

async function poll() {
  try {
    takeSummary(await get("/summary", 3000), "polling");
    takeJob(await get("/job"), "polling");
    renew();
  } catch (error) {
    const isGone = error instanceof TypeError || error.name === "TimeoutError";
    lost(isGone ? "Connection lost: the process has ended, or cannot answer." : error.message);
    if (isGone) await goElsewhere();
  }
}

async function everySecond() {
  if (document.hidden) return;
  if (polling || Date.now() - Math.max(lastHeard, looked) > patience) await poll();
  if (chosen !== null && chosen !== asked) {
    try {
      showProcess(await get(`/summary?rank=${chosen}`));
    } catch (error) {
      setText($("process-note"), error.message);
    }
  }
}

async function everyFive() {
  if (document.hidden || document.body.classList.contains("stale")) return;
  try {
    past = await get(chosen === null || chosen === asked ? "/history" : `/history?rank=${chosen}`);
    showHistory(past, op);
  } catch { /* the link says so */ }
  try {
    showStragglers(await get("/stragglers"));
  } catch (error) {
    setText($("late-note"), error.message);
  }
}

function showStragglers(late) {
  noteLateness(late.ranking);
  list("late-verdict", late.stragglers.map(each => each.sentence));
  table("ranking", [
    { title: "Rank", header: true }, { title: "Group", mono: true }, { title: "Late on average" }, { title: "Share of the time" }, { title: "Operations", number: true },
  ], late.ranking.slice(0, 16).map(row => {
    const named = late.stragglers.some(each => each.rank === row.rank && each.group === row.group);
    return [{ text: `${named ? "◀ " : ""}${row.rank}`, tone: named ? "bad" : "", spoken: named ? `${row.rank}, a straggler` : "" }, row.group,
      duration(row.late_s), { text: `${(100 * row.share).toFixed(1)} %`, part: Math.round(100 * Math.min(1, row.share)) / 100 }, String(row.operations)];
  }), "No collectives to compare yet, or one rank only.");
  const none = late.ranking.some(row => row.judged === false) ? "too early to say" : late.ranking.length ? "none beyond chance" : "";
  setText($("late-note"), late.stragglers.length ? `${plural(late.stragglers.length, "rank")} late beyond chance` : none);
}

// The rank that is shown in detail

function showRanks(now) {
  const select = $("rank");
  if (select.options.length === now.ranks.length) return;
  select.replaceChildren(...now.ranks.map(rank => new Option(String(rank.rank), String(rank.rank), false, rank.rank === chosen)));
  name();
}

function name() {
  for (const node of document.querySelectorAll(".shown")) setText(node, `of rank ${chosen}`);
  $("trace-of-rank").dataset.path = `/trace?seconds=60&rank=${chosen}`;
  $("rank").value = String(chosen);
}

function choose(rank) {
  if (rank === chosen) return;
  chosen = rank;
  forget();
  name();
  if (job) showJob(job, chosen, choose, look);
  everySecond();
  everyFive();
}

function threads(answer) {
  if (!answer.threads) return `rank ${answer.rank} does not answer: ${answer.silence}`;
  const threads = [...answer.threads].sort((a, b) => Number(b.main) - Number(a.main));  // the program first
  return threads.map(thread => [`Thread ${thread.name}${thread.exception ? `, handling ${thread.exception}` : ""}`,
    ...thread.frames.map(frame => `  ${frame.file}:${frame.line} in ${frame.name}`)].join("\n")).join("\n\n");
}

async function look(rank) {
  choose(rank);
  const text = $("stacks-text");
  text.hidden = false;
  setText(text, "Asking …");
  text.focus();
  text.scrollIntoView({ block: "center" });
  try {
    const { ranks } = await get(`/stacks?rank=${rank}`);
    setText(text, threads(ranks[0]));
    setText($("stacks-note"), `of rank ${rank} at ${new Date().toLocaleTimeString()}, innermost frame first`);
  } catch (error) {
    setText(text, error.message);
  }
}

document.addEventListener("click", event => {
  const path = event.target.closest("[data-path]")?.dataset.path;
  if (path) open(path).then(() => setText($("files-note"), ""), error => setText($("files-note"), error.message));
});
$("hosts").addEventListener("click", event => { if (event.target.dataset.rank) choose(Number(event.target.dataset.rank)); });
$("shade").addEventListener("change", () => { if (job) showJob(job, chosen, choose, look); });
$("read-stacks").addEventListener("click", () => look(chosen));
$("rank").addEventListener("change", event => choose(Number(event.target.value)));
$("op").addEventListener("change", event => { op = event.target.value; if (past) showHistory(past, op); });
$("dump-command").textContent = `curl -X POST -H "Authorization: Bearer $TOKEN" -d '{"everywhere": true}' ${location.origin}/acts/dump`;
document.addEventListener("visibilitychange", () => {
  if (document.hidden) hangUp();
  else { looked = Date.now(); listen(); everyFive(); }
});

async function repeat(task, every) {
  const began = performance.now();
  await task();
  setTimeout(repeat, Math.max(100, every - (performance.now() - began)), task, every);
}

looked = Date.now();
listen();
repeat(everySecond, POLL_MS);
repeat(everyFive, SLOW_MS);
