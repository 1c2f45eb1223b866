// An answer as it came: its tokens coloured by sweep, and below them the sweep that is looked at.

import { download, el, iconButton, setAttribute, setText } from "./dom.js";
import { milliseconds, plural } from "./format.js";
import { describe, drawTree, treeFile } from "./sweep_tree.js";
import { drawWaterfall, legend } from "./sweep_waterfall.js";

const TONES = 5;
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

// What speculation brought, in words that need no explanation.
export function headline(sweeps) {
  const tokens = sweeps.reduce((sum, sweep) => sum + sweep.emitted.length, 0);
  const trips = sweeps.filter((sweep) => !sweep.is_part).length; // a part travels behind the sweep before it
  return `${plural(tokens, "token")} in ${plural(trips, "trip")}; one at a time takes ${tokens.toLocaleString("en")}`;
}

export class SweepView {
  #sweeps = [];
  #groups = [];
  #drafted = new Set(); // places in the text whose token was drafted and accepted
  #tokens = 0;
  #pinned = null;
  #shown = null;

  constructor() {
    this.text = el("div", { class: "swept", role: "group", "aria-label": "The answer by sweep; arrow keys go from sweep to sweep" });
    this.panel = el("section", { class: "sweep-panel", "aria-label": "The sweep that is looked at" });
    this.none = el("p", { class: "small" }, "How this answer came was not kept.");
    this.headline = el("p", { class: "swept-headline" });
    this.key = el("p", { class: "small swept-key" }, "Every colour is one sweep through the swarm. An underlined token is the target’s own; the others were drafted, and it would have said the same.");
    this.element = el("div", { class: "sweep-view" }, this.none, this.headline, this.key, this.text, this.panel);
    this.text.addEventListener("pointerover", (event) => this.#look(this.#at(event.target)));
    this.text.addEventListener("pointerleave", () => this.#look(this.#pinned));
    this.text.addEventListener("focusin", (event) => this.#pin(this.#at(event.target)));
    this.text.addEventListener("click", (event) => this.#pin(this.#at(event.target)));
    this.text.addEventListener("keydown", (event) => this.#walk(event));
    this.panel.hidden = true;
  }

  // Show these sweeps; they only ever grow at the end.
  update(sweeps, leftOut = 0) {
    if (sweeps.length < this.#sweeps.length) this.#clear();
    for (const sweep of sweeps.slice(this.#sweeps.length)) this.#add(sweep);
    this.none.textContent = leftOut > 0 ? `The text goes on: its last ${plural(leftOut, "sweep")} are not drawn.` : "How this answer came was not kept.";
    this.none.hidden = this.#sweeps.length > 0 && leftOut === 0;
    this.panel.hidden = this.key.hidden = this.headline.hidden = this.#sweeps.length === 0;
    setText(this.headline, headline(this.#sweeps));
    if (this.#sweeps.length > 0) this.#look(this.#pinned);
  }

  // The sweep that brought most tokens, the first of equals: the one to see first.
  get #best() {
    const most = Math.max(...this.#sweeps.map((sweep) => sweep.emitted.length));
    return this.#sweeps.findIndex((sweep) => sweep.emitted.length === most);
  }

  #clear() {
    this.#sweeps = [];
    this.#groups = [];
    this.#drafted.clear();
    this.#tokens = 0;
    this.#pinned = null;
    this.#shown = null;
    this.text.replaceChildren();
  }

  #add(sweep) {
    const place = this.#sweeps.length;
    sweep.nodes.filter((node) => node.is_accepted).forEach((_, depth) => this.#drafted.add(sweep.start + depth));
    this.#sweeps.push(sweep);
    const tokens = sweep.emitted.map(({ text }, offset) => el("span", { class: `token ${this.#drafted.has(this.#tokens + offset) ? "is-drafted" : "is-own"}` }, text));
    this.#tokens += tokens.length;
    const said = sweep.emitted.map(({ text }) => text).join("");
    const group = el("span", { class: `sweep tone-${place % TONES}`, role: "button", tabindex: place === 0 ? "0" : "-1", "aria-pressed": "false", "aria-label": `Sweep ${place + 1}, ${plural(tokens.length, "token")}: ${said.trim() || "white space"}`, "data-place": place }, ...tokens);
    this.#groups.push(group);
    if (tokens.length > 0) this.text.append(group);
  }

  #at(target) {
    const group = target.closest?.(".sweep");
    return group ? Number(group.dataset.place) : null;
  }

  #pin(place) {
    if (place === null) return;
    const before = this.#pinned === null ? this.text.querySelector('[tabindex="0"]') : this.#groups[this.#pinned];
    if (before) {
      setAttribute(before, "tabindex", "-1");
      setAttribute(before, "aria-pressed", "false");
    }
    this.#pinned = place;
    setAttribute(this.#groups[place], "tabindex", "0");
    setAttribute(this.#groups[place], "aria-pressed", "true");
    this.#look(place);
  }

  #walk(event) {
    const at = this.#at(event.target);
    if (at === null) return;
    const ends = { Home: 0, End: this.#groups.length - 1 };
    let next = event.key in ends ? ends[event.key] : at + (STEPS[event.key] ?? 0);
    const step = STEPS[event.key] ?? 1;
    while (this.#groups[next] && !this.#groups[next].isConnected) next += step; // a sweep that brought nothing is not in the text
    if (next === at || !this.#groups[next]) return;
    event.preventDefault();
    this.#groups[next].focus();
  }

  #look(place) {
    if (this.#sweeps.length === 0) return;
    const chosen = place ?? this.#best;
    if (chosen === this.#shown) return;
    this.#groups[this.#shown]?.classList.remove("is-looked-at");
    this.#groups[chosen].classList.add("is-looked-at");
    this.#shown = chosen;
    this.#draw(this.#sweeps[chosen], chosen);
  }

  #draw(sweep, place) {
    const carried = sweep.nodes.filter((node) => node.is_carried).length + sweep.left_out;
    const accepted = sweep.nodes.filter((node) => node.is_accepted).length;
    const facts = [
      carried === 0 ? "nothing drafted" : `${carried} drafted, ${accepted} accepted`,
      plural(sweep.emitted.length, "token"),
      milliseconds(sweep.total_ms),
      ...(sweep.is_part ? ["goes on below the sweep before it"] : []),
    ];
    const left = sweep.left_out > 0 ? el("p", { class: "small" }, `${plural(sweep.left_out, "unlikely node")} not drawn`) : null;
    const tree = drawTree(sweep);
    const title = `Sweep ${place + 1} of ${this.#sweeps.length}: ${describe(sweep)}`;
    const save = iconButton("save", "Save this tree as SVG", () => download(`sweep-${place + 1}.svg`, "image/svg+xml", treeFile(tree, title)), "sweep-save");
    this.panel.replaceChildren(
      el("div", { class: "sweep-head" },
        el("h3", {}, `Sweep ${place + 1} of ${this.#sweeps.length}`),
        el("p", { class: "sweep-facts" }, facts.join(" · ")),
        sweep.reason ? el("p", { class: "sweep-reason", title: "why the tree had this size" }, sweep.reason) : null,
        save),
      el("div", { class: "sweep-parts" },
        el("div", { class: "tree-scroll", tabindex: "0", role: "region", "aria-label": `Tree of sweep ${place + 1}. ${describe(sweep)}` }, tree, left),
        el("div", { class: "fall-box" }, drawWaterfall(sweep), legend())));
  }
}
