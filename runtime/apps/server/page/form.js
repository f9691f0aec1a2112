// A panel that asks once and draws the answer: every task but chat and text that goes on.

import { ask } from "./api.js";
import { announce, growWithText, make, makeId, sendAtEnter, show } from "./dom.js";
import { describeRange } from "./options.js";
import { Panel } from "./panel.js";

const KEYS = { lines: "One a line. Ctrl+Enter sends.", text: "Enter sends, Shift+Enter makes a new line." };

/** The fields of a task, and its answer below. */
export class Form extends Panel {
  constructor(task, models) {
    super({ name: task.name, lead: task.lead, models });
    this.task = task;
    this.fields = new Map();
    this.send.textContent = task.button;
    this.result = make("section", { className: "result", "aria-label": "Result", hidden: true });
    this.result.classList.toggle("broad", Boolean(task.isBroad));
    const form = make("form", { className: "task", noValidate: true });
    for (const field of task.fields) {
      form.append(field.kind === "ticks" ? this.makeTicks(field) : this.makeField(field));
    }
    this.extra = task.makeExtra?.(this);
    const buttons = make("div", { className: "row" }, this.send, this.stop, ...(this.extra ? [this.extra] : []));
    form.append(buttons, this.error);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    this.choice.addEventListener("change", () => this.suitModel());
    this.suitModel();
    this.element = make("div", {}, this.head, form, this.result);
  }

  /** `suit(model)` returns what a field is for that model: {label, hint, value, options, optional}, or null. */
  makeField({ name, label = "", kind, rows = 3, value = "", hint = "", optional = false, suit, ...range }) {
    const id = makeId(name);
    const isArea = kind === "lines" || kind === "text";
    const field = make(isArea ? "textarea" : kind === "choice" ? "select" : "input", { id, value, ...range });
    if (isArea) {
      field.rows = rows;
      sendAtEnter(field, () => this.start(), { newLines: kind === "lines" });
      growWithText(field);
    } else if (kind !== "choice") {
      field.type = kind === "line" ? "text" : kind;
    }
    field.dir = kind === "number" ? "ltr" : "auto";
    const title = make("label", { htmlFor: id }, label);
    const note = make("small", { id: `${id}-hint` });
    const element = make("div", { className: "field" }, title, field, note);
    const entry = { name, kind, label, field, title, note, element, suit, optional, example: value };
    this.fields.set(name, entry);
    describe(entry, hint);
    return element;
  }

  /** Several boxes to tick: [value, label, hint, whether it is ticked at first] each. */
  makeTicks({ name, label, options }) {
    const boxes = [];
    const element = make("fieldset", { className: "field ticks" }, make("legend", {}, label));
    for (const [value, words, hint, checked] of options) {
      const id = makeId(name);
      const box = make("input", { type: "checkbox", id, value, checked, "aria-describedby": `${id}-hint` });
      const title = make("label", { htmlFor: id }, words);
      boxes.push(box);
      element.append(make("div", { className: "tick" }, box, title, make("small", { id: `${id}-hint` }, hint)));
    }
    this.fields.set(name, { name, kind: "ticks", label, field: boxes[0], boxes, element });
    return element;
  }

  /** Show the fields that the chosen model has a use for, with examples of its own where nobody wrote any. */
  suitModel() {
    for (const entry of this.fields.values()) {
      if (!entry.suit) {
        continue;
      }
      const suited = entry.suit(this.model);
      entry.element.hidden = suited === null;
      if (suited === null) {
        continue;
      }
      const { label, hint = "", value = "", placeholder = "", options, optional = false } = suited;
      entry.title.textContent = label;
      Object.assign(entry, { label, optional });
      describe(entry, hint);
      if (options) {
        const items = options.map(([key, words]) => make("option", { value: key }, show(words)));
        entry.field.replaceChildren(...items);
        continue;
      }
      entry.field.placeholder = placeholder;
      if (entry.field.value === entry.example) {
        entry.field.value = value;
      }
      entry.example = value;
    }
  }

  /** Return what the fields hold; where one is empty or wrong, nothing, after having said so. */
  readFields() {
    const values = {};
    for (const entry of this.fields.values()) {
      if (entry.element.hidden) {
        continue;
      }
      const { value, complaint } = read(entry);
      if (complaint) {
        this.complain(complaint, entry.field);
        return null;
      }
      values[entry.name] = value;
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
    const path = this.task.path?.(values, model) ?? `v1/${this.task.capability}`;
    this.result.classList.add("old");
    announce("Working.");
    await this.run(async (signal) => {
      const body = { model: model.id, ...(await this.task.write(values, model)) };
      const answer = await (this.task.ask ?? ask)(path, body, signal, (parts) => this.showProgress(parts));
      this.result.hidden = false;
      const { summary, parts } = this.task.draw(answer, values, this.result.clientWidth, model);
      this.result.replaceChildren(make("p", { className: "summary", dir: "auto" }, show(summary)), ...parts);
      announce(summary);
      if (this.task.isBroad) {
        this.result.scrollIntoView(); // its form is as high as the window
      }
    });
    this.result.classList.remove("old");
  }

  /** Show how far an answer is that takes long; `task.ask` calls it. */
  showProgress(parts) {
    this.result.hidden = false;
    this.result.classList.remove("old");
    this.result.replaceChildren(...parts);
  }
}

/** Write below a field what it takes, and which keys send it. */
function describe({ field, kind, note }, hint) {
  note.textContent = [hint, KEYS[kind]].filter(Boolean).join(" ");
  note.hidden = note.textContent === "";
  if (note.hidden) {
    field.removeAttribute("aria-describedby");
  } else {
    field.setAttribute("aria-describedby", note.id);
  }
}

/** Return what a field holds, or what is wrong with it. */
function read({ kind, label, field, boxes, optional }) {
  if (kind === "ticks") {
    const ticked = boxes.filter((box) => box.checked).map((box) => box.value);
    return ticked.length > 0 ? { value: ticked } : { complaint: `Tick at least one of “${label}”.` };
  }
  if (kind === "number" && !field.checkValidity()) {
    return { complaint: `${label}: ${describeRange(field)}` };
  }
  if (kind === "number" || kind === "choice") {
    const isNumber = kind === "number";
    return { value: field.value === "" ? undefined : isNumber ? Number(field.value) : field.value };
  }
  if (kind === "file") {
    return { value: field.files[0] };
  }
  const lines = field.value.split("\n").filter((line) => line.trim() !== "");
  if (lines.length === 0) {
    return optional ? { value: undefined } : { complaint: `Write something into “${label}” first.` };
  }
  return { value: kind === "lines" ? lines : field.value };
}
