// The parts of code that are set in colours: highlight.js finds them, and this emitter makes elements of them.

import { el } from "./dom.js";
import highlighter from "./vendor/highlight.js";

const MAX_CHARS = 12_000; // of code that is coloured: the worst that was found takes 0.7 s

class Elements {
  #open = [el("code")];

  addText(text) {
    if (text !== "") this.#open.at(-1).append(text);
  }

  startScope(scope) {
    const part = el("span", { class: `is-${scope.split(".")[0].replaceAll(/[^a-z]/g, "-")}` });
    this.#open.at(-1).append(part);
    this.#open.push(part);
  }

  endScope() {
    this.#open.pop();
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  __addSublanguage(emitter, name) {
    const part = el("span", { class: name ? "is-sublanguage" : null });
    part.append(...emitter.element.childNodes);
    this.#open.at(-1).append(part);
  }

  finalize() {
    this.#open.length = 1;
  }

  toHTML() {
    return "";
  }

  get element() {
    return this.#open[0];
  }
}

highlighter.configure({ __emitter: Elements });

// Code as an element, in colours where its language is known.
export function coloured(code, language) {
  const name = language.toLowerCase();
  if (code.length > MAX_CHARS || highlighter.getLanguage(name) === undefined) return el("code", {}, code);
  try {
    return highlighter.highlight(code, { language: name, ignoreIllegals: true })._emitter.element;
  } catch {
    return el("code", {}, code);
  }
}
