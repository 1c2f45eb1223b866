// Where the page's data is: at the service, or in a snapshot's files beside the page. Read by several modules.

export const SNAPSHOT = document.querySelector('meta[name="canopy-snapshot"]') !== null;
export const STREAM = "api/v1/stream";
export const STATE = SNAPSHOT ? "state.json" : "api/v1/state";

// The fingerprint comes from the network, so it is checked before it becomes part of a path.
export function historyOf(fingerprint, window) {
  if (!/^[0-9a-f]{8,128}$/.test(fingerprint)) throw new Error("the model's fingerprint is none");
  return SNAPSHOT ? `history/${fingerprint}.${window}.json` : `api/v1/history?${new URLSearchParams({ model: fingerprint, window })}`;
}
