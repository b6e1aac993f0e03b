// One process: operations with rates and percentiles, groups, failures.

import { bytes, count, duration, plural, quantile, ranges } from "./format.js";
import { $, setText, table } from "./table.js";

const KEEP_S = 65, ROWS = 60;
const samples = [];  // the summaries of the last minute, oldest first
let recent = true;

const keyOf = row => JSON.stringify([row.op, row.group, row.size]);

function since(now, before) {
  const earlier = new Map(before);
  return now.map(([place, n]) => [place, n - (earlier.get(place) ?? 0)]).filter(([, n]) => n > 0);
}

function totals(summary) {
  return summary.operations.reduce((sum, row) => ({
    ended: sum.ended + row.count + row.failed, failed: sum.failed + row.failed, bytes: sum.bytes + row.bytes,
  }), { ended: 0, failed: 0, bytes: 0 });
}

function showTiles(now) {
  const all = totals(now), before = samples.at(-2), span = before ? now.now_s - before.now_s : 0;
  const rate = field => Math.max(0, all[field] - totals(before)[field]) / span;
  setText($("tile-ops"), span > 0 ? `${count(rate("ended"))} /s` : "–");
  setText($("tile-bytes"), span > 0 ? `${bytes(rate("bytes"))}/s` : "–");
  setText($("tile-ops-note"), `${count(all.ended)} since the start, ${all.failed ? `${all.failed} failed` : "none failed"}`);
  setText($("tile-bytes-note"), `${bytes(all.bytes)} since the start`);
}

function showOperations(now) {
  const base = recent ? samples[0] : null, seconds = base ? now.now_s - base.now_s : 0, spanned = recent && seconds > 0;
  const before = new Map((base?.operations ?? []).map(row => [keyOf(row), row]));
  const rows = now.operations.map(row => {
    const old = before.get(keyOf(row)) ?? { count: 0, bytes: 0, total_s: 0, durations: [] };
    return { row, span: spanned
      ? { count: row.count - old.count, bytes: row.bytes - old.bytes, spent: row.total_s - old.total_s, places: since(row.durations, old.durations) }
      : { count: row.count, bytes: row.bytes, spent: row.total_s, places: row.durations } };
  });
  rows.sort((a, b) => b.span.spent - a.span.spent || b.row.total_s - a.row.total_s);
  table("operations", [
    { title: "Operation", header: true, mono: true }, { title: "Group", mono: true }, { title: "Size", mono: true }, { title: "Count", number: true },
    { title: "Rate", number: true }, { title: "Payload", number: true }, { title: "Payload rate", number: true },
    { title: "p50", number: true, hint: "Half of the operations took at most this long" },
    { title: "p99", number: true, hint: "99 of 100 operations took at most this long" },
    { title: "Longest", number: true, hint: "Of the last minutes" }, { title: "Failed", number: true },
  ], rows.slice(0, ROWS).map(({ row, span }) => [
    row.op, row.group, row.size, count(row.count), spanned ? `${count(span.count / seconds)} /s` : "–", bytes(row.bytes),
    spanned ? `${bytes(span.bytes / seconds)}/s` : "–", duration(Math.min(row.longest_s || Infinity, quantile(span.places, .5))),
    duration(Math.min(row.longest_s || Infinity, quantile(span.places, .99))), row.count ? duration(row.longest_s) : "–",
    { text: String(row.failed), tone: row.failed ? "bad" : "" },
  ]), "No operation has ended yet.");
  const hidden = rows.length - ROWS;
  setText($("operations-note"), rows.length
    ? (spanned ? `rates and percentiles of the last ${Math.max(1, Math.round(seconds))} s` : "percentiles since the start") + (hidden > 0 ? `; ${hidden} more rows in /metrics` : "")
    : "");
}

function showGroups(now) {
  const signs = { open: ["✓ open", "good"], broken: ["✕ broken", "bad"], closed: ["– closed", "dim"] };
  table("groups", [
    { title: "Group", header: true, mono: true }, { title: "State" }, { title: "Backend", mono: true }, { title: "Rank in it", number: true },
    { title: "Size", number: true }, { title: "Ranks in the job" }, { title: "Last number", number: true }, { title: "Open for", number: true }, { title: "Description", wide: true },
  ], now.groups.map(group => [
    group.name, { text: signs[group.state][0], tone: signs[group.state][1] }, group.backend, String(group.rank), String(group.world_size), ranges(group.global_ranks),
    String(group.last_seq), duration(group.open_for_s), group.broken_by ? `${group.broken_by.error}: ${group.broken_by.message}` : group.desc,
  ]), "No group has been opened in this process yet.");
}

function showFailures(now) {
  table("failures", [
    { title: "Ago", header: true }, { title: "Error", mono: true }, { title: "Group", mono: true }, { title: "Call", mono: true, wide: true }, { title: "Message", wide: true },
  ], now.failures.map(failure => [duration(failure.ago_s), { text: failure.error, tone: "bad" }, failure.group, failure.call, failure.message]), "No operation has failed.");
}

export function forget() {
  samples.length = 0;
}

export function showProcess(now) {
  if (samples.length && now.identity.pid !== samples[0].identity.pid) forget();
  samples.push(now);
  while (samples.length > 2 && now.now_s - samples[0].now_s > KEEP_S) samples.shift();
  const me = now.identity;
  setText($("process-note"), `${me.host}, pid ${me.pid}, ${plural(now.in_flight_count, "operation")} in flight${now.health.ok ? "" : `; ${now.health.status}`}`);
  setText($("process-name"), `dist2 ${me.version}`);
  showTiles(now);
  showOperations(now);
  showGroups(now);
  showFailures(now);
}

function chooseSpan(isRecent) {
  recent = isRecent;
  $("recent").setAttribute("aria-pressed", isRecent);
  $("always").setAttribute("aria-pressed", !isRecent);
  if (samples.length) showOperations(samples.at(-1));
}

$("recent").addEventListener("click", () => chooseSpan(true));
$("always").addEventListener("click", () => chooseSpan(false));
