// Curves from one token to others, behind the text.

import { makeSvg } from "./dom.js";

const ARC = 14; // how high a curve stands above its line, at least
const HIGHEST_ARC = 34;

/** A picture that lies behind the tokens of a text. */
class Lines {
  constructor(words) {
    this.words = words;
    this.picture = makeSvg("svg", { class: "lines", "aria-hidden": "true" });
    words.element.prepend(this.picture);
    this.drawn = null;
    new ResizeObserver(() => this.draw(this.drawn)).observe(words.element);
  }

  /** Draw {from: a token, to: [[token, weight], ...]}; null takes all away. */
  draw(what) {
    this.drawn = what;
    this.picture.replaceChildren();
    if (what === null) {
      return;
    }
    const frame = this.words.element.getBoundingClientRect();
    const box = (place) => {
      const { left, top, width, height } = this.words.elements[place].getClientRects()[0] ?? frame;
      return { x: left - frame.left + width / 2, top: top - frame.top, bottom: top - frame.top + height };
    };
    const start = box(what.from);
    const paths = what.to.map(([place, weight]) => {
      const path = makeSvg("path", { d: curve(start, box(place)), "stroke-width": (1 + 7 * weight).toFixed(2) });
      path.dataset.token = place;
      path.style.setProperty("--strength", (0.35 + 0.5 * weight).toFixed(3));
      return path;
    });
    this.picture.append(...paths);
  }
}

/** Return the path of a curve: an arc on one line of the text, an S between two. */
function curve(start, end) {
  const at = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  if (Math.abs(start.top - end.top) < 4) {
    const arc = Math.min(HIGHEST_ARC, ARC + Math.abs(start.x - end.x) / 12);
    const middle = at((start.x + end.x) / 2, start.top - arc);
    return `M${at(start.x, start.top)}Q${middle} ${at(end.x, end.top)}`;
  }
  const isAbove = end.top < start.top;
  const from = isAbove ? start.top : start.bottom;
  const to = isAbove ? end.bottom : end.top;
  const half = (from + to) / 2;
  return `M${at(start.x, from)}C${at(start.x, half)} ${at(end.x, half)} ${at(end.x, to)}`;
}

export { Lines };
