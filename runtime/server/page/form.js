// A panel that asks once and draws the answer: every task but chat and text that goes on.

import { ask } from "./api.js";
import { announce, growWithText, make, makeId, sendAtEnter, show } from "./dom.js";
import { describeRange } from "./options.js";
import { Panel } from "./panel.js";

/** The fields of a task, and its answer below. */
export class Form extends Panel {
  constructor(task, models) {
    super({ name: task.name, lead: task.lead, models });
    this.task = task;
    this.fields = new Map();
    this.send.textContent = task.button;
    this.result = make("section", { className: "result", "aria-label": "Result", hidden: true });
    const form = make("form", { className: "task", noValidate: true });
    for (const field of task.fields) {
      form.append(this.makeField(field));
    }
    this.extra = task.makeExtra?.(this);
    const buttons = make("div", { className: "row" }, this.send, this.stop, ...(this.extra ? [this.extra] : []));
    form.append(buttons, this.error);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    this.element = make("div", {}, this.head, form, this.result);
  }

  makeField({ name, label, kind, rows = 3, value = "", hint = "", ...range }) {
    const id = makeId(name);
    const isArea = kind === "lines" || kind === "text";
    const field = make(isArea ? "textarea" : "input", { id, value, ...range });
    if (isArea) {
      field.rows = rows;
      sendAtEnter(field, () => this.start(), { newLines: kind === "lines" });
      growWithText(field);
    } else {
      field.type = kind === "number" ? "number" : "text";
    }
    field.dir = kind === "number" ? "ltr" : "auto";
    const keys = { lines: "One a line. Ctrl+Enter sends.", text: "Enter sends, Shift+Enter makes a new line." };
    const words = [hint, keys[kind]].filter(Boolean).join(" ");
    const parts = [make("label", { htmlFor: id }, label), field];
    if (words) {
      field.setAttribute("aria-describedby", `${id}-hint`);
      parts.push(make("small", { id: `${id}-hint` }, words));
    }
    this.fields.set(name, { field, label, kind });
    return make("div", { className: "field" }, ...parts);
  }

  /** Return what the fields hold; where one is empty or wrong, nothing, after having said so. */
  readFields() {
    const values = {};
    for (const [name, { field, label, kind }] of this.fields) {
      if (kind === "number") {
        if (!field.checkValidity()) {
          this.complain(`${label}: ${describeRange(field)}`, field);
          return null;
        }
        values[name] = field.value === "" ? undefined : Number(field.value);
        continue;
      }
      const lines = field.value.split("\n").filter((line) => line.trim() !== "");
      if (lines.length === 0) {
        this.complain(`Write something into “${label}” first.`, field);
        return null;
      }
      values[name] = kind === "lines" ? lines : field.value;
    }
    return values;
  }

  async start() {
    if (this.running) {
      return;
    }
    const values = this.readFields();
    if (values === null) {
      return;
    }
    const complaint = this.task.check?.(values, this.model);
    if (complaint) {
      this.complain(complaint);
      return;
    }
    const { model } = this;
    const body = { model: model.id, ...this.task.write(values, model) };
    this.result.classList.add("old");
    announce("Working.");
    await this.run(async (signal) => {
      const answer = await ask(`v1/${this.task.capability}`, body, signal);
      this.result.hidden = false;
      const { summary, parts } = this.task.draw(answer, values, this.result.clientWidth);
      this.result.replaceChildren(make("p", { className: "summary", dir: "auto" }, show(summary)), ...parts);
      announce(summary);
    });
    this.result.classList.remove("old");
  }
}
