// One message on the page: what was said, how fast it came, and what can be done with it.

import { chip } from "./attachments.js";
import { wholeText } from "./conversation.js";
import { copyButton, el, icon, iconButton, setText } from "./dom.js";
import { plural, rate, seconds } from "./format.js";
import { render } from "./markdown.js";
import { SweepView } from "./sweep_view.js";

const END_WORDS = { stopped: "Stopped", length: "Cut at the most tokens", content_filter: "Filtered" };

// The line below an answer: speed first.
export function factsOf({ stats, state, finish }) {
  const facts = [];
  if (stats) {
    if (stats.rate > 0) facts.push(`${rate(stats.rate)} tokens/s`);
    if (stats.perSweep > 0) facts.push(`${stats.perSweep.toFixed(2)} tokens per sweep`);
    if (stats.tokens > 0) facts.push(plural(stats.tokens, "token"));
    if (stats.firstMs !== null) facts.push(`first after ${seconds(stats.firstMs)}`);
  }
  const word = END_WORDS[state === "stopped" ? "stopped" : finish];
  return word ? [...facts, word] : facts;
}

export class MessageView {
  #isEditing = false;

  // `actions`: edit(message, text), again(message), show(id), leaveOut(message); none of them while an answer comes.
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const isUser = message.role === "user";
    this.body = el("div", { class: isUser ? "said" : "prose" });
    this.reasoning = isUser ? null : el("details", { class: "reasoning" }, el("summary", {}, "How it thought"), el("div", { class: "prose" }));
    this.waiting = isUser ? null : el("p", { class: "waiting" }, el("span", { class: "dots", "aria-hidden": "true" }, el("span"), el("span"), el("span")), el("span", {}, "The swarm reads the prompt"));
    this.sweeps = null;
    this.problem = el("div", { class: "banner is-bad", role: "alert", hidden: true });
    this.facts = el("p", { class: "facts" });
    this.tools = el("div", { class: "tools" });
    const files = message.attachments?.length ? el("ul", { class: "chips", "aria-label": "Attached files" }, ...message.attachments.map((file) => chip(file))) : null;
    this.element = el("article", { class: `message is-${message.role}`, "aria-label": isUser ? "You" : "Answer", "data-id": message.id },
      el("h2", { class: "unseen" }, isUser ? "You" : "Answer"), files, this.waiting, this.reasoning, this.body, this.problem,
      el("div", { class: "message-foot" }, this.facts, this.tools));
  }

  // `view`: {versions, isSweepView, isBusy}
  update(view) {
    const { message } = this;
    if (message.role === "user") {
      if (!this.#isEditing) setText(this.body, message.content);
      this.body.hidden = message.content === "" && !this.#isEditing;
    } else {
      this.#updateAnswer(view);
    }
    this.#updateTools(view);
  }

  #updateAnswer({ isSweepView }) {
    const { message } = this;
    const isStreaming = message.state === "streaming";
    this.element.setAttribute("aria-busy", String(isStreaming));
    this.waiting.hidden = !isStreaming || message.content !== "" || Boolean(message.reasoning);
    this.reasoning.hidden = !message.reasoning;
    if (message.reasoning) render(this.reasoning.lastElementChild, message.reasoning);
    const hasSweeps = isSweepView && message.content !== "";
    if (hasSweeps) {
      if (this.sweeps === null) {
        this.sweeps = new SweepView();
        this.body.after(this.sweeps.element);
      }
      this.sweeps.update(message.sweeps ?? [], message.sweepsLeftOut);
      this.sweeps.element.hidden = false;
    } else if (this.sweeps !== null) {
      this.sweeps.element.hidden = true;
    }
    this.body.hidden = hasSweeps && (message.sweeps?.length ?? 0) > 0;
    if (!this.body.hidden) render(this.body, message.content);
    this.problem.hidden = message.state !== "failed";
    if (message.state === "failed" && this.problem.dataset.said !== message.error) {
      this.problem.dataset.said = message.error;
      this.problem.replaceChildren(icon("warning"), el("div", {},
        el("p", {}, message.content === "" ? `No answer: ${message.error}` : `The answer broke off: ${message.error}`),
        message.isContextFull ? this.#shorter() : null));
    }
    setText(this.facts, factsOf(message).join(" · "));
  }

  #updateTools({ versions, isBusy }) {
    const { message, actions } = this;
    const key = JSON.stringify([versions, isBusy, message.state, this.#isEditing]);
    if (this.tools.dataset.key === key) return;
    this.tools.dataset.key = key;
    if (this.#isEditing || message.state === "streaming") {
      this.tools.replaceChildren();
      return;
    }
    const isUser = message.role === "user";
    const tools = [copyButton(() => (isUser ? wholeText(message) : message.content), isUser ? "Copy what you said" : "Copy the answer")];
    if (!isBusy) {
      tools.push(isUser ? iconButton("edit", "Edit, and ask again", () => this.#edit()) : iconButton("again", "Answer again", () => actions.again(message)));
      if (versions.length > 1) tools.unshift(this.#versions(versions));
    }
    this.tools.replaceChildren(...tools);
  }

  #shorter() {
    const button = el("button", { type: "button", class: "button" }, "Leave out the oldest turns, and ask again");
    button.addEventListener("click", () => this.actions.leaveOut(this.message));
    return button;
  }

  #versions(versions) {
    const at = versions.indexOf(this.message.id);
    const go = (place) => () => this.actions.show(versions[place]);
    const before = iconButton("previous", "Version before", go(at - 1));
    const after = iconButton("next", "Version after", go(at + 1));
    before.disabled = at === 0;
    after.disabled = at === versions.length - 1;
    return el("span", { class: "versions" }, before, el("span", { "aria-label": `Version ${at + 1} of ${versions.length}`, role: "img" }, `${at + 1}/${versions.length}`), after);
  }

  #edit() {
    const { message, actions } = this;
    this.#isEditing = true;
    const area = el("textarea", { class: "edit", rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Edit what you said" });
    area.value = message.content;
    const close = () => {
      this.#isEditing = false;
      this.element.classList.remove("is-edited");
      this.body.replaceChildren();
      setText(this.body, message.content);
      delete this.tools.dataset.key;
      actions.redraw();
    };
    const send = () => {
      const text = area.value;
      close();
      if (text.trim() !== "" || message.attachments?.length) actions.edit(message, text);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
        this.element.querySelector(".tools button:last-child")?.focus();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const cancel = el("button", { type: "button", class: "button" }, "Cancel");
    const ask = el("button", { type: "button", class: "button is-main" }, "Ask again");
    cancel.addEventListener("click", close);
    ask.addEventListener("click", send);
    this.body.replaceChildren(area, el("div", { class: "edit-buttons" }, cancel, ask));
    this.body.hidden = false;
    this.element.classList.add("is-edited");
    delete this.tools.dataset.key;
    this.tools.replaceChildren();
    area.focus();
  }
}
