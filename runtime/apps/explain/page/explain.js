// The whole of an explanation in one element: its views as tabs, the text that they tint, and what is at hand.

import { Attention } from "./attention.js";
import { Chooser } from "./chooser.js";
import { make, makeId, percent, quote, show } from "./dom.js";
import { Lens } from "./lens.js";
import { Neurons } from "./neurons.js";
import { Saliency, describe } from "./saliency.js";
import { Words } from "./words.js";

/** Show an explanation, as `planforge explain --json` writes it, in an element; nothing outside is touched. */
function mountExplanation(element, data) {
  const page = new Page(data);
  element.replaceChildren(page.element);
  page.open(0);
}

class Page {
  constructor(data) {
    this.data = data;
    this.target = 0;
    this.words = new Words(data.tokens, data.kind === "similarity" ? { text: "First text" } : {});
    this.labels = data.targets.map((target) => (target.token === null ? makeLabel(target) : null));
    this.status = make("p", { className: "unseen", role: "status" });
    this.lead = make("p", { className: "lead" });
    this.controls = make("div");
    this.labelRow = make("div", { className: "labels" }, ...this.labels.filter(Boolean));
    this.reading = make("p", { className: "reading" });
    this.side = make("div", { className: "side-place" });
    this.wide = make("div");
    this.text = make("div", { className: "text-place" }, this.labelRow, this.words.element, this.reading);
    this.frame = make("div", { className: "frame" }, this.text, this.side);
    this.panel = make("section", { id: makeId("explain-panel") }, this.lead, this.controls, this.frame, this.wide);
    this.chooser = new Chooser(this.panel, (place, how) => this.change(place, how));
    this.text.addEventListener("pointerover", (event) => this.read(this.words.find(event)));
    this.text.addEventListener("pointerleave", () => this.read(-1));
    this.makeViews();
    this.makeTabs();
    const title = make("h2", {}, `Why ${show(data.model)} answered so`);
    const head = make("header", { className: "head" }, title, this.count());
    this.element = make("div", { className: "explain" }, head, this.tabs, this.panel, this.status);
  }

  count() {
    const tokens = this.data.tokens.length;
    const explained = this.data.targets.filter(({ token }) => token !== null).length;
    const more = explained > 0 ? `, ${explained} of them explained` : "";
    return make("p", { className: "soft" }, `${tokens} tokens (words or pieces of words; ␣ is a space)${more}.`);
  }

  makeViews() {
    const { data, words } = this;
    const tools = {
      announce: (text) => this.announce(text),
      choose: (place) => {
        if (!this.chooser.held && place !== this.chooser.current) {
          this.chooser.choose(place);
        }
      },
    };
    this.views = [];
    if (data.targets.length > 0) {
      this.views.push(new Saliency(data, words));
      const [{ token, likeliest }] = data.targets;
      const isAlone = token === null && likeliest.length === 0; // a score: it has no ranks
      if (data.lens && !isAlone) {
        this.views.push(new Lens(data, words, tools));
      }
    }
    if (data.neurons) {
      this.views.push(new Neurons(data, words, tools));
    }
    if (data.attention.length > 0) {
      const attention = new Attention(data, words);
      attention.onStops = () => this.offer(0);
      this.views.push(attention);
    }
  }

  makeTabs() {
    this.buttons = this.views.map(({ name, key }, place) => {
      const tab = make("button", { type: "button", role: "tab", id: makeId("explain-tab") }, name);
      tab.dataset.view = key;
      tab.setAttribute("aria-controls", this.panel.id);
      tab.addEventListener("click", () => this.open(place));
      return tab;
    });
    const named = { role: "tablist", "aria-label": "Ways to look at it" };
    this.tabs = make("div", { className: "tabs", ...named }, ...this.buttons);
    this.tabs.hidden = this.views.length < 2;
    this.tabs.addEventListener("keydown", (event) => this.moveAmongTabs(event));
    if (this.views.length > 1) {
      this.panel.setAttribute("role", "tabpanel");
    }
  }

  moveAmongTabs(event) {
    const last = this.buttons.length - 1;
    const now = this.buttons.indexOf(this.shown);
    const places = {
      ArrowRight: now === last ? 0 : now + 1,
      ArrowLeft: now === 0 ? last : now - 1,
      Home: 0,
      End: last,
    };
    if (event.key in places) {
      event.preventDefault();
      this.open(places[event.key]);
      this.shown.focus();
    }
  }

  /** Show a view. */
  open(place) {
    if (this.views.length === 0) {
      return;
    }
    if (this.view) {
      this.view.active = false;
      this.view.leave?.();
    }
    this.view = this.views[place];
    this.view.active = true;
    this.shown = this.buttons[place];
    this.buttons.forEach((tab) => {
      tab.setAttribute("aria-selected", String(tab === this.shown));
      tab.tabIndex = tab === this.shown ? 0 : -1;
    });
    if (this.views.length > 1) {
      this.panel.setAttribute("aria-labelledby", this.shown.id);
    }
    this.lead.textContent = this.view.lead;
    this.controls.replaceChildren(this.view.controls);
    this.side.replaceChildren(...(this.view.side ? [this.view.side] : []));
    this.wide.replaceChildren(...(this.view.wide ? [this.view.wide] : []));
    this.frame.classList.toggle("with-side", Boolean(this.view.side));
    this.panel.dataset.view = this.view.key;
    const token = this.data.targets[this.target]?.token;
    this.offer(this.view.stops ? Math.max(0, this.view.stops.indexOf(token)) : this.target);
  }

  /** Offer what can be at hand: in most views what is explained, in others tokens of the view's own. */
  offer(place) {
    const ofTargets = this.data.targets.map(({ token }, target) => this.labels[target] ?? this.words.elements[token]);
    const elements = this.view.stops?.map((token) => this.words.elements[token]) ?? ofTargets;
    this.labelRow.hidden = Boolean(this.view.stops) || this.labels.filter(Boolean).length < 2;
    this.chooser.setElements(elements, place);
    this.read(-1);
  }

  /** Draw what is at hand now. */
  async change(place, { spoken }) {
    if (!this.view.stops) {
      this.target = place;
    }
    const view = this.view;
    await view.draw(place);
    if (spoken && view === this.view) {
      this.announce([view.say(place), this.chooser.held ? "Held; Escape lets go." : ""].join(" "));
    }
    if (spoken) {
      this.read(view.stops?.[place] ?? -1);
    }
  }

  /** Write below the text what is known of one of its tokens; -1 is none. */
  read(token) {
    const explained = this.data.targets[this.target]?.token;
    const known = token >= 0 && (this.view.stops || token !== explained) ? this.view.read(token) : "";
    const what = this.view.stops ? "a token" : this.labels.some(Boolean) ? "a label" : "an underlined token";
    const several = this.chooser.elements.length > 1;
    const choice = `Point at ${what} or use the arrow keys; a click holds it.`;
    const hint = several ? choice : "Point at a token for its number.";
    const held = this.chooser.held ? "It is held: Esc or a click lets go." : "";
    this.reading.textContent = [known, held].join(" ").trim() || hint;
  }

  /** Have a screen reader say a text. */
  announce(text) {
    this.status.textContent = text;
  }
}

/** Return the button of a label. */
function makeLabel(target) {
  const number = typeof target.probability === "number" ? percent(target.probability) : describe(target);
  return make("button", { type: "button", className: "label" }, quote(target.text), " ", make("small", {}, number));
}

export { mountExplanation };
