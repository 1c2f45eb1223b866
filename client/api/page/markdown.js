// Markdown as elements. marked finds the structure; every text becomes a text node, so nothing a model writes is markup.

import { coloured } from "./code_colours.js";
import { copyButton, el } from "./dom.js";
import { drawFormula, extensions } from "./formulas.js";
import { Marked } from "./vendor/marked.js";

const MAX_DEPTH = 24;
const BUDGET_MS = 100; // for finding mark-up; what is left then stays as it was written
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…", mdash: "—", ndash: "–" };
const FIRST_LEVEL = 3; // the page's own headings are h1 and h2
const LAST_LEVEL = 6;

function decoded(text) {
  return text.replaceAll(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|([a-z]{2,6}));/gi, (whole, decimal, hex, name) => {
    if (name !== undefined) return ENTITIES[name.toLowerCase()] ?? whole;
    const code = decimal === undefined ? Number.parseInt(hex, 16) : Number(decimal);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

// The address of a link, null where it is none that a reader should follow.
export function safeAddress(href) {
  try {
    const url = new URL(decoded(href));
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative: it would lead into this page's own server
  }
}

function link(href, children) {
  const address = safeAddress(href);
  if (address === null) return el("span", { class: "no-link", title: "not a link that this page follows" }, ...children);
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address }, ...children);
}

function inline(tokens, depth) {
  return (tokens ?? []).map((token) => one(token, depth));
}

function one(token, depth) {
  if (depth > MAX_DEPTH) return token.raw;
  switch (token.type) {
    case "text":
      return token.tokens ? el("span", {}, ...inline(token.tokens, depth + 1)) : decoded(token.text);
    case "escape":
      return token.text;
    case "strong":
    case "em":
    case "del":
      return el(token.type, {}, ...inline(token.tokens, depth + 1));
    case "codespan":
      return el("code", {}, token.text);
    case "br":
      return el("br");
    case "link":
      return link(token.href, inline(token.tokens, depth + 1));
    case "image":
      return link(token.href, [`image: ${token.text || token.href}`]); // never loaded: it would tell its server who reads this
    case "formula":
      return drawFormula(token);
    case "checkbox":
      return el("input", { type: "checkbox", disabled: true, checked: token.checked, "aria-label": token.checked ? "done" : "to do" });
    default:
      return token.raw; // raw HTML, and what this page does not know
  }
}

export function codeBlock(code, language) {
  const name = /^[\w+#.-]{1,24}/.exec(language ?? "")?.[0] ?? "";
  return el("div", { class: "code" },
    el("div", { class: "code-head" }, el("span", { class: "code-language" }, name || "text"), copyButton(() => code, "Copy this code", "code-copy")),
    el("pre", { tabindex: "0", role: "group", "aria-label": name === "" ? "code" : `code, ${name}` }, coloured(code, name)));
}

function table(token, depth) {
  const cell = (tag, { tokens, align }) => el(tag, { class: align ? `align-${align}` : null, scope: tag === "th" ? "col" : null }, ...inline(tokens, depth + 1));
  return el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "table" },
    el("table", {},
      el("thead", {}, el("tr", {}, ...token.header.map((each) => cell("th", each)))),
      el("tbody", {}, ...token.rows.map((row) => el("tr", {}, ...row.map((each) => cell("td", each)))))));
}

function list(token, depth) {
  const items = token.items.map((item) => {
    const hasBox = item.task && item.tokens?.[0]?.type !== "checkbox" && item.tokens?.[0]?.tokens?.[0]?.type !== "checkbox";
    const box = hasBox ? el("input", { type: "checkbox", disabled: true, checked: item.checked, "aria-label": item.checked ? "done" : "to do" }) : null;
    return el("li", { class: item.task ? "task" : null }, box, ...blocks(item.tokens, depth + 1));
  });
  return el(token.ordered ? "ol" : "ul", { start: token.ordered && Number(token.start) !== 1 ? token.start : null }, ...items);
}

function block(token, depth) {
  if (depth > MAX_DEPTH) return el("p", {}, token.raw);
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "hr":
      return el("hr");
    case "heading":
      return el(`h${token.level ?? LAST_LEVEL}`, {}, ...inline(token.tokens, depth + 1));
    case "code":
      return codeBlock(token.text, token.lang);
    case "blockquote":
      return el("blockquote", {}, ...blocks(token.tokens, depth + 1));
    case "list":
      return list(token, depth);
    case "table":
      return table(token, depth);
    case "paragraph":
      return el("p", {}, ...inline(token.tokens, depth + 1));
    case "html":
      return el("p", { class: "raw" }, token.raw.trimEnd());
    default:
      return one(token, depth);
  }
}

function blocks(tokens, depth) {
  return (tokens ?? []).map((token) => block(token, depth)).filter((element) => element !== null);
}

// Levels follow each other without a gap, whatever level a model begins with.
function levelled(tokens) {
  let first = 0;
  let before = FIRST_LEVEL - 1;
  for (const token of tokens.filter(({ type }) => type === "heading")) {
    first ||= token.depth;
    before = token.level = Math.min(FIRST_LEVEL + Math.max(token.depth - first, 0), before + 1, LAST_LEVEL);
  }
  return tokens;
}

// Some texts take time that grows with the square of their length: an opening that never closes is looked for again and
// again. Past the budget nothing opens any more.
const NESTING = ["blockquote", "list", "table", "escape", "emStrong", "codespan", "del", "link", "reflink", "tag", "autolink", "url"];
const marked = new Marked({ gfm: true, breaks: true });
let clock = () => performance.now();
let until = Infinity;
const withinBudget = () => (clock() < until ? false : undefined); // false: marked's own tokenizer goes on
marked.use({
  extensions: extensions.map((each) => ({
    ...each,
    start: (source) => (clock() < until ? each.start(source) : undefined),
    tokenizer: (source) => (clock() < until ? each.tokenizer(source) : undefined),
  })),
  tokenizer: {
    ...Object.fromEntries(NESTING.map((name) => [name, withinBudget])),
    inlineText: (source) => withinBudget() ?? { type: "text", raw: source, text: source, escaped: true }, // all that is left
  },
});

function parts(source) {
  until = clock() + BUDGET_MS;
  try {
    return levelled(marked.lexer(source).filter((token) => token.type !== "space" && token.type !== "def"));
  } catch {
    return [{ type: "paragraph", raw: source, tokens: [{ type: "escape", raw: source, text: source }] }];
  } finally {
    until = Infinity;
  }
}

const drawn = new WeakMap(); // holder → the raw text of each child

// Show a text; blocks that did not change stay, so that a selection or a focus in them survives streaming.
export function render(holder, source, now = () => performance.now()) {
  clock = now;
  const before = drawn.get(holder) ?? [];
  const after = parts(source);
  let same = 0;
  while (same < before.length && same < after.length && before[same] === after[same].raw) same += 1;
  while (holder.childNodes.length > same) holder.lastChild.remove();
  for (const token of after.slice(same)) holder.append(block(token, 0) ?? el("span"));
  drawn.set(holder, after.map((token) => token.raw));
}
