// Starts the page of its own: the explanation that lies in it, and the colours.

import { offerColors } from "./colors.js";
import { mountExplanation } from "./explain.js";

offerColors(document.getElementById("theme"));
const given = document.getElementById("data").textContent;
mountExplanation(document.getElementById("explanation"), JSON.parse(given));
