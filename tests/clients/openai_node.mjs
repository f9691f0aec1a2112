// OpenAI's client for Node against a running server: node openai_node.mjs URL KEY, in a folder that has the package.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.cwd(), "package.json"));
const { default: OpenAI } = require("openai");
const { version } = require("./node_modules/openai/package.json");
const [url, apiKey] = process.argv.slice(2);

let refusals = 0; // answers of 429, which the client asks again after

async function countRefusals(...request) {
  const response = await fetch(...request);
  if (response.status === 429) {
    assert.equal(response.headers.get("retry-after"), "1");
    refusals += 1;
  }
  return response;
}

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, fetch: countRefusals, maxRetries: 0 });
const chat = {
  model: "llama",
  messages: [{ role: "user", content: "And God said, Let there be light" }],
  temperature: 0,
  max_completion_tokens: 12,
};
const completion = { model: "gpt", prompt: "And it came to pass", temperature: 0, max_tokens: 12 };

async function listModels() {
  const names = [];
  for await (const model of client.models.list()) {
    names.push(model.id);
  }
  assert.deepEqual(names.sort(), ["bert", "gpt", "llama"]);
  assert.equal((await client.models.retrieve("gpt")).owned_by, "planforge");
}

async function streamChat() {
  const whole = await client.chat.completions.create(chat);
  assert.equal(whole.choices[0].finish_reason, "length");
  assert.equal(whole.usage.completion_tokens, 12);
  const stream = await client.chat.completions.create({
    ...chat,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = [];
  for await (const chunk of stream) {
    chunks.push(chunk);
  }
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, 12);
  const helper = client.chat.completions.stream(chat);
  assert.equal(await helper.finalContent(), text);
}

async function drawSeveral() {
  const drawn = { ...chat, temperature: 1, seed: 3, n: 2, logprobs: true, top_logprobs: 2 };
  const [one, other] = (await client.chat.completions.create(drawn)).choices;
  assert.notEqual(one.message.content, other.message.content);
  assert.equal(one.logprobs.content.length, 12);
  assert.equal(one.logprobs.content[0].top_logprobs.length, 2);
}

async function complete() {
  const whole = await client.completions.create(completion);
  let text = "";
  for await (const chunk of await client.completions.create({ ...completion, stream: true })) {
    text += chunk.choices[0].text;
  }
  assert.equal(text, whole.choices[0].text);
  assert.ok(text.length > 12);
}

async function leaveStream() {
  const stream = await client.completions.create({ ...completion, max_tokens: 200, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.choices.length);
    break; // aborts the request
  }
  assert.ok(stream.controller.signal.aborted);
}

async function embed() {
  const input = ["Birds can fly.", "The baker sells bread."];
  const packed = await client.embeddings.create({ model: "bert", input }); // as base64, which it unpacks
  const plain = await client.embeddings.create({ model: "bert", input, encoding_format: "float" });
  assert.equal(packed.data[0].embedding.length, 384);
  assert.deepEqual(packed.data.map(roundVector), plain.data.map(roundVector));
  const short = await client.embeddings.create({ model: "bert", input, dimensions: 64 });
  assert.equal(short.data[1].embedding.length, 64);
}

function roundVector(entry) {
  return Array.from(entry.embedding, Math.fround);
}

async function parse() {
  const schema = {
    type: "object",
    properties: {
      name: { type: "string", enum: ["Abraham", "Isaac", "Jacob"] },
      age: { type: "integer", minimum: 0, maximum: 150 },
    },
    required: ["name", "age"],
    additionalProperties: false,
  };
  for (const seed of [0, 1, 2]) {
    const answer = await client.chat.completions.parse({
      model: "llama",
      messages: [{ role: "user", content: "Who was Abraham?" }],
      response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
      temperature: 1,
      seed,
      max_completion_tokens: 200,
    });
    const person = answer.choices[0].message.parsed;
    assert.deepEqual(Object.keys(person).sort(), ["age", "name"]);
    assert.ok(schema.properties.name.enum.includes(person.name));
    assert.ok(Number.isInteger(person.age) && person.age >= 0 && person.age <= 150);
  }
}

async function expectErrors() {
  const cases = [
    [{ ...completion, model: "gpt-4" }, OpenAI.NotFoundError, "model_not_found", "model"],
    [{ ...completion, presence_penalty: 3 }, OpenAI.BadRequestError, "invalid_value", "presence_penalty"],
    [{ ...completion, temperature: -1 }, OpenAI.BadRequestError, "invalid_value", "temperature"],
    [{ ...completion, prompt: "word ".repeat(1000) }, OpenAI.BadRequestError, "context_length_exceeded", "prompt"],
  ];
  for (const [body, kind, code, param] of cases) {
    await assert.rejects(client.completions.create(body), (error) => {
      assert.ok(error instanceof kind, String(error));
      assert.deepEqual([error.code, error.param], [code, param]);
      return true;
    });
  }
  const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(stranger.completions.create(completion), OpenAI.AuthenticationError);
}

async function retry() {
  refusals = 0;
  const patient = client.withOptions({ maxRetries: 20 });
  const expected = (await client.completions.create(completion)).choices[0].text;
  const body = { ...completion, max_tokens: 200, ignore_eos: true };
  const answers = await Promise.all(Array.from({ length: 8 }, () => patient.completions.create(body)));
  for (const answer of answers) {
    assert.equal(answer.usage.completion_tokens, 200);
    assert.ok(answer.choices[0].text.startsWith(expected));
  }
  assert.ok(refusals > 0, "no request was refused, so none was asked again");
}

console.log(`openai ${version} on Node ${process.version}`);
for (const check of [
  listModels, streamChat, drawSeveral, complete, leaveStream, embed, parse, expectErrors, retry,
]) {
  await check();
  console.log(`  ${check.name}: passed`);
}
console.log(`  ${refusals} requests were refused by the full queue and answered when asked again`);
