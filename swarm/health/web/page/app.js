// The page: holds the chosen model, and draws each newer state at most once per frame.

import { attachAll } from "./copy.js";
import { Claims } from "./claims.js";
import { CoverageMap } from "./coverage_map.js";
import { byId, setAttribute, setHidden, setText } from "./dom.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";
import { Announcer, renderHeader } from "./header.js";
import { History } from "./history.js";
import { Journal } from "./journal.js";
import { NodesTable } from "./nodes_table.js";
import { STATE } from "./source.js";
import { MAX_RANGES, renderVerdicts, weakest } from "./verdicts.js";
import { Waterfall } from "./waterfall.js";

const MARK = "#model=";
const WORST = ["broken", "degraded", "serving"];

const parts = {
  map: new CoverageMap(byId("map")),
  claims: new Claims(byId("claims"), byId("claims-note")),
  nodes: new NodesTable(byId("nodes"), byId("nodes-note")),
  waterfall: new Waterfall(byId("probe"), byId("probe-note")),
  history: new History(byId("history")),
  journal: new Journal(),
};
const announcer = new Announcer();
let chosen = decodeURIComponent(location.hash.startsWith(MARK) ? location.hash.slice(MARK.length) : "");
let due = false;

function select(fingerprint) {
  chosen = fingerprint;
  history.replaceState(null, "", `${MARK}${encodeURIComponent(fingerprint)}`);
  draw();
}

// The chosen model, else the worst one, which then stays: details never change under a reader.
function current(models) {
  const worst = [...models].sort((a, b) => WORST.indexOf(a.verdict) - WORST.indexOf(b.verdict))[0];
  const model = models.find(({ fingerprint }) => fingerprint === chosen) ?? worst ?? null;
  if (model !== null) chosen = model.fingerprint;
  return model;
}

function marginText(model) {
  const { holders, ranges } = weakest(model);
  if (model.missing.length > 0) return `✕ Broken: nobody serves ${format.layers(model.missing)}`;
  if (model.verdict === "broken") return `✕ Broken: ${model.reason}`;
  const weak = ranges.length > MAX_RANGES ? `${ranges.length} ranges of layers` : format.layers(ranges);
  return `${format.plural(model.margin, "machine")} to spare: ${weak} ${holders === 1 ? "hang on one machine" : `have ${holders}`}`;
}

function drawFrame() {
  renderHeader(feed);
  announcer.announce(feed);
  const { state } = feed;
  setHidden(byId("loading"), state !== null || feed.trouble !== null);
  setHidden(byId("trouble"), state !== null || feed.trouble === null);
  if (state === null) {
    if (feed.trouble !== null) setText(byId("trouble-text"), `This page asks every 5 seconds and shows the swarm as soon as it answers (last try: ${feed.trouble}).`);
    return;
  }
  setAttribute(byId("main"), "aria-busy", null);
  byId("still")?.remove(); // a snapshot's text for readers without scripts
  setHidden(byId("empty"), state.models.length > 0);
  const model = current(state.models);
  renderVerdicts(state.models, { feed, fingerprint: model?.fingerprint, onSelect: select });
  setHidden(byId("details"), model === null);
  setAttribute(byId("details"), "class", feed.stale ? "details is-old" : "details");
}

function draw() {
  drawFrame();
  if (feed.state === null) return;
  const model = current(feed.state.models);
  if (model === null) return;
  setText(byId("map-margin"), marginText(model));
  parts.map.render(model);
  parts.claims.render(model);
  parts.nodes.render(model, feed.now);
  parts.waterfall.render(model, feed.now);
  parts.history.render(model, feed.now);
  parts.journal.render(feed.state, feed.now);
}

function drawSoon() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    try {
      draw();
      setHidden(byId("fault"), true);
    } catch (error) {
      console.error(error);
      setText(byId("fault"), `This page could not draw the newest state, and what is below may be old (${error.message}). Reload it; the state itself is at ${STATE}.`);
      setHidden(byId("fault"), false);
    }
  });
}

const feed = new Feed(drawSoon, drawFrame);
byId("retry").addEventListener("click", () => feed.ask());
attachAll();
feed.start();
drawFrame();
