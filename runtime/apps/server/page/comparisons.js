// The task that compares texts: each two in what they mean, or a query with each text by the tokens that match.

import { make, percent, quote, round, shorten } from "./dom.js";
import { drawMatches, drawPoints, drawSimilarities } from "./drawings.js";
import { compare, project } from "./pca.js";

const MOST_TEXTS = 60; // in a table
export const QUESTION = "Who sells food?";
export const EXAMPLES = [
  "The baker sells bread.",
  "A cake shop opened in our street.",
  "Birds can fly.",
  "Wings lift the plane.",
  "She plays the violin.",
];
const WAYS = {
  whole: "meaning: a vector for each text",
  sparse: "words: a weight for each",
  multi: "tokens: a vector for each",
};
const SUMS = {
  sparse: "The words that the query and a text both have a weight for. A score is the sum of their products.",
  multi: "Each of the query's tokens, and the text's token that it matches best. A score is the sum of their products.",
};

/** Return the ways in which a model compares texts. */
function listWays({ capabilities, matches = [] }) {
  return [...(capabilities.includes("embeddings") ? ["whole"] : []), ...matches];
}

function suitWay(model) {
  const ways = listWays(model);
  return ways.length > 1 ? { label: "Compare by", options: ways.map((way) => [way, WAYS[way]]) } : null;
}

function suitTexts(model) {
  const ways = listWays(model);
  if (!model.matches) {
    return { label: "Texts", value: EXAMPLES.join("\n") };
  }
  const where = ways.includes("whole") ? "By words or tokens, the" : "The";
  const hint = `${where} first is a query; the others are compared with it.`;
  return { label: "Texts", value: [QUESTION, ...EXAMPLES].join("\n"), hint };
}

const chooseWay = ({ way }, model) => way ?? listWays(model)[0];

export const comparisons = {
  capability: "embeddings",
  also: "matches",
  tab: "Compare",
  name: "Compare texts",
  lead: "How alike are texts in what they mean?",
  button: "Compare",
  fields: [
    { name: "way", kind: "choice", suit: suitWay },
    { name: "input", kind: "lines", rows: 6, suit: suitTexts },
  ],
  check: ({ input }) => {
    if (input.length < 2) {
      return "Write at least two texts, one a line.";
    }
    return input.length > MOST_TEXTS ? `Give at most ${MOST_TEXTS} texts here; programs may ask for more.` : "";
  },
  path: (values, model) => (chooseWay(values, model) === "whole" ? "v1/embeddings" : "v1/matches"),
  write: (values, model) => {
    const { input } = values;
    const way = chooseWay(values, model);
    return way === "whole" ? { input } : { query: input[0], documents: input.slice(1), kind: way };
  },
  draw: ({ data }, values, width, model) => {
    const way = chooseWay(values, model);
    const entries = [...data].sort((a, b) => a.index - b.index);
    return way === "whole" ? drawWhole(entries, values.input, width) : drawParts(entries, values.input, way);
  },
};

/** Draw how alike each two texts are. */
function drawWhole(entries, texts, width) {
  const vectors = entries.map(({ embedding }) => embedding);
  const likeness = compare(vectors);
  const { points, kept } = project(vectors);
  const size = vectors[0].length;
  const note = `Each text is a vector of ${size} numbers; this plane keeps ${percent(kept)} of their differences.`;
  return {
    summary: describeNearest(likeness),
    parts: [
      make("p", { className: "soft" }, "1 is the same, 0 has nothing in common."),
      drawSimilarities(texts, likeness),
      make("h3", {}, "As a picture"),
      make("figure", {}, drawPoints(texts, points, width), make("figcaption", {}, note)),
    ],
  };
}

function describeNearest(likeness) {
  let best = [0, 1];
  likeness.forEach((row, i) =>
    row.forEach((value, j) => {
      if (i < j && value > likeness[best[0]][best[1]]) {
        best = [i, j];
      }
    }),
  );
  const value = round(likeness[best[0]][best[1]], 2);
  return `Texts ${best[0] + 1} and ${best[1] + 1} are the most alike (${value}).`;
}

/** Draw which tokens of each text match the query's, the best text first. */
function drawParts(entries, [, ...texts], way) {
  const ranked = [...entries].sort((a, b) => b.score - a.score);
  const products = ranked.map(({ matches }) => Math.max(...matches.map(({ product }) => product)));
  const largest = Math.max(0, ...products);
  const found = ranked.map(({ index, score, matches }, place) => {
    const figure = make("span", { className: "figure" }, round(score));
    const title = make("summary", {}, figure, quote(shorten(texts[index], 80)));
    const table = drawMatches(texts[index], matches, largest, way === "multi");
    return make("details", { className: "match", open: place === 0 }, title, table);
  });
  const [{ index, score }] = ranked;
  return {
    summary: `The best: ${shorten(texts[index], 60)} (${round(score)})`,
    parts: [make("p", { className: "soft" }, SUMS[way]), ...found],
  };
}
