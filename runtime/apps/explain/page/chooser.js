// One of several elements at hand: the pointer shows it, a click holds it, arrow keys go on, Escape lets go.

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Elements of which one is at hand; only that one is reached by Tab. */
class Chooser {
  /** `onChange(place, {spoken})`: `spoken` where a screen reader should hear of it. */
  constructor(root, onChange) {
    this.elements = [];
    this.places = new Map();
    this.current = -1;
    this.held = false;
    this.onChange = onChange;
    root.addEventListener("pointerover", (event) => this.hover(event));
    root.addEventListener("click", (event) => this.click(event));
    root.addEventListener("keydown", (event) => this.press(event));
  }

  /** Choose among other elements. */
  setElements(elements, current) {
    for (const element of this.elements) {
      ["role", "tabindex", "aria-pressed"].forEach((name) => element.removeAttribute(name));
      element.classList.remove("stop", "current", "held");
    }
    this.elements = elements;
    this.places = new Map(elements.map((element, place) => [element, place]));
    for (const element of elements) {
      element.classList.add("stop");
      element.setAttribute("role", "button");
      element.setAttribute("tabindex", "-1");
      element.setAttribute("aria-pressed", "false");
    }
    this.held = false;
    this.current = -1;
    if (elements.length > 0) {
      this.choose(Math.min(Math.max(0, current), elements.length - 1));
    }
  }

  find(event) {
    const element = event.target.closest(".stop");
    return this.places.get(element) ?? -1;
  }

  /** Have an element at hand, and mark it. */
  choose(place, { hold = this.held, spoken = false } = {}) {
    const before = this.elements[this.current];
    const element = this.elements[place];
    this.held = hold;
    if (before) {
      before.classList.remove("current", "held");
      before.setAttribute("tabindex", "-1");
      before.setAttribute("aria-pressed", "false");
    }
    element.classList.add("current");
    element.classList.toggle("held", hold);
    element.setAttribute("tabindex", "0");
    element.setAttribute("aria-pressed", String(hold));
    this.current = place;
    this.onChange(place, { spoken });
  }

  hover(event) {
    const place = this.find(event);
    if (place >= 0 && !this.held && place !== this.current) {
      this.choose(place);
    }
  }

  click(event) {
    const place = this.find(event);
    if (place >= 0) {
      this.choose(place, { hold: !(this.held && place === this.current), spoken: true });
    }
  }

  press(event) {
    if (event.key === "Escape" && this.held) {
      this.choose(this.current, { hold: false, spoken: true });
      return;
    }
    const place = this.find(event);
    if (place < 0 || event.ctrlKey || event.altKey || event.metaKey) {
      return;
    }
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.click(event);
      return;
    }
    const last = this.elements.length - 1;
    const ends = { Home: 0, End: last };
    const next = ends[event.key] ?? (event.key in STEPS ? place + STEPS[event.key] : -1);
    if (event.key in ends || event.key in STEPS) {
      event.preventDefault();
    }
    if (next >= 0 && next <= last) {
      this.choose(next, { spoken: true });
      this.elements[next].focus();
    }
  }
}

export { Chooser };
