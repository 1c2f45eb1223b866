// A command that can be selected whole, and a button that copies it.

import { byId, el, setText } from "./dom.js";
import { glyph } from "./glyphs.js";

const SHOWN_MS = 2_000;
const LONG = 24; // characters

function select(code) {
  const selection = document.getSelection();
  selection.removeAllRanges();
  selection.selectAllChildren(code);
}

async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    select(code); // no permission, or a page served without TLS, where there is no clipboard
    return document.execCommand("copy");
  }
}

function attach(holder, code) {
  const label = el("span", {}, "Copy");
  const button = el("button", { type: "button", class: "button copy" }, glyph("copy"), label);
  let timer = 0;
  button.addEventListener("click", async () => {
    const done = await copy(code);
    setText(label, done ? "Copied" : "Press Ctrl+C");
    setText(byId("announcer"), done ? "Command copied." : "The command is selected: press Control C to copy it.");
    clearTimeout(timer);
    timer = setTimeout(() => setText(label, "Copy"), SHOWN_MS);
  });
  holder.append(button);
}

// Short words stay whole where the line wraps: 4-8 is not cut at its hyphen.
function words(text) {
  return text.split(/( +)/).map((word) => (word.length > LONG || word.trim() === "" ? word : el("span", { class: word.startsWith("--") ? "option" : "plain" }, word)));
}

// A command line with its button; `setCommand` changes the text.
export function command(text) {
  const code = el("code", {}, ...words(text));
  const holder = el("div", { class: "command" }, el("pre", {}, code));
  attach(holder, code);
  return holder;
}

export function setCommand(holder, text) {
  const code = holder.querySelector("code");
  if (code.textContent !== text) code.replaceChildren(...words(text));
}

// Give the commands that stand in the page itself their buttons.
export function attachAll() {
  for (const holder of document.querySelectorAll("[data-copy]")) {
    const code = holder.querySelector("code");
    code.replaceChildren(...words(code.textContent));
    attach(holder, code);
  }
}
