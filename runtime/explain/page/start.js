// Starts the page of its own: the explanation that lies in it, and the colours.

import { mountExplanation } from "./explain.js";

function chooseColors(event) {
  const theme = event.target.value;
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("planforge.theme", theme);
  } catch {
    // a browser that keeps nothing for files: the choice lasts as long as the page
  }
}

const themes = document.getElementById("theme");
themes.value = document.documentElement.dataset.theme;
themes.addEventListener("change", chooseColors);
const given = document.getElementById("data").textContent;
mountExplanation(document.getElementById("explanation"), JSON.parse(given));
