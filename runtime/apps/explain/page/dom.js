// Makes elements and words. Text goes in as text: nothing here is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
let made = 0;

/** Return an element; names with a dash, and what is no property of it, are set as attributes. */
function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element) {
      element[key] = value;
    } else {
      element.setAttribute(key, value);
    }
  }
  element.append(...children);
  return element;
}

/** Return an SVG element. */
function makeSvg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** Return an id that no other element has. */
function makeId(name) {
  made += 1;
  return `${name}-${made}`;
}

/** Return a text in which nothing stays unseen: control characters as pictures, marks of direction by number. */
function show(text) {
  return String(text)
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (character) => {
      const code = character.charCodeAt(0);
      return String.fromCharCode(code === 0x7f ? 0x2421 : 0x2400 + code);
    })
    .replace(/[\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (character) => {
      return `[U+${character.charCodeAt(0).toString(16).toUpperCase()}]`;
    });
}

/** Return a token as one line: spaces and line breaks are seen. */
function spell(text) {
  return show(text).replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(nothing)";
}

/** Return a token as one line in an element where its direction ends; the marks of spaces are pale. */
function quote(text) {
  const element = make("bdi", { className: "quote" });
  for (const part of spell(text).split(/([␣↵⇥]+)/)) {
    if (part !== "") {
      element.append(/^[␣↵⇥]/.test(part) ? make("span", { className: "soft" }, part) : part);
    }
  }
  return element;
}

/** Return a share in words; of a signed one the sign too. */
function percent(share, { signed = false } = {}) {
  const size = Math.abs(share);
  const tiny = size > 0 && size < 0.0005;
  const figure = tiny ? "<0.1" : (100 * size).toFixed(size > 0.0995 ? 0 : 1);
  const sign = size < 0.00005 ? "" : share < 0 ? "\u2212" : signed ? "+" : "";
  return `${sign}${figure} %`;
}

/** Return a number in words. */
function figure(value, digits = 2) {
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `\u2212${text}` : text;
}

/** Return a list of bars: {name: element, size from 0 to 1, figure: text, className} each. */
function drawBars(rows) {
  const list = make("ol", { className: "shares" });
  for (const { name, size, figure: words, className = "" } of rows) {
    const bar = make("span", { className: "share", "aria-hidden": "true" });
    bar.style.setProperty("--share", Math.min(1, Math.max(0, size || 0)));
    list.append(make("li", { className }, name, bar, make("span", { className: "figure" }, words)));
  }
  return list;
}

/** Return a select with its label: [value, words] for each option. */
function makeSelect(words, options, onchange) {
  const select = make("select", { id: makeId("explain-select"), onchange });
  for (const [value, text] of options) {
    select.append(make("option", { value }, show(text)));
  }
  const field = make("p", { className: "choice" }, make("label", { htmlFor: select.id }, words), select);
  return { field, select };
}

/** Return the indexes of the largest numbers by size, the largest first; of null and 0 none. */
function findStrongest(values, count) {
  const places = [];
  values.forEach((value, place) => {
    if (value) {
      places.push(place);
    }
  });
  return places.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, count);
}

export { make, makeSvg, makeId, show, spell, quote, percent, figure, drawBars, makeSelect, findStrongest };
