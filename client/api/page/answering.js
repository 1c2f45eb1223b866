// One answer while it comes: chunks go into the message, and the clock tells how fast it was.

import { stream } from "./api.js";

const MAX_SWEEPS = 4_000; // of one answer; later ones are not drawn

function newStats() {
  return { tokens: 0, perSweep: 0, rate: 0, firstMs: null, totalMs: 0, context: null }; // context: tokens of prompt and answer
}

// Reads an answer into `message`; returns when it has ended, however it ended.
export class Answering {
  #abort = new AbortController();
  #firstTokens = 0;
  #trees = 0;

  constructor(message, onChange, clock = () => performance.now()) {
    this.message = message;
    this.onChange = onChange;
    this.clock = clock;
    Object.assign(message, { content: "", reasoning: "", sweeps: [], sweepBytes: 0, sweepsLeftOut: 0, stats: newStats(), state: "streaming", finish: null, error: "", isContextFull: false });
  }

  stop() {
    this.#abort.abort();
  }

  // Returns the error, null for none.
  async run(request) {
    const { message } = this;
    this.began = this.clock();
    try {
      await stream(request, this.#abort.signal, (chunk) => this.#take(chunk));
      message.state = "done";
      return null;
    } catch (error) {
      message.state = this.#abort.signal.aborted ? "stopped" : "failed";
      message.error = error instanceof TypeError ? "the connection broke" : error.message;
      message.isContextFull = error.code === "context_length_exceeded";
      return message.state === "failed" ? error : null;
    } finally {
      this.onChange();
    }
  }

  #take(chunk) {
    const { message } = this;
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (typeof delta.content === "string") message.content += delta.content;
    if (typeof thought === "string") message.reasoning += thought;
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    const sweeps = Array.isArray(chunk.canopy?.sweeps) ? chunk.canopy.sweeps : [];
    const drawn = sweeps.slice(0, MAX_SWEEPS - message.sweeps.length);
    message.sweeps.push(...drawn);
    message.sweepsLeftOut += sweeps.length - drawn.length;
    if (drawn.length > 0) message.sweepBytes += JSON.stringify(drawn).length;
    this.#count(sweeps, chunk.canopy?.tokens, chunk.usage);
    this.onChange();
  }

  #count(sweeps, tokens, usage) {
    const { stats } = this.message;
    const came = tokens?.length ?? sweeps.reduce((sum, sweep) => sum + sweep.emitted.length, 0);
    const now = this.clock();
    if (came > 0) {
      stats.tokens += came;
      stats.totalMs = now - this.began;
      if (stats.firstMs === null) {
        stats.firstMs = stats.totalMs;
        this.#firstTokens = came;
      }
    }
    this.#trees += sweeps.filter((sweep) => !sweep.is_part).length;
    if (this.#trees > 0) stats.perSweep = stats.tokens / this.#trees;
    if (usage) this.#countWhole(usage);
    const later = stats.totalMs - (stats.firstMs ?? 0);
    stats.rate = later > 0 ? (1_000 * (stats.tokens - this.#firstTokens)) / later : 0;
  }

  // The server's own count, at the end; it alone is there where sweeps are not.
  #countWhole(usage) {
    const { stats } = this.message;
    const accepted = usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
    stats.tokens = usage.completion_tokens ?? stats.tokens;
    stats.context = (usage.prompt_tokens ?? 0) + stats.tokens;
    if (this.#trees === 0 && stats.tokens > accepted) stats.perSweep = stats.tokens / (stats.tokens - accepted);
  }
}
