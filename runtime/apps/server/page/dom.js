// Elements and words of the page. Text goes in as text: nothing here, or anywhere in the page, is parsed as HTML.

import { make } from "./explain/dom.js";

export { figure as round, make, makeId, makeSvg, percent } from "./explain/dom.js";

/**
 * Return a text as it is shown: control characters as pictures of themselves, so that none stays unseen.
 * Marks of direction do what they are for: texts have them, where an explanation's tokens spell them.
 */
export function show(text) {
  return String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/g, (character) => {
    const code = character.charCodeAt(0);
    return String.fromCharCode(code === 0x7f ? 0x2421 : 0x2400 + code);
  });
}

/** Return a text that came from elsewhere, in an element where its direction ends. */
export function quote(text, className = "") {
  return make("bdi", { className }, show(text));
}

/** Return a text cut to so many characters. */
export function shorten(text, length) {
  const characters = Array.from(text);
  return characters.length > length ? `${characters.slice(0, length - 1).join("")}…` : text;
}

/** Have a screen reader say a text. */
export function announce(text) {
  document.getElementById("status").textContent = show(text);
}

/** Call `send` at Enter or, where Enter makes a new line, at Ctrl+Enter. */
export function sendAtEnter(field, send, { newLines = false } = {}) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || event.shiftKey) {
      return;
    }
    if (!newLines || event.ctrlKey || event.metaKey) {
      event.preventDefault();
      send();
    }
  });
}

/** Let a text area be as high as its text, within what the style allows. */
export function growWithText(area) {
  const grow = () => {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
  };
  area.addEventListener("input", grow);
  return grow;
}
