"""Measures how soon an explanation appears: python -m benchmarks.explain_page [--tokens 200] [--rounds 5].

Opens a page of made-up numbers in a Chromium, with 12 layers of 12 heads, and measures milliseconds: until
the page is drawn and its first tints with it, and until each view is drawn after a click on its tab. They go
to results/explain_page.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from planforge.runtime.apps.explain.page import make_page
from tests.helpers.browser import Browser, Page, running_browser
from tests.helpers.made_explanation import ANSWER, PROMPT, make_generation, split

from .common import write_result

DRAWN = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
TINTED = (
    "[...document.querySelectorAll('.token')].some((token) => token.style.getPropertyValue('--share') > 0)"
)
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.explain_page", description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=200, help="of the prompt and the answer, half of them each"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    half = arguments.tokens // 2
    words = split(PROMPT + ANSWER) * (1 + half // 20)
    text = make_page(make_generation(words[:half], words[half : 2 * half], layers=12, heads=12))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(text, encoding="utf-8")
        with running_browser(Path(folder) / "profile") as browser:
            rounds = [measure(browser, file.as_uri()) for _ in range(arguments.rounds)]
    medians = {name: round(statistics.median(one[name] for one in rounds)) for name in rounds[0]}
    print(f"{2 * half} tokens, {half} of them explained; a file of {len(text.encode()) / 1e6:.1f} MB")
    for name, milliseconds in medians.items():
        print(f"{name:32}{milliseconds:6} ms")
    sizes = {"tokens": 2 * half, "explained": half, "layers": 12, "heads": 12, "bytes": len(text.encode())}
    write_result("explain_page", {**sizes, "milliseconds": medians})


def measure(browser: Browser, url: str) -> dict[str, float]:
    """Return milliseconds by the event that was waited for."""
    page = browser.open(url)
    assert page.evaluate(TINTED)
    timing = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    times = {
        "parsed, tints set": float(page.evaluate(timing)),
        "first paint": float(page.wait(FIRST_PAINT)),
        "another token by an arrow key": press_arrow(page),
    }
    for view in ("lens", "neurons", "attention"):
        done = "document.querySelector('.beside h4')" if view == "attention" else "true"
        click = f"document.querySelector('.tabs [data-view={view}]').click()"
        script = (
            f"(async () => {{ const start = performance.now(); {click};"
            f"let now; do {{ now = await {DRAWN}; }} while (!{done}); return now - start; }})()"
        )
        times[f"view: {view}"] = float(page.evaluate(script))
    page.close()
    return times


def press_arrow(page: Page) -> float:
    """Return how long it takes to draw the next token of the answer."""
    event = "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})"
    script = (
        "(async () => { const start = performance.now();"
        f"document.querySelector('.current').dispatchEvent({event}); return await {DRAWN} - start; }})()"
    )
    return float(page.evaluate(script))


if __name__ == "__main__":
    main()
