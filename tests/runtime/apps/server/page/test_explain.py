"""The tab that explains: what it asks of each kind of model, and what it draws, with real models too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime import TextGenerator, load
from planforge.runtime.apps.explain import explain
from planforge.runtime.apps.server import ServerSettings

from .....helpers.browser import Browser, Page
from .....helpers.explanation_page import CURRENT, FIGURES, check_tints, open_view, shares_of
from .....helpers.made_explanation import make_classification, make_generation, make_translation
from .....helpers.page import PANEL, Open, error_line, fill, press_button
from .....helpers.page_server import StandIn
from .....helpers.serving import running_server

KEY = "a-key"
TAB = "explanations"
MODELS: list[dict[str, Any]] = [
    {"id": "writer", "capabilities": ["chat", "completions", TAB]},
    {"id": "translator", "capabilities": ["translations", TAB]},
    {"id": "classifier", "capabilities": ["embeddings", "classify", TAB], "labels": ["bad", "<b>good</b>"]},
    {"id": "ranker", "capabilities": ["classify", "rerank", TAB], "labels": ["score"]},
    {"id": "encoder", "capabilities": ["embeddings", TAB], "labels": []},
    {"id": "silent", "capabilities": ["completions"]},
]
USUAL = ["gradient", "lens", "attention"]
DATE = "the 3rd of May, 1998"
# What is asked of each where the reader writes nothing, and which fields there are.
ASKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "writer": (
        {"input": "In the beginning God created the", "answer": " heavens and the earth"},
        ["Text", "Answer", "Words to watch"],
    ),
    "translator": ({"input": DATE}, ["Text", "Translation", "Words to watch"]),
    "classifier": ({"input": "I would gladly see this film again."}, ["Text", "Second text", "Label"]),
    "ranker": ({"input": "Who sells food?", "pair": "The baker sells bread."}, ["Question", "Second text"]),
    "encoder": ({"input": "Birds can fly.", "pair": "Wings lift the plane."}, ["Text", "Second text"]),
}
MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "writer": make_generation,
    "translator": make_translation,
    "classifier": make_classification,
    "ranker": lambda: make_classification(("score",)),
}
RESULT = f"{PANEL}.querySelector('.result:not([hidden]) .explain')"
LABELS = f"[...{PANEL}.querySelectorAll('.field:not([hidden]) > label')].map((one) => one.textContent)"


def choose_model(page: Page, name: str) -> None:
    choice = f"{PANEL}.querySelector('.model select')"
    page.evaluate(f"{choice}.value = {name!r}")
    assert page.evaluate(f"{choice}.value") == name
    page.evaluate(f"{choice}.dispatchEvent(new Event('change'))")


def tick(page: Page, method: str) -> None:
    page.click(f"section:not([hidden]) .tick input[value={method}]")


def test_each_kind_of_model_has_fields_and_examples_of_its_own(server: StandIn, open_page: Open) -> None:
    server.models = MODELS
    page = open_page(TAB)
    choices = f"[...{PANEL}.querySelectorAll('.model option')].map((one) => one.value)"
    assert page.evaluate(choices) == list(ASKED)
    for name, (asked, labels) in ASKED.items():
        server.answers[f"/v1/{TAB}"] = MADE.get(name, MADE["ranker"])()
        choose_model(page, name)
        assert page.evaluate(LABELS) == labels
        server.bodies.clear()
        press_button(page, "Explain")
        page.wait(f"{RESULT} && {PANEL}.querySelector('.result:not(.old)')")
        assert server.bodies == [(f"/v1/{TAB}", {"model": name, "methods": USUAL, **asked})]


def test_what_the_reader_wrote_stays_when_the_model_changes(server: StandIn, open_page: Open) -> None:
    server.models = MODELS
    page = open_page(TAB)
    fill(page, "Text", "Let there be")
    choose_model(page, "translator")
    text = f"{PANEL}.querySelector('textarea').value"
    assert page.evaluate(text) == "Let there be"
    fill(page, "Text", DATE)  # the translator's own example
    choose_model(page, "writer")
    assert page.evaluate(text) == "In the beginning God created the"


def test_choices_are_sent(server: StandIn, open_page: Open) -> None:
    server.models = MODELS
    server.answers[f"/v1/{TAB}"] = make_generation()
    page = open_page(TAB)
    fill(page, "Answer", "")
    fill(page, "Words to watch", " sea\n\n light")
    tick(page, "attention")
    tick(page, "occlusion")
    press_button(page, "Explain")
    page.wait(RESULT)
    _, body = server.bodies.pop()
    assert body["methods"] == ["gradient", "lens", "occlusion"]
    assert body["watch"] == [" sea", " light"] and "answer" not in body
    choose_model(page, "classifier")
    labels = f"{PANEL}.querySelector('.field select')"
    options = f"[...{labels}.options].map((one) => one.textContent)"
    assert page.evaluate(options) == ["the likeliest ones", "bad", "<b>good</b>"]
    page.evaluate(f"{labels}.value = '<b>good</b>'")
    press_button(page, "Explain")
    page.wait(f"{PANEL}.querySelector('.result:not(.old)')")
    assert server.bodies[-1][1]["answer"] == "<b>good</b>"
    assert "watch" not in server.bodies[-1][1]


def test_what_is_missing_is_asked_for(server: StandIn, open_page: Open) -> None:
    server.models = MODELS
    page = open_page(TAB)
    fill(page, "Words to watch", " sea")
    tick(page, "lens")
    press_button(page, "Explain")
    assert error_line(page) == "Words are watched by “Layers”: tick it, or watch none."
    tick(page, "gradient")
    tick(page, "attention")
    press_button(page, "Explain")
    assert error_line(page) == "Tick at least one of “What to look at”."
    for name in ("ranker", "encoder"):
        choose_model(page, name)
        fill(page, "Second text", "")
        press_button(page, "Explain")
        page.wait(f"{PANEL}.querySelector('.error').textContent.includes('“Second text”')")
        assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    assert server.bodies == []


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1200, False)])
def test_it_draws_at_any_width(
    width: int, dark: bool, server: StandIn, open_page: Open, tmp_path: Path
) -> None:
    server.models = MODELS
    page = open_page(TAB, width, 740, dark)
    for name, make in MADE.items():
        server.answers[f"/v1/{TAB}"] = make()
        choose_model(page, name)
        page.evaluate(f"{PANEL}.querySelector('.result').replaceChildren()")
        page.evaluate("scrollTo(0, 0)")
        press_button(page, "Explain")
        page.wait(RESULT)
        place = page.evaluate(f"{PANEL}.querySelector('.result').getBoundingClientRect().toJSON()")
        assert 0 <= place["top"] < 100 or place["bottom"] <= 740, name  # it is in sight, not below the form
        views = page.evaluate(
            f"[...{RESULT}.querySelectorAll('.tabs button')].map((one) => one.dataset.view)"
        )
        assert "words" in views and "attention" in views
        for view in views:
            open_view(page, view)
            assert page.evaluate("document.documentElement.scrollWidth") == width, (name, view)
        page.screenshot(tmp_path / f"{name}.png", whole=True)


def test_real_models_are_explained(
    explained: Callable[[str], Path], browser: Browser, tmp_path: Path
) -> None:
    """Behind a key, which the files that draw it need none of."""
    with (
        TextGenerator.load(explained("gpt2-demo") / "bundle") as gpt,
        load(explained("classifier") / "bundle") as classifier,
        running_server({"gpt": gpt, "labels": classifier}, ServerSettings(keys=(KEY,))) as address,
    ):
        page = browser.open(f"{address.url}/#{TAB}")
        page.wait("document.activeElement.id === 'key-field'")
        page.type(KEY)
        page.press("Enter")
        page.wait(PANEL)
        prompt, answer = "In the beginning God created the", " heavens and the earth"
        press_button(page, "Explain")
        page.wait(RESULT)
        expected = explain(gpt, prompt, answer).to_json()
        assert page.evaluate(f"{PANEL}.querySelector('.summary').textContent") == answer.strip()
        assert page.evaluate(f"{RESULT}.querySelector('h2').textContent") == "Why gpt answered so"
        rows = expected["saliency"]["gradient_norm"]
        page.evaluate(f"{RESULT}.querySelector('.token.stop').focus()")
        page.press("Home")
        tints = []
        for place, target in enumerate(expected["targets"]):
            assert page.evaluate(CURRENT) == target["token"]
            check_tints(page, shares_of(rows[place]))
            tints.append(tuple(page.evaluate(FIGURES)))
            page.press("ArrowRight")
        assert len(set(tints)) == len(tints) == 4
        page.screenshot(tmp_path / "explained.png", whole=True)
        fill(page, "Words to watch", "Mesopotamia")
        press_button(page, "Explain")
        assert "watch takes words of one token" in error_line(page)
        choose_model(page, "labels")
        press_button(page, "Explain")
        page.wait(f"{RESULT}?.querySelector('.label')")
        shown = page.evaluate(f"[...{RESULT}.querySelectorAll('.label bdi')].map((one) => one.textContent)")
        assert sorted(shown) == ["LABEL_0", "LABEL_1", "LABEL_2"]
        asked = page.evaluate(
            "performance.getEntriesByType('resource').map((one) => new URL(one.name).pathname)"
        )
        assert {"/explain/explain.js", "/explain/dom.js", "/explain/explain.css"} <= set(asked)
        page.close()
        known = ("status of 401", "status of 400")
        assert [one for one in page.troubles if not any(words in one for words in known)] == []
        assert all(url.startswith(address.url) for url in page.requests)


def test_the_server_offers_no_more_than_what_draws(explained: Callable[[str], Path]) -> None:
    with (
        load(explained("classifier") / "bundle") as model,
        running_server({"labels": model}, ServerSettings(keys=(KEY,))) as address,
    ):
        kinds = {"explain.js": "text/javascript", "theme.js": "text/javascript", "base.css": "text/css"}
        for name, kind in kinds.items():
            response = address.client.get(f"/explain/{name}")
            assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
            assert response.headers["cache-control"] == "no-cache" and response.headers["etag"]
            assert response.headers["content-security-policy"].startswith("default-src 'self';")
        for name in (
            "template.html",
            "page.css",
            "start.js",
            "nothing.js",
            "deep/dom.js",
            "__init__.py",
            "%2e%2e/__init__.py",
        ):
            assert address.client.get(f"/explain/{name}").status_code in (401, 404), name
    with (
        load(explained("classifier") / "bundle") as model,
        running_server({"labels": model}, ServerSettings(page=False)) as address,
    ):
        assert address.client.get("/explain/explain.js").status_code == 404
