// How to answer: system prompt and sampling of a conversation. New conversations begin with the last ones that were set.

import { apiKey, setApiKey } from "./api.js";
import { byId, el } from "./dom.js";

const KEPT = "canopy.settings";
const FIELDS = [
  { id: "temperature", label: "Temperature", hint: "0 always takes the likeliest token", min: 0, max: 2, step: 0.05 },
  { id: "top_p", label: "Top p", hint: "the best tokens that hold this much probability", min: 0, max: 1, step: 0.01 },
  { id: "top_k", label: "Top k", hint: "the k best tokens", min: 1, max: 1_000_000, step: 1 },
  { id: "min_p", label: "Min p", hint: "tokens at least this fraction as likely as the best", min: 0, max: 1, step: 0.01 },
  { id: "max_tokens", label: "Most tokens", hint: "of an answer", min: 1, max: 1_000_000, step: 1 },
  { id: "seed", label: "Seed", hint: "the same seed gives the same answer", min: 0, max: 2 ** 53 - 1, step: 1 },
  { id: "frequency_penalty", label: "Frequency penalty", hint: "against tokens by how often they came", min: -2, max: 2, step: 0.1 },
  { id: "presence_penalty", label: "Presence penalty", hint: "against tokens that came", min: -2, max: 2, step: 0.1 },
  { id: "repetition_penalty", label: "Repetition penalty", hint: "1 is none", min: 0.1, max: 2, step: 0.05 },
];

export function lastSettings() {
  const settings = { system: "" };
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    if (typeof kept.system === "string") settings.system = kept.system;
    for (const { id } of FIELDS) if (Number.isFinite(kept[id])) settings[id] = kept[id];
  } catch {
    // nothing was kept, or nothing that can be read
  }
  return settings;
}

// The fields of a request; what is not set is left to the model's own defaults.
export function samplingOf(settings) {
  return Object.fromEntries(FIELDS.filter(({ id }) => Number.isFinite(settings[id])).map(({ id }) => [id, settings[id]]));
}

export class Settings {
  #dialog = byId("settings");
  #inputs = new Map();
  #onSave = () => {};

  constructor() {
    byId("sampling").append(...FIELDS.map((field) => this.#field(field)));
    byId("settings-form").addEventListener("submit", () => this.#save());
    byId("settings-reset").addEventListener("click", () => {
      byId("system").value = "";
      for (const input of this.#inputs.values()) input.value = "";
    });
    byId("settings-close").addEventListener("click", () => this.#dialog.close());
  }

  open(settings, onSave) {
    this.#onSave = onSave;
    byId("system").value = settings.system ?? "";
    byId("api-key").value = apiKey();
    for (const [id, input] of this.#inputs) input.value = Number.isFinite(settings[id]) ? String(settings[id]) : "";
    this.#dialog.showModal();
  }

  // The server wants a key.
  askForKey(settings, onSave) {
    this.open(settings, onSave);
    byId("api-key").focus();
  }

  #field({ id, label, hint, min, max, step }) {
    const input = el("input", { type: "number", id: `set-${id}`, min, max, step: step < 1 ? "any" : step, inputmode: step < 1 ? "decimal" : "numeric", placeholder: "model’s own", "aria-describedby": `hint-${id}` });
    this.#inputs.set(id, input);
    return el("div", { class: "field" }, el("label", { for: `set-${id}` }, label), input, el("p", { class: "small", id: `hint-${id}` }, hint));
  }

  #save() {
    const settings = { system: byId("system").value };
    for (const [id, input] of this.#inputs) if (input.value !== "" && input.validity.valid) settings[id] = input.valueAsNumber;
    setApiKey(byId("api-key").value.trim());
    try {
      localStorage.setItem(KEPT, JSON.stringify(settings));
    } catch {
      // the conversation keeps them all the same
    }
    this.#onSave(settings);
  }
}
