// What each layer would answer: a table of ranks, layers by tokens of the answer.

import { make, makeSelect, quote, spell } from "./dom.js";
import { nameTarget } from "./saliency.js";

const DEPTHS = 10; // colours; the deepest is rank 1
const CELL_STEPS = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };

/** The view of the layers. */
class Lens {
  /** `choose(target)` has a target at hand, `announce(text)` has a screen reader say a text. */
  constructor(data, words, { choose, announce }) {
    this.data = data;
    this.words = words;
    this.key = "lens";
    this.name = "Layers";
    const what = nameTarget(data).replace("the", "each");
    this.lead =
      `If the model had to answer after each layer, in which place would ${what} be? ` +
      "1, in the strongest colour, is the likeliest. The first row, embeddings, is before any layer.";
    this.choose = choose;
    this.announce = announce;
    this.controls = make("div", { className: "controls" });
    this.built = false;
    this.row = 0;
    this.column = 0;
    if (data.lens.watched.length > 0) {
      const words = data.lens.watched.map(({ text }, place) => [place, `“${spell(text)}”`]);
      const options = [["", "the answer's own tokens"], ...words];
      const { field, select } = makeSelect("Ranks of", options, () => this.fill());
      this.select = select;
      this.controls.append(field);
    }
    this.note = make("p", { className: "reading" });
    this.wide = make("div", {}, this.note);
  }

  /** The word that is watched, if one is chosen. */
  get watched() {
    return this.select?.value ? this.data.lens.watched[Number(this.select.value)] : null;
  }

  get layers() {
    return this.data.lens.layers;
  }

  get ranks() {
    return (this.watched ?? this.data.lens).ranks;
  }

  draw(place) {
    if (!this.built) {
      this.build();
    }
    this.words.clear();
    this.heads.forEach((head, column) => head.classList.toggle("current", column === place));
    this.column = place;
    this.tell(this.row, place);
  }

  build() {
    const { targets, lens } = this.data;
    this.built = true;
    this.heads = targets.map(({ text }) => make("th", { scope: "col" }, make("span", {}, quote(text))));
    this.cells = lens.layers.map(() => targets.map(() => make("td", { tabIndex: -1 })));
    const rows = this.cells.map((cells, row) => {
      cells.forEach((cell, column) => {
        cell.dataset.row = row;
        cell.dataset.column = column;
      });
      return make("tr", {}, make("th", { scope: "row" }, lens.layers[row]), ...cells);
    });
    const head = make("thead", {}, make("tr", {}, make("td"), ...this.heads));
    const table = make("table", { className: "lens" }, head, make("tbody", {}, ...rows));
    table.addEventListener("pointerover", (event) => this.point(event, false));
    table.addEventListener("focusin", (event) => this.point(event, true));
    table.addEventListener("keydown", (event) => this.press(event));
    const label = `In which place each layer has ${nameTarget(this.data)}`;
    this.wide.append(make("div", { className: "wide", role: "region", "aria-label": label }, table));
    this.row = lens.layers.length - 1;
    this.fill();
  }

  /** Write the ranks into the table. */
  fill() {
    const ranks = this.ranks;
    const most = Math.log(Math.max(2, ...ranks.map((row) => Math.max(...row))));
    ranks.forEach((row, layer) =>
      row.forEach((rank, column) => {
        const cell = this.cells[layer][column];
        cell.textContent = String(rank);
        cell.className = `depth-${Math.round(DEPTHS * (1 - Math.log(rank) / most))}`;
      }),
    );
    this.mark(this.cells[this.row][this.column]);
    this.tell(this.row, this.column);
  }

  /** Have Tab reach one cell alone. */
  mark(cell) {
    this.marked?.setAttribute("tabindex", "-1");
    cell.setAttribute("tabindex", "0");
    this.marked = cell;
  }

  point(event, spoken) {
    const cell = event.target.closest("tbody td");
    if (!cell) {
      return;
    }
    [this.row, this.column] = [Number(cell.dataset.row), Number(cell.dataset.column)];
    this.mark(cell);
    const row = this.row;
    const column = this.column;
    this.choose(column);
    this.column = column;
    this.tell(row, column);
    if (spoken) {
      this.announce(this.note.textContent);
    }
  }

  press(event) {
    const cell = event.target.closest("tbody td");
    const step = CELL_STEPS[event.key];
    if (cell && step) {
      event.preventDefault();
      this.cells[Number(cell.dataset.row) + step[0]]?.[Number(cell.dataset.column) + step[1]]?.focus();
    }
  }

  /** Write above the table what one cell is about. */
  tell(row, column) {
    const { lens, targets } = this.data;
    const layer = row === 0 ? `The ${lens.layers[0]}` : `After ${lens.layers[row]}`;
    const word = this.watched ?? targets[column];
    const rank = this.ranks[row][column];
    const place = this.watched ? make("span", {}, ", in the place of ", quote(targets[column].text)) : "";
    this.note.replaceChildren(
      `${layer}${row === 0 ? " alone" : ""}`, place, ": the likeliest is ", quoteStrong(lens.likeliest[row][column]),
      ", and ", quote(word.text), ` has rank ${rank}.`,
    );
  }

  read() {
    return "";
  }

  say(place) {
    const ranks = this.ranks.map((row) => row[place]);
    const first = ranks.indexOf(1);
    const word = spell((this.watched ?? this.data.targets[place]).text);
    return first < 0 ? `${word} is nowhere the likeliest.` : `${word} is first the likeliest at ${this.layers[first]}.`;
  }
}

function quoteStrong(text) {
  return make("strong", {}, quote(text));
}

export { Lens };
