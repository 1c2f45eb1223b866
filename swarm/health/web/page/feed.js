// Brings states: from the event stream, and by polling where the stream is silent or gone. Draws nothing.
// A snapshot has no stream: its file is read again now and then, and its age is measured by the reader's own clock.

import { SNAPSHOT, STATE, STREAM } from "./source.js";

const TICK_MS = 1_000;
const POLL_MS = SNAPSHOT ? 60_000 : 5_000; // between two polls
const QUIET_MS = 9_000; // a stream this silent is checked by a poll: a working service sends a state every 5 s
const DEAD_MS = 20_000; // two heartbeats: a stream this silent is opened anew, even if the browser holds it for open
const REOPEN_MS = 30_000; // before a stream that was refused is tried again
const ANSWER_MS = 4_500;
const OLD_MS = 15 * 60_000; // a snapshot of this age is marked as old
const REASONS = { TimeoutError: "no answer in time", TypeError: "it cannot be reached" }; // in place of fetch's own messages
export const STALE_MS = 15_000;

export class Feed {
  // onState(state) for every newer state; onTick() every second.
  constructor(onState, onTick) {
    this.onState = onState;
    this.onTick = onTick;
    this.trouble = null; // what went wrong last, null while all is well
    this.snapshot = SNAPSHOT;
    this.streaming = false;
    this.streamedAt = performance.now(); // when the stream last brought anything, or was opened
    this.renewedAt = this.streamedAt; // when a newer state came; a repeated one renews nothing
    this.state = null;
    this.askedAt = -POLL_MS;
    this.asking = false;
    this.refusedAt = 0;
    this.source = null;
  }

  start() {
    if (!SNAPSHOT) this.open();
    this.ask();
    setInterval(() => this.tick(), TICK_MS);
    document.addEventListener("visibilitychange", () => document.hidden || this.tick());
  }

  // Age of the state that is shown, in milliseconds.
  get silentMs() {
    if (SNAPSHOT && this.state !== null) return Math.max(0, Date.now() - this.state.at * 1000);
    return performance.now() - this.renewedAt;
  }

  get stale() {
    return this.state !== null && this.silentMs > (SNAPSHOT ? OLD_MS : STALE_MS);
  }

  // The service's clock now, whatever this machine's clock says; in a snapshot time stands still.
  get now() {
    if (this.state === null) return 0;
    return SNAPSHOT ? this.state.at : this.state.at + (performance.now() - this.renewedAt) / 1000;
  }

  open() {
    this.source?.close();
    const source = new EventSource(STREAM);
    this.source = source;
    this.streamedAt = performance.now();
    source.addEventListener("open", () => {
      this.streaming = true;
    });
    source.addEventListener("state", (event) => {
      this.streamedAt = performance.now();
      this.read(event.data);
    });
    source.addEventListener("error", () => {
      this.streaming = false; // unless it is closed the browser opens it again by itself
      if (source.readyState === EventSource.CLOSED) this.refusedAt = performance.now();
    });
  }

  tick() {
    const now = performance.now();
    if (!SNAPSHOT) this.tend(now);
    const isDue = SNAPSHOT || now - this.renewedAt >= (this.streaming ? QUIET_MS : POLL_MS);
    if (isDue && now - this.askedAt >= POLL_MS) this.ask();
    this.onTick();
  }

  // Reopen the stream: after a pause if it was refused, at once if it fell silent.
  tend(now) {
    const isClosed = this.source.readyState === EventSource.CLOSED;
    if (isClosed ? now - this.refusedAt > REOPEN_MS : now - this.streamedAt > DEAD_MS) {
      this.streaming = false;
      this.open();
    }
  }

  async ask() {
    if (this.asking) return;
    this.asking = true;
    this.askedAt = performance.now();
    try {
      const answer = await fetch(STATE, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
      if (!answer.ok) throw new Error(`it answered ${answer.status}`);
      this.read(await answer.text());
    } catch (error) {
      this.trouble = REASONS[error.name] ?? error.message;
      this.onTick();
    } finally {
      this.asking = false;
    }
  }

  // Take in a state unless it is older than the one shown.
  read(text) {
    let state;
    try {
      state = JSON.parse(text);
      if (state.v !== 1) throw new Error(`state of version ${state.v}: reload the page`);
      if (!Array.isArray(state.models)) throw new Error("state without models");
    } catch (error) {
      this.trouble = error.message;
      this.onTick();
      return;
    }
    const same = this.state !== null && this.state.started_at === state.started_at;
    if (same && state.at < this.state.at) return;
    this.trouble = null;
    if (!same || state.at !== this.state.at) this.renewedAt = performance.now();
    this.state = state;
    this.onState(state);
  }
}
