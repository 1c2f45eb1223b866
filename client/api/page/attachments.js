// Text files that go with a message: read here, bounded, shown as chips.

import { el, icon } from "./dom.js";
import { bytes } from "./format.js";

const MAX_FILE_BYTES = 262_144;
const MAX_ALL_BYTES = 1_048_576;
const MAX_FILES = 10;

// Returns the file as {name, size, text}; throws with a line for people.
async function read(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} has ${bytes(file.size)}; a file may have ${bytes(MAX_FILE_BYTES)}`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new Error("binary");
    return { name: file.name.slice(0, 120), size: file.size, text };
  } catch {
    throw new Error(`${file.name} is not a text file (UTF-8)`);
  }
}

export function chip({ name, size }, onRemove = null) {
  const children = [icon("attach"), el("span", { class: "chip-name" }, name), el("span", { class: "chip-size" }, bytes(size))];
  if (onRemove !== null) {
    const button = el("button", { type: "button", class: "chip-remove", "aria-label": `Remove ${name}` }, icon("remove"));
    button.addEventListener("click", onRemove);
    children.push(button);
  }
  return el("li", { class: "chip" }, ...children);
}

export class Attachments {
  files = [];

  constructor(list, say) {
    this.list = list;
    this.say = say;
  }

  async add(files) {
    const problems = [];
    for (const file of files) {
      try {
        if (this.files.length >= MAX_FILES) throw new Error(`${file.name} was left out: ${MAX_FILES} files are the most`);
        const found = await read(file);
        if (this.files.reduce((sum, other) => sum + other.size, found.size) > MAX_ALL_BYTES) throw new Error(`${file.name} was left out: all files together may have ${bytes(MAX_ALL_BYTES)}`);
        this.files.push(found);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.say(problems.join(". "));
    this.#draw();
  }

  set(files) {
    this.files = [...files];
    this.#draw();
  }

  #draw() {
    this.list.hidden = this.files.length === 0;
    this.list.replaceChildren(...this.files.map((file) => chip(file, () => {
      this.set(this.files.filter((other) => other !== file));
      document.getElementById("input").focus();
    })));
  }
}
