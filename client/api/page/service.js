// Whether the swarm can answer now: asked again and again, and said where it changes.

import { health } from "./api.js";
import { announce, byId, copyButton, el, icon, setText } from "./dom.js";
import { layers } from "./format.js";
import { recall, remember } from "./store.js";

const WELL_MS = 15_000;
const ILL_MS = 2_500;
const PATIENCE_MS = 10_000;

export class Service extends EventTarget {
  card = null; // of the chosen model; the last that was heard
  #cards = [];
  #chosen = recall("canopy.model");
  #state = "asking"; // ready · waiting (layers are missing) · silent (the server does not answer)
  #reason = "";
  #timer = 0;
  #drawn = "";

  get state() {
    return this.#state;
  }

  start() {
    addEventListener("online", () => this.ask());
    byId("models").addEventListener("change", ({ target }) => {
      remember("canopy.model", (this.#chosen = target.value));
      this.#choose();
    });
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.ask();
    });
    return this.ask();
  }

  // Ask now, for example after an answer failed.
  async ask() {
    clearTimeout(this.#timer);
    try {
      this.#cards = await health(AbortSignal.timeout(PATIENCE_MS));
      this.#choose();
    } catch (error) {
      this.#reason = error.message;
      this.#set("silent");
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.ask(), this.#state === "ready" ? WELL_MS : ILL_MS);
  }

  // Take the model that was chosen last, where there is more than one.
  #choose() {
    this.card = this.#cards.find((card) => card.id === this.#chosen) ?? this.#cards[0];
    this.#set(this.card.is_complete ? "ready" : "waiting");
  }

  #set(state) {
    const before = this.#state;
    this.#state = state;
    this.#draw();
    if (before !== state && before !== "asking" && state === "ready") announce("The swarm answers again.");
    this.dispatchEvent(new Event("change"));
  }

  #draw() {
    const { card } = this;
    setText(byId("model"), card?.id.split("/").at(-1) ?? "");
    byId("model").title = card?.id ?? "";
    this.#drawChoice();
    const words = { ready: "Ready", waiting: "Layers missing", silent: "No connection", asking: "Asking" };
    const pill = byId("state");
    pill.className = `pill is-${this.#state}`;
    setText(pill, words[this.#state]);
    const key = JSON.stringify([this.#state, card?.missing, card?.serve_line]);
    if (key === this.#drawn) return;
    this.#drawn = key;
    const banner = byId("trouble");
    banner.hidden = this.#state === "ready" || this.#state === "asking";
    if (this.#state === "waiting") banner.replaceChildren(...this.#missing(card));
    if (this.#state === "silent") banner.replaceChildren(icon("warning"), el("div", {}, el("p", {}, el("strong", {}, "The server does not answer"), ` (${this.#reason}).`), el("p", { class: "small" }, "This page asks again every few seconds. What you write stays here.")));
  }

  #drawChoice() {
    const select = byId("models");
    select.hidden = this.#cards.length < 2;
    byId("model").classList.toggle("unseen", !select.hidden);
    if ([...select.options].map((option) => option.value).join("\n") !== this.#cards.map((card) => card.id).join("\n")) select.replaceChildren(...this.#cards.map(({ id }) => el("option", { value: id }, id)));
    select.value = this.card?.id ?? "";
  }

  #missing(card) {
    const line = card.serve_line;
    const missing = card.missing.map(layers).join(", ");
    const name = card.id || "the model";
    const named = /^\d+$/.test(missing) ? `Layer ${missing} of ${name} is` : `Layers ${missing} of ${name} are`;
    const trouble = missing === "" ? `No machine that serves ${name} is found yet.` : `${named} served by no machine.`;
    return [
      icon("warning"),
      el("div", {},
        el("p", {}, el("strong", {}, trouble), " On any machine with room, run:"),
        line ? el("div", { class: "command" }, el("pre", { tabindex: "0", role: "group", "aria-label": "command" }, el("code", {}, line)), copyButton(() => line, "Copy the command", "button")) : null,
        el("p", { class: "small" }, "The page notices by itself when they are there; nothing needs to be loaded again.")),
    ];
  }
}
