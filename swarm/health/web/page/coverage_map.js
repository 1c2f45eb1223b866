// Layers across: how many machines hold each, one bar per machine below, gaps as bands through everything.

import { el, keyed, setAttribute, setAttributes, setHidden, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { glyph, known, NODE_STATES, PATHS } from "./glyphs.js";
import { pack, runs, step } from "./lanes.js";

const COLUMN_PX = 46; // height of the replica columns
const LABEL_PX = 16;
const AXIS_PX = 18;
const CHARACTER_PX = 7.2;
const SIZES = [
  { upTo: 14, height: 26, gap: 4, glyph: 13 },
  { upTo: 40, height: 17, gap: 3, glyph: 11 },
  { upTo: Infinity, height: 10, gap: 1, glyph: 8 },
];

export class CoverageMap {
  constructor(host) {
    this.host = host;
    this.model = null;
    this.head = svg("svg", { class: "map-head", role: "img" });
    this.columns = svg("g");
    this.axis = svg("g", { class: "axis" });
    this.head.append(this.columns, this.axis);
    this.body = svg("svg", { class: "map-body", role: "img", "aria-label": "One bar per machine: the same as the table of nodes" });
    this.gaps = svg("g");
    this.bars = svg("g");
    this.body.append(this.gaps, this.bars);
    this.scroll = el("div", { class: "map-scroll", role: "group", "aria-label": "Machines by the layers that they hold" }, this.body);
    this.legend = el("ul", { class: "legend" });
    this.hint = el("p", { class: "small", hidden: true });
    host.append(this.head, this.scroll, this.hint, this.legend);
    new ResizeObserver(() => this.model && this.render(this.model)).observe(host);
  }

  render(model) {
    this.model = model;
    const { placed, lanes } = pack(model.nodes);
    const size = SIZES.find(({ upTo }) => lanes <= upTo);
    const height = Math.max(lanes * (size.height + size.gap) + 6, 48);
    setAttribute(this.body, "height", height);
    const width = Math.max(this.scroll.clientWidth, 200);
    const perLayer = width / model.num_layers;
    const scale = { width, height, perLayer, size };
    this.drawColumns(model, scale);
    this.drawAxis(model, scale);
    this.drawGaps(model, scale);
    this.drawBars(placed, scale);
    this.drawLegend(model);
    const taller = this.scroll.scrollHeight > this.scroll.clientHeight + 1;
    setAttribute(this.scroll, "tabindex", taller ? 0 : null);
    setHidden(this.hint, !taller);
    setText(this.hint, `Scroll in the map to see all ${format.count(model.nodes.length)} machines.`);
    setAttribute(this.head, "aria-label", described(model));
  }

  drawColumns(model, { width, perLayer }) {
    const bottom = LABEL_PX + COLUMN_PX;
    const all = runs(model.replicas);
    const highest = Math.max(...model.replicas, 1);
    const labelled = labels(all, perLayer);
    setAttributes(this.head, { width, height: bottom + AXIS_PX });
    keyed(this.columns, all, (run) => run.start, () => svg("g", {}, svg("rect"), svg("text"), svg("title")), (group, run) => {
      const [column, label, title] = group.children;
      const length = (run.end - run.start) * perLayer;
      const tall = run.value === 0 ? COLUMN_PX : Math.max(4, (run.value / highest) * COLUMN_PX);
      const kind = run.value === 0 ? "none" : run.value === 1 ? "one" : "more";
      setAttribute(group, "class", `column is-${kind}`);
      setAttributes(column, { x: run.start * perLayer + 0.5, y: bottom - tall, width: Math.max(length - 1, 0.7), height: tall, rx: Math.min(2, length / 4) });
      const text = run.value === 0 ? (length > 80 ? "✕ nobody" : "✕") : `${run.value}`;
      setText(label, labelled.has(run) ? text : "");
      const middle = (run.start + run.end) * perLayer / 2;
      setAttributes(label, { x: Math.min(Math.max(middle, 12), width - 12), y: run.value === 0 ? bottom - COLUMN_PX / 2 + 4 : bottom - tall - 5 });
      setText(title, `${format.layers([[run.start, run.end]])}: ${format.plural(run.value, "machine")}`);
    });
  }

  drawAxis(model, { width, perLayer }) {
    const every = step(perLayer, 30);
    const ticks = [];
    for (let layer = 0; layer < model.num_layers; layer += every) ticks.push(layer);
    keyed(this.axis, ticks, (layer) => layer, (layer) => svg("g", {}, svg("path"), svg("text", {}, `${layer}`)), (group, layer) => {
      const left = layer * perLayer;
      const centred = every === 1;
      const y = LABEL_PX + COLUMN_PX;
      setAttribute(group.firstChild, "d", centred ? "" : `M${left + 0.5} ${y}v5`);
      const x = centred ? left + perLayer / 2 : Math.min(left + 1, width - 16);
      setAttributes(group.lastChild, { x, y: y + 15, class: centred ? "centred" : null });
    });
  }

  drawGaps(model, { height, perLayer }) {
    keyed(this.gaps, model.missing, ([start]) => start, () => svg("g", { class: "gap" }, svg("rect"), svg("rect")), (group, [start, end]) => {
      for (const rect of group.children) setAttributes(rect, { x: start * perLayer, y: 0, width: (end - start) * perLayer, height });
      setAttribute(group.firstChild, "class", "gap-ground");
      setAttribute(group.lastChild, "class", "gap-edge");
    });
  }

  drawBars(placed, { perLayer, size }) {
    keyed(this.bars, placed, ({ node }) => node.peer, createBar, (group, { node, lane }) => {
      const [bar, sign, label, title] = group.children;
      const [start, end] = node.span;
      const length = Math.max((end - start) * perLayer - 2, 2);
      setAttribute(group, "class", `bar is-${known(node.state)}`);
      setAttribute(group, "transform", `translate(${(start * perLayer + 1).toFixed(1)} ${3 + lane * (size.height + size.gap)})`);
      setAttributes(bar, { width: length.toFixed(1), height: size.height, rx: Math.min(4, size.height / 3) });
      const roomy = length >= size.glyph + 2;
      const left = length >= 60 ? 6 : (length - size.glyph) / 2;
      setAttribute(sign, "d", roomy ? PATHS[known(node.state)] : "");
      setAttribute(sign, "transform", `translate(${left.toFixed(1)} ${(size.height - size.glyph) / 2}) scale(${size.glyph / 16})`);
      const room = size.height < 14 ? 0 : Math.floor((length - size.glyph - 16) / CHARACTER_PX);
      setText(label, shortened(format.called(node), room));
      setAttributes(label, { x: size.glyph + 11, y: size.height / 2 });
      setText(title, `${format.called(node)}: ${format.layers([node.span])}, ${node.state}`);
    });
  }

  drawLegend(model) {
    const counts = NODE_STATES.map((state) => ({ state, n: model.nodes.filter((node) => node.state === state).length }));
    const shown = counts.filter(({ state, n }) => n > 0 || state === "serving");
    keyed(this.legend, shown, ({ state }) => state, ({ state }) => el("li", { class: `is-${state}` }, el("span", { class: "chip" }, glyph(state)), el("span")), (item, { state, n }) =>
      setText(item.lastChild, `${n} ${state}`));
    setHidden(this.legend, model.nodes.length === 0);
  }
}

const createBar = () => svg("g", {}, svg("rect"), svg("path"), svg("text"), svg("title"));

// Which columns show their number: all, or where there is no room the gaps and one of the highest.
function labels(all, perLayer) {
  const widest = Math.max(...all.map((run) => `${run.value}`.length)) * CHARACTER_PX + 2;
  const fits = all.filter((run) => (run.end - run.start) * perLayer > widest);
  if (fits.length === all.length) return new Set(all);
  const highest = all.reduce((best, run) => (run.value > best.value ? run : best));
  return new Set([highest, ...fits.filter((run) => run.value === 0)]);
}

function shortened(text, room) {
  if (room < 4) return "";
  return text.length <= room ? text : `${text.slice(0, room - 1)}…`;
}

function described(model) {
  const parts = runs(model.replicas).slice(0, 12).map((run) => `${format.layers([[run.start, run.end]])}: ${run.value}`);
  return `Machines per layer. ${parts.join("; ")}.`;
}
