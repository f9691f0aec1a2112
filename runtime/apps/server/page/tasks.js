// The tasks that answer at once: what they ask for, what they send, and what they draw.

import { comparisons, EXAMPLES, QUESTION } from "./comparisons.js";
import { make, percent, round } from "./dom.js";
import { drawAttention, drawBars, drawMarks } from "./drawings.js";
import { explanations } from "./explanations.js";
import { pictures } from "./pictures.js";

const TONES = 6; // colours of marks
const MOST_BARS = 25;

const rerank = {
  capability: "rerank",
  tab: "Rank",
  name: "Rank texts",
  lead: "Which texts fit a question best?",
  button: "Rank",
  fields: [
    { name: "query", label: "Question", kind: "line", value: QUESTION },
    { name: "documents", label: "Texts", kind: "lines", rows: 6, value: EXAMPLES.join("\n") },
    { name: "top_n", label: "How many to show", kind: "number", min: 1, step: 1, placeholder: "all" },
  ],
  write: ({ query, documents, top_n }) => ({ query, documents, top_n }),
  draw: ({ results }, { documents }) => {
    const scores = results.map((result) => result.relevance_score);
    const low = Math.min(0, ...scores);
    const high = Math.max(1, ...scores);
    const rows = results.map(({ index, relevance_score: score }) => [
      documents[index],
      (score - low) / (high - low),
      round(score, 3),
    ]);
    return { summary: `Best first; a higher score fits better.`, parts: [drawBars(rows)] };
  },
};

const classify = {
  capability: "classify",
  tab: "Classify",
  name: "Classify a text",
  lead: "Which of the model's classes does a text belong to?",
  button: "Classify",
  fields: [{ name: "input", label: "Text", kind: "text", value: "I would gladly see this film again." }],
  write: ({ input }) => ({ input }),
  draw: ({ data: [{ label, score, probabilities }] }) => {
    const rows = Object.entries(probabilities).sort((a, b) => b[1] - a[1]);
    const areShares = rows.every(([, value]) => value >= 0 && value <= 1);
    const figure = (value) => (areShares ? percent(value) : round(value, 3));
    const most = Math.max(...rows.map(([, value]) => Math.abs(value)));
    const bars = rows.slice(0, MOST_BARS).map(([name, value]) => [
      name,
      areShares ? value : Math.abs(value) / most,
      figure(value),
    ]);
    return { summary: `${label}: ${figure(score)}`, parts: [drawBars(bars)] };
  },
};

const tags = {
  capability: "tags",
  tab: "Tag",
  name: "Tag words",
  lead: "Which words name persons, places or whatever else the model was trained to find?",
  button: "Tag",
  fields: [{ name: "input", label: "Text", kind: "text", value: "Ada Lovelace met Charles Babbage in London." }],
  write: ({ input }) => ({ input }),
  draw: ({ data: [{ entities }] }, { input }) => {
    const labels = [...new Set(entities.map(({ label }) => label))];
    const tone = (label) => labels.indexOf(label) % TONES;
    const marks = entities.map((entity) => ({ ...entity, tone: tone(entity.label) }));
    const rows = entities.map(({ text, label, score }) => [`${text} (${label})`, score, percent(score)]);
    const count = entities.length === 1 ? "1 stretch" : `${entities.length} stretches`;
    return {
      summary: entities.length > 0 ? `Found ${count} of the text.` : "Found nothing to tag in this text.",
      parts: [drawMarks(input, marks), drawBars(rows)],
    };
  },
};

const answers = {
  capability: "answers",
  tab: "Answer",
  name: "Answer a question",
  lead: "The answer is looked for in the text you give.",
  button: "Look for it",
  fields: [
    { name: "question", label: "Question", kind: "line", value: "Where did they meet?" },
    { name: "context", label: "Text", kind: "text", rows: 5, value: "Ada Lovelace met Charles Babbage in London." },
  ],
  write: ({ question, context }) => ({ question, context }),
  draw: ({ data: [{ answers: found, no_answer_score: none }] }, { context }) => {
    const isAnswered = found.length > 0 && !(found[0].score <= none);
    const marks = isAnswered ? [{ ...found[0], tone: 0 }] : [];
    const rows = found.map(({ text, score }) => [text, score, percent(score)]);
    return {
      summary: isAnswered ? found[0].text : "The text seems not to hold an answer.",
      parts: [drawMarks(context, marks), drawBars(rows)],
    };
  },
};

const fillMask = {
  capability: "fill-mask",
  tab: "Fill a gap",
  name: "Fill a gap",
  lead: "Which words fit into the gaps of a text?",
  button: "Fill",
  fields: [{ name: "input", label: "Text", kind: "text", value: "The capital of France is [MASK]." }],
  makeExtra: (form) => {
    const put = () => {
      const { field } = form.fields.get("input");
      field.setRangeText(form.model.mask_token ?? "[MASK]", field.selectionStart, field.selectionEnd, "end");
      field.focus();
    };
    return make("button", { type: "button", onclick: put }, "Put a gap here");
  },
  check: ({ input }, { mask_token: mask = "[MASK]" }) =>
    input.includes(mask) ? "" : `A gap is written ${mask}: put at least one into the text.`,
  write: ({ input }) => ({ input }),
  draw: ({ data: [{ masks }] }) => ({
    summary: masks.map(([best]) => best.token).join(", "),
    parts: masks.flatMap((words, place) => [
      ...(masks.length > 1 ? [make("h3", {}, `Gap ${place + 1}`)] : []),
      drawBars(words.map(({ token, score }) => [token, score, percent(score)])),
    ]),
  }),
};

const translations = {
  capability: "translations",
  tab: "Translate",
  name: "Translate",
  lead: "What languages a model knows depends on how it was trained.",
  button: "Translate",
  fields: [
    { name: "input", label: "Text", kind: "text", rows: 4 },
    {
      name: "num_beams",
      label: "Beams",
      kind: "number",
      min: 1,
      step: 1,
      placeholder: "the model's own",
      hint: "How many translations to follow at a time: more is slower and often better.",
    },
  ],
  write: ({ input, num_beams }, { alignments }) => ({ input, num_beams, ...(alignments ? { alignment: true } : {}) }),
  draw: ({ data: [{ text, alignment }] }, _, width) => {
    if (!alignment) {
      return { summary: text, parts: [] };
    }
    const note = "Each row is a part of the translation: the stronger a square, the more it looked there.";
    const picture = make("figure", {}, drawAttention(alignment, width), make("figcaption", {}, note));
    return { summary: text, parts: [make("h3", {}, "What it looked at"), picture] };
  },
};

export const TASKS = [comparisons, rerank, classify, tags, answers, fillMask, translations, pictures, explanations];
