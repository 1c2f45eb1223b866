// Elements. Text from the model enters the page here only, as text; nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const FORBIDDEN = /^(on|style$|srcdoc$)/i;

const PATHS = {
  attach: "M13 7.4l-5.3 5.3a3.2 3.2 0 0 1-4.5-4.5l5.6-5.6a2.1 2.1 0 0 1 3 3L6.4 11a1 1 0 0 1-1.4-1.4l4.7-4.7",
  copy: "M6 5.5h6.5v8H6zM3.5 10.5v-8H10",
  edit: "M3 13l.6-2.8 7-7 2.2 2.2-7 7zM9.2 4.6l2.2 2.2",
  again: "M13 8a5 5 0 1 1-1.5-3.6M13 2.6v2.6h-2.6",
  previous: "M10 3.5L5.5 8l4.5 4.5",
  next: "M6 3.5L10.5 8 6 12.5",
  remove: "M4 4l8 8M12 4l-8 8",
  send: "M8 13V3.4M3.8 7.4L8 3.2l4.2 4.2",
  stop: "M4.5 4.5h7v7h-7z",
  down: "M8 3v9.6M3.8 8.6L8 12.8l4.2-4.2",
  save: "M8 2.5v7.6M4.8 7.2L8 10.4l3.2-3.2M3 13.3h10",
  bin: "M3 4.5h10M6.2 4.3V2.8h3.6v1.5M4.4 4.7l.6 8.5h6l.6-8.5",
  warning: "M8 2.6v6.6M8 12.9v.2",
  tick: "M3.2 8.6l3.2 3.2 6.4-7.4",
};

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
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

// Set an attribute; null and false remove it.
export function setAttribute(element, name, value) {
  if (FORBIDDEN.test(name)) throw new Error(`attribute ${name} must not be set`);
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : String(value));
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}

export function icon(name) {
  return svg("svg", { viewBox: "0 0 16 16", class: "glyph", "aria-hidden": "true", focusable: "false" }, svg("path", { d: PATHS[name] }));
}

// A button that shows a sign, and says its name to everybody else.
export function iconButton(name, label, action, extra = "") {
  const button = el("button", { type: "button", class: `icon ${extra}`.trim(), "aria-label": label, title: label }, icon(name));
  button.addEventListener("click", action);
  return button;
}

// Copy a text; false where the browser allows it in no way.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "unseen", readonly: true, "aria-hidden": "true", tabindex: "-1" });
    const before = document.activeElement;
    area.value = text; // no permission, or a page served without TLS, where there is no clipboard
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }
}

// A button that copies what `read` returns, and says so for a moment.
export function copyButton(read, label, extra = "icon") {
  const text = extra.startsWith("icon") ? null : el("span", {}, "Copy");
  const button = el("button", { type: "button", class: extra, "aria-label": label, title: label }, icon("copy"), text);
  let timer = 0;
  button.addEventListener("click", async () => {
    const done = await copy(read());
    const said = done ? "Copied" : "Not copied: the browser forbids it";
    announce(done ? "Copied." : "The browser forbids copying.");
    button.replaceChildren(icon(done ? "tick" : "warning"), ...(text === null ? [] : [el("span", {}, said)]));
    clearTimeout(timer);
    timer = setTimeout(() => button.replaceChildren(icon("copy"), ...(text === null ? [] : [text])), 2_000);
  });
  return button;
}

// Offer a text as a file.
export function download(name, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// Say something to those who do not see the page.
export function announce(text) {
  const place = byId("announcer");
  place.append(el("p", {}, text));
  while (place.childElementCount > 6) place.firstElementChild.remove();
}
