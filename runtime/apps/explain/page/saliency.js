// How much each token counted for what is explained, and what else the model could have answered.

import { drawBars, figure, findStrongest, make, makeSelect, percent, quote, show, spell } from "./dom.js";

const LISTED_TOKENS = 8; // tokens in the list
const SPOKEN_TOKENS = 3;
const SHOWN_SHARE = 0.01; // smaller shares have no figure below their token
const SIGN =
  "Blue tokens spoke for it, orange ones (with a minus) against it; " +
  "all shares together are 100 % without their signs.";

/** Return what a text was compared with, whose words are not among the tokens. */
function nameOther({ other }) {
  return other ? ` These are the words of the first text; it was compared with “${show(other)}”.` : "";
}

const METHODS = {
  gradient_norm: {
    name: "Gradient norm",
    hint:
      "How much the answer would change if the token changed a little, whichever way: the size of the gradient. " +
      "All shares together are 100 %.",
  },
  gradient_x_input: {
    name: "Gradient × input",
    hint: `How much the token itself added, if the model were a straight line: single signs are often wrong. ${SIGN}`,
  },
  integrated_gradients: {
    name: "Integrated gradients",
    hint: `What the token added on the way from an empty text to this one. ${SIGN}`,
  },
  occlusion: {
    name: "Occlusion",
    hint: `By how much the answer's score falls when the token is taken out. ${SIGN}`,
  },
};

/** The view of what counted. */
class Saliency {
  constructor(data, words) {
    this.data = data;
    this.words = words;
    this.key = "words";
    const known = Object.keys(METHODS).filter((name) => name in data.saliency);
    this.methods = [...known, ...Object.keys(data.saliency).filter((name) => !(name in METHODS))];
    this.hasMethods = this.methods.length > 0;
    this.name = this.hasMethods ? "What counted" : "The answer";
    this.controls = make("div", { className: "controls" });
    this.side = make("div", { className: "beside" });
    this.place = 0;
    const what = `${nameTarget(data)}${data.targets.length > 1 ? " at hand" : ""}`;
    if (this.hasMethods) {
      this.lead =
        `The stronger a token's colour, the more it counted for ${what}; ` +
        `the number below it says how much, in percent.${nameOther(data)}`;
      const options = this.methods.map((name) => [name, METHODS[name]?.name ?? name.replaceAll("_", " ")]);
      const { field, select } = makeSelect("Method", options, () => this.changeMethod());
      this.select = select;
      this.hint = make("p", { className: "soft" });
      this.controls.append(field, this.hint);
      this.showHint();
    } else {
      this.lead = `How sure the model was of ${what}, and what else it could have answered.`;
    }
  }

  get method() {
    return this.hasMethods ? this.select.value : null;
  }

  showHint() {
    this.hint.textContent = METHODS[this.method]?.hint ?? "";
  }

  changeMethod() {
    this.showHint();
    this.draw(this.place);
  }

  /** Return the row of a target as shares, which sum to 1 without their signs; null for what is not read. */
  share(place) {
    const row = this.data.saliency[this.method]?.[place] ?? this.data.tokens.map(() => null);
    const sum = row.reduce((total, value) => total + Math.abs(value ?? 0), 0);
    return row.map((value) => (value === null ? null : sum > 0 ? value / sum : 0));
  }

  /** Have a target at hand. */
  draw(place) {
    this.place = place;
    const target = this.data.targets[place];
    const parts = [make("h3", {}, quote(target.text)), make("p", { className: "figures" }, describe(target))];
    this.shares = this.hasMethods ? this.share(place) : null;
    if (this.hasMethods) {
      const strongest = findStrongest(this.shares, LISTED_TOKENS);
      const most = Math.abs(this.shares[strongest[0]] ?? 1);
      this.words.tint(
        this.shares.map((share) => (share === null ? null : share / most)),
        this.shares.map((share) => (Math.abs(share ?? 0) >= SHOWN_SHARE ? figure(100 * share, 0) : "")),
      );
      parts.push(make("h4", {}, "Counted most"), this.drawStrongest(strongest, most));
      const missing = this.method === "integrated_gradients" ? this.data.missing?.[place] : null;
      if (typeof missing === "number") {
        parts.push(make("p", { className: "soft" }, tellSum(missing)));
      }
    } else {
      this.words.clear();
    }
    if (target.likeliest.length > 0) {
      const title = target.token === null ? "The likeliest labels" : "The likeliest in this place";
      parts.push(make("h4", {}, title), drawLikeliest(target));
    }
    this.side.replaceChildren(...parts);
  }

  drawStrongest(strongest, most) {
    if (strongest.length === 0) {
      return make("p", { className: "soft" }, "No token counted.");
    }
    return drawBars(
      strongest.map((token) => ({
        name: quote(this.data.tokens[token].text),
        size: Math.abs(this.shares[token]) / most,
        figure: this.write(token),
        className: this.shares[token] < 0 ? "minus" : "",
      })),
    );
  }

  write(token) {
    return percent(this.shares[token], { signed: this.method !== "gradient_norm" });
  }

  /** Return a sentence about a token of the text. */
  read(token) {
    if (!this.shares) {
      return "";
    }
    const text = spell(this.data.tokens[token].text);
    const share = this.shares[token];
    const value = this.data.saliency[this.method][this.place][token];
    if (share === null) {
      return `“${text}” was not read: it comes later, or is left out.`;
    }
    const number = this.method === "gradient_norm" ? "" : ` (${figure(value, 3)})`;
    return `“${text}” counted ${this.write(token)}${number}.`;
  }

  /** Return what a screen reader says of a target. */
  say(place) {
    const target = this.data.targets[place];
    const start = `${spell(target.text)}: ${describe(target)}.`;
    const strongest = this.shares ? findStrongest(this.shares, SPOKEN_TOKENS) : [];
    const list = strongest.map((token) => `${spell(this.data.tokens[token].text)} ${this.write(token)}`);
    return list.length > 0 ? `${start} Counted most: ${list.join(", ")}.` : start;
  }
}

/** Return what integrated gradients add up to, in words. */
function tellSum(missing) {
  const change = "how much the score changes from an empty text to this one";
  return `With their signs, all tokens add up to ${change}, give or take ${percent(Math.abs(missing))} of it.`;
}

/** Return what is explained, in words. */
function nameTarget({ kind, targets }) {
  if (targets[0]?.token === null) {
    return kind === "classification" ? "the label" : kind === "similarity" ? "the likeness" : "the score";
  }
  return kind === "translation" ? "the token of the translation" : "the token of the answer";
}

/** Return a target's numbers in words. */
function describe({ probability, logit }) {
  const parts = [];
  if (typeof probability === "number") {
    parts.push(`probability ${percent(probability)}`);
  }
  if (typeof logit === "number") {
    parts.push(`${typeof probability === "number" ? "logit" : "value"} ${figure(logit)}`);
  }
  return parts.join(", ");
}

/** Return bars of what is likeliest, and of the target itself where it is none of them. */
function drawLikeliest({ text, probability, likeliest }) {
  const rows = [...likeliest];
  if (typeof probability === "number" && !rows.some((one) => one.text === text)) {
    rows.push({ text, probability });
  }
  return drawBars(
    rows.map((one) => ({
      name: quote(one.text),
      size: one.probability,
      figure: percent(one.probability),
      className: one.text === text ? "own" : "",
    })),
  );
}

export { Saliency, nameTarget, describe };
