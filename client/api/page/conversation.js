// A conversation as plain data: a tree of messages, since an edit or another answer keeps what was there before.

export const MAX_MESSAGES = 1_000;
const TITLE_CHARS = 60;

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function create(settings, now = Date.now()) {
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, messages: {}, roots: [], chosen: {} };
}

function children(conversation, parent) {
  return parent === null ? conversation.roots : conversation.messages[parent].children;
}

// Add a message below another (null: at the top), and show it.
export function add(conversation, parent, message, now = Date.now()) {
  const id = newId();
  conversation.messages[id] = { id, parent, children: [], created: now, content: "", ...message };
  children(conversation, parent).push(id);
  choose(conversation, id);
  conversation.updated = now;
  if (conversation.title === "" && message.role === "user") conversation.title = titleOf(message);
  return conversation.messages[id];
}

export function choose(conversation, id) {
  conversation.chosen[conversation.messages[id].parent ?? ""] = id;
}

// The messages that are shown, first to last.
export function path(conversation) {
  const found = [];
  let ids = conversation.roots;
  let parent = "";
  while (ids.length > 0) {
    const chosen = conversation.chosen[parent];
    const id = ids.includes(chosen) ? chosen : ids.at(-1);
    found.push(conversation.messages[id]);
    parent = id;
    ids = conversation.messages[id].children;
  }
  return found;
}

// A message's versions, itself included, oldest first.
export function versions(conversation, message) {
  return children(conversation, message.parent);
}

export function titleOf(message) {
  const words = (message.content.trim() || message.attachments?.[0]?.name || "New conversation").replaceAll(/\s+/g, " ");
  return words.length > TITLE_CHARS ? `${words.slice(0, TITLE_CHARS - 1)}…` : words;
}

// What the model reads of a message: attached files stand before the text, each in a fence that it cannot close.
export function wholeText(message) {
  const files = (message.attachments ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), (run) => run[0].length));
    const fence = "`".repeat(longest + 1);
    return `File: ${name}\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
  });
  return files.join("") + message.content;
}

// How many of the messages that are shown, the oldest, no request carries any more.
export function leftOut(conversation, shown = path(conversation)) {
  return Math.max(shown.findIndex((message) => message.id === conversation.from), 0);
}

// Leave out so many of the oldest turns that half of what was written is left; the last turn always is. Returns whether
// there was one to leave out.
export function leaveOutOldest(conversation) {
  const shown = path(conversation);
  const already = leftOut(conversation, shown);
  const begins = shown.map((message, place) => place).filter((place) => place > already && shown[place].role === "user");
  const chars = (from) => shown.slice(from).reduce((sum, message) => sum + wholeText(message).length, 0);
  const from = begins.find((place) => chars(place) <= chars(already) / 2) ?? begins.at(-1);
  if (from === undefined) return false;
  conversation.from = shown[from].id;
  return true;
}

// The messages of a request, up to and without the answer that is asked for.
export function requestMessages(conversation, answer) {
  const shown = path(conversation);
  const before = shown.slice(leftOut(conversation, shown), shown.indexOf(answer)).filter((message) => message.role === "user" || message.content !== "");
  const told = conversation.settings.system.trim();
  const system = told === "" ? [] : [{ role: "system", content: told }];
  return [...system, ...before.map((message) => ({ role: message.role, content: wholeText(message) }))];
}

export function asMarkdown(conversation) {
  const told = conversation.settings.system.trim();
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (told !== "") parts.push(`## System\n\n${told}`);
  for (const message of path(conversation)) parts.push(`## ${message.role === "user" ? "You" : "Answer"}\n\n${wholeText(message)}`);
  return `${parts.join("\n\n")}\n`;
}

const union = (one, other) => [...new Set([...one, ...other])];

// Take in what another tab did to the same conversation. Messages are only ever added, so nothing is lost; what
// `isOwn` says is written here now is left alone.
export function merge(ours, theirs, isOwn) {
  for (const [id, message] of Object.entries(theirs.messages)) {
    const own = ours.messages[id];
    if (own === undefined) ours.messages[id] = message;
    else if (isOwn(own)) own.children = union(own.children, message.children);
    else Object.assign(own, message, { children: union(own.children, message.children) });
  }
  ours.roots = union(ours.roots, theirs.roots);
  ours.chosen = { ...theirs.chosen, ...ours.chosen };
  Object.assign(ours, { title: theirs.title, settings: theirs.settings, from: theirs.from, updated: Math.max(ours.updated, theirs.updated) });
  return ours;
}

// Whether a text stands in a conversation; for searching.
export function mentions(conversation, wanted) {
  if (conversation.title.toLowerCase().includes(wanted)) return true;
  return Object.values(conversation.messages).some((message) => message.content.toLowerCase().includes(wanted));
}
