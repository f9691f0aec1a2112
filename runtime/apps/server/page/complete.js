// A text that the model continues, for models with and without a chat template.

import { stream } from "./api.js";
import { announce, make, makeId, sendAtEnter } from "./dom.js";
import { Meter, Options, describeEnd } from "./options.js";
import { Panel } from "./panel.js";

const LEAD = "Begin a text and let the model continue it, as often as you like.";

/** Return the neighbours that the model read of a chunk, folded. */
function listNeighbours(neighbours, number) {
  const items = neighbours.map((one) => {
    const place = `${one.document}, token ${one.start}, distance ${one.distance.toFixed(3)}`;
    return make("li", {}, make("small", {}, place), make("div", { dir: "auto" }, one.text));
  });
  return make("details", {}, make("summary", {}, `Read beside chunk ${number}`), make("ul", {}, ...items));
}

/** A text area whose text grows. */
export class Complete extends Panel {
  constructor(models) {
    super({ name: "Continue a text", lead: LEAD, models });
    this.options = new Options({ max_tokens: 64 }); // the API's own is 16
    const hint = make("small", { id: makeId("hint") }, "Ctrl+Enter lets the model continue, Esc stops it.");
    const example = "In the beginning";
    this.area = make("textarea", { id: makeId("text"), rows: 12, value: example, "aria-describedby": hint.id });
    this.area.className = "long";
    this.area.dir = "auto";
    this.figures = make("p", { className: "figures" });
    this.note = make("p", { className: "soft" });
    this.neighbours = make("div", {});
    this.undo = make("button", { type: "button", disabled: true, onclick: () => this.goBack() }, "Take it back");
    this.send.textContent = "Continue";
    this.before = [];
    const form = make(
      "form",
      { className: "task", noValidate: true },
      make("div", { className: "field" }, make("label", { htmlFor: this.area.id }, "Text"), this.area, hint),
      make("div", { className: "row" }, this.send, this.stop, this.undo),
      this.error,
      this.figures,
      this.note,
      this.neighbours,
      make("details", {}, make("summary", {}, "Options"), this.options.element),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.goOn();
    });
    sendAtEnter(this.area, () => this.goOn(), { newLines: true });
    this.element = make("div", {}, this.head, form);
  }

  goBack() {
    this.area.value = this.before.pop();
    this.undo.disabled = this.before.length === 0;
    this.figures.textContent = "";
    this.note.textContent = "";
    this.area.focus();
  }

  async goOn() {
    const prompt = this.area.value;
    if (this.running) {
      return;
    }
    if (prompt === "") {
      this.complain("Write the beginning of a text first.", this.area);
      return;
    }
    const options = this.options.read((message, field) => this.complain(message, field));
    if (options === null) {
      return;
    }
    this.note.textContent = "";
    this.figures.textContent = "";
    this.neighbours.replaceChildren();
    this.area.readOnly = true;
    this.undo.disabled = true;
    const body = { model: this.model.id, prompt, ...options };
    const done = await this.run((signal) => this.receive(body, signal));
    this.area.readOnly = false;
    if (this.area.value !== prompt) {
      this.before.push(prompt);
    }
    this.undo.disabled = this.before.length === 0;
    if (done) {
      announce(`The model continued: ${this.area.value.slice(prompt.length)}`);
    }
  }

  async receive(body, signal) {
    const meter = new Meter();
    let usage;
    announce("The model is writing.");
    try {
      for await (const event of stream("v1/completions", body, signal)) {
        const [choice] = event.choices ?? [];
        usage = event.usage ?? usage;
        if (choice?.neighbours) {
          this.neighbours.replaceChildren(...choice.neighbours.map(listNeighbours));
        }
        this.note.textContent = describeEnd(choice?.finish_reason) || this.note.textContent;
        if (choice?.text) {
          meter.count();
          this.area.value += choice.text;
          this.area.scrollTop = this.area.scrollHeight;
          this.figures.textContent = meter.describe();
        }
      }
    } finally {
      this.figures.textContent = meter.describe(signal.aborted ? undefined : usage);
      this.note.textContent = signal.aborted ? "Stopped." : this.note.textContent;
    }
  }
}
