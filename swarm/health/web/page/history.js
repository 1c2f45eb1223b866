// The last day and month: shares of the time that was recorded, a strip of them, and the probed speed beneath.

import { el, keyed, setAttribute, setAttributes, setHidden, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { historyOf, SNAPSHOT } from "./source.js";

const WINDOWS = [
  { id: "24h", label: "24 hours", seconds: 86_400, cells: 96, ticks: [SNAPSHOT ? "24 h before" : "24 h ago", "12 h"] },
  { id: "30d", label: "30 days", seconds: 30 * 86_400, cells: 90, ticks: [SNAPSHOT ? "30 d before" : "30 d ago", "15 d"] },
];
const HEIGHTS = { serving: 100, degraded: 66, broken: 33 }; // per cent: the strip reads without colour too
const REFRESH_MS = 60_000;
const RETRY_MS = 5_000; // after a question that was not answered
const ANSWER_MS = 5_000;
const VERDICTS = ["serving", "degraded", "broken"];
const MIN_SHOWN = 0.2; // of a cell: a verdict that held for a moment only is visible too
const WHOLE = 0.99; // of a window: if less is recorded, the text says how much

const total = (seconds) => VERDICTS.reduce((sum, verdict) => sum + seconds[verdict], 0);

// Seconds for which each verdict held. A point without `seconds` counts as its worst verdict for all of its time.
function heldIn(points, step) {
  const seconds = Object.fromEntries(VERDICTS.map((verdict) => [verdict, 0]));
  for (const point of points) {
    const held = point.seconds ?? { [point.verdict]: step };
    for (const verdict of VERDICTS) if (Number.isFinite(held[verdict]) && held[verdict] > 0) seconds[verdict] += held[verdict];
  }
  return seconds;
}

// "50.0 % serving · 50.0 % broken", of the time that was recorded.
function shares(seconds) {
  const recorded = total(seconds);
  const named = VERDICTS.filter((verdict) => seconds[verdict] > 0 || verdict === "serving");
  return named.map((verdict) => `${format.share(seconds[verdict], recorded)} ${verdict}`.replaceAll(" ", "\u00a0")).join(" · ");
}

// Fold points into equal cells that end now.
function fold(points, step, window, now) {
  const length = window.seconds / window.cells;
  const first = now - window.seconds;
  const cells = Array.from({ length: window.cells }, (_, place) => ({ place, from: first + place * length, points: [], minReplicas: null, probed: [] }));
  for (const point of points) {
    const cell = cells[Math.min(Math.floor((point.at - first) / length), window.cells - 1)];
    if (cell === undefined || !VERDICTS.includes(point.verdict)) continue;
    cell.points.push(point);
    if (Number.isFinite(point.min_replicas)) cell.minReplicas = Math.min(cell.minReplicas ?? Infinity, point.min_replicas);
    if (Number.isFinite(point.tokens_per_s)) cell.probed.push(point);
  }
  for (const cell of cells) {
    cell.seconds = heldIn(cell.points, step);
    cell.speed = meanSpeed(cell.probed);
  }
  return cells;
}

function summary(points, step, window) {
  const seconds = heldIn(points, step);
  const recorded = total(seconds);
  if (recorded === 0) return "nothing recorded yet";
  return (recorded < WHOLE * window.seconds ? `${format.duration(recorded)} recorded: ` : "") + shares(seconds);
}

// The mean of all probes: each point's weighs as many as it is of, so that every window says the same of the same probes.
function meanSpeed(points) {
  const probed = points.filter((point) => Number.isFinite(point.tokens_per_s));
  const weight = (point) => point.probes ?? 1; // a snapshot of an earlier release does not count them
  const probes = probed.reduce((sum, point) => sum + weight(point), 0);
  return probes === 0 ? null : probed.reduce((sum, point) => sum + point.tokens_per_s * weight(point), 0) / probes;
}

function speedText(points) {
  if (points.length === 0) return "";
  const speed = meanSpeed(points);
  return speed === null ? "No probed speed recorded" : `Probed ${format.decimal(speed)} tokens/s on average`;
}

// A line through the known speeds, broken where there are none.
function line(cells, highest) {
  let path = "";
  let pen = "M";
  for (const { place, speed } of cells) {
    if (speed === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${place + 0.5} ${(38 - (speed / highest) * 36).toFixed(2)}`;
    if (pen === "M") path += "h.01";
    pen = "L";
  }
  return path;
}

function tooltip(cell) {
  const speed = cell.speed === null ? "" : `, ${format.decimal(cell.speed)} tokens/s`;
  const replicas = cell.minReplicas === null ? "" : `, at least ${format.plural(cell.minReplicas, "machine")} per layer`;
  const held = VERDICTS.filter((verdict) => cell.seconds[verdict] > 0);
  const verdicts = held.length > 1 ? shares(cell.seconds) : (held[0] ?? "not recorded");
  return `${format.stamp(cell.from)}: ${verdicts}${replicas}${speed}`;
}

// A bar for each verdict of a cell, side by side: as wide as its share of the recorded time, as high as it is good.
function bars(cell, width) {
  const recorded = total(cell.seconds);
  if (recorded === 0) return [{ verdict: "unknown", x: 0, width, height: 8 }];
  const held = VERDICTS.filter((verdict) => cell.seconds[verdict] > 0);
  const weights = held.map((verdict) => Math.max(cell.seconds[verdict] / recorded, MIN_SHOWN));
  const unit = width / weights.reduce((a, b) => a + b, 0);
  let x = 0;
  return held.map((verdict, place) => {
    const bar = { verdict, x, width: weights[place] * unit, height: HEIGHTS[verdict] };
    x += bar.width;
    return bar;
  });
}

class Strip {
  constructor(window) {
    this.window = window;
    this.share = el("span", { class: "strip-share" });
    this.speed = el("span", { class: "strip-speed" });
    this.cells = svg("svg", { class: "strip", role: "img" });
    this.path = svg("path", { class: "speed-line", "vector-effect": "non-scaling-stroke" });
    this.chart = svg("svg", { class: "speed", viewBox: `0 0 ${window.cells} 40`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.path);
    this.box = el("div", { class: "window" },
      el("p", { class: "strip-head" }, el("strong", {}, window.label), this.share),
      this.cells, this.chart,
      el("p", { class: "strip-axis", "aria-hidden": "true" }, ...[...window.ticks, SNAPSHOT ? "snapshot" : "now"].map((tick) => el("span", {}, tick))),
      this.speed);
  }

  draw(points, step, now, text) {
    const cells = fold(points, step, this.window, now);
    const width = 100 / cells.length;
    keyed(this.cells, cells, (cell) => cell.place, () => svg("g", {}, svg("title"), svg("g")), (group, cell) => {
      setText(group.firstChild, tooltip(cell));
      keyed(group.lastChild, bars(cell, width * 0.8), (bar) => bar.verdict, (bar) => svg("rect", { class: `is-${bar.verdict}` }), (rect, bar) => {
        setAttributes(rect, { x: `${(cell.place * width + bar.x).toFixed(3)}%`, width: `${bar.width.toFixed(3)}%`, y: `${100 - bar.height}%`, height: `${bar.height}%` });
      });
    });
    const speeds = cells.map((cell) => cell.speed).filter((speed) => speed !== null);
    setText(this.share, text);
    setAttribute(this.cells, "aria-label", `${this.window.label}: ${text}`);
    setHidden(this.chart, speeds.length === 0);
    setAttribute(this.path, "d", line(cells, Math.max(...speeds, 0.001)));
    setText(this.speed, speedText(points));
  }
}

export class History {
  constructor(host) {
    this.strips = WINDOWS.map((window) => new Strip(window));
    this.trouble = el("p", { class: "small" });
    host.append(...this.strips.map(({ box }) => box), this.trouble);
    this.asked = null; // the last request: {fingerprint, verdict, until}
  }

  // Ask again for another model, after a change of verdict, and once a minute; sooner where there was no answer.
  render(model, now) {
    const { asked } = this;
    if (asked?.fingerprint === model.fingerprint && asked.verdict === model.verdict && performance.now() < asked.until) return;
    if (asked?.fingerprint !== model.fingerprint) for (const strip of this.strips) strip.draw([], 0, now, "not read yet");
    this.asked = { fingerprint: model.fingerprint, verdict: model.verdict, until: performance.now() + REFRESH_MS };
    for (const strip of this.strips) this.ask(strip, this.asked, now);
  }

  async ask(strip, asked, now) {
    const { fingerprint } = asked;
    try {
      const answer = await fetch(historyOf(fingerprint, strip.window.id), { signal: AbortSignal.timeout(ANSWER_MS) });
      const none = answer.status === 404; // a model so new that nothing of it is written yet
      if (!answer.ok && !none) throw new Error(`it answered ${answer.status}`);
      const { points, step_s: step } = none ? { points: [], step_s: 0 } : await answer.json();
      if (this.asked.fingerprint !== fingerprint) return;
      strip.draw(points, step, now, summary(points, step, strip.window));
      setText(this.trouble, "");
    } catch (error) {
      if (this.asked !== asked) return;
      asked.until = performance.now() + RETRY_MS;
      setText(this.trouble, `History could not be read: ${error.message}.`);
    }
  }
}
