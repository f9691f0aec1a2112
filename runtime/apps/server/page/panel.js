// What every panel has: a choice of the model, a button that sends and one that stops, a line for what went wrong.

import { explain } from "./api.js";
import { announce, make, makeId, show } from "./dom.js";

/** The frame of one tab; what it is for goes between its head and its end. */
export class Panel {
  constructor({ name, lead, models }) {
    this.models = models;
    this.choice = make("select", { id: makeId("model") });
    for (const model of models) {
      this.choice.append(make("option", { value: model.id }, show(model.id)));
    }
    this.size = make("span", { className: "soft" });
    this.choice.addEventListener("change", () => this.showSize());
    this.showSize();
    this.send = make("button", { type: "submit", className: "main" });
    this.stop = make("button", { type: "button", hidden: true, onclick: () => this.cancel() }, "Stop");
    this.error = make("p", { className: "error", role: "alert" });
    this.head = make(
      "header",
      { className: "head" },
      make("h2", {}, name),
      make("p", { className: "lead" }, lead),
      make("p", { className: "model" }, make("label", { htmlFor: this.choice.id }, "Model"), this.choice, this.size),
    );
  }

  /** The chosen model. */
  get model() {
    return this.models[this.choice.selectedIndex];
  }

  get running() {
    return this.controller !== undefined;
  }

  showSize() {
    const length = Number(this.model.context_length);
    this.size.textContent = length > 0 ? `reads up to ${length} tokens` : "";
  }

  /** Show what is to be done, and put the cursor where. */
  complain(message, field) {
    this.error.textContent = show(message);
    field?.focus();
  }

  /** End what is running. */
  cancel() {
    this.controller?.abort();
  }

  /** Do one thing at a time; return whether it went through. */
  async run(work) {
    if (this.running) {
      return false;
    }
    this.controller = new AbortController();
    const { signal } = this.controller;
    this.error.textContent = "";
    this.switchButtons(true);
    try {
      await work(signal);
      return true;
    } catch (error) {
      if (signal.aborted) {
        announce("Stopped.");
      } else {
        this.complain(explain(error));
      }
      return false;
    } finally {
      this.controller = undefined;
      this.switchButtons(false);
    }
  }

  /** Show the button that can be used now; the focus goes along. */
  switchButtons(running) {
    const [shown, hidden] = running ? [this.stop, this.send] : [this.send, this.stop];
    const focused = document.activeElement === hidden;
    shown.hidden = false;
    if (focused) {
      shown.focus();
    }
    hidden.hidden = true;
  }
}
