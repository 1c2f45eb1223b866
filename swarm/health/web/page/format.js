// Numbers, times and layers as people read them. Pure; unknown (null, undefined) is an en dash everywhere.

const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clockOf = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const stampOf = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : UNKNOWN);
export const compact = (value) => (known(value) ? short.format(value) : UNKNOWN);
export const percent = (share) => (known(share) ? `${Math.round(share * 100)} %` : UNKNOWN);
export const decimal = (value, digits = 1) => (known(value) ? value.toFixed(digits) : UNKNOWN);
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

// A share of time; 100 % and 0 % are never the result of rounding.
export function share(part, all) {
  if (all === 0) return UNKNOWN;
  const value = (100 * part) / all;
  return part === all || part === 0 ? `${value} %` : `${Math.min(99.9, Math.max(0.1, value)).toFixed(1)} %`;
}

export function milliseconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return `${value < 100 ? value.toFixed(1) : whole.format(value)} ms`;
}

// A length of time in at most two units: 12 s, 3 min, 2 h 14 min, 5 d 3 h.
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const clock = (at) => (known(at) ? clockOf.format(at * 1000) : UNKNOWN);
export const stamp = (at) => (known(at) ? stampOf.format(at * 1000) : UNKNOWN);
export const iso = (at) => (known(at) ? new Date(at * 1000).toISOString() : "");

// A half-open range of layers with its last layer: [4, 8) is 4…7.
export function span(range) {
  if (!Array.isArray(range)) return UNKNOWN;
  const [start, end] = range;
  return end - start === 1 ? `${start}` : `${start}…${end - 1}`;
}

// "layer 3" or "layers 4…7 and 9…11".
export function layers(ranges) {
  const texts = ranges.map(span);
  const single = ranges.length === 1 && ranges[0][1] - ranges[0][0] === 1;
  const last = texts.pop() ?? UNKNOWN;
  return `${single ? "layer" : "layers"} ${texts.length === 0 ? last : `${texts.join(", ")} and ${last}`}`;
}

// What a machine is called here: the name its owner gave it, or the end of its peer id.
export const called = (node) => node.name || node.short || UNKNOWN;
