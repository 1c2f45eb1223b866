// The list of conversations: search, open, rename, export, delete.

import { byId, download, el, iconButton, setAttribute } from "./dom.js";
import { asMarkdown, mentions } from "./conversation.js";
import { when } from "./format.js";

const MAX_SHOWN = 200;
const MAX_TITLE = 120;

export class Sidebar {
  #renaming = null;

  // `actions`: open(id), remove(id), rename(id, title), all() → conversations, current() → id.
  constructor(actions) {
    this.actions = actions;
    this.list = byId("conversations");
    this.search = byId("search");
    this.search.addEventListener("input", () => this.draw());
    byId("menu").addEventListener("click", () => this.toggle(!this.isOpen));
    byId("shade").addEventListener("click", () => this.toggle(false));
    byId("sidebar-close").addEventListener("click", () => this.toggle(false));
  }

  get isOpen() {
    return document.body.classList.contains("has-sidebar");
  }

  // On narrow screens the list lies over the page.
  toggle(isOpen) {
    document.body.classList.toggle("has-sidebar", isOpen);
    setAttribute(byId("menu"), "aria-expanded", String(isOpen));
    byId("column").inert = isOpen;
    if (isOpen) this.search.focus();
    else if (byId("sidebar").contains(document.activeElement)) byId("menu").focus();
  }

  draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const all = this.actions.all().filter((one) => one.roots.length > 0);
    const shown = (wanted === "" ? all : all.filter((one) => mentions(one, wanted))).slice(0, MAX_SHOWN);
    this.list.replaceChildren(...shown.map((one) => this.#item(one)));
    byId("no-conversations").hidden = shown.length > 0;
    byId("no-conversations").textContent = wanted === "" ? "Nothing yet. What you ask appears here." : "None of them says that.";
  }

  #item(one) {
    const isCurrent = one.id === this.actions.current();
    if (this.#renaming === one.id) return el("li", { class: "conversation is-current" }, this.#title(one));
    const open = el("button", { type: "button", class: "conversation-open", "aria-current": isCurrent ? "true" : null },
      el("span", { class: "conversation-title" }, one.title), el("span", { class: "conversation-when" }, when(one.updated)));
    open.addEventListener("click", () => {
      this.actions.open(one.id);
      this.toggle(false);
    });
    const tools = el("div", { class: "conversation-tools" },
      iconButton("edit", `Rename ${one.title}`, () => this.#rename(one)),
      iconButton("save", `Export ${one.title}`, () => this.#export(one)),
      iconButton("bin", `Delete ${one.title}`, () => this.actions.remove(one.id)));
    return el("li", { class: `conversation${isCurrent ? " is-current" : ""}` }, open, tools);
  }

  #rename(one) {
    this.#renaming = one.id;
    this.draw();
    const input = this.list.querySelector("input");
    input.focus();
    input.select();
  }

  #title(one) {
    const input = el("input", { type: "text", class: "rename", "aria-label": "Title of the conversation", maxlength: MAX_TITLE });
    input.value = one.title;
    const done = (isKept) => {
      if (this.#renaming === null) return;
      this.#renaming = null;
      if (isKept && input.value.trim() !== "") this.actions.rename(one.id, input.value.trim());
      this.draw();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      event.preventDefault();
      done(event.key === "Enter");
    });
    input.addEventListener("blur", () => done(true));
    return input;
  }

  #export(one) {
    const name = one.title.replaceAll(/[^\p{L}\p{N}]+/gu, "-").replaceAll(/^-|-$/g, "").toLowerCase().slice(0, 60) || "conversation";
    download(`${name}.md`, "text/markdown", asMarkdown(one));
  }
}
