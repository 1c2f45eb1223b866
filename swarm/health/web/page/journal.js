// Alerts, events and contributors: three lists.

import { byId, el, keyed, setAttribute, setAttributes, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { glyph, known, setGlyph } from "./glyphs.js";

const EVENTS = 8;
const CONTRIBUTORS = 10;
const SEVERITIES = ["critical", "warning", "info"];
const EVENT_SIGNS = { joined: "joining", draining: "draining", moved: "draining", restored: "serving", error: "warning", difference: "warning", left: "offline" };

function entry() {
  return el("li", { class: "entry" }, glyph("info"), el("div", {}, el("p", { class: "entry-text" }), el("p", { class: "entry-meta" }, el("span"), el("time"))));
}

function write(item, { kind, sign, text, meta, at, when }) {
  const [icon, body] = item.children;
  setAttribute(item, "class", `entry is-${kind}`);
  setGlyph(icon, sign);
  setText(body.firstChild, text);
  const [label, time] = body.lastChild.children;
  setText(label, meta);
  setText(time, when);
  setAttributes(time, { datetime: format.iso(at), title: `${format.stamp(at)}` });
}

function empty(list, text) {
  keyed(list, [text], (line) => `empty ${line}`, (line) => el("li", { class: "small" }, line), () => {});
}

// The name of the model of an alert or event; null where the page has one model only.
function modelOf(state, item) {
  if (state.models.length < 2 || !item.model) return null;
  return state.models.find(({ fingerprint }) => fingerprint === item.model)?.name ?? item.model.slice(0, 40);
}

function renderAlerts(state, now) {
  const list = byId("alerts");
  const alerts = [...state.alerts].sort((a, b) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity) || b.since - a.since);
  if (alerts.length === 0) return empty(list, "Nothing is wrong that this service knows of.");
  return keyed(list, alerts, (alert) => alert.id, entry, (item, alert) => {
    const severity = SEVERITIES.includes(alert.severity) ? alert.severity : "info";
    const meta = [severity, modelOf(state, alert)].filter(Boolean).join(" · ");
    write(item, { kind: severity, sign: severity, text: alert.text, meta, at: alert.since, when: `for ${format.duration(now - alert.since)}` });
  });
}

function renderContributors(state, all) {
  const list = byId("contributors");
  if (state.contributors.length === 0) return empty(list, "No client has signed for a token yet.");
  const rows = all ? state.contributors : state.contributors.slice(0, CONTRIBUTORS);
  const highest = Math.max(...rows.map((row) => row.layer_tokens), 1);
  const create = () => el("li", { class: "contributor" },
    el("span", { class: "peer" }), el("span", { class: "amount" }), svg("svg", { class: "meter", "aria-hidden": "true" },
      svg("rect", { class: "meter-ground", width: "100%", height: "100%", rx: 2 }), svg("rect", { class: "meter-fill", height: "100%", rx: 2 })));
  return keyed(list, rows, (row) => row.peer, create, (item, row) => {
    const [name, amount, meter] = item.children;
    setText(name, format.called(row));
    setText(amount, `${format.compact(row.layer_tokens)} · ${format.percent(row.share)}`);
    setAttribute(meter.lastChild, "width", `${((row.layer_tokens / highest) * 100).toFixed(1)}%`);
  });
}

export class Journal {
  constructor() {
    this.all = { events: false, contributors: false };
    this.buttons = {};
    for (const id of ["events", "contributors"]) {
      const button = el("button", { type: "button", class: "button more" });
      button.addEventListener("click", () => {
        this.all[id] = !this.all[id];
        this.render(this.state, this.now);
      });
      byId(id).after(button);
      this.buttons[id] = button;
    }
  }

  render(state, now) {
    this.state = state;
    this.now = now;
    renderAlerts(state, now);
    renderContributors(state, this.all.contributors);
    this.renderEvents(state, now);
    this.renderButton("events", state.events.length, EVENTS);
    this.renderButton("contributors", state.contributors.length, CONTRIBUTORS);
  }

  renderEvents(state, now) {
    const list = byId("events");
    if (state.events.length === 0) return empty(list, "Nothing has happened since this service started.");
    const events = this.all.events ? state.events : state.events.slice(0, EVENTS);
    return keyed(list, events, (event) => `${event.at} ${event.peer} ${event.kind} ${event.text}`, entry, (item, event) => {
      const sign = EVENT_SIGNS[event.kind] ?? (known(event.kind) === "unknown" ? "info" : event.kind);
      const when = now - event.at < 86_400 ? format.clock(event.at) : format.stamp(event.at);
      const meta = [event.kind, event.short, modelOf(state, event)].filter(Boolean).join(" · ");
      write(item, { kind: sign, sign, text: event.text || event.kind, meta, at: event.at, when });
    });
  }

  renderButton(id, n, shown) {
    const button = this.buttons[id];
    button.hidden = n <= shown;
    setText(button, this.all[id] ? "Show fewer" : `Show all ${n}`);
  }
}
