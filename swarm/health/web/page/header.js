// The frame of the page: sources and freshness, banners, the title, and announcements for screen readers.

import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";
import { glyph, setGlyph } from "./glyphs.js";

const WORST = ["broken", "degraded", "serving"];
const TITLE_SIGNS = { broken: "✕", degraded: "!", serving: "✓" };

export const worst = (models) => WORST.find((verdict) => models.some((model) => model.verdict === verdict)) ?? null;

function freshness(feed) {
  const age = format.duration(feed.silentMs / 1000);
  if (feed.state !== null && feed.snapshot) return { key: "live", kind: feed.stale ? "critical" : "info", text: `Snapshot, ${age} old` };
  if (feed.state === null) return { key: "live", ...(feed.trouble === null ? { kind: "unknown", text: "Waiting" } : { kind: "critical", text: "No answer" }) };
  if (feed.stale) return { key: "live", kind: "critical", text: `Last heard ${age} ago` };
  if (feed.trouble !== null) return { key: "live", kind: "warning", text: `Reconnecting · ${age}` };
  return { key: "live", kind: "serving", text: feed.streaming ? "Live" : "Asking every 5 s" };
}

function sources(feed) {
  const items = [freshness(feed)];
  if (feed.state === null) return items;
  const { broker, dht } = feed.state.sources ?? {};
  const signs = { connected: "serving", ok: "serving", down: "critical", off: "unknown" };
  const sign = (state) => (feed.stale ? "unknown" : (signs[state] ?? "unknown"));
  if (broker) items.push({ key: "broker", kind: sign(broker.state), text: `Broker ${broker.state}` });
  if (dht) items.push({ key: "dht", kind: sign(dht.state), text: `DHT ${dht.state}` });
  return items;
}

function banners(feed) {
  const items = [];
  if (feed.state === null) return items;
  const { broker, dht } = feed.state.sources ?? {};
  if (feed.snapshot) {
    const age = format.duration(feed.silentMs / 1000);
    const rest = feed.stale ? "It is old: what is below may not be true any more." : "Everything below is as it was then.";
    items.push({ key: "snapshot", kind: feed.stale ? "critical" : "info", text: `This is a snapshot of ${format.stamp(feed.state.at)}, ${age} old, and not a live view. ${rest}` });
  } else if (feed.stale) {
    const age = format.duration(feed.silentMs / 1000);
    const why = feed.trouble === null ? "" : ` (${feed.trouble})`;
    items.push({ key: "stale", kind: "critical", text: `No update for ${age}${why}. Below is the last known state, not what is true now; this page keeps asking.` });
  }
  if (broker?.state === "down") {
    items.push({ key: "broker", kind: "warning", text: `The MQTT broker is down since ${format.clock(broker.since)}. Machines are shown from the DHT alone: load, speed and sudden deaths are seen late or not at all. Serving goes on.` });
  } else if (broker?.state === "off") {
    items.push({ key: "broker", kind: "info", text: "No MQTT broker is set up. Machines are shown from the DHT alone, without load and live counters." });
  }
  if (dht?.state === "down") {
    items.push({ key: "dht", kind: "warning", text: `The DHT is out of reach since ${format.clock(dht.since)}. Machines are shown from their telemetry alone.` });
  }
  return items;
}

function labelled(tag, kinds) {
  return {
    create: (item) => el(tag, {}, glyph(item.kind), el("span")),
    update: (node, item) => {
      setAttribute(node, "class", `${kinds} is-${item.kind}`);
      setGlyph(node.firstChild, item.kind);
      setText(node.lastChild, item.text);
    },
  };
}

const sourceItem = labelled("li", "source");
const bannerItem = labelled("p", "banner");

function title(feed) {
  const state = feed.state;
  if (state === null) return "Canopy";
  const verdict = worst(state.models);
  if (feed.stale) return feed.snapshot ? "? old snapshot · Canopy" : "? stale · Canopy";
  if (feed.snapshot) return `${verdict ?? "empty"}, snapshot of ${format.stamp(feed.state.at)} · Canopy`;
  return verdict === null ? "Canopy" : `${TITLE_SIGNS[verdict]} ${verdict} · Canopy`;
}

function refused(counts) {
  const parts = Object.entries(counts ?? {}).filter(([, n]) => n > 0);
  if (parts.length === 0) return "No message has been refused.";
  const text = parts.map(([reason, n]) => `${format.count(n)} ${reason}`).join(", ");
  return `Refused so far, and not believed: ${text}.`;
}

export function renderHeader(feed) {
  keyed(byId("sources"), sources(feed), (item) => item.key, sourceItem.create, sourceItem.update);
  keyed(byId("banners"), banners(feed), (item) => item.key, bannerItem.create, bannerItem.update);
  const text = title(feed);
  if (document.title !== text) document.title = text;
  if (feed.state === null) return;
  setText(byId("swarm"), feed.state.swarm ?? "");
  setText(byId("refused"), refused(feed.state.refused));
}

// Announces every change of a verdict once, through the live region of the page.
export class Announcer {
  constructor() {
    this.verdicts = null;
    this.wasStale = false;
  }

  announce(feed) {
    if (feed.state === null) return;
    const now = new Map(feed.state.models.map((model) => [model.fingerprint, model]));
    const changes = [];
    for (const [fingerprint, model] of now) {
      const before = this.verdicts?.get(fingerprint)?.verdict;
      if (this.verdicts !== null && before !== model.verdict) changes.push(`${model.name} is ${model.verdict}: ${model.reason}.`);
    }
    for (const [fingerprint, model] of this.verdicts ?? []) if (!now.has(fingerprint)) changes.push(`${model.name} is gone.`);
    if (feed.stale !== this.wasStale) changes.push(feed.stale ? (feed.snapshot ? "This snapshot is old." : "No updates arrive; what is shown is old.") : "Updates arrive again.");
    this.wasStale = feed.stale;
    this.verdicts = now;
    if (changes.length > 0) setText(byId("announcer"), changes.join(" "));
  }
}
