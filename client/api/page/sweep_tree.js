// The tree of one sweep: what was drafted, the path that the text took, and the target's own token at its end.

import { setAttribute, svg } from "./dom.js";
import { plural, tokenLabel } from "./format.js";

const ROW = 27;
const HEIGHT = 20;
const GAP = 22;
const CHAR = 7.3; // of the monospace face at 12 px
const PADDING = 8;
const EDGE = 6;

function width(label) {
  let cells = 0;
  for (const letter of label) cells += letter.codePointAt(0) > 0x2e7f ? 2 : 1;
  return Math.max(cells * CHAR + 2 * PADDING, 26);
}

// Places of all nodes: accepted and likely children first, and a first child in the row of its parent.
function layout(sweep) {
  const root = { text: sweep.root.text, kind: "root", depth: 0, parent: null, pick: sweep.root.pick, below: [] };
  const nodes = sweep.nodes.map((node) => ({
    text: node.text,
    kind: node.is_accepted ? "accepted" : node.is_carried ? "drafted" : "earlier",
    probability: node.probability,
    pick: node.pick,
    below: [],
  }));
  let last = root;
  sweep.nodes.forEach((node, place) => {
    const own = nodes[place];
    own.parent = node.parent === null ? root : nodes[node.parent];
    own.depth = own.parent.depth + 1;
    own.parent.below.push(own);
    if (node.is_accepted && own.depth > last.depth) last = own;
  });
  const all = [root, ...nodes];
  if (last.pick !== null) {
    const pick = { text: last.pick.text, kind: "pick", depth: last.depth + 1, parent: last, pick: null, below: [] };
    last.below.push(pick);
    all.push(pick);
  }
  const rank = (node) => (node.kind === "accepted" ? 2 : node.kind === "pick" ? 1.5 : node.probability);
  for (const node of all) node.below.sort((one, other) => rank(other) - rank(one));
  let rows = 0;
  const open = [[root, false]];
  while (open.length > 0) {
    const [node, isNew] = open.pop();
    if (isNew) rows += 1;
    node.row = rows;
    for (let place = node.below.length - 1; place >= 0; place -= 1) open.push([node.below[place], place > 0]);
  }
  const widths = [];
  for (const node of all) {
    node.label = tokenLabel(node.text, 12);
    node.width = width(node.label);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const lefts = widths.map((_, depth) => EDGE + widths.slice(0, depth).reduce((sum, wide) => sum + wide + GAP, 0));
  for (const node of all) {
    node.x = lefts[node.depth];
    node.y = EDGE + node.row * ROW;
  }
  return { all, last, width: lefts.at(-1) + widths.at(-1) + EDGE, height: (rows + 1) * ROW + EDGE };
}

function edge({ parent, x, y, kind, probability }) {
  const from = [parent.x + parent.width, parent.y + HEIGHT / 2];
  const to = [x, y + HEIGHT / 2];
  const bend = to[0] - GAP / 2;
  const path = from[1] === to[1] ? `M${from}H${to[0]}` : `M${from}H${bend - 8}C${bend + 4},${from[1]} ${bend - 6},${to[1]} ${to}`;
  return svg("path", { d: path, class: `edge is-${kind}`, "stroke-width": kind === "pick" ? 1.5 : (1 + 2.5 * (probability ?? 0)).toFixed(2) });
}

const WORDS = { root: "certain before this sweep", accepted: "drafted, and accepted", drafted: "drafted, and not taken", earlier: "drafted by an earlier sweep", pick: "the target's own token" };

function box({ x, y, width: wide, kind, label, text, probability, pick }) {
  const chance = probability === undefined || probability === null ? "" : `, ${(100 * probability).toFixed(probability < 0.1 ? 1 : 0)} % likely when it was drafted`;
  const next = pick === null || kind === "pick" ? "" : `; the target goes on with ${JSON.stringify(pick.text)}`;
  return svg("g", { class: `node is-${kind}` },
    svg("title", {}, `${JSON.stringify(text)}: ${WORDS[kind]}${chance}${next}`),
    svg("rect", { x, y, width: wide, height: HEIGHT, rx: 5 }),
    svg("text", { x: x + wide / 2, y: y + HEIGHT / 2 }, label));
}

export function describe(sweep) {
  const path = sweep.nodes.filter((node) => node.is_accepted);
  const said = path.map((node) => tokenLabel(node.text)).join(" ");
  const drafted = sweep.nodes.filter((node) => node.is_carried).length + sweep.left_out;
  if (drafted === 0) return "Nothing was drafted: the target made this token alone.";
  return `${plural(drafted, "token")} drafted in ${plural(sweep.depth, "level")}; ${path.length} accepted${said === "" ? "" : `: ${said}`}.`;
}

export function drawTree(sweep) {
  const { all, width: wide, height } = layout(sweep);
  const under = [...all].sort((one, other) => (one.kind === "accepted" || one.kind === "pick") - (other.kind === "accepted" || other.kind === "pick"));
  return svg("svg", { class: "tree", width: Math.ceil(wide), height: Math.ceil(height), viewBox: `0 0 ${Math.ceil(wide)} ${Math.ceil(height)}`, role: "img", "aria-label": describe(sweep) },
    ...under.filter((node) => node.parent !== null).map(edge),
    ...all.map(box));
}

const PAINT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "text-anchor", "dominant-baseline"];

// A tree that is on the page as a file of its own: the colours that the page's styles give stand in it as attributes.
export function treeFile(tree, title) {
  const copy = tree.cloneNode(true);
  const [drawn, copied] = [tree, copy].map((each) => [...each.querySelectorAll("rect, path, text")]);
  drawn.forEach((element, place) => {
    const style = getComputedStyle(element);
    for (const name of PAINT) setAttribute(copied[place], name, style.getPropertyValue(name));
  });
  setAttribute(copy, "xmlns", "http://www.w3.org/2000/svg");
  const ground = svg("rect", { width: "100%", height: "100%", fill: getComputedStyle(tree.closest(".sweep-panel")).backgroundColor });
  copy.prepend(svg("title", {}, title), ground);
  return new XMLSerializer().serializeToString(copy);
}
