// The last hour of a rank, drawn by uPlot (MIT licence, vendor/), with the same in words for those who do not see it.

import { bytes, count, duration } from "./format.js";
import { $, make, setText } from "./table.js";

const HEIGHT = 190;
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// light-dark() stays as it is in a custom property: a painted element resolves it.
const probe = document.body.appendChild(make("span", "", "sr"));
probe.setAttribute("aria-hidden", "true");
function painted(name) {
  probe.style.color = color(name);
  return getComputedStyle(probe).color;
}

const clock = (at, seconds) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(seconds ? { second: "2-digit" } : {}) });
const axis = (values, size) => ({
  stroke: () => painted("dim"), grid: { stroke: () => painted("line"), width: 1 }, ticks: { show: false },
  font: "11px system-ui", ...(values ? { values: (_, ticks) => ticks.map(tick => tick === null ? "" : values(tick)), size } : {}),
});
const line = (label, tone, values, dash) => ({
  label, stroke: () => painted(tone), width: 1.5, dash, points: { size: 4 }, value: (_, value) => value === null || value === undefined ? "–" : values(value),
});

const charts = {
  latency: { lines: [line("p50", "blue", duration), line("p99", "orange", duration, [6, 3])], values: duration, log: true },
  bandwidth: { lines: [line("payload", "blue", value => `${bytes(value)}/s`), line("bus", "orange", value => `${bytes(value)}/s`, [6, 3])], values: value => `${bytes(value)}/s` },
  rate: { lines: [line("ended", "blue", value => `${count(value)} /s`), line("in flight", "orange", count, [6, 3])], values: count },
};

function chart(id) {
  const { lines, values, log } = charts[id], place = $(id);
  const zero = (_, least, most) => [0, most > 0 ? most * 1.05 : 1];
  // A flat or empty curve has no decades: give it some.
  const splits = { splits: (_, __, least, most) => Array.from({ length: Math.round(Math.log10(most / least)) + 1 }, (_, i) => least * 10 ** i) };
  const binary = { incrs: Array.from({ length: 60 }, (_, i) => 2 ** i) };
  const x = { ...axis(), size: 28, values: (_, ticks, __, ___, step) => ticks.map(tick => clock(tick, step < 60)), space: 64 };
  const decades = (_, least, most) => least > 0 ? [10 ** Math.floor(Math.log10(least)), 10 ** Math.ceil(Math.log10(most * 1.001))] : [1e-6, 1];
  const drawn = new uPlot({
    width: Math.max(200, place.clientWidth), height: HEIGHT - 30, cursor: { drag: { x: false, y: false } },
    scales: { x: { time: true }, y: log ? { distr: 3, range: decades } : { range: zero } },
    series: [{ label: "at", value: (_, at) => at ? clock(at, true) : "–" }, ...lines],
    axes: [x, { ...axis(values, 74), ...(log ? splits : id === "bandwidth" ? binary : {}) }],
  }, [[], ...lines.map(() => [])], place);
  new ResizeObserver(() => drawn.setSize({ width: Math.max(200, place.clientWidth), height: HEIGHT - 30 })).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.redraw(false, true));
  return drawn;
}

const drawn = Object.fromEntries(Object.keys(charts).map(id => [id, chart(id)]));

function words(id, values, text) {
  const known = values.filter(value => value !== null), last = values.at(-1);
  setText($(`${id}-now`), known.length ? `now ${last === null ? "none" : text(last)}, at most ${text(Math.max(...known))}` : "nothing yet");
}

// Returns the answer of /history, drawn.
export function showHistory(history, op) {
  const columns = history.operations[op] ?? history.operations.all;
  drawn.latency.setData([history.at_s, columns.p50_s, columns.p99_s]);
  drawn.bandwidth.setData([history.at_s, columns.bytes_per_s, columns.bus_bytes_per_s]);
  drawn.rate.setData([history.at_s, columns.per_s, history.in_flight]);
  words("latency", columns.p99_s, value => `p99 ${duration(value)}`);
  words("bandwidth", columns.bus_bytes_per_s, value => `bus ${bytes(value)}/s`);
  words("rate", columns.per_s, value => `${count(value)} /s`);
  const select = $("op"), names = Object.keys(history.operations);
  if (Array.from(select.options, each => each.value).join() === names.join()) return;
  select.replaceChildren(...names.map(name => {
    const option = make("option", name === "all" ? "all operations" : name);
    option.value = name;
    option.selected = name === op;
    return option;
  }));
}
