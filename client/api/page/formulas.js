// Formulas between \( \), \[ \], $ $ and $$ $$: found by marked as tokens of their own, shown as MathML.

import { el } from "./dom.js";
import temml from "./vendor/temml.js";

const MAX_CHARS = 4_000;
const MACROS = /\\(?:[egx]?def|let|futurelet|global|long|(?:re|provide)?newcommand|renewcommand)(?![a-zA-Z])/; // a macro may double itself
const OPTIONS = { throwOnError: true, trust: false, strict: false, maxExpand: 200, maxSize: [20, 200] };

// Each: what opens and closes it, whether it stands in lines of its own.
const FORMS = [
  [/^\$\$((?:\\[^]|[^\\$])+?)\$\$/, true],
  [/^\\\[([^]+?)\\\]/, true],
  [/^\\\(([^]+?)\\\)/, false],
  // Dollars are money as well: no space inside them, no digit behind (Pandoc's rule), all in one line, and no code.
  [/^\$(?![\s$])((?:\\[^\n]|[^\\$\n`])*?[^\\$\s`])\$(?![\d$])/, false],
];
const START = /\$|\\[([]/;

function found(source, isBlock) {
  for (const [form, isDisplay] of FORMS) {
    if (isBlock && !isDisplay) continue;
    const match = form.exec(source);
    if (match === null || match[1].trim() === "" || match[0].length > MAX_CHARS) continue;
    const rest = isBlock ? /^[ \t]*(?:\n|$)/.exec(source.slice(match[0].length)) : [""];
    if (rest !== null) return { type: "formula", raw: match[0] + rest[0], text: match[1].trim(), isDisplay };
  }
  return undefined;
}

const start = (source) => START.exec(source)?.index;

export const extensions = [
  { name: "formula", level: "block", start: (source) => /(?:^|\n)(?:\$\$|\\\[)/.exec(source)?.index, tokenizer: (source) => found(source, true) },
  { name: "formula", level: "inline", start, tokenizer: (source) => found(source, false) },
];

// A formula as MathML; one that cannot be read stays as it was written.
export function drawFormula({ raw, text, isDisplay }) {
  const holder = el("span", { class: isDisplay ? "formula is-display" : "formula", "data-tex": text });
  if (isDisplay) holder.tabIndex = 0; // it may be wider than its column
  try {
    if (MACROS.test(text)) throw new Error("no macros");
    temml.render(text, holder, { ...OPTIONS, displayMode: isDisplay });
  } catch {
    holder.removeAttribute("tabindex");
    holder.replaceChildren(raw.trim());
  }
  return holder;
}
