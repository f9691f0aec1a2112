// Which tokens each token looked at, by layer and head.

import { drawBars, figure, findStrongest, make, makeSelect, percent, quote, spell } from "./dom.js";
import { Lines } from "./lines.js";

const LISTED_LINKS = 8; // tokens in the list
const SPOKEN_LINKS = 3;
const DRAWN = 16; // curves at most
const FAINTEST = 0.02; // what gets a curve
const SHOWN_WEIGHT = 0.01;
const NAMES = {
  self: "between tokens that are read",
  source: "within the text",
  cross: "from translation to text",
};
const MEAN = "mean";
const BEFORE = " To see why a token was written, choose the one before it: from there the model went on.";

/** The view of the attention. The weights are unpacked when they are first looked at. */
class Attention {
  constructor(data, words) {
    this.data = data;
    this.words = words;
    this.key = "attention";
    this.name = "Attention";
    this.controls = make("div", { className: "controls" });
    this.side = make("div", { className: "beside" });
    this.unpacked = new Map();
    const written = data.targets.filter(({ token }) => token !== null);
    this.following = new Map(written.map(({ token, text }) => [token - 1, text])); // what each token led to
    this.lead =
      "While it reads a token, the model looks at others: the thicker a line and the stronger a token's colour, " +
      `the more the token at hand looked at it.${written.length > 0 ? BEFORE : ""}`;
    this.place = 0;
    const kinds = data.attention.map(({ name }, place) => [place, this.nameKind(name)]);
    const kind = makeSelect("Attention", kinds, () => this.changeKind());
    this.layer = makeSelect("Layer", [], () => this.draw(this.place));
    this.head = makeSelect("Head", [], () => this.draw(this.place));
    this.kind = kind.select;
    if (kinds.length > 1) {
      this.controls.append(kind.field);
    }
    const note = "Much attention for the first token or a full stop often means: nothing to look for.";
    this.controls.append(this.layer.field, this.head.field, make("p", { className: "soft" }, note));
    this.offer();
  }

  nameKind(name) {
    return name === "self" && this.data.kind === "translation" ? "within the translation" : (NAMES[name] ?? name);
  }

  get entry() {
    return this.data.attention[Number(this.kind.value)];
  }

  /** The tokens that look at others. */
  get stops() {
    const [first, end] = this.entry.queries;
    return Array.from({ length: end - first }, (_, place) => first + place);
  }

  /** Offer the layers and heads that there are; the last layer is chosen. */
  offer() {
    const { layers, heads } = this.entry;
    const option = (_, place) => make("option", { value: place }, String(place + 1));
    const number = (count) => Array.from({ length: count }, option);
    this.layer.select.replaceChildren(...number(layers));
    this.layer.select.value = String(layers - 1);
    this.head.select.replaceChildren(make("option", { value: MEAN }, "mean of all"), ...number(heads));
  }

  changeKind() {
    this.offer();
    this.onStops();
  }

  async draw(place) {
    this.place = place;
    const entry = this.entry;
    if (!this.unpacked.has(entry)) {
      this.unpacked.set(entry, unpack(entry));
      this.side.replaceChildren(make("p", { className: "soft" }, "Unpacking …"));
    }
    let weights;
    try {
      weights = await this.unpacked.get(entry);
    } catch (error) {
      const trouble = `The attention can't be unpacked: ${error.message}`;
      this.side.replaceChildren(make("p", { className: "error", role: "alert" }, trouble));
      return;
    }
    if (this.active && entry === this.entry && place === this.place) {
      this.drawRow(this.readRow(entry, weights, place));
    }
  }

  /** Return the weights (tokens) of one token that looks, null for those it can't look at. */
  readRow({ heads, queries, keys }, weights, place) {
    const [count, width] = [queries[1] - queries[0], keys[1] - keys[0]];
    const layer = Number(this.layer.select.value);
    const chosen = this.head.select.value;
    const among = chosen === MEAN ? Array.from({ length: heads }, (_, head) => head) : [Number(chosen)];
    const row = this.data.tokens.map(() => null);
    for (let key = 0; key < width; key += 1) {
      let sum = 0;
      for (const head of among) {
        sum += weights[((layer * heads + head) * count + place) * width + key];
      }
      row[keys[0] + key] = sum / among.length / 255;
    }
    return row;
  }

  drawRow(row) {
    this.row = row;
    this.from = this.stops[this.place];
    const strongest = findStrongest(row, DRAWN);
    const most = row[strongest[0]] ?? 1;
    const [first, end] = this.entry.queries; // these stay as they are, though they may not be looked at
    const others = row.map((_, token) => (token >= first && token < end ? 0 : null));
    this.words.tint(
      row.map((weight, token) => (weight === null ? others[token] : weight / most)),
      row.map((weight) => ((weight ?? 0) >= SHOWN_WEIGHT ? figure(100 * weight, 0) : "")),
    );
    const to = strongest.filter((token) => token !== this.from && row[token] >= FAINTEST);
    this.lines ??= new Lines(this.words);
    this.lines.draw({ from: this.from, to: to.map((token) => [token, row[token]]) });
    const bars = strongest.slice(0, LISTED_LINKS).map((token) => ({
      name: quote(this.data.tokens[token].text),
      size: row[token],
      figure: percent(row[token]),
    }));
    const next = this.following.get(this.from);
    const led = next === undefined ? [] : [make("p", { className: "soft" }, "The one after it: ", quote(next))];
    this.side.replaceChildren(
      make("h3", {}, quote(this.data.tokens[this.from].text)),
      ...led,
      make("h4", {}, "looks most at"),
      bars.length > 0 ? drawBars(bars) : make("p", { className: "soft" }, "All get next to nothing."),
    );
  }

  /** Take the lines away, as another view comes. */
  leave() {
    this.lines?.draw(null);
  }

  read(token) {
    const weight = this.row?.[token];
    const text = spell(this.data.tokens[token].text);
    if (typeof weight === "number") {
      return `“${text}” gets ${percent(weight)} of the attention.`;
    }
    return token === this.from ? "" : `“${text}” can't be looked at from there.`;
  }

  say() {
    if (!this.row) {
      return "";
    }
    const name = (token) => spell(this.data.tokens[token].text);
    const list = findStrongest(this.row, SPOKEN_LINKS).map((token) => `${name(token)} ${percent(this.row[token])}`);
    return `${name(this.from)} looks most at ${list.join(", ")}.`;
  }
}

/** Return the bytes of an entry's weights. */
async function unpack({ layers, heads, queries, keys, weights }) {
  const packed = Uint8Array.from(atob(weights), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const expected = layers * heads * (queries[1] - queries[0]) * (keys[1] - keys[0]);
  if (bytes.length !== expected) {
    throw new Error(`${bytes.length} weights instead of ${expected}`);
  }
  return bytes;
}

export { Attention };
