// Answers questions with transformers.js in Node: `node ask_transformers_js.mjs FOLDER QUESTIONS OUT`.
//
// With the option `wasm` the model runs in WebAssembly, by the kernels that browsers have.
//
// B batch, T tokens, V vocabulary

import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [, , folder, questionsFile, out] = process.argv;
const { options, questions } = JSON.parse(fs.readFileSync(questionsFile, "utf8"));
const require = createRequire(path.join(options.modules, "any.js"));
const NAME = "@huggingface/transformers";
if (options.wasm) {
  // transformers.js takes the ONNX Runtime that it is shown, and reads files as it does where there is no Node.
  globalThis[Symbol.for("onnxruntime")] = require("onnxruntime-web");
  Object.defineProperty(process, "release", { value: { ...process.release, name: "browser" } });
}
const library = await import(pathToFileURL(require.resolve(NAME)));
const { env, Tensor, LogitsProcessor, LogitsProcessorList } = library;
env.allowRemoteModels = false;
if (options.wasm) env.backends.onnx.wasm.wasmPaths = new URL("./", pathToFileURL(require.resolve("onnxruntime-web"))).href;
const name = "package"; // a folder whose name begins with a dot it would not open
fs.symlinkSync(path.resolve(folder), path.join(out, name));
env.localModelPath = out + path.sep;

const choices = { dtype: options.dtype, device: options.wasm ? "auto" : "cpu" };
const model = await library[options.class].from_pretrained(name, choices);
const tokenizer = await library.AutoTokenizer.from_pretrained(name);

const ownConfig = { ...model.generation_config }; // of a model that generates

// Golden tokens are the model's likeliest, without a checkpoint's rules, and go on behind an end token.
const PLAIN = {
  eos_token_id: null,
  forced_bos_token_id: null,
  forced_eos_token_id: null,
  bad_words_ids: null,
  no_repeat_ngram_size: 0,
  repetition_penalty: 1,
  min_length: 0,
  min_new_tokens: null,
};

let count = 0;

// Write numbers to a file; return what stands for them in the answer.
function keep(numbers, shape) {
  const file = `${count++}.f32`;
  const values = Float32Array.from(numbers);
  fs.writeFileSync(path.join(out, file), Buffer.from(values.buffer));
  return { file, shape };
}

// Keeps the logits of every step, and lets a generation choose given tokens.
class Recorder extends LogitsProcessor {
  constructor(forced) {
    super();
    this.forced = forced;
    this.steps = []; // of (B, V)
    this.tokens = []; // of B
  }

  _call(inputIds, logits) {
    const [rows, width] = logits.dims;
    const step = this.steps.length;
    this.steps.push(Float32Array.from(logits.data));
    const chosen = [];
    for (let row = 0; row < rows; ++row) {
      const own = logits.data.subarray(row * width, (row + 1) * width);
      const likeliest = own.reduce((best, value, token) => (value > own[best] ? token : best), 0);
      const token = this.forced ? this.forced[step] : likeliest;
      own.fill(-Infinity);
      own[token] = 0;
      chosen.push(token);
    }
    this.tokens.push(chosen);
    return logits;
  }

  keepSteps(rows) {
    const width = this.steps[0].length / rows;
    const all = new Float32Array(this.steps.length * rows * width);
    this.steps.forEach((step, place) => all.set(step, place * rows * width));
    return keep(all, [this.steps.length, rows, width]);
  }
}

// Pad rows with `side` "left" or "right"; return ids and mask.
function pad(rows, side, values = rows) {
  const width = Math.max(...rows.map((row) => row.length));
  const ids = new BigInt64Array(rows.length * width);
  const mask = new BigInt64Array(rows.length * width);
  rows.forEach((row, place) => {
    const begin = place * width + (side === "left" ? width - row.length : 0);
    row.forEach((_, i) => {
      ids[begin + i] = BigInt(values[place][i]);
      mask[begin + i] = 1n;
    });
  });
  const shape = [rows.length, width];
  return { input_ids: new Tensor("int64", ids, shape), attention_mask: new Tensor("int64", mask, shape) };
}

async function continueIds(rows, steps, forced) {
  const recorder = new Recorder(forced);
  const processors = new LogitsProcessorList();
  processors.push(recorder);
  Object.assign(model.generation_config, PLAIN);
  await model.generate({
    ...pad(rows, options.class.includes("Seq2Seq") ? "right" : "left"),
    max_new_tokens: steps,
    do_sample: false,
    num_beams: 1,
    logits_processor: processors,
  });
  return recorder;
}

const KINDS = {
  // Feed tokens one by one behind a prompt; answer the logits before each.
  async force({ prompt, continuation }) {
    const recorder = await continueIds([prompt], continuation.length, continuation);
    const { file, shape } = recorder.keepSteps(1);
    return { logits: { file, shape: [shape[0], shape[2]] } };
  },
  // Continue prompts as one padded batch; answer the logits and the likeliest token of each step.
  async greedy({ prompts, steps }) {
    const recorder = await continueIds(prompts, steps, null);
    const tokens = prompts.map((_, row) => recorder.tokens.map((chosen) => chosen[row]));
    return { logits: recorder.keepSteps(prompts.length), tokens };
  },
  // Continue texts as one batch by the package's settings, greedily; of a translator with its target's tokenizer.
  async generate({ texts, max_new_tokens }) {
    Object.assign(model.generation_config, ownConfig);
    const translates = options.class.includes("Seq2Seq");
    const inputs = tokenizer(texts, { padding: true });
    const choices = max_new_tokens === null ? {} : { max_new_tokens };
    const found = await model.generate({ ...inputs, do_sample: false, num_beams: 1, ...choices });
    const begin = translates ? 1 : inputs.input_ids.dims[1]; // behind the start token, or the prompts
    const writer = translates ? await library.AutoTokenizer.from_pretrained(`${name}/target`) : tokenizer;
    const answers = found.tolist().map((row) => {
      const tokens = row.slice(begin).map(Number);
      const text = tokens.length ? writer.decode(tokens, { skip_special_tokens: true }) : "";
      return { tokens, text, pad: writer.pad_token_id ?? null };
    });
    return { answers };
  },
  // Answer what the pipeline of a head says of texts.
  async label({ texts, head }) {
    const [Pipeline, task, choices] = {
      sequence_classification: [library.TextClassificationPipeline, "text-classification", { top_k: null }],
      token_classification: [library.TokenClassificationPipeline, "token-classification", { ignore_labels: [] }],
      masked_lm: [library.FillMaskPipeline, "fill-mask", {}],
    }[head];
    const ask = new Pipeline({ task, model, tokenizer });
    const given = await ask(texts, choices);
    const describe = ({ token, entity, label, index, score }) => ({
      place: index ?? 0,
      label: token ?? entity ?? label,
      score,
    });
    return { labels: given.map((own) => own.map(describe)) };
  },
  // Answer the outputs of sequences as one batch.
  async encode({ rows, segments, outputs }) {
    const feeds = pad(rows, "right");
    feeds.token_type_ids = pad(rows, "right", segments).input_ids;
    const given = await model(feeds);
    const found = outputs.map((output) => [output, keep(given[output].data, given[output].dims)]);
    return { outputs: Object.fromEntries(found) };
  },
  // Answer the ids of texts, without what is put around them.
  async read({ texts }) {
    return { ids: texts.map((text) => tokenizer.encode(text, { add_special_tokens: false })) };
  },
  // Answer the texts of ids, without special tokens; of a translation's target by its own tokenizer.
  async write({ ids, target }) {
    const writer = target ? await library.AutoTokenizer.from_pretrained(`${name}/target`) : tokenizer;
    return { texts: ids.map((row) => (row.length ? writer.decode(row, { skip_special_tokens: true }) : "")) };
  },
  // Answer all ids of texts and pairs.
  async inputs({ texts }) {
    const ids = texts.map(({ text, pair }) => tokenizer.encode(text, { text_pair: pair }));
    return { ids };
  },
  // Answer a conversation as the chat template renders it.
  async chat({ messages }) {
    return { text: tokenizer.apply_chat_template(messages, { tokenize: false, add_generation_prompt: true }) };
  },
};

const answers = [];
for (const question of questions) answers.push(await KINDS[question.kind](question));
fs.writeFileSync(path.join(out, "answers.json"), JSON.stringify({ version: env.version, answers }));
