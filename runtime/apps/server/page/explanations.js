// The task that says why a model answered so; what draws its answer is the page of `planforge explain`.

import { make, percent, round } from "./dom.js";
import { mountExplanation } from "./explain/explain.js";

const METHODS = [
  ["gradient", "Gradient", "Which words counted?", true],
  ["lens", "Layers", "After each layer: what would the model say if it were the last one?", true],
  ["attention", "Attention", "Which words did each word look at?", true],
  ["occlusion", "Occlusion", "How much changes when a word is taken out? Slower.", false],
  ["integrated_gradients", "Integrated gradients", "Which words counted, so that it adds up? Much slower.", false],
  ["neurons", "Neurons", "Which groups of neurons react together? Needs scikit-learn on the server.", false],
];
const SPACE = "A space before a word counts: most words have one.";

const can = (model, ...able) => able.some((one) => model.capabilities.includes(one));
const isTranslator = (model) => can(model, "translations");
const isGenerator = (model) => can(model, "completions", "chat");
const isEncoder = (model) => !isTranslator(model) && !isGenerator(model);
const isRanker = (model) => isEncoder(model) && can(model, "rerank");
const isClassifier = (model) => isEncoder(model) && can(model, "classify") && !isRanker(model);

function suitText(model) {
  if (isTranslator(model)) {
    return { label: "Text", value: "the 3rd of May, 1998" };
  }
  if (isGenerator(model)) {
    return { label: "Text", value: "In the beginning God created the", hint: "The answer goes on from here." };
  }
  if (isRanker(model)) {
    return { label: "Question", value: "Who sells food?" };
  }
  return { label: "Text", value: isClassifier(model) ? "I would gladly see this film again." : "Birds can fly." };
}

function suitPair(model) {
  if (!isEncoder(model)) {
    return null;
  }
  if (isRanker(model)) {
    return { label: "Second text", value: "The baker sells bread.", hint: "How well does it fit the question?" };
  }
  if (isClassifier(model)) {
    return { label: "Second text", optional: true, hint: "Only for models that judge two texts together." };
  }
  return { label: "Second text", value: "Wings lift the plane.", hint: "How alike are the two in what they mean?" };
}

function suitAnswer(model) {
  if (isEncoder(model)) {
    return null;
  }
  const common = { placeholder: "the model's own", optional: true };
  if (isTranslator(model)) {
    return { ...common, label: "Translation", hint: "Leave it empty to ask about the model's own." };
  }
  const hint = `Leave it empty to ask about the model's own. ${SPACE}`;
  return { ...common, label: "Answer", value: " heavens and the earth", hint };
}

function suitLabel(model) {
  if (!isClassifier(model)) {
    return null;
  }
  return { label: "Label", options: [["", "the likeliest ones"], ...model.labels.map((label) => [label, label])] };
}

function suitWatch(model) {
  const hint = `Other words whose rank after each layer you want to see. ${SPACE}`;
  return isEncoder(model) ? null : { label: "Words to watch", optional: true, hint };
}

/** Return in a line what is explained. */
function summarize({ kind, tokens, targets }) {
  const written = tokens.filter(({ part }) => part === "answer" || part === "translation");
  if (kind === "generation" || kind === "translation") {
    return written.map(({ text }) => text).join("").trim() || "(nothing)";
  }
  const [{ text, probability, logit }] = targets;
  const figure = typeof probability === "number" ? percent(probability) : round(logit ?? 0, 3);
  return `${text}: ${figure}`;
}

export const explanations = {
  capability: "explanations",
  tab: "Explain",
  name: "Explain an answer",
  lead: "Why does a model say this, and nothing else? See which words it took it from.",
  button: "Explain",
  isBroad: true,
  fields: [
    { name: "input", kind: "text", rows: 2, suit: suitText },
    { name: "pair", kind: "text", rows: 2, suit: suitPair },
    { name: "answer", kind: "line", suit: suitAnswer },
    { name: "label", kind: "choice", suit: suitLabel },
    { name: "methods", label: "What to look at", kind: "ticks", options: METHODS },
    { name: "watch", kind: "lines", rows: 2, suit: suitWatch },
  ],
  check: ({ watch, methods }) =>
    watch && !methods.includes("lens") ? "Words are watched by “Layers”: tick it, or watch none." : "",
  write: ({ input, pair, answer, label, methods, watch }) => ({ input, pair, answer: answer ?? label, methods, watch }),
  draw: (answer) => {
    const place = make("div");
    mountExplanation(place, answer);
    return { summary: summarize(answer), parts: [place] };
  },
};
