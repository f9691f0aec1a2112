// The task that makes pictures: it shows how far they are, and what they look like by then.

import { stream } from "./api.js";
import { announce, make } from "./dom.js";

const PREVIEWS = 4; // pictures on the way

export const pictures = {
  capability: "images/generations",
  tab: "Pictures",
  name: "Make a picture",
  lead: "Say what it shall show. You may give a picture to begin with.",
  button: "Make it",
  fields: [
    { name: "prompt", label: "Text", kind: "text", value: "a red three" },
    { name: "negative_prompt", label: "What it shall not show", kind: "line", optional: true },
    {
      name: "steps",
      label: "Steps",
      kind: "number",
      min: 1,
      max: 1000,
      step: 1,
      placeholder: "the model's own",
      hint: "More take longer and give finer pictures.",
    },
    {
      name: "guidance_scale",
      label: "How much the text counts",
      kind: "number",
      min: 0,
      max: 100,
      step: "any",
      placeholder: "the model's own",
    },
    {
      name: "size",
      label: "Width and height",
      kind: "line",
      optional: true,
      placeholder: "such as 256x256; the model's own",
    },
    { name: "n", label: "How many pictures", kind: "number", min: 1, max: 10, step: 1, placeholder: "1" },
    {
      name: "seed",
      label: "Seed",
      kind: "number",
      min: 0,
      max: Number.MAX_SAFE_INTEGER,
      step: 1,
      placeholder: "another each time",
      hint: "The same number gives the same picture again.",
    },
    { name: "image", label: "Picture to begin with", kind: "file", accept: "image/png,image/jpeg,image/webp" },
    {
      name: "strength",
      label: "How much of it to make anew",
      kind: "number",
      min: 0.01,
      max: 1,
      step: "any",
      placeholder: "0.8",
    },
  ],
  check: ({ image, strength }) =>
    strength !== undefined && !image ? "Choose a picture to begin with, or leave out how much of it to make anew." : "",
  write: async ({ image, strength, size, ...others }, { image_size: usual }) => {
    const start = image ? { image: await encode(image), strength } : {};
    const chosen = size ?? (image ? await chooseSize(image, usual) : undefined);
    return { ...others, ...start, size: chosen, partial_images: PREVIEWS };
  },
  path: ({ image }) => (image ? "v1/images/edits" : "v1/images/generations"),
  ask: follow,
  draw: ({ made }, { prompt }) => {
    const [event] = made;
    const cut = event.dropped > 0 ? `; the text's last ${event.dropped} tokens were left out` : "";
    return {
      summary: `${event.size} pixels, seed ${event.seed}${cut}`,
      parts: made.map((one) => drawPicture(one, prompt)),
    };
  },
};

/** Return the pictures that a stream ends with; show each step, and the pictures on the way. */
async function follow(path, body, signal, showProgress) {
  const made = [];
  const bar = make("progress");
  const words = make("p", { className: "soft" }, "Waiting for its turn …");
  const picture = make("img", { className: "picture", alt: "", hidden: true });
  showProgress([words, bar, picture]);
  for await (const event of stream(path, body, signal, {})) {
    const [, word] = event.type.split(".");
    if (word === "step") {
      const left = Math.ceil(event.seconds_left);
      Object.assign(bar, { max: event.steps, value: event.step });
      words.textContent = `Step ${event.step} of ${event.steps}${left > 0 ? `, about ${left} s left` : ""}`;
      if (event.step === 1) {
        announce(words.textContent);
      }
    } else if (word === "partial_image" && event.index === 0) {
      Object.assign(picture, { src: makeSource(event), hidden: false, alt: "The picture as far as it is" });
    } else if (word === "completed") {
      made.push(event);
    }
  }
  return { made };
}

function drawPicture(event, prompt) {
  const src = makeSource(event);
  const name = `picture-${event.seed}.${event.output_format}`;
  return make(
    "figure",
    {},
    make("img", { className: "picture", src, alt: prompt }),
    make("figcaption", {}, make("a", { href: src, download: name }, "Save the picture")),
  );
}

function makeSource({ b64_json: data, output_format: format }) {
  return `data:image/${format};base64,${data}`;
}

/** Return the size of a picture, made as small as those that the model was made for. */
async function chooseSize(file, usual) {
  const picture = await createImageBitmap(file);
  const most = Math.max(...usual.split("x").map(Number));
  const scale = Math.min(1, most / Math.max(picture.width, picture.height));
  const [width, height] = [picture.width, picture.height].map((side) => Math.max(8, Math.round((side * scale) / 8) * 8));
  return `${width}x${height}`;
}

/** Return a file's bytes in base64. */
async function encode(file) {
  const reader = new FileReader();
  const read = new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
  });
  reader.readAsDataURL(file);
  return (await read).split(",")[1];
}
