// The text as its tokens, which are tinted.

import { make, show } from "./dom.js";

const TITLES = {
  prompt: "Prompt",
  answer: "Answer",
  source: "Text",
  translation: "Translation",
  text: "Text",
  pair: "Other text",
  query: "Question",
};

const SPACED = /^ \S/;

/** The tokens, each in an element of its own, by the parts of the text. */
class Words {
  /** `titles` are those of parts that are called otherwise here. */
  constructor(tokens, titles = {}) {
    this.tokens = tokens;
    this.elements = tokens.map((token, place) => this.makeToken(token, place));
    this.element = make("div", { className: "words" });
    for (const { part, places } of splitParts(tokens)) {
      const title = part === "special" ? "" : (titles[part] ?? TITLES[part] ?? show(part));
      const text = make("p", { className: "part", dir: "auto" });
      text.append(...places.flatMap((place) => this.place(place)));
      this.element.append(...(title ? [make("h3", {}, title)] : []), text);
    }
  }

  makeToken({ text, part }, place) {
    const shown = show(SPACED.test(text) ? text.slice(1) : text).replaceAll("\n", "↵") || "\u00a0";
    const element = make("span", { className: "token" }, shown);
    element.dataset.token = place;
    element.classList.toggle("special", part === "special");
    element.classList.toggle("crowded", this.isCrowded(place));
    return element;
  }

  /** Return whether a token of one character stands close to another, with too little room for their figures. */
  isCrowded(place) {
    const isShort = (other) => Array.from(this.tokens[other]?.text.trim() ?? "--").length < 2;
    const isSpaced = (other) => SPACED.test(this.tokens[other]?.text ?? "");
    return isShort(place) && ((isShort(place - 1) && !isSpaced(place)) || (isShort(place + 1) && !isSpaced(place + 1)));
  }

  /** Return a token with the space before it and the line's end behind it: they have no tint. */
  place(place) {
    const { text } = this.tokens[place];
    return [SPACED.test(text) ? " " : "", this.elements[place], text.includes("\n") ? "\n" : ""].filter(Boolean);
  }

  /** Return which token an event is about; -1 where none is. */
  find(event) {
    const element = event.target.closest(".token");
    return element && this.element.contains(element) ? Number(element.dataset.token) : -1;
  }

  /**
   * Tint tokens by their values, from -1 to 1; null is a token that is not read.
   * `figures` are what is written below them; `tone` is a colour's number where it is not the sign's.
   */
  tint(values, figures, tone = null) {
    this.elements.forEach((element, place) => {
      const value = values[place];
      const color = tone ?? (value < 0 ? 1 : 0);
      element.classList.toggle("later", value === null);
      element.style.setProperty("--share", Math.min(1, Math.abs(value ?? 0)).toFixed(3));
      element.style.setProperty("--tone", `var(--tone-${color})`);
      element.dataset.figure = figures[place] ?? "";
    });
  }

  /** Take all tints away. */
  clear() {
    this.tint(this.tokens.map(() => 0), []);
  }
}

/** Return the parts of a text; special tokens belong to the part around them. */
function splitParts(tokens) {
  const parts = [];
  const isSpecial = (place) => tokens[place]?.part === "special";
  let waiting = []; // special tokens before the first part
  tokens.forEach(({ part }, place) => {
    const last = parts[parts.length - 1];
    if (part === "special") {
      (last?.places ?? waiting).push(place);
    } else if (last?.part === part) {
      last.places.push(place);
    } else {
      if (isSpecial(last?.places.at(-1)) && isSpecial(last.places.at(-2))) {
        waiting = [last.places.pop()]; // of two between parts, one ends the former and one begins the latter
      }
      parts.push({ part, places: [...waiting, place] });
      waiting = [];
    }
  });
  return waiting.length > 0 ? [{ part: "special", places: waiting }, ...parts] : parts;
}

export { Words };
