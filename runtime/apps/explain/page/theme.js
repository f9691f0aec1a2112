// Runs before the page is drawn, so that it is never drawn in the wrong colours.
try {
  document.documentElement.dataset.theme = localStorage.getItem("planforge.theme") ?? "";
} catch {
  document.documentElement.dataset.theme = ""; // a browser that keeps nothing for files
}
