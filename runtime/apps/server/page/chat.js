// The chat: messages that stream in, can be stopped, edited and asked for again.

import { stream } from "./api.js";
import { announce, growWithText, make, makeId, sendAtEnter, show } from "./dom.js";
import { Meter, Options, describeEnd } from "./options.js";
import { Panel } from "./panel.js";

const KEPT = "planforge.chat";
const LEAD = "Talk with a model. It answers from what it learned; what it says can be wrong.";
const HINT = "Enter sends, Shift+Enter makes a new line, Esc stops the answer.";

/** A conversation with one model. */
export class Chat extends Panel {
  constructor(models) {
    super({ name: "Chat", lead: LEAD, models });
    this.messages = [];
    this.options = new Options();
    this.system = make("textarea", { id: makeId("system"), rows: 3, placeholder: "none" });
    this.log = make("div", { className: "log", role: "log", "aria-live": "off", "aria-label": "Conversation" });
    const hint = make("small", { id: makeId("hint") }, HINT);
    this.draft = make("textarea", { id: makeId("draft"), rows: 1, "aria-describedby": hint.id });
    this.grow = growWithText(this.draft);
    this.send.textContent = "Send";
    this.form = make(
      "form",
      { className: "composer", noValidate: true },
      this.error,
      make("label", { className: "unseen", htmlFor: this.draft.id }, "Message"),
      make("div", { className: "row" }, this.draft, this.send, this.stop),
      hint,
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.say();
    });
    sendAtEnter(this.draft, () => this.say());
    this.restore();
    this.system.addEventListener("change", () => this.keep());
    this.element = make("div", { className: "chat" }, this.head, this.makeSide(), this.log, this.form);
    this.draw();
  }

  makeSide() {
    const fresh = make("button", { type: "button", onclick: () => this.startAnew() }, "New chat");
    const system = make(
      "div",
      { className: "field" },
      make("label", { htmlFor: this.system.id }, "System prompt"),
      this.system,
      make("small", {}, "tells the model how to answer, from the start of the chat"),
    );
    const open = window.matchMedia("(min-width: 70rem)").matches;
    const details = make("details", { open }, make("summary", {}, "Options"), system, this.options.element);
    return make("aside", { className: "side", "aria-label": "Options of the chat" }, fresh, details);
  }

  startAnew() {
    this.cancel();
    this.messages = [];
    this.error.textContent = "";
    this.keep();
    this.draw();
    this.draft.focus();
  }

  /** Send what is written. */
  say() {
    const content = this.draft.value;
    if (this.running) {
      return;
    }
    if (content.trim() === "") {
      this.complain("Write a message first.", this.draft);
      return;
    }
    if (this.answer([...this.messages, { role: "user", content }])) {
      this.draft.value = "";
      this.grow();
    }
  }

  /** Have the model answer these messages, which become the conversation; return whether it was asked. */
  answer(messages) {
    const options = this.options.read((message, field) => this.complain(message, field));
    if (options === null || this.running) {
      return false;
    }
    const reply = { role: "assistant", content: "", name: this.model.id };
    this.messages = [...messages, reply];
    const body = { model: this.model.id, messages: this.wordMessages(messages), ...options };
    if ("max_tokens" in body) {
      body.max_completion_tokens = body.max_tokens;
      delete body.max_tokens;
    }
    const work = (signal) => {
      this.draw();
      window.scrollTo(0, document.body.scrollHeight);
      return this.receive(body, reply, signal);
    };
    this.run(work).then((done) => this.finish(reply, done));
    return true;
  }

  wordMessages(messages) {
    const system = this.system.value;
    const worded = messages.map(({ role, content }) => ({ role, content }));
    return system.trim() === "" ? worded : [{ role: "system", content: system }, ...worded];
  }

  async receive(body, reply, signal) {
    const meter = new Meter();
    const { text, figures, article } = reply.parts;
    article.setAttribute("aria-busy", "true");
    announce("The model is writing.");
    let usage;
    try {
      for await (const event of stream("v1/chat/completions", body, signal)) {
        const [choice] = event.choices ?? [];
        const piece = choice?.delta?.content ?? "";
        usage = event.usage ?? usage;
        reply.end = describeEnd(choice?.finish_reason) || reply.end;
        if (piece !== "") {
          meter.count();
          reply.content += piece;
          followEnd(() => {
            text.append(show(piece));
            text.normalize();
            figures.textContent = meter.describe();
          });
        }
      }
    } finally {
      reply.figures = meter.describe(signal.aborted ? undefined : usage);
      reply.end = signal.aborted ? "Stopped." : reply.end;
    }
  }

  /** Show an answer that ended, however it did. */
  finish(reply, done) {
    if (!this.messages.includes(reply)) {
      return;
    }
    if (reply.content === "" && !done) {
      this.messages.pop(); // nothing came: the question stays, and can be sent again
    }
    this.keep();
    this.draw();
    if (done) {
      announce(`${reply.name} answered: ${reply.content}`);
    }
  }

  draw() {
    this.log.replaceChildren(...this.messages.map((message, place) => this.drawMessage(message, place)));
    if (this.messages.length === 0) {
      this.log.append(make("p", { className: "empty" }, "Nothing said yet. Write a message below."));
    }
  }

  drawMessage(message, place) {
    const isUser = message.role === "user";
    const last = place === this.messages.length - 1;
    const text = make("div", { className: "text", dir: "auto" }, show(message.content));
    const figures = make("span", { className: "figures" }, message.figures ?? "");
    const buttons = make("span", { className: "buttons" });
    const article = make(
      "article",
      { className: `message ${message.role}` },
      make("h3", {}, isUser ? "You" : show(message.name)),
      text,
      make("footer", {}, buttons, figures),
    );
    if (message.end) {
      article.append(make("p", { className: "soft" }, message.end));
    }
    message.parts = { article, text, figures };
    if (this.running) {
      return article;
    }
    const addButton = (word, act) => buttons.append(make("button", { type: "button", onclick: act }, word));
    addButton("Edit", () => this.edit(message, place));
    if (last) {
      addButton(isUser ? "Send again" : "Regenerate", () => this.regenerate());
    }
    return article;
  }

  /** Answer the newest question once more. */
  regenerate() {
    const question = this.messages.findLastIndex((message) => message.role === "user");
    this.answer(this.messages.slice(0, question + 1));
  }

  /** Turn a message into a field; a question is asked again, an answer is only changed. */
  edit(message, place) {
    const { article, text } = message.parts;
    const isUser = message.role === "user";
    const area = make("textarea", { value: message.content, "aria-label": "Change this message" });
    const save = () => {
      if (this.running || area.value.trim() === "") {
        return;
      }
      message.content = area.value;
      if (!isUser) {
        this.keep();
        this.draw();
      } else if (this.answer(this.messages.slice(0, place + 1))) {
        this.draft.focus();
      }
    };
    const saveButton = make("button", { type: "button", className: "main", onclick: save });
    saveButton.textContent = isUser ? "Send" : "Save";
    const cancel = make("button", { type: "button", onclick: () => this.draw() }, "Cancel");
    const follows = isUser && place < this.messages.length - 1;
    const note = make("small", {}, follows ? "What follows this message is replaced." : "");
    text.replaceWith(area);
    article.querySelector("footer").replaceChildren(make("span", { className: "buttons" }, saveButton, cancel), note);
    sendAtEnter(area, save);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.draw();
        this.draft.focus();
      }
    });
    growWithText(area)();
    area.focus();
  }

  /** Keep the conversation until the browser's tab is closed, so that a reload does not lose it. */
  keep() {
    const messages = this.messages.map(({ parts, ...message }) => message);
    try {
      sessionStorage.setItem(KEPT, JSON.stringify({ system: this.system.value, messages }));
    } catch {
      sessionStorage.removeItem(KEPT); // longer than the browser keeps
    }
  }

  restore() {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    this.messages = kept.messages ?? [];
    this.system.value = kept.system ?? "";
  }
}

/** Change the page; who was looking at its end still is. */
function followEnd(change) {
  const page = document.documentElement;
  const atEnd = page.scrollHeight - window.scrollY - window.innerHeight < 48;
  change();
  if (atEnd) {
    window.scrollTo(0, page.scrollHeight);
  }
}
