// Bars, marked texts, tables and pictures.

import { make, makeSvg, quote, round, shorten, show } from "./dom.js";

const FONT = "13px system-ui, sans-serif";
const LABEL = 13; // its height
const LONGEST_TOKEN = 16; // characters
const LONGEST_WORD = 32;
const MOST_MATCHES = 64; // in a table

/** Return a list of bars: [name, share from 0 to 1, the figure as text] each. */
export function drawBars(rows) {
  const list = make("ol", { className: "bars" });
  for (const [name, share, figure] of rows) {
    const bar = make("span", { className: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", Math.min(1, Math.max(0, share || 0)));
    list.append(make("li", {}, quote(name, "name"), bar, make("span", { className: "figure" }, figure)));
  }
  return list;
}

/** Return a text with its stretches marked: {start, end, tone, label} each, counted in characters as Python does. */
export function drawMarks(text, stretches) {
  const characters = Array.from(text);
  const element = make("p", { className: "text marked", dir: "auto" });
  const cut = (start, end) => show(characters.slice(start, end).join(""));
  let place = 0;
  for (const { start, end, tone, label } of [...stretches].sort((a, b) => a.start - b.start)) {
    if (start < place || end <= start) {
      continue; // inside another one
    }
    const mark = make("mark", { className: `tone-${tone}` }, cut(start, end));
    if (label) {
      mark.append(make("small", {}, show(label)));
    }
    element.append(cut(place, start), mark);
    place = end;
  }
  element.append(cut(place));
  return element;
}

/** Return what is wider than the page may be, to be scrolled by itself. */
export function makeScrollable(label, content) {
  return make("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": label }, content);
}

/** Return a cell with a number; the larger its share, the stronger its colour. */
function makeShade(value, share) {
  const depth = share > 0.8 ? "strong" : share > 0.55 ? "middle" : "";
  const cell = make("td", { className: depth }, round(value, 2));
  cell.style.setProperty("--share", Math.max(0, share || 0));
  return cell;
}

/** Return a table of how alike each two texts are. */
export function drawSimilarities(texts, likeness) {
  const head = make("tr", {}, make("td"));
  const body = make("tbody");
  texts.forEach((text, row) => {
    head.append(make("th", { scope: "col" }, String(row + 1)));
    const line = make("tr", {}, make("th", { scope: "row" }, `${row + 1} `, quote(shorten(text, 60))));
    likeness[row].forEach((value) => {
      line.append(makeShade(value, value));
    });
    body.append(line);
  });
  return makeScrollable("How alike each two texts are", make("table", {}, make("thead", {}, head), body));
}

/** Return a table of the tokens of a text that match, and what each adds to the score; `pairs` are of two tokens. */
export function drawMatches(text, matches, largest, pairs) {
  if (matches.length === 0) {
    return make("p", { className: "soft" }, "Nothing matches.");
  }
  const names = pairs ? ["Query", "Text", "Product"] : ["Word", "Product"];
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  const body = make("tbody");
  for (const { query, document: own, product } of matches.slice(0, MOST_MATCHES)) {
    const line = make("tr", {}, make("th", { scope: "row" }, quote(shorten(query, LONGEST_WORD))));
    if (pairs) {
      line.append(make("td", { className: "word" }, quote(shorten(own, LONGEST_WORD))));
    }
    line.append(makeShade(product, product / largest / 2)); // pale, for numbers to be read on any shade
    body.append(line);
  }
  const table = make("table", {}, make("thead", {}, head), body);
  const rest = matches.slice(MOST_MATCHES);
  if (rest.length > 0) {
    const sum = rest.reduce((total, { product }) => total + product, 0);
    table.prepend(make("caption", { className: "soft" }, `${rest.length} more add ${round(sum)}.`));
  }
  return makeScrollable(`What matches in “${shorten(text, 40)}”`, table);
}

/** Return a picture of the texts as points. */
export function drawPoints(texts, points, width) {
  const w = Math.min(736, Math.max(280, width));
  const h = Math.round(w * 0.5);
  const margin = 36;
  const bounds = [0, 1].map((axis) => {
    const parts = points.map((point) => point[axis]);
    return [Math.min(...parts), Math.max(...parts)];
  });
  const scale = Math.min(
    (w - 2 * margin) / (bounds[0][1] - bounds[0][0] || 1),
    (h - 2 * margin) / (bounds[1][1] - bounds[1][0] || 1),
  );
  const middle = bounds.map(([low, high]) => (low + high) / 2);
  const places = points.map(([x, y]) => [w / 2 + (x - middle[0]) * scale, h / 2 - (y - middle[1]) * scale]);
  const label = "The texts as points: the nearer two points are, the more alike their texts";
  const picture = makeSvg("svg", { viewBox: `0 0 ${w} ${h}`, class: "points", role: "img", "aria-label": label });
  places.forEach(([x, y], place) => {
    const dot = makeSvg("circle", { cx: x, cy: y, r: 5 });
    dot.append(makeSvg("title", {}, show(texts[place])));
    picture.append(dot);
  });
  picture.append(...placeLabels(texts, places, w, h));
  return picture;
}

/** Return a label beside each point: the text where there is room for it, else its number. */
function placeLabels(texts, places, w, h) {
  const measure = document.createElement("canvas").getContext("2d");
  measure.font = FONT;
  const taken = places.map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
  const isFree = ([left, top, right, bottom]) =>
    left >= 0 && top >= 0 && right <= w && bottom <= h &&
    taken.every(([l, t, r, b]) => right <= l || left >= r || bottom <= t || top >= b);
  return places.map(([x, y], place) => {
    const number = String(place + 1);
    for (const words of [`${number} ${shorten(show(texts[place]), 32)}`, number]) {
      const long = measure.measureText(words).width;
      const spots = [
        [x + 9, y - LABEL / 2],
        [x - 9 - long, y - LABEL / 2],
        [x - long / 2, y - 9 - LABEL],
        [x - long / 2, y + 9],
      ];
      const spot = spots.find(([left, top]) => isFree([left, top, left + long, top + LABEL]));
      if (spot) {
        const [left, top] = spot;
        taken.push([left, top, left + long, top + LABEL]);
        return makeSvg("text", { x: left, y: top + LABEL - 2.5 }, words);
      }
    }
    return makeSvg("text", { x: x + 7, y: y - 7 }, number);
  });
}

/** Return a picture of which source tokens each target token looked at. */
export function drawAttention({ source, target, weights }, width) {
  const measure = document.createElement("canvas").getContext("2d");
  measure.font = FONT;
  const word = (token) => shorten(show(token).replaceAll(" ", "␣"), LONGEST_TOKEN);
  const longest = (tokens) => Math.max(...tokens.map((token) => measure.measureText(word(token)).width));
  const left = Math.ceil(longest(target)) + 10;
  const cell = Math.min(28, Math.max(15, Math.floor((Math.min(width, 736) - left - 2) / source.length)));
  const fits = (token) => measure.measureText(word(token)).width <= cell; // else its word is turned
  const top = source.every(fits) ? 24 : Math.ceil(longest(source)) + 10;
  const w = left + cell * source.length + 2;
  const h = top + cell * target.length + 2;
  const label = "Which parts of the text each part of the translation looked at";
  const picture = makeSvg("svg", { viewBox: `0 0 ${w} ${h}`, width: w, height: h, class: "attention" });
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", label);
  source.forEach((token, column) => {
    const x = left + cell * (column + 0.5);
    const upright = { x, y: top - 8, "text-anchor": "middle" };
    const turned = { transform: `translate(${x + 4} ${top - 6}) rotate(-90)` };
    picture.append(makeSvg("text", fits(token) ? upright : turned, word(token)));
  });
  target.forEach((token, row) => {
    const y = top + cell * (row + 0.5) + 4;
    picture.append(makeSvg("text", { x: left - 6, y, "text-anchor": "end" }, word(token)));
    source.forEach((other, column) => {
      const weight = Math.min(1, Math.max(0, weights[row][column]));
      const place = { x: left + cell * column, y: top + cell * row, width: cell - 1, height: cell - 1 };
      const title = makeSvg("title", {}, `${word(token)} looked at ${word(other)}: ${weight.toFixed(2)}`);
      picture.append(makeSvg("rect", place, title));
      picture.lastChild.style.setProperty("--share", weight);
    });
  });
  return makeScrollable(label, picture);
}
