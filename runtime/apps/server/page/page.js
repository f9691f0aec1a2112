// Starts the page: which models there are, a tab for each thing they can do, the key, the colours.

import { explain, hasKey, keepKey, listLoading, listModels } from "./api.js";
import { Chat } from "./chat.js";
import { Complete } from "./complete.js";
import { make, show } from "./dom.js";
import { offerColors } from "./explain/colors.js";
import { Form } from "./form.js";
import { TASKS } from "./tasks.js";

const KINDS = [
  { capability: "chat", tab: "Chat", makePanel: (models) => new Chat(models) },
  { capability: "completions", tab: "Continue", makePanel: (models) => new Complete(models) },
  ...TASKS.map((task) => ({ ...task, makePanel: (models) => new Form(task, models) })),
];

const AGAIN = 500; // milliseconds between two questions whether the models are loaded
const byId = (id) => document.getElementById(id);
const shown = []; // {id, tab, section, panel} each

function select(place, { focus = false } = {}) {
  shown.forEach(({ tab, section }, other) => {
    tab.setAttribute("aria-selected", String(other === place));
    tab.tabIndex = other === place ? 0 : -1;
    section.hidden = other !== place;
  });
  if (focus) {
    shown[place].tab.focus();
  }
  history.replaceState(null, "", `#${shown[place].id}`);
}

function addTab({ capability, tab: name, makePanel }, models) {
  const place = shown.length;
  const panel = makePanel(models);
  const id = capability.replace("/", "-");
  const tab = make("button", { type: "button", id: `tab-${id}`, role: "tab", onclick: () => select(place) }, name);
  tab.setAttribute("aria-controls", `panel-${id}`);
  const section = make("section", { id: `panel-${id}`, role: "tabpanel" }, panel.element);
  section.setAttribute("aria-labelledby", tab.id);
  byId("tabs").append(tab);
  byId("main").append(section);
  shown.push({ id, tab, section, panel });
}

function moveAmongTabs(event) {
  const current = shown.findIndex(({ tab }) => tab === document.activeElement);
  const last = shown.length - 1;
  const targets = {
    ArrowRight: current === last ? 0 : current + 1,
    ArrowDown: current === last ? 0 : current + 1,
    ArrowLeft: current === 0 ? last : current - 1,
    ArrowUp: current === 0 ? last : current - 1,
    Home: 0,
    End: last,
  };
  if (current >= 0 && event.key in targets) {
    event.preventDefault();
    select(targets[event.key], { focus: true });
  }
}

/** Wait while models are being loaded, and say so. */
async function waitForModels() {
  for (;;) {
    const names = await listLoading();
    if (names.length === 0) {
      return;
    }
    byId("loading").textContent = show(`The server is loading ${names.join(", ")} …`);
    await new Promise((resolve) => setTimeout(resolve, AGAIN));
  }
}

/** Ask for the models and draw their tabs, or say what is wrong. */
async function start() {
  byId("trouble").hidden = true;
  byId("loading").hidden = false;
  let trouble = "";
  try {
    await waitForModels();
    const models = await listModels();
    for (const kind of KINDS) {
      const names = [kind.capability, kind.also];
      const able = models.filter((model) => model.capabilities.some((one) => names.includes(one)));
      if (able.length > 0) {
        addTab(kind, able);
      }
    }
    if (shown.length === 0) {
      trouble = "The server has no model that this page can use. Start it with: planforge serve BUNDLE";
    } else {
      const wanted = shown.findIndex(({ id }) => location.hash === `#${id}`);
      select(Math.max(0, wanted));
    }
  } catch (error) {
    const isFirst = error.status === 401 && !hasKey(); // the form that asks for a key says enough
    trouble = isFirst ? "" : explain(error);
  }
  byId("loading").hidden = true;
  byId("trouble").hidden = trouble === "";
  byId("trouble-text").textContent = trouble;
}

function askForKey() {
  byId("key").hidden = false;
  byId("key-field").focus();
}

function takeKey(event) {
  event.preventDefault();
  try {
    keepKey(byId("key-field").value);
  } catch (error) {
    byId("key-error").textContent = explain(error);
    return;
  }
  byId("key-error").textContent = "";
  byId("key").hidden = true;
  if (shown.length === 0) {
    start();
  }
}

offerColors(byId("theme"));
byId("tabs").addEventListener("keydown", moveAmongTabs);
byId("key").addEventListener("submit", takeKey);
byId("again").addEventListener("click", start);
document.addEventListener("key-wanted", askForKey);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    shown.find(({ section }) => !section.hidden)?.panel.cancel();
  }
});
start();
