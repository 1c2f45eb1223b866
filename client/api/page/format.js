// Numbers as people read them.

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10_000) return `${(value / 1_000).toFixed(1)} s`;
  return value >= 10 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
}

export function seconds(ms) {
  if (ms < 995) return `${Math.round(ms)} ms`;
  return ms >= 9_950 ? `${Math.round(ms / 1_000)} s` : `${(ms / 1_000).toFixed(1)} s`;
}

export function rate(value) {
  return value >= 10 ? value.toFixed(0) : value.toFixed(1);
}

export function bytes(value) {
  if (value < 1_024) return `${value} B`;
  return value < 1_048_576 ? `${(value / 1_024).toFixed(value < 10_240 ? 1 : 0)} KiB` : `${(value / 1_048_576).toFixed(1)} MiB`;
}

export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

// A half-open range of layers, as `4-8`, by its first and last layer.
export function layers(span) {
  const [, start, end] = /(\d+)-(\d+)$/.exec(span) ?? [];
  if (start === undefined) return span;
  return Number(end) - Number(start) === 1 ? start : `${start}…${Number(end) - 1}`;
}

// A token as a label: white space that stands alone becomes visible.
export function tokenLabel(text, most = 14) {
  if (text === "") return "∅";
  const shown = text.trim() === "" ? text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") : text.trim().replaceAll(/\s+/g, " ");
  const letters = [...shown];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : shown;
}

export function when(timestamp, now = Date.now()) {
  const days = Math.floor((now - timestamp) / 86_400_000);
  const date = new Date(timestamp);
  if (days < 1) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return date.toLocaleDateString([], { day: "numeric", month: "short", ...(days > 300 ? { year: "numeric" } : {}) });
}
