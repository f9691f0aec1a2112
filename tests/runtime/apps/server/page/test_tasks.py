"""The tasks that answer at once: what they send and draw, at any width, in either colours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .....helpers.page import PANEL, TABS, Open, ask, do_task, wait_for_text
from .....helpers.page_answers import VECTORS, make_answers
from .....helpers.page_server import END, StandIn

ASKED: dict[str, dict[str, Any]] = {
    "embeddings": {"input": ["a b", "c", "d", "e", "f"]},
    "rerank": {"query": "who?", "documents": ["first text", "second text"], "top_n": 2},
    "classify": {"input": "Good."},
    "tags": {"input": "😀bcde ghij."},
    "answers": {"question": "where?", "context": "The 😀bc tail"},
    "fill-mask": {"input": "x [MASK] y [MASK]"},
    "translations": {"input": "3 May", "num_beams": 4, "alignment": True},
    "images-generations": {"prompt": "a red three", "partial_images": 4, "stream": True},
    "explanations": {
        "input": "In the beginning",
        "answer": " God",
        "methods": ["gradient", "lens", "attention"],
        "watch": [" sea", " light"],
    },
}
SHOWN = {
    "embeddings": ["Texts 1 and 2 are the most alike (0.97)", "a vector of 3 numbers; this plane keeps"],
    "rerank": ["second text\n0.875", "first text\n0.250"],
    "classify": ["label: 75 %", "label\n75 %", "other\n25 %"],
    "tags": ["Found 2 stretches", "text (label)\n98 %"],
    "answers": ["text\n90 %"],
    "fill-mask": ["Gap 2", "text\n75 %", "dawn\n13 %"],
    "translations": ["What it looked at"],
    "images-generations": ["8x8 pixels, seed 7", "Save the picture"],
    "explanations": ["label and", "Why gpt2-demo answered so", "Prompt\nIn the text\nAnswer\nlabel and"],
}
MODELS = {
    "translations": "transformer-demo",
    "images-generations": "sd-demo",
    "explanations": "gpt2-demo",
}


@pytest.mark.parametrize("tab", ASKED)
def test_a_task_sends_and_draws(tab: str, server: StandIn, open_page: Open, tmp_path: Path) -> None:
    server.answers = make_answers()
    page = open_page(tab)
    do_task(page, tab)
    model = MODELS.get(tab, "bert-demo")
    path = f"/v1/{tab.replace('images-', 'images/')}"
    assert server.bodies == [(path, {"model": model} | ASKED[tab])]
    text = re.sub(r"\s*\n\s*", "\n", page.text())
    for words in SHOWN[tab]:
        assert words in text, (words, text)
    marked = page.evaluate(f"[...{PANEL}.querySelectorAll('mark')].map((m) => m.firstChild.data)")
    assert marked == {"tags": ["😀bcde", "ghij"], "answers": ["😀bc "]}.get(tab, [])
    rects = page.evaluate(f"[...{PANEL}.querySelectorAll('rect title')].map((t) => t.textContent)")
    assert len(rects) == (6 if tab == "translations" else 0)
    if rects:
        assert rects[1] == "text looked at ␣: 0.20"
    page.screenshot(tmp_path / f"{tab}.png", whole=True)


def test_the_picture_is_that_of_the_principal_components(open_page: Open) -> None:
    page = open_page("embeddings")
    rng = np.random.default_rng(0)
    cases = [VECTORS, rng.standard_normal((12, 40)).tolist(), [[1.0, 2.0]] * 3, [[0.0, 1.0], [0.0, 3.0]]]
    for vectors in cases:
        script = f"import('./pca.js').then((m) => m.project({json.dumps(vectors)}))"
        placed = page.evaluate(script)
        centered = np.array(vectors) - np.mean(vectors, axis=0)
        left, values, _ = np.linalg.svd(centered, full_matrices=False)
        plane = left[:, :2] * values[:2]
        got = np.array(placed["points"])[:, : plane.shape[1]]
        np.testing.assert_allclose(got @ got.T, plane @ plane.T, atol=1e-4)
        total = float((values**2).sum())
        assert placed["kept"] == pytest.approx((values[:2] ** 2).sum() / total if total else 1.0, abs=1e-6)


@pytest.mark.parametrize(("width", "dark"), [(360, True), (800, False), (1200, True)])
def test_nothing_is_wider_than_the_window(
    width: int, dark: bool, server: StandIn, open_page: Open, tmp_path: Path
) -> None:
    server.answers = make_answers()
    page = open_page("chat", width, 740, dark)
    ask(page, "wide" * 100)
    server.stream("answer" * 100, END)
    wait_for_text(page, "Regenerate")
    for tab in TABS:
        page.click(f"#tab-{tab}")
        if tab in ASKED:
            do_task(page, tab)
        page.evaluate(f"{PANEL}.querySelectorAll('details').forEach((d) => {{ d.open = true; }})")
        assert page.evaluate("document.documentElement.scrollWidth") == width, tab
        page.screenshot(tmp_path / f"{tab}.png", whole=True)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    other = "light" if dark else "dark"
    page.evaluate(f"document.getElementById('theme').value = '{other}'")
    page.evaluate("document.getElementById('theme').dispatchEvent(new Event('change'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    page.go(f"{server.url}?again#chat")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
