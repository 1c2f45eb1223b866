// Where the time of one sweep went: drafting, every hop, and the wire between them, on one axis.

import { el, svg } from "./dom.js";
import { layers, milliseconds } from "./format.js";

export const PARTS = {
  draft: "drafting",
  wire: "on the wire",
  queue: "waiting",
  compute: "computing",
  other: "messages",
  rest: "not accounted for",
};

function rows(sweep) {
  const found = [
    { name: "draft", parts: [["draft", sweep.draft_ms]] },
    { name: "to hop 0", parts: [["wire", sweep.first_link_ms]] },
    ...sweep.hops.map((hop, place) => ({
      name: `hop ${place}`,
      detail: hop.name,
      parts: [["queue", hop.queue_ms], ["compute", hop.compute_ms], ["other", hop.other_ms], ["wire", hop.link_ms]],
    })),
    { name: "rest", parts: [["rest", Math.max(sweep.other_ms ?? 0, 0)]] },
  ];
  let at = 0;
  for (const row of found) {
    row.parts = row.parts.map(([kind, ms]) => {
      const part = { kind, ms: ms ?? 0, start: at };
      at += part.ms;
      return part;
    });
    row.ms = row.parts.reduce((sum, part) => sum + part.ms, 0);
  }
  return { found, total: Math.max(at, (sweep.draft_ms ?? 0) + (sweep.total_ms ?? 0), 0.001) };
}

export function drawWaterfall(sweep) {
  const { found, total } = rows(sweep);
  const percent = (ms) => `${((ms / total) * 100).toFixed(2)}%`;
  const items = found.map((row) => {
    const bars = row.parts.filter((part) => part.ms > 0).map((part) => svg("rect", { class: `part-${part.kind}`, x: percent(part.start), width: percent(Math.max(part.ms, total / 400)), y: "20%", height: "60%" }));
    const said = row.parts.filter((part) => part.ms > 0).map((part) => `${PARTS[part.kind]} ${milliseconds(part.ms)}`).join(", ");
    return el("li", { class: "fall", title: `${row.detail ? `${row.detail}: ` : ""}${said || "0 ms"}` },
      el("span", { class: "fall-name" }, row.name, row.detail ? el("span", { class: "fall-detail" }, `layers ${layers(row.detail)}`) : null),
      svg("svg", { class: "fall-bar", "aria-hidden": "true" }, svg("rect", { class: "fall-ground", width: "100%", height: "100%", rx: 3 }), ...bars),
      el("span", { class: "fall-ms" }, milliseconds(row.ms)),
      el("span", { class: "unseen" }, said));
  });
  return el("ol", { class: "falls", "aria-label": `Where ${milliseconds(total)} went` }, ...items);
}

export function legend() {
  return el("ul", { class: "legend" }, ...Object.entries(PARTS).map(([kind, label]) =>
    el("li", {}, svg("svg", { class: "swatch", "aria-hidden": "true" }, svg("rect", { class: `part-${kind}`, width: "100%", height: "100%", rx: 2 })), label)));
}
