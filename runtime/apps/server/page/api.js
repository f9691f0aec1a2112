// Asks the server, and says in one line what went wrong.

const KEY = "planforge.key";
const NO_ANSWER = "The server does not answer. Look whether it still runs, then try again.";
const CUT = "The connection ended before the answer did. Try again.";
const UNREADABLE = "The server's answer is not what this page expects. Are the page and the server of one version?";

/** What the server, or the way to it, made of a request; the message is what to show. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Keep a key until the browser's tab is closed. */
export function keepKey(key) {
  if (!/^[\x21-\x7e]+$/.test(key)) {
    throw new ServerError("A key has letters, digits and signs, without spaces.");
  }
  sessionStorage.setItem(KEY, key);
}

/** Return whether a key was given. */
export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** Return the names of the models that are still being loaded. */
export async function listLoading() {
  const response = await fetch("ready", { cache: "no-store" }).catch(() => null);
  const told = await response?.json().catch(() => null);
  const models = Object.entries(told?.models ?? {});
  return models.filter(([, state]) => state === "loading").map(([name]) => name);
}

/** Return the models that the server has. */
export async function listModels() {
  const models = (await read(await request("v1/models"))).data;
  if (!Array.isArray(models)) {
    throw new ServerError(UNREADABLE);
  }
  return models;
}

/** Return the server's answer to a JSON body. */
export async function ask(path, body, signal) {
  return read(await request(path, body, signal));
}

/** Yield each event of a streamed answer. */
export async function* stream(path, body, signal, options = { stream_options: { include_usage: true } }) {
  const whole = { ...body, stream: true, ...options };
  const response = await request(path, whole, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw signal.aborted ? error : new ServerError(CUT);
      });
      const lines = (rest + (value ?? "")).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.trim() === "data: [DONE]") {
          return;
        }
        if (line.startsWith("data:")) {
          yield readEvent(line.slice(5));
        }
      }
      if (done) {
        throw new ServerError(CUT);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Return what to show of an error. */
export function explain(error) {
  if (error instanceof ServerError) {
    return error.message;
  }
  console.warn(error);
  return UNREADABLE;
}

function readEvent(text) {
  let event;
  try {
    event = JSON.parse(text);
  } catch {
    throw new ServerError(UNREADABLE);
  }
  if (event?.error) {
    throw new ServerError(advise(event.error, 500), 500);
  }
  return event;
}

async function read(response) {
  try {
    return await response.json();
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(UNREADABLE);
  }
}

async function request(path, body, signal) {
  const options = { signal, cache: "no-store", credentials: "omit", redirect: "error", headers: {} };
  const key = sessionStorage.getItem(KEY);
  if (key) {
    options.headers.Authorization = `Bearer ${key}`;
  }
  if (body) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw signal?.aborted ? error : new ServerError(NO_ANSWER);
  }
  if (response.ok) {
    return response;
  }
  const told = await response.json().catch(() => null);
  if (response.status === 401) {
    document.dispatchEvent(new CustomEvent("key-wanted"));
  }
  throw new ServerError(advise(told?.error, response.status, response.headers.get("Retry-After")), response.status);
}

function advise(error, status, wait) {
  const said = toOneLine(error?.message ?? "");
  const seconds = /^\d+$/.test(wait ?? "") ? `${wait} s` : "a moment";
  if (status === 401) {
    return "The server wants a key, or another one: give it at the top of the page, then try again.";
  }
  if (status === 404) {
    return `${said || "The server does not know this"}. Reload the page to see which models it has now.`;
  }
  if (status === 413) {
    return `${said || "That is more than the server takes at once"}. Try a shorter text.`;
  }
  if (status === 429 || status === 503) {
    return `The server is busy${said ? `: ${said}` : ""}. Wait ${seconds}, then try again.`;
  }
  if (status >= 500) {
    return `The server made a mistake${said ? `: ${said}` : ""}. Try again; its log says more.`;
  }
  const name = toOneLine(error?.param ?? "");
  const where = name && !said.includes(name) ? ` (${name})` : "";
  return said ? `${said}${where}.` : `The server refused this (${status}). Change it, then try again.`;
}

/** Return a text without line breaks, and without the full stop at its end. */
function toOneLine(text) {
  const line = String(text).replace(/\s+/g, " ").replace(/[\s.]+$/, "").trim();
  return line.length > 300 ? `${line.slice(0, 299)}…` : line;
}
