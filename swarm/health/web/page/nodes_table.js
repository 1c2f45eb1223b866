// Every machine: sortable by any column, searchable, the first 100 rows until all are asked for.

import { el, keyed, narrow, setAttribute, setAttributes, setHidden, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { glyph, known, NODE_STATES, setGlyph } from "./glyphs.js";

const SHOWN = 100;
const SHOWN_NARROW = 20;

const load = (node) => (node.state === "offline" ? null : (node.busy ?? null));
const free = (node) => (node.state !== "offline" && node.kv_total > 0 && node.kv_free !== null ? node.kv_free / node.kv_total : null);
const uptime = (node, now) => (node.state === "offline" || !node.started_at ? null : now - node.started_at);

const sessions = (node) => (node.state === "offline" ? null : (node.sessions ?? null));
const FIRST = [["preferred_sessions", "preferred"], ["contributor_sessions", "contributors'"]];
const preferred = (node) => {
  const counts = FIRST.filter(([field]) => node[field]).map(([field, name]) => `${node[field]} ${name}`);
  return counts.length ? ` (${counts.join(", ")})` : "";
};

// A card's name and how its layers run: the plain path is several times as slow as the card.
const device = (node) => [node.device, node.path].filter(Boolean).join(" · ");

// What its work is found to be: by the service itself, then by each node that computed it again, with its file's name.
const wrong = (node) => (node.named ? 1_000 : 0) + (node.refuted ?? []).length + (node.agrees === false ? 0.5 : 0);
function work(node, now) {
  const own = node.named ? "unlike two others" : node.agrees === false ? "unlike another's" : node.agrees ? "like another's" : null;
  const said = node.refuted ?? [];
  const count = said.length ? `wrong, ${format.plural(said.length, "machine says", "machines say")}` : null;
  const lines = said.map(({ short, at, evidence }) => `${short}, ${format.duration(now - at)} ago${evidence ? `\n${evidence.slice(0, 16)}` : ""}`);
  return [own, count, ...lines].filter(Boolean).join("\n") || "–";
}

// The columns: `key` sorts, `text` is shown, `meter` fills a bar.
const COLUMNS = [
  { id: "state", label: "State", key: (node) => NODE_STATES.indexOf(node.state) },
  { id: "name", label: "Node", key: (node) => format.called(node).toLowerCase() },
  { id: "device", label: "Device", key: device, text: (node) => device(node) || "–" },
  { id: "span", label: "Layers", key: (node) => node.span[0] * 10_000 + node.span[1], text: (node) => format.span(node.span) },
  { id: "class", label: "Numeric class", key: (node) => node.numeric_class ?? "", text: (node) => node.numeric_class ?? "–" },
  { id: "reach", label: "Reached", key: (node) => node.reach ?? "", text: (node) => node.reach ?? "–" },
  { id: "version", label: "Version", key: (node) => node.version ?? "", text: (node) => node.version ?? "–" },
  { id: "uptime", label: "Uptime", key: uptime, text: (node, now) => format.duration(uptime(node, now)) },
  { id: "load", label: "Load", key: load, text: (node) => format.percent(load(node)), meter: load },
  { id: "kv", label: "KV free", key: free, text: (node) => (free(node) === null ? "–" : `${format.compact(node.kv_free)} of ${format.compact(node.kv_total)}`), meter: free },
  { id: "sessions", label: "Sessions", key: sessions, text: (node) => (sessions(node) === null ? "–" : `${sessions(node)}${preferred(node)}`) },
  { id: "work", label: "Work", key: wrong, text: work },
];

// Unknown values go last whichever the direction.
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (a === b) return 0;
  return (a < b ? -1 : 1) * sign;
}

function createCell(column) {
  const cell = el("td", { role: "cell", "data-label": column.label, class: `is-${column.id}` });
  if (column.id === "state") cell.append(el("span", { class: "sign" }, glyph("unknown"), el("span")));
  else if (column.id === "name") cell.append(el("span", { class: "peer" }), el("code", { class: "short" }));
  else {
    cell.append(el("span", { class: "cell-text" }));
    if (column.meter) cell.append(svg("svg", { class: "meter", "aria-hidden": "true" }, svg("rect", { class: "meter-ground", width: "100%", height: "100%", rx: 2 }), svg("rect", { class: "meter-fill", height: "100%", rx: 2 })));
  }
  return cell;
}

function updateCell(cell, column, node, now) {
  if (column.id === "state") {
    const [icon, word] = cell.firstChild.children;
    setAttribute(cell.firstChild, "class", `sign is-${known(node.state)}`);
    setGlyph(icon, node.state);
    setText(word, node.state);
  } else if (column.id === "name") {
    setText(cell.firstChild, node.name ?? "");
    setHidden(cell.firstChild, !node.name);
    setText(cell.lastChild, node.short);
    setAttribute(cell.lastChild, "title", node.peer);
  } else {
    setText(cell.firstChild, column.text(node, now));
    if (!column.meter) return;
    const value = column.meter(node);
    setAttributes(cell.lastChild.lastChild, { width: `${Math.round(Math.min(1, value ?? 0) * 100)}%` });
  }
}

export class NodesTable {
  constructor(host, note) {
    this.note = note;
    this.sort = { id: "span", sign: 1 };
    this.query = "";
    this.all = false;
    this.rows = el("tbody", { role: "rowgroup" });
    this.heads = COLUMNS.map((column) => {
      const button = el("button", { type: "button", class: "sorter" }, el("span", {}, column.label), el("span", { class: "arrow", "aria-hidden": "true" }));
      button.addEventListener("click", () => this.sortBy(column.id));
      return el("th", { role: "columnheader", scope: "col", class: `is-${column.id}` }, button);
    });
    const table = el("table", { role: "table", class: "cards nodes", "aria-labelledby": "nodes-title" },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...this.heads)), this.rows);
    this.none = el("p", { class: "small" }, "No machine matches.");
    this.more = el("button", { type: "button", class: "button more" });
    this.more.addEventListener("click", () => {
      this.all = !this.all;
      this.draw();
    });
    narrow.addEventListener("change", () => this.model && this.draw());
    host.append(this.tools(), el("div", { class: "table-scroll" }, table), this.none, this.more);
  }

  tools() {
    const find = el("input", { type: "search", id: "find", placeholder: "name, id, device, state", autocomplete: "off", spellcheck: "false" });
    find.addEventListener("input", () => {
      this.query = find.value.trim().toLowerCase();
      this.draw();
    });
    this.select = el("select", { id: "sort" }, ...COLUMNS.map(({ id, label }) => el("option", { value: id }, label)));
    this.select.addEventListener("change", () => this.sortBy(this.select.value, 1));
    this.turn = el("button", { type: "button", class: "button" }, "↑");
    this.turn.addEventListener("click", () => this.sortBy(this.sort.id));
    return el("div", { class: "tools" },
      el("label", { class: "field" }, "Find ", find),
      el("div", { class: "field sort-field" }, el("label", { for: "sort" }, "Sort by "), this.select, this.turn));
  }

  sortBy(id, sign = null) {
    const turned = this.sort.id === id ? -this.sort.sign : 1;
    this.sort = { id, sign: sign ?? turned };
    this.draw();
  }

  render(model, now) {
    this.model = model;
    this.now = now;
    this.draw();
  }

  chosen() {
    const { key } = COLUMNS.find(({ id }) => id === this.sort.id);
    const matches = (node) => [node.name, node.peer, node.device, node.state, node.numeric_class, node.reach, node.version].some((text) => text?.toLowerCase().includes(this.query));
    const nodes = this.query === "" ? this.model.nodes : this.model.nodes.filter(matches);
    return nodes
      .map((node) => ({ node, key: key(node, this.now) }))
      .sort((a, b) => compare(a.key, b.key, this.sort.sign) || (a.node.peer < b.node.peer ? -1 : 1))
      .map(({ node }) => node);
  }

  draw() {
    const nodes = this.chosen();
    const limit = narrow.matches ? SHOWN_NARROW : SHOWN;
    const shown = this.all ? nodes : nodes.slice(0, limit);
    keyed(this.rows, shown, (node) => node.peer, () => el("tr", { role: "row" }, ...COLUMNS.map(createCell)), (row, node) => {
      setAttribute(row, "class", `is-${known(node.state)}${node.named || node.refuted?.length ? " is-refuted" : ""}`);
      COLUMNS.forEach((column, place) => updateCell(row.children[place], column, node, this.now));
    });
    this.drawHeads();
    setHidden(this.none, nodes.length > 0);
    setHidden(this.more, nodes.length <= limit);
    setText(this.more, this.all ? `Show the first ${limit} only` : `Show all ${format.count(nodes.length)}`);
    const here = this.model.nodes.length;
    setText(this.note, nodes.length === here ? format.plural(here, "machine") : `${format.count(nodes.length)} of ${format.plural(here, "machine")}`);
  }

  drawHeads() {
    COLUMNS.forEach(({ id }, place) => {
      const sorted = this.sort.id === id ? (this.sort.sign === 1 ? "ascending" : "descending") : null;
      setAttribute(this.heads[place], "aria-sort", sorted);
      setText(this.heads[place].firstChild.lastChild, sorted === null ? "" : sorted === "ascending" ? "↑" : "↓");
    });
    if (this.select.value !== this.sort.id) this.select.value = this.sort.id;
    setText(this.turn, this.sort.sign === 1 ? "↑" : "↓");
    setAttribute(this.turn, "aria-label", this.sort.sign === 1 ? "Ascending; turn round" : "Descending; turn round");
  }
}
