// Numbers, durations and sets of ranks as text.

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base * 0.9995 && unit < units.length - 1) { value /= base; unit += 1; }
  const digits = unit === 0 && Number.isInteger(value) ? 0 : value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`.trim();
}

export const count = value => scaled(value, 1000, ["", "k", "M", "G", "T"]);
export const bytes = value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds >= 86400) return `${(seconds / 86400).toFixed(1)} d`;
  if (seconds >= 3600) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 99.95) return `${(seconds / 60).toFixed(1)} min`;
  return seconds >= 0.9995 ? `${seconds.toFixed(seconds >= 9.995 ? 1 : 2)} s` : scaled(seconds * 1e6, 1000, ["µs", "ms"]);
}

export const grouped = value => value.toLocaleString("en");
export const plural = (n, word) => `${grouped(n)} ${word}${n === 1 ? "" : "s"}`;

export function ranges(ranks) {
  const parts = [];
  for (let i = 0; i < ranks.length;) {
    let j = i;
    while (j + 1 < ranks.length && ranks[j + 1] === ranks[j] + 1) j += 1;
    parts.push(j > i + 1 ? `${ranks[i]}–${ranks[j]}` : ranks.slice(i, j + 1).join(", "));
    i = j + 1;
  }
  return parts.join(", ");
}

export const named = ranks => `rank${ranks.length === 1 ? "" : "s"} ${ranges(ranks)}`;

// Places of a histogram: place p holds durations in (2^(p-1), 2^p] nanoseconds; linear inside.
export function quantile(places, q) {
  const total = places.reduce((sum, [, n]) => sum + n, 0);
  let below = 0;
  for (const [place, n] of places) {
    if (below + n >= q * total) return 2 ** (place - 1) * (1 + (q * total - below) / n) / 1e9;
    below += n;
  }
  return NaN;
}
