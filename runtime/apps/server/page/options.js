// The options of an answer, and how fast it came.

import { make, makeId } from "./dom.js";

const OPTIONS = [
  ["temperature", "Temperature", "0 always takes the likeliest word; higher is bolder", { min: 0, max: 2, step: "any" }],
  ["top_p", "Top p", "choose among the likeliest words that make up this share", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", "choose among this many of the likeliest words", { min: 1, step: 1 }],
  ["max_tokens", "Longest answer", "in tokens; a token is a word or a part of one", { min: 1, step: 1 }],
  ["seed", "Seed", "the same number gives the same answer again", { min: 0, step: 1, max: Number.MAX_SAFE_INTEGER }],
];

/** Number fields for the options of an answer; `values` are what they hold at first, by name. */
export class Options {
  constructor(values = {}) {
    this.fields = new Map();
    this.element = make("div", { className: "options" });
    for (const [name, label, hint, range] of OPTIONS) {
      const id = makeId(name);
      const properties = { id, type: "number", placeholder: "the model's own", "aria-describedby": `${id}-hint` };
      const field = make("input", { ...properties, ...range, value: values[name] ?? "" });
      this.fields.set(name, [field, label]);
      this.element.append(
        make(
          "div",
          { className: "field" },
          make("label", { htmlFor: id }, label),
          field,
          make("small", { id: `${id}-hint` }, hint),
        ),
      );
    }
  }

  /** Return the options that are given; where one is wrong, nothing, after having said so. */
  read(complain) {
    const options = {};
    for (const [name, [field, label]] of this.fields) {
      if (!field.checkValidity()) {
        complain(`${label}: ${describeRange(field)}`, field);
        return null;
      }
      if (field.value !== "") {
        options[name] = Number(field.value);
      }
    }
    return options;
  }
}

/** Return what a number field takes. */
export function describeRange(field) {
  const kind = field.step === "any" ? "a number" : "a whole number";
  return field.max ? `give ${kind} from ${field.min} to ${field.max}.` : `give ${kind}, ${field.min} or more.`;
}

/** How many tokens came, how fast, and when the first. */
export class Meter {
  constructor() {
    this.begin = performance.now();
    this.tokens = 0;
  }

  /** Count a piece of the answer. */
  count() {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens += 1;
  }

  /** Return the figures in words; the server's count of tokens, if it gave one, is the better one. */
  describe(usage) {
    if (this.first === undefined) {
      return "";
    }
    const tokens = usage?.completion_tokens ?? this.tokens;
    const words = [tokens === 1 ? "1 token" : `${tokens} tokens`];
    const seconds = (this.last - this.first) / 1000;
    if (tokens > 1 && seconds > 0) {
      words.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    words.push(`first after ${((this.first - this.begin) / 1000).toFixed(2)} s`);
    return words.join(" · ");
  }
}

/** Return why an answer ended, if a reader should know. */
export function describeEnd(reason) {
  const words = {
    length: "Ended at the longest answer that was asked for, or at the end of what the model can hold.",
    context: "Ended because the model can hold no more.",
    content_filter: "Ended by the server's filter.",
  };
  return words[reason] ?? "";
}
