// Runs before the page is drawn, so that it is never drawn in the wrong colours.
document.documentElement.dataset.theme = localStorage.getItem("planforge.theme") ?? "";
