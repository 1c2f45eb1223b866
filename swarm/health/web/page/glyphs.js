// Signs that show every state beside its colour. Paths lie in a 16 × 16 box and are stroked.

import { svg } from "./dom.js";

export const PATHS = {
  serving: "M3.2 8.6l3.2 3.2 6.4-7.4",
  degraded: "M8 2.6v6.6M8 12.9v.2",
  broken: "M4 4l8 8M12 4l-8 8",
  joining: "M8 3v10M3 8h10",
  draining: "M3 8h10M9 4l4 4-4 4",
  offline: "M4 4l8 8M12 4l-8 8",
  stale: "M5.4 5.6a2.7 2.7 0 1 1 3.9 2.5c-.9.5-1.3 1-1.3 1.9M8 13.1v.1",
  unknown: "M4 8h8",
  info: "M8 7.3v5.3M8 3.4v.1",
  warning: "M8 2.6v6.6M8 12.9v.2",
  critical: "M4 4l8 8M12 4l-8 8",
  copy: "M6 5.5h6.5v8H6zM3.5 10.5v-8H10",
};

export const NODE_STATES = ["serving", "joining", "draining", "stale", "offline"];

// A state that this page does not know is drawn as unknown, never as good.
export const known = (state) => (Object.hasOwn(PATHS, state) ? state : "unknown");

export function glyph(kind, extra = "") {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", class: `glyph ${extra}`.trim(), "aria-hidden": "true", focusable: "false" },
    svg("path", { d: PATHS[known(kind)] }),
  );
}

export function setGlyph(icon, kind) {
  const path = icon.firstChild;
  if (path.getAttribute("d") !== PATHS[known(kind)]) path.setAttribute("d", PATHS[known(kind)]);
}
