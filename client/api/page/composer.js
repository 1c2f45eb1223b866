// Where a message is written. Enter sends, Shift+Enter begins a line, Esc stops the answer.

import { Attachments } from "./attachments.js";
import { byId, icon, setAttribute, setText } from "./dom.js";

const MAX_CHARS = 1_000_000;

export class Composer {
  // `onSend(text, files)` returns whether the message was taken; `onStop()` ends the answer.
  constructor({ onSend, onStop }) {
    this.input = byId("input");
    this.button = byId("send");
    this.files = new Attachments(byId("files"), (problem) => this.say(problem));
    this.onSend = onSend;
    this.onStop = onStop;
    this.isRunning = false;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isRunning) this.onStop();
      else this.#send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      if (!this.isRunning) this.#send();
    });
    this.input.addEventListener("input", () => this.#fit());
    this.input.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    byId("attach").append(icon("attach"));
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", async (event) => {
      await this.files.add(event.target.files);
      event.target.value = "";
      this.input.focus();
    });
    const area = byId("composer");
    area.addEventListener("dragover", (event) => event.preventDefault());
    area.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
    this.running(false);
  }

  // A line about what cannot be done; empty takes it away.
  say(problem) {
    setText(byId("composer-problem"), problem);
    byId("composer-problem").hidden = problem === "";
  }

  running(isRunning) {
    this.isRunning = isRunning;
    const label = isRunning ? "Stop the answer (Esc)" : "Send (Enter)";
    this.button.replaceChildren(icon(isRunning ? "stop" : "send"));
    this.button.classList.toggle("is-stop", isRunning);
    setAttribute(this.button, "aria-label", label);
    setAttribute(this.button, "title", label);
  }

  fill(text) {
    this.input.value = text;
    this.#fit();
    this.input.focus();
  }

  #take(event, data) {
    if (!data?.files?.length) return;
    event.preventDefault();
    this.files.add(data.files);
  }

  #send() {
    const text = this.input.value;
    if (text.trim() === "" && this.files.files.length === 0) return;
    if (text.length > MAX_CHARS) {
      this.say(`The message has ${text.length.toLocaleString("en")} characters; ${MAX_CHARS.toLocaleString("en")} are the most.`);
      return;
    }
    if (!this.onSend(text, this.files.files)) return;
    this.say("");
    this.files.set([]);
    this.fill("");
  }

  #fit() {
    this.input.rows = 1;
    const line = Number.parseFloat(getComputedStyle(this.input).lineHeight) || 24;
    this.input.rows = Math.min(10, Math.max(1, Math.round((this.input.scrollHeight - 20) / line)));
  }
}
