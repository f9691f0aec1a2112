// Groups of neurons that are active together: a line each of where, which tints the text.

import { figure, make, makeSvg, percent, quote, spell } from "./dom.js";

const TONES = 6;
const NAMED = 6; // tokens of each group
const HEIGHT = 28;
const SHOWN_ACTIVITY = 0.1; // weaker ones have no figure below their token

/** The view of the neurons. */
class Neurons {
  constructor(data, words, { announce }) {
    this.data = data;
    this.words = words;
    this.announce = announce;
    this.key = "neurons";
    this.name = "Neurons";
    this.stops = data.tokens.map((_, place) => place);
    this.lead =
      "Neurons that are active together make a group. Choose one: the text is tinted where it is active, and the " +
      "number below a token is in percent of the group's strongest. Beside each is the layer that has most of it.";
    this.controls = make("div", { className: "controls" });
    this.side = make("div", { className: "beside factors" });
    this.factor = 0;
    this.built = false;
    this.side.addEventListener("click", (event) => {
      const button = event.target.closest(".factor");
      if (button) {
        this.chooseFactor(Number(button.dataset.factor));
      }
    });
  }

  draw() {
    if (!this.built) {
      this.built = true;
      this.buttons = this.data.neurons.activations.map((row, factor) => this.makeButton(row, factor));
      this.side.append(...this.buttons);
    }
    const most = Math.max(...this.row.map((value) => value ?? 0)) || 1;
    const shares = this.row.map((value) => (value ?? 0) / most);
    this.shares = shares;
    this.words.tint(
      shares,
      shares.map((share) => (share >= SHOWN_ACTIVITY ? figure(100 * share, 0) : "")),
      this.factor % TONES,
    );
    this.buttons.forEach((button, factor) => button.setAttribute("aria-pressed", String(factor === this.factor)));
  }

  get row() {
    return this.data.neurons.activations[this.factor];
  }

  chooseFactor(factor) {
    this.factor = factor;
    this.draw();
    this.announce(`Group ${factor + 1} tints the text.`);
  }

  makeButton(row, factor) {
    const { tokens, layers } = this.data.neurons;
    const strongest = make("span", { className: "strongest" });
    for (const token of tokens[factor].slice(0, NAMED)) {
      strongest.append(make("span", { className: "sample" }, quote(this.data.tokens[token].text)), " ");
    }
    const button = make(
      "button",
      { type: "button", className: `factor tone-${factor % TONES}` },
      make("span", { className: "title" }, `Group ${factor + 1}`, make("small", {}, nameLayers(layers?.[factor]))),
      drawSparkline(row),
      strongest,
    );
    button.dataset.factor = factor;
    return button;
  }

  read(token) {
    const share = percent(this.shares[token]);
    return `“${spell(this.data.tokens[token].text)}”: group ${this.factor + 1} has ${share} of its strongest.`;
  }

  say(place) {
    return this.read(place);
  }
}

/** Return where a group's neurons are, in words. */
function nameLayers(shares) {
  if (!shares || shares.length === 0) {
    return "";
  }
  const most = shares.indexOf(Math.max(...shares));
  return ` ${percent(shares[most])} of it in layer ${most + 1}`;
}

/** Return a line of a group over the text, from the first token to the last. */
function drawSparkline(row) {
  const most = Math.max(...row.map((value) => value ?? 0)) || 1;
  const top = (value) => (HEIGHT - 1 - (HEIGHT - 3) * ((value ?? 0) / most)).toFixed(1);
  const steps = row.map((value, place) => `V${top(value)}H${place + 1}`);
  const line = `M0 ${HEIGHT}${steps.join("")}V${HEIGHT}`;
  return makeSvg(
    "svg",
    {
      class: "sparkline",
      viewBox: `0 0 ${Math.max(1, row.length)} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    },
    makeSvg("path", { d: line }),
  );
}

export { Neurons };
