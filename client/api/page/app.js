// The page: conversations, one of them open, at most one answer coming.

import { Answering } from "./answering.js";
import { Composer } from "./composer.js";
import * as conversations from "./conversation.js";
import { announce, byId, el, setAttribute, setText } from "./dom.js";
import { MessageView } from "./message_view.js";
import { Service } from "./service.js";
import { lastSettings, samplingOf, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Speech } from "./speech.js";
import { recall, remember, Store } from "./store.js";

const DRAW_MS = 40; // between drawings of a streaming answer, at least; more where drawing takes long
const SAVE_MS = 3_000;
const NEAR_END = 80; // pixels from the end of the log in which new text keeps it at the end
const CONTEXT_HIGH = 0.8; // of the context: from here on the page offers to leave out the oldest turns
const THEMES = ["auto", "light", "dark"];

const store = new Store((message) => message === answering?.message, heard);
const service = new Service();
const speech = new Speech();
const settings = new Settings();
const views = new Map(); // message id → its view
let conversation = conversations.create(lastSettings());
let answering = null; // the answer that comes now
let isSweepView = recall("canopy.sweeps") === "on";
let removed = null; // the conversation that was deleted last, until something else happens

// Drawing

const log = byId("log");

function isAtEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
}

function toEnd() {
  log.scrollTop = log.scrollHeight;
}

function viewOf(message) {
  let view = views.get(message.id);
  if (view === undefined || view.message !== message) {
    view = new MessageView(message, actions);
    views.set(message.id, view);
  }
  return view;
}

function drawMessage(message) {
  viewOf(message).update({ versions: conversations.versions(conversation, message), isSweepView, isBusy: answering !== null });
}

function draw() {
  const shown = conversations.path(conversation);
  const elements = shown.map((message) => viewOf(message).element);
  const holder = byId("messages");
  elements.forEach((element, place) => {
    if (holder.children[place] !== element) holder.insertBefore(element, holder.children[place] ?? null);
  });
  while (holder.childElementCount > elements.length) holder.lastElementChild.remove();
  for (const message of shown) drawMessage(message);
  drawLeftOut(shown);
  drawContext(shown);
  byId("welcome").hidden = shown.length > 0;
  document.title = conversation.title === "" ? "Canopy chat" : `${conversation.title} · Canopy chat`;
  byId("undo").hidden = removed === null;
  sidebar.draw();
}

// Where the model's reading begins, once the oldest turns are left out.
function drawLeftOut(shown) {
  const count = conversations.leftOut(conversation, shown);
  shown.forEach((message, place) => viewOf(message).element.classList.toggle("is-left-out", place < count));
  const note = byId("left-out");
  note.hidden = count === 0;
  if (count > 0) viewOf(shown[count]).element.prepend(note);
  else byId("log").append(note);
}

// How much of the context the last answer that ended left.
function drawContext(shown) {
  const used = shown.findLast((message) => message.stats?.context)?.stats.context ?? 0;
  const size = service.card?.context_length ?? 0;
  const isKnown = used > 0 && size > 0;
  byId("context").hidden = !isKnown;
  if (!isKnown) return;
  const part = used / size;
  setText(byId("context-words"), `${used.toLocaleString("en")} of ${size.toLocaleString("en")} tokens of context`);
  Object.assign(byId("context-meter"), { max: size, high: size * CONTEXT_HIGH, optimum: 0, value: Math.min(used, size) });
  const turns = shown.filter((message, place) => message.role === "user" && place >= conversations.leftOut(conversation, shown)).length;
  byId("leave-out").hidden = part < CONTEXT_HIGH || turns < 2 || answering !== null;
}

let drawTimer = 0;
let drawMs = 0;

// Draw the answer that comes, but not more often than the browser can.
function drawSoon() {
  if (drawTimer !== 0) return;
  drawTimer = setTimeout(() => {
    drawTimer = 0;
    const wasAtEnd = isAtEnd();
    const began = performance.now();
    if (answering !== null && conversation.messages[answering.message.id] === answering.message) {
      drawMessage(answering.message);
      speech.hear(answering.message.content);
    }
    drawMs = performance.now() - began;
    if (wasAtEnd) toEnd();
    saveSoon();
  }, Math.max(DRAW_MS, 4 * drawMs));
}

// Keeping

let saveTimer = 0;

function saveSoon() {
  if (saveTimer === 0) saveTimer = setTimeout(save, SAVE_MS);
}

async function save() {
  clearTimeout(saveTimer);
  saveTimer = 0;
  if (conversation.roots.length === 0) return;
  try {
    await store.put(conversation);
  } catch (error) {
    composer.say(`This conversation cannot be kept: ${error.message}`);
  }
}

function open(next) {
  stop();
  save();
  removed = null;
  conversation = next;
  views.clear();
  clearTimeout(drawTimer);
  drawTimer = 0;
  byId("log").append(byId("left-out")); // it may stand in a message
  byId("messages").replaceChildren();
  remember("canopy.open", conversation.id);
  draw();
  toEnd();
}

// Another tab changed what is kept.
function heard() {
  const isGone = conversation.roots.length > 0 && store.get(conversation.id) === null;
  if (isGone) open(conversations.create(lastSettings()));
  else draw();
}

// Answers

function stop() {
  if (answering === null) return false;
  answering.stop();
  return true;
}

async function answer(parent) {
  const message = conversations.add(conversation, parent, { role: "assistant" });
  const own = conversation;
  const request = { model: service.card?.id, messages: conversations.requestMessages(own, message), ...samplingOf(own.settings) };
  const run = new Answering(message, drawSoon);
  answering = run;
  save();
  speech.begin();
  composer.running(true);
  draw();
  toEnd();
  const error = await run.run(request);
  if (answering !== run) return; // another one began meanwhile
  answering = null;
  composer.running(false);
  own.updated = Date.now();
  draw();
  if (isAtEnd()) toEnd();
  speech.end(message.content, error === null ? (message.state === "stopped" ? "Stopped." : "End of the answer.") : "");
  await store.put(own).catch((problem) => composer.say(`This conversation cannot be kept: ${problem.message}`));
  if (error !== null) failed(error);
}

function failed(error) {
  service.ask();
  if (error.status === 401) settings.askForKey(conversation.settings, saveSettings);
}

function mayAsk() {
  if (answering !== null) return false;
  const conversationIsFull = Object.keys(conversation.messages).length >= conversations.MAX_MESSAGES;
  if (conversationIsFull) composer.say("This conversation is full; begin another one.");
  else if (service.state === "waiting") composer.say("Layers are missing: the answer has to wait until a machine serves them.");
  else if (service.state === "silent") composer.say("The server does not answer; your message stays here.");
  else return true;
  return false;
}

function send(text, files) {
  if (!mayAsk()) return false;
  removed = null;
  const last = conversations.path(conversation).at(-1);
  const message = conversations.add(conversation, last?.id ?? null, { role: "user", content: text, attachments: files });
  remember("canopy.open", conversation.id);
  answer(message.id);
  return true;
}

const actions = {
  edit(message, text) {
    if (!mayAsk()) return;
    const next = conversations.add(conversation, message.parent, { role: "user", content: text, attachments: message.attachments });
    answer(next.id);
  },
  again(message) {
    if (mayAsk()) answer(message.parent);
  },
  show(id) {
    conversations.choose(conversation, id);
    draw();
    save();
    views.get(id)?.element.querySelector(".versions button:enabled")?.focus();
  },
  leaveOut(message) {
    if (leaveOut() && mayAsk()) answer(message.parent);
  },
  redraw: draw,
};

function leaveOut() {
  const isLess = conversations.leaveOutOldest(conversation);
  if (isLess) announce("The oldest turns are left out from now on; they stay on the page.");
  else composer.say("This turn alone is too long for the model's context: shorten it, or attach less.");
  draw();
  save();
  return isLess;
}

function saveSettings(next) {
  conversation.settings = next;
  save();
}

// Parts of the page

const composer = new Composer({ onSend: send, onStop: stop });

const sidebar = new Sidebar({
  all: () => store.all,
  current: () => conversation.id,
  open: (id) => open(store.get(id)),
  async rename(id, title) {
    const one = id === conversation.id ? conversation : store.get(id);
    one.title = title;
    await store.put(one);
    draw();
  },
  async remove(id) {
    const one = store.get(id);
    await store.remove(id);
    if (id === conversation.id) open(conversations.create(lastSettings()));
    removed = one;
    draw();
    announce(`${one.title} was deleted. It can be taken back.`);
    byId("undo-button").focus();
  },
});

function begin() {
  open(conversations.create(lastSettings()));
  sidebar.toggle(false);
  composer.input.focus();
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  remember("canopy.theme", theme);
  for (const button of byId("themes").children) setAttribute(button, "aria-pressed", String(button.dataset.theme === theme));
}

function showSweeps(isShown) {
  isSweepView = isShown;
  remember("canopy.sweeps", isShown ? "on" : "off");
  setAttribute(byId("sweeps"), "aria-checked", String(isShown));
  document.body.classList.toggle("shows-sweeps", isShown);
  draw();
}

function wire() {
  byId("new").addEventListener("click", begin);
  byId("new-narrow").addEventListener("click", begin);
  byId("sweeps").addEventListener("click", () => showSweeps(!isSweepView));
  byId("open-settings").addEventListener("click", () => settings.open(conversation.settings, saveSettings));
  byId("newest").addEventListener("click", toEnd);
  byId("leave-out").addEventListener("click", leaveOut);
  byId("read-again").addEventListener("click", () => {
    delete conversation.from;
    draw();
    save();
  });
  byId("undo-button").addEventListener("click", async () => {
    const one = removed;
    removed = null;
    await store.restore(one);
    open(one);
  });
  for (const theme of THEMES) {
    const button = el("button", { type: "button", class: "theme", "data-theme": theme }, theme[0].toUpperCase() + theme.slice(1));
    button.addEventListener("click", () => setTheme(theme));
    byId("themes").append(button);
  }
  for (const button of document.querySelectorAll("[data-ask]")) button.addEventListener("click", () => composer.fill(button.textContent));
  log.addEventListener("scroll", () => { byId("newest").hidden = isAtEnd(); }, { passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || byId("settings").open) return;
    if (sidebar.isOpen) sidebar.toggle(false);
    else stop();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) save(); // a phone may end the page without another word
  });
  addEventListener("pagehide", () => {
    stop();
    save();
  });
  let wasIll = false;
  service.addEventListener("change", () => {
    if (service.state === "ready" && wasIll) composer.say("");
    wasIll = service.state !== "ready";
    const card = service.card;
    drawContext(conversations.path(conversation));
    byId("about").textContent = card?.context_length ? `${card.context_length.toLocaleString("en")} tokens of context${card.has_template ? "" : " · it brings no chat template, so turns are joined as a plain transcript"}` : "";
  });
}

async function start() {
  wire();
  setTheme(THEMES.includes(recall("canopy.theme")) ? recall("canopy.theme") : "auto");
  service.start();
  const isKept = await store.start();
  byId("not-kept").hidden = isKept;
  for (const one of store.all) for (const message of Object.values(one.messages)) if (message.state === "streaming") message.state = "stopped";
  const before = store.get(recall("canopy.open"));
  if (before !== null && conversation.roots.length === 0) conversation = before;
  showSweeps(isSweepView);
  toEnd();
  byId("main").removeAttribute("aria-busy");
  if (matchMedia("(pointer: fine)").matches) composer.input.focus();
}

start();
