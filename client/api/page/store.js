// Conversations in this browser: IndexedDB, bounded. Where the browser keeps nothing, they live as long as the page.
// Tabs tell each other what they keep.

import { merge } from "./conversation.js";

const NAME = "canopy-chat";
const TABLE = "conversations";
export const MAX_CONVERSATIONS = 200;
export const MAX_BYTES = 8_000_000; // of the sweeps of one conversation

// Small choices, which hold for this browser.
export function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // it holds until the page is left
  }
}

function asked(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });
}

async function open() {
  const request = indexedDB.open(NAME, 1);
  request.addEventListener("upgradeneeded", () => request.result.createObjectStore(TABLE, { keyPath: "id" }));
  return asked(request);
}

// The oldest sweeps go first: they are the largest part, and the text does not need them.
export function bounded(conversation) {
  const messages = { ...conversation.messages };
  const carriers = Object.values(messages).filter((message) => message.sweeps?.length);
  carriers.sort((one, other) => one.created - other.created);
  let size = carriers.reduce((sum, message) => sum + message.sweepBytes, 0);
  for (const message of carriers) {
    if (size <= MAX_BYTES) break;
    size -= message.sweepBytes;
    messages[message.id] = { ...message, sweeps: [], sweepBytes: 0 };
  }
  return { ...conversation, messages };
}

export class Store {
  #database = null;
  #memory = new Map();
  #tabs = null;
  #gone = new Set(); // deleted ones, so that an answer that ends late does not bring its conversation back

  // `isOwn(message)`: whether this tab writes it now; `onOther()`: another tab changed something.
  constructor(isOwn, onOther) {
    this.isOwn = isOwn;
    this.onOther = onOther;
  }

  // Returns whether conversations outlive the page.
  async start() {
    try {
      this.#database = await open();
      for (const one of await asked(this.#table("readonly").getAll())) this.#memory.set(one.id, one);
      this.#tabs = new BroadcastChannel(NAME);
      this.#tabs.addEventListener("message", ({ data }) => this.#hear(data));
      return true;
    } catch {
      this.#database = null;
      return false;
    }
  }

  get all() {
    return [...this.#memory.values()].sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return this.#memory.get(id) ?? null;
  }

  // Keep a conversation; over the bound, the one that was longest untouched is forgotten.
  async put(conversation) {
    if (this.#gone.has(conversation.id)) return;
    this.#memory.set(conversation.id, conversation);
    const over = this.all.slice(MAX_CONVERSATIONS);
    for (const old of over) this.#memory.delete(old.id);
    if (this.#database === null) return;
    const table = this.#table("readwrite");
    for (const old of over) table.delete(old.id);
    const kept = table.put(bounded(conversation));
    table.transaction.commit(); // now: the page may end before it hears that this was kept
    await asked(kept);
    this.#tabs.postMessage({ id: conversation.id, isGone: false });
  }

  async restore(conversation) {
    this.#gone.delete(conversation.id);
    await this.put(conversation);
  }

  async remove(id) {
    this.#gone.add(id);
    this.#memory.delete(id);
    if (this.#database === null) return;
    await asked(this.#table("readwrite").delete(id));
    this.#tabs.postMessage({ id, isGone: true });
  }

  async #hear({ id, isGone }) {
    if (isGone) {
      this.#gone.add(id);
      this.#memory.delete(id);
    } else {
      const theirs = await asked(this.#table("readonly").get(id));
      if (theirs === undefined) return;
      const ours = this.#memory.get(id);
      this.#gone.delete(id);
      this.#memory.set(id, ours === undefined ? theirs : merge(ours, theirs, this.isOwn));
    }
    this.onOther();
  }

  #table(mode) {
    return this.#database.transaction(TABLE, mode).objectStore(TABLE);
  }
}
