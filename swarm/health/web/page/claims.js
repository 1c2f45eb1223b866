// The speed that nodes claim, beside the speed that this service measured.

import { el, keyed, narrow, setAttribute, setAttributes, setHidden, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { glyph, setGlyph } from "./glyphs.js";

const SHOWN = 6;
const SHOWN_NARROW = 3;
const TOLERANCE = 1.25; // a node is slow if its probe takes this many times its highest claim
const VERDICTS = {
  ok: { glyph: "serving", kind: "serving" },
  slow: { glyph: "warning", kind: "degraded" },
  none: { glyph: "unknown", kind: "unknown" },
};

const claims = (node) => (node.claimed_ms ?? []).map(([, ms]) => ms).filter(Number.isFinite);

function judge(node) {
  const highest = Math.max(...claims(node));
  const probed = node.probed_ms ?? null;
  if (probed === null || !Number.isFinite(highest)) return { kind: "none", ratio: 0, text: probed === null ? "not probed yet" : "claims nothing" };
  const ratio = probed / highest;
  if (probed * TOLERANCE < Math.min(...claims(node))) return { kind: "ok", ratio, text: "faster" };
  if (ratio <= TOLERANCE) return { kind: "ok", ratio, text: "as claimed" };
  return { kind: "slow", ratio, text: `${ratio.toFixed(1)} × slower` };
}

function range(node) {
  const all = claims(node);
  if (all.length === 0) return "–";
  const lowest = Math.min(...all);
  const highest = Math.max(...all);
  return lowest === highest ? format.milliseconds(lowest) : `${lowest.toFixed(1)} to ${highest.toFixed(1)} ms`;
}

function answers(node) {
  if (node.agrees === true) return { glyph: "serving", kind: "serving", text: "agree" };
  if (node.agrees === false) return { glyph: "critical", kind: "broken", text: "differ" };
  return { glyph: "unknown", kind: "unknown", text: "not compared" };
}

function figure(label) {
  const value = el("dd");
  return { box: el("div", { class: "figure" }, el("dt", {}, label), value), value };
}

const cell = (label, ...children) => el("td", { role: "cell", "data-label": label }, ...children);
const sign = () => el("span", { class: "sign" }, glyph("unknown"), el("span"));

function setSign(node, { glyph: kind, kind: colour, text }) {
  setAttribute(node, "class", `sign is-${colour}`);
  setGlyph(node.firstChild, kind);
  setText(node.lastChild, text);
}

function createRow() {
  const row = el("tr", { role: "row" });
  const parts = {
    name: el("span", { class: "peer" }), claimed: el("span"), probed: el("span"), verdict: sign(), answers: sign(),
    bar: svg("rect", { class: "claimed-range", y: 3, height: 10, rx: 3 }), mark: svg("rect", { class: "probed-mark", y: 0, height: 16, width: 3, rx: 1 }),
  };
  const chart = svg("svg", { class: "range", "aria-hidden": "true" }, svg("rect", { class: "range-ground", y: 7, width: "100%", height: 2 }), parts.bar, parts.mark);
  row.append(cell("Node", parts.name), cell("Claimed", parts.claimed), cell("Probed", parts.probed),
    el("td", { role: "cell", class: "chart-cell" }, chart), cell("Speed", parts.verdict), cell("Answers", parts.answers));
  row.parts = parts;
  return row;
}

function updateRow(row, { node, verdict }, scale) {
  const { parts } = row;
  setText(parts.name, format.called(node));
  setText(parts.claimed, range(node));
  setText(parts.probed, format.milliseconds(node.probed_ms));
  setSign(parts.verdict, { ...VERDICTS[verdict.kind], text: verdict.text });
  setSign(parts.answers, answers(node));
  const all = claims(node);
  const lowest = Math.min(...all, Infinity);
  const share = (ms) => `${((ms / scale) * 97).toFixed(2)}%`;
  const known = Number.isFinite(lowest);
  setAttributes(parts.bar, { x: known ? share(lowest) : 0, width: known ? share(Math.max(Math.max(...all) - lowest, scale / 100)) : 0 });
  const probed = Number.isFinite(node.probed_ms);
  setAttributes(parts.mark, { x: probed ? share(node.probed_ms) : 0, visibility: probed ? null : "hidden", class: `probed-mark is-${verdict.kind}` });
}

export class Claims {
  constructor(host, note) {
    this.note = note;
    this.all = false;
    this.figures = [figure("tokens/s"), figure("time to first token"), figure("tokens per sweep"), figure("per sweep")];
    this.rows = el("tbody", { role: "rowgroup" });
    const legend = (kind, text) => el("li", {}, svg("svg", { class: "swatch", "aria-hidden": "true" }, svg("rect", { class: kind, width: "100%", height: "100%" })), el("span", {}, text));
    this.claimed = el("span");
    this.legend = el("ul", { class: "legend" }, legend("claimed-range", ""), legend("probed-mark", "probed, per sweep"));
    this.legend.firstChild.lastChild.replaceWith(this.claimed);
    const heads = ["Node", "Claimed", "Probed", "", "Speed", "Answers"].map((text) =>
      text === "" ? el("td", { role: "cell" }) : el("th", { role: "columnheader", scope: "col" }, text));
    this.table = el("table", { role: "table", class: "cards claims", "aria-labelledby": "claims-title" },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)), this.rows);
    this.more = el("button", { type: "button", class: "button more" });
    this.more.addEventListener("click", () => {
      this.all = !this.all;
      this.render(this.model);
    });
    narrow.addEventListener("change", () => this.model && this.render(this.model));
    this.summary = el("dl", { class: "figures probe-figures" }, ...this.figures.map(({ box }) => box));
    host.append(this.summary, this.table, this.legend, this.more);
  }

  render(model) {
    this.model = model;
    const { probe } = model;
    const texts = [format.decimal(probe?.tokens_per_s), format.milliseconds(probe?.ttft_ms), format.decimal(probe?.acceptance_length, 2), format.milliseconds(probe?.sweep_ms)];
    setHidden(this.summary, !probe?.ok);
    this.figures.forEach(({ value }, place) => setText(value, texts[place]));
    const rows = model.nodes
      .filter((node) => node.state !== "offline" && (claims(node).length > 0 || Number.isFinite(node.probed_ms)))
      .map((node) => ({ node, verdict: judge(node) }))
      .sort((a, b) => (a.node.agrees === false ? 0 : 1) - (b.node.agrees === false ? 0 : 1) || b.verdict.ratio - a.verdict.ratio || (a.node.peer < b.node.peer ? -1 : 1));
    const limit = narrow.matches ? SHOWN_NARROW : SHOWN;
    const shown = rows.slice(0, this.all ? 200 : limit);
    const sizes = rows.flatMap(({ node }) => (node.claimed_ms ?? []).map(([nodes]) => nodes));
    setText(this.claimed, sizes.length === 0 ? "claimed" : `claimed, for ${Math.min(...sizes)} to ${Math.max(...sizes)} tree nodes`);
    setHidden(this.legend, rows.length === 0);
    const scale = Math.max(...shown.flatMap(({ node }) => [...claims(node), node.probed_ms ?? 0]), 1);
    keyed(this.rows, shown, ({ node }) => node.peer, createRow, (row, item) => updateRow(row, item, scale));
    setHidden(this.table, rows.length === 0);
    setHidden(this.more, rows.length <= limit);
    setText(this.more, this.all ? "Show the worst only" : `Show more of ${format.count(rows.length)}`);
    const probed = rows.filter(({ verdict }) => verdict.ratio > 0);
    const slow = probed.filter(({ verdict }) => verdict.kind === "slow").length;
    const differ = rows.filter(({ node }) => node.agrees === false).length;
    if (probed.length === 0) setText(this.note, rows.length === 0 ? "No node has claimed or shown its speed." : "No machine has been probed yet.");
    else setText(this.note, `${format.plural(probed.length, "machine")} probed: ${slow === 0 ? "none" : format.count(slow)} slower than claimed, ${differ === 0 ? "none" : format.count(differ)} with other answers`);
  }
}
