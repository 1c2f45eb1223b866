// The server: its health, its models, and one streamed answer.

import { createParser } from "./vendor/eventsource-parser.js";

const MAX_EVENT_CHARS = 4_000_000;
const KEY = "canopy.key";

export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function setApiKey(key) {
  try {
    if (key === "") sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, key);
  } catch {
    // a browser that keeps nothing: the key is asked for again
  }
}

function headers() {
  const key = apiKey();
  return { accept: "application/json", ...(key === "" ? {} : { authorization: `Bearer ${key}` }) };
}

// The models' cards, whether or not every layer is served; the one that is meant where none is chosen comes first.
export async function health(signal) {
  const response = await fetch("health", { headers: headers(), signal, cache: "no-store" });
  const body = await response.json();
  if (typeof body?.model?.id !== "string") throw new Error(body?.error?.message ?? `it answered ${response.status}`);
  return [body.model, ...body.models.filter((card) => card.id !== body.model.id)];
}

export class AnswerError extends Error {
  constructor(message, status = 0, retryAfter = null, code = "") {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.code = code;
  }
}

async function refused(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  let error = {};
  try {
    error = (await response.json()).error;
  } catch {
    // no body that says more
  }
  const message = String(error?.message ?? `the server answered ${response.status}`);
  return new AnswerError(message, response.status, retryAfter, String(error?.code ?? ""));
}

// Ask, and hand every chunk of the answer over; returns when the server says that it is done.
export async function stream(request, signal, onChunk) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true }, canopy: { trace: true } }),
    signal,
  });
  if (!response.ok) throw await refused(response);
  let isDone = false;
  let failure = null;
  const parser = createParser({
    maxBufferSize: MAX_EVENT_CHARS,
    onEvent: ({ data }) => {
      if (data === "[DONE]") {
        isDone = true;
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) failure ??= new AnswerError(String(chunk.error.message ?? "the answer broke off"), chunk.error.status ?? 0);
      else onChunk(chunk);
    },
    onError: (error) => {
      if (error.type === "max-buffer-size-exceeded") failure ??= new AnswerError("the server sent an event that is too large");
    },
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    parser.feed(value);
    if (failure !== null) {
      await reader.cancel();
      throw failure;
    }
  }
  if (!isDone) throw new AnswerError("the connection ended before the answer did");
}
