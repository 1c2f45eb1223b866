// One card per model: can it be used, what is missing, and the line that mends it.

import { byId, el, keyed, setAttribute, setHidden, setText } from "./dom.js";
import { command, setCommand } from "./copy.js";
import * as format from "./format.js";
import { glyph, setGlyph } from "./glyphs.js";
import { runs } from "./lanes.js";

const WORDS = { serving: "Serving", degraded: "Degraded", broken: "Broken" };
const MAX_FIXES = 4;
export const MAX_RANGES = 3; // of layers that one text names

// The first figure of a card: its margin, which is how many machines may go; of a broken one, what is broken.
function distance(model) {
  if (model.verdict === "broken") {
    if (model.missing.length === 0) return { value: "Broken", label: "though every layer has a machine" };
    const missing = model.missing.length > MAX_RANGES ? `${model.missing.length} ranges of layers` : format.layers(model.missing);
    return { value: "Broken", label: `${missing} missing` };
  }
  return { value: format.count(model.margin), label: `${model.margin === 1 ? "machine" : "machines"} to spare` };
}

// The layers held by the fewest machines, and how many hold them.
export function weakest(model) {
  const holders = Math.min(...model.replicas);
  return { holders, ranges: runs(model.replicas).filter((run) => run.value === holders).map((run) => [run.start, run.end]) };
}

function figure(label) {
  const value = el("dd");
  const name = el("dt", {}, label);
  return { box: el("div", { class: "figure" }, name, value), name, value };
}

function create(onSelect) {
  const card = el("article", { class: "verdict panel" });
  const parts = {
    icon: glyph("unknown"),
    word: el("span", { class: "word" }),
    since: el("span", { class: "since" }),
    name: el("h2", { class: "model-name" }),
    fingerprint: el("span", { class: "fingerprint" }),
    reason: el("p", { class: "reason" }),
    figures: [figure("machines to spare"), figure("machines serving"), figure("tokens/s, probed"), figure("layers")],
    mend: el("div", { class: "mend" }),
    why: el("p", { class: "why" }),
    fixes: el("div", { class: "fixes" }),
    select: el("button", { type: "button", class: "button choose", "aria-pressed": "false" }, "Show details"),
  };
  parts.mend.append(parts.why, parts.fixes);
  card.append(
    el("div", { class: "verdict-head" },
      el("span", { class: "mark" }, parts.icon),
      el("div", { class: "verdict-text" },
        el("div", { class: "model-line" }, parts.name, parts.fingerprint),
        el("p", { class: "word-line" }, parts.word, parts.since),
        parts.reason),
      parts.select),
    el("dl", { class: "figures" }, ...parts.figures.map(({ box }) => box)),
    parts.mend,
  );
  parts.select.addEventListener("click", () => onSelect(card.dataset.fingerprint));
  card.parts = parts;
  return card;
}

function why(model) {
  if (model.missing.length > 0) return `Missing: ${format.layers(model.missing)}. On any machine, run:`;
  if (model.verdict === "serving") return "It works. To make it stronger, run:";
  return `Weakest: ${format.layers(weakest(model).ranges)}. To strengthen it, run:`;
}

function update(card, model, { feed, chosen, several }) {
  const { parts } = card;
  const verdict = Object.hasOwn(WORDS, model.verdict) ? model.verdict : "unknown";
  card.dataset.fingerprint = model.fingerprint;
  setAttribute(card, "class", `verdict panel is-${feed.stale ? "unknown" : verdict}${several && chosen ? " is-chosen" : ""}`);
  setGlyph(parts.icon, feed.stale ? "stale" : verdict);
  setText(parts.word, `${feed.stale ? "Last known: " : ""}${WORDS[verdict] ?? "Unknown"}`);
  const since = `for ${format.duration(feed.now - model.since)}`;
  setText(parts.since, feed.snapshot ? `at ${format.stamp(feed.state.at)}, ${since}` : since);
  setText(parts.name, model.name);
  setText(parts.fingerprint, model.fingerprint.slice(0, 12));
  setText(parts.reason, model.reason);
  const serving = model.nodes.filter((node) => node.state === "serving").length;
  const { value: away, label } = distance(model);
  const texts = [away, format.count(serving), format.decimal(model.probe?.tokens_per_s), format.count(model.num_layers)];
  parts.figures.forEach(({ value }, place) => setText(value, texts[place]));
  setText(parts.figures[0].name, label);
  setText(parts.figures[1].name, `${serving === 1 ? "machine" : "machines"} serving`);
  const fixes = model.fixes.slice(0, MAX_FIXES);
  setHidden(parts.mend, fixes.length === 0);
  setText(parts.why, why(model));
  keyed(parts.fixes, fixes.map((text, place) => ({ text, place })), (fix) => fix.place, (fix) => command(fix.text), (node, fix) => setCommand(node, fix.text));
  setHidden(parts.select, !several);
  setAttribute(parts.select, "aria-pressed", String(chosen));
  setText(parts.select, chosen ? "Shown below" : "Show details");
}

// Draw one card per model; `fingerprint` is the chosen model's, `onSelect` is called when another is chosen.
export function renderVerdicts(models, { feed, fingerprint, onSelect }) {
  const several = models.length > 1;
  keyed(byId("verdicts"), models, (model) => model.fingerprint, () => create(onSelect), (card, model) =>
    update(card, model, { feed, several, chosen: model.fingerprint === fingerprint }));
}
