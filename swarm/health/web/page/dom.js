// Elements and in-place updates. Text from the network enters the page here only, as text; nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const FORBIDDEN = /^(on|style$|srcdoc$)/i;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Make an HTML element; children are elements or plain text.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// Make an SVG element.
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Set or (with null) remove an attribute, touching the page only when it differs.
export function setAttribute(element, name, value) {
  if (FORBIDDEN.test(name)) throw new Error(`attribute ${name} must not be set`);
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
}

// Set an element's whole text, touching the page only when it differs.
export function setText(element, text) {
  const first = element.firstChild;
  if (first !== null && first === element.lastChild && first.nodeType === Node.TEXT_NODE) {
    if (first.nodeValue !== text) first.nodeValue = text;
  } else if (first !== null || text !== "") {
    element.textContent = text;
  }
}

export function setHidden(element, hidden) {
  if (element.hasAttribute("hidden") !== hidden) element.toggleAttribute("hidden", hidden); // SVG elements have no `hidden` property
}

// Whether tables are cards; the same width as in the style sheets.
export const narrow = matchMedia("(max-width: 860px)");

export function byId(id) {
  return document.getElementById(id);
}

const kept = new WeakMap(); // parent → Map(key → child)

// Make the parent's children match the items: same key, same element. Order changes keep focus.
export function keyed(parent, items, keyOf, create, update) {
  const before = kept.get(parent) ?? new Map();
  const after = new Map();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const order = [];
  for (const item of items) {
    const key = keyOf(item);
    if (after.has(key)) continue; // of two items with one key the first counts
    const child = before.get(key) ?? create(item);
    update(child, item);
    after.set(key, child);
    order.push(child);
  }
  for (const [key, child] of before) if (!after.has(key)) child.remove();
  let cursor = parent.firstChild;
  for (const child of order) {
    if (child === cursor) cursor = cursor.nextSibling;
    else parent.insertBefore(child, cursor);
  }
  kept.set(parent, after);
  if (focused !== null && focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}
