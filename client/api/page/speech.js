// Reads a streaming answer out in whole sentences, not too often: a screen reader that is fed every token says nothing.

import { announce } from "./dom.js";

const PAUSE_MS = 2_500;

function plain(markdown) {
  return markdown.replaceAll(/```[^\n]*\n?/g, " code: ").replaceAll(/[*_#`>|]+/g, "").replaceAll(/\s+/g, " ").trim();
}

export class Speech {
  #said = 0;
  #last = 0;

  begin() {
    this.#said = 0;
    this.#last = 0;
  }

  hear(text, now = performance.now()) {
    if (now - this.#last < PAUSE_MS) return;
    const rest = text.slice(this.#said);
    const end = Math.max(rest.lastIndexOf(". "), rest.lastIndexOf("! "), rest.lastIndexOf("? "), rest.lastIndexOf("\n"));
    if (end < 0) return;
    this.#say(rest.slice(0, end + 1));
    this.#said += end + 1;
    this.#last = now;
  }

  end(text, word) {
    this.#say(`${text.slice(this.#said)} ${word}`);
    this.#said = text.length;
  }

  #say(part) {
    const words = plain(part);
    if (words !== "") announce(words);
  }
}
