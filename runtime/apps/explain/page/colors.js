// The reader's choice of colours, kept for the next visit; theme.js sets it before the page is drawn.

/** Let a select choose the page's colours. */
function offerColors(select) {
  const root = document.documentElement;
  select.value = root.dataset.theme;
  select.addEventListener("change", () => {
    root.dataset.theme = select.value;
    try {
      localStorage.setItem("planforge.theme", select.value);
    } catch {
      // a browser that keeps nothing for files: the choice lasts as long as the page
    }
  });
}

export { offerColors };
