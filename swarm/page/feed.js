// Where state comes from: the event stream, and asking where the stream is silent or gone. Draws nothing.

const STREAM = "api/v1/stream";
const STATE = "api/v1/state";
const TICK_MS = 1_000;
const POLL_MS = 5_000; // between two questions
const QUIET_MS = 9_000; // a stream this silent is checked by asking: nothing may have changed, or all may be dead
const REOPEN_MS = 30_000; // before a stream that was refused is tried again
const ANSWER_MS = 4_500;
const REASONS = { TimeoutError: "no answer in time", TypeError: "it cannot be reached" }; // fetch's own words are no help
export const STALE_MS = 15_000;

export class Feed {
  // onState(state) for every newer state; onTick() every second.
  constructor(onState, onTick) {
    this.onState = onState;
    this.onTick = onTick;
    this.trouble = null; // what went wrong last, null while all is well
    this.streaming = false;
    this.heardAt = performance.now(); // of the last sign of life
    this.changedAt = this.heardAt; // when the state shown was new
    this.state = null;
    this.askedAt = -POLL_MS;
    this.asking = false;
    this.refusedAt = 0;
    this.source = null;
  }

  start() {
    this.open();
    this.ask();
    setInterval(() => this.tick(), TICK_MS);
    document.addEventListener("visibilitychange", () => document.hidden || this.tick());
  }

  get silentMs() {
    return performance.now() - this.heardAt;
  }

  get stale() {
    return this.state !== null && this.silentMs > STALE_MS;
  }

  // The service's clock now, without believing this machine's.
  get now() {
    return this.state === null ? 0 : this.state.at + (performance.now() - this.changedAt) / 1000;
  }

  open() {
    const source = new EventSource(STREAM);
    this.source = source;
    source.addEventListener("open", () => {
      this.streaming = true;
    });
    source.addEventListener("state", (event) => this.read(event.data));
    source.addEventListener("error", () => {
      this.streaming = false; // unless it is closed the browser opens it again by itself
      if (source.readyState === EventSource.CLOSED) this.refusedAt = performance.now();
    });
  }

  tick() {
    const now = performance.now();
    if (this.source.readyState === EventSource.CLOSED && now - this.refusedAt > REOPEN_MS) this.open();
    const wait = this.streaming ? QUIET_MS : POLL_MS;
    if (this.silentMs >= wait && now - this.askedAt >= POLL_MS) this.ask();
    this.onTick();
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

  // Take a state unless it is older than the one shown.
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
    const older = this.state !== null && this.state.started_at === state.started_at && state.at < this.state.at;
    if (older) return;
    this.trouble = null;
    this.heardAt = performance.now();
    if (this.state?.at !== state.at) this.changedAt = this.heardAt; // an answer may be an unchanged state
    this.state = state;
    this.onState(state);
  }
}
