// One sweep of the latest probe, hop by hop: how long it travelled, waited and computed.

import { el, keyed, setAttribute, setAttributes, setHidden, setText, svg } from "./dom.js";
import * as format from "./format.js";

const PARTS = [
  { id: "link", short: "wire", label: "on the wire" },
  { id: "queue", short: "wait", label: "waiting" },
  { id: "compute", short: "compute", label: "computing" },
];

// The hops and the way back, each with its parts and when they start, in milliseconds.
function steps({ probe, nodes }) {
  const names = new Map(nodes.map((node) => [node.peer, format.called(node)]));
  let at = 0;
  const found = probe.hops.map((hop, place) => {
    const parts = [hop.link_ms ?? 0, hop.queue_ms ?? 0, hop.compute_ms ?? 0];
    const starts = [at, at + parts[0], at + parts[0] + parts[1]];
    at += parts[0] + parts[1] + parts[2];
    return { key: `${place}`, name: names.get(hop.peer) ?? hop.short, what: format.layers([hop.span]), parts, starts };
  });
  const back = probe.return_ms ?? 0;
  found.push({ key: "back", name: "back to the client", what: "", parts: [back, 0, 0], starts: [at, at, at] });
  return { found, total: Math.max(at + back, 0.001) };
}

function create() {
  const rects = PARTS.map(({ id }) => svg("rect", { class: `hop-${id}`, y: "15%", height: "70%" }));
  return el("li", { class: "hop" },
    el("div", { class: "hop-text" }, el("span", { class: "peer" }), el("span", { class: "hop-layers" }), el("span", { class: "hop-ms" })),
    svg("svg", { class: "hop-bar", "aria-hidden": "true" }, svg("rect", { class: "hop-ground", width: "100%", height: "100%" }), ...rects));
}

function update(item, step, total) {
  const [text, bar] = item.children;
  const [name, layers, ms] = text.children;
  setText(name, step.name);
  setText(layers, step.what);
  const taken = PARTS.map((part, place) => ({ label: part.short, ms: step.parts[place] })).filter((part) => part.ms > 0);
  setText(ms, taken.map((part) => `${part.label} ${format.milliseconds(part.ms)}`).join(" · ") || format.milliseconds(0));
  step.parts.forEach((length, place) => {
    setAttributes(bar.children[place + 1], { x: `${((step.starts[place] / total) * 100).toFixed(2)}%`, width: `${((length / total) * 100).toFixed(2)}%` });
  });
}

export class Waterfall {
  constructor(host, note) {
    this.note = note;
    this.failure = el("p", { class: "banner is-critical" });
    this.list = el("ol", { class: "hops" });
    this.scale = el("p", { class: "hop-scale", "aria-hidden": "true" }, el("span", {}, "0 ms"), el("span"));
    this.legend = el("ul", { class: "legend" }, ...PARTS.map(({ id, label }) => el("li", {}, svg("svg", { class: "swatch", "aria-hidden": "true" }, svg("rect", { class: `hop-${id}`, width: "100%", height: "100%" })), el("span", {}, label))));
    this.none = el("p", { class: "small" }, "No probe has been made yet. Probes are small generations that this service makes through the swarm, within a budget.");
    host.append(this.failure, this.list, this.scale, this.legend, this.none);
  }

  render(model, now) {
    const { probe } = model;
    const drawn = probe !== null && probe !== undefined && (probe.hops?.length ?? 0) > 0;
    setHidden(this.none, Boolean(probe));
    for (const part of [this.list, this.scale, this.legend]) setHidden(part, !drawn);
    setHidden(this.failure, !probe || probe.ok);
    setText(this.note, probe ? `${probe.ok ? "made" : "failed"} ${format.duration(now - probe.at)} ago` : "");
    if (probe && !probe.ok) setText(this.failure, `The probe failed: ${probe.error ?? "no reason is known"}`);
    if (!drawn) return;
    const { found, total } = steps(model);
    keyed(this.list, found, (step) => step.key, create, (item, step) => update(item, step, total));
    setText(this.scale.lastChild, format.milliseconds(total));
    setAttribute(this.list, "aria-label", `One sweep through ${format.plural(probe.hops.length, "hop")}, ${format.milliseconds(total)} in all`);
  }
}
