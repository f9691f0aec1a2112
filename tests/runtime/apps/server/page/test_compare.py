"""The tab that compares texts: which models it offers, what it asks of each, and which tokens it shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export
from planforge.runtime import TextEncoder

from .....helpers.browser import Browser, Page
from .....helpers.page import PANEL, Open, error_line, fill, press_button
from .....helpers.page_answers import VECTORS
from .....helpers.page_server import StandIn
from .....helpers.retrieval_folders import write_folder
from .....helpers.serving import Address, running_server

TAB = "embeddings"
TEXTS = ["cat who ran", "the cat sat on the mat .", "a dog ran away from the cat !", "he saw her"]
KINDS = ("router", "colbert", "bge-m3")
ASKED = {"query": "q", "documents": ["a", "b", "c"]}
MODELS: list[dict[str, Any]] = [
    {"id": "both", "capabilities": ["embeddings", "embed_sparse", "matches"], "matches": ["sparse", "multi"]},
    {"id": "words", "capabilities": ["embed_sparse", "matches"], "matches": ["sparse"]},
    {"id": "dense", "capabilities": ["embeddings"]},
    {"id": "writer", "capabilities": ["chat"]},
]
LABELS = f"[...{PANEL}.querySelectorAll('.field:not([hidden]) > label')].map((one) => one.textContent)"
TABLES = f"[...{PANEL}.querySelectorAll('details.match')]"
ROWS = "[...one.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"


def choose(page: Page, place: str, value: str) -> None:
    choice = f"{PANEL}.querySelector('{place} select')"
    page.evaluate(f"{choice}.value = {value!r}")
    page.evaluate(f"{choice}.dispatchEvent(new Event('change'))")


def compare(page: Page) -> None:
    page.evaluate(f"{PANEL}.querySelector('.result').hidden = true")
    press_button(page, "Compare")
    page.wait(f"{PANEL}.querySelector('.result:not([hidden]):not(.old) .summary')")


def read_tables(page: Page) -> list[tuple[str, list[list[str]]]]:
    """Return of each text, from the best on, its title with its score, and the rows of its table."""
    titles = page.evaluate(f"{TABLES}.map((one) => one.querySelector('summary').innerText)")
    rows = page.evaluate(f"{TABLES}.map((one) => {ROWS})")
    return list(zip(titles, rows, strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TextEncoder]]:
    root: Path = tmp_path_factory.mktemp("compared")
    opened = {}
    for kind in KINDS:
        export(write_folder(kind, root / kind), root / f"{kind}-B", target=["cpu"], precision=["fp32"])
        opened[kind] = TextEncoder.load(root / f"{kind}-B")
    yield opened
    for model in opened.values():
        model.close()


@pytest.fixture(scope="module")
def address(models: Any) -> Iterator[Address]:
    with running_server(models) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "way", "dark"),
    [
        ("router", "sparse", False),
        ("colbert", "multi", True),
        ("bge-m3", "sparse", True),
        ("bge-m3", "multi", False),
    ],
)
def test_real_models_show_which_tokens_match(
    name: str,
    way: str,
    dark: bool,
    address: Address,
    models: dict[str, TextEncoder],
    browser: Browser,
    tmp_path: Path,
) -> None:
    model = models[name]
    embed = model.embed_sparse if way == "sparse" else model.embed_multi
    query: Any = embed(TEXTS[0], input_type="query")
    documents: Any = embed(TEXTS[1:], input_type="document")
    scores = model.similarity([query], documents)[0]
    page = browser.open(f"{address.url}/#{TAB}", dark=dark)
    page.wait(PANEL)
    choose(page, ".model", name)
    fill(page, "Texts", "\n".join(TEXTS))
    if name == "bge-m3":
        choose(page, ".field", way)
    compare(page)
    wanted = []
    for place in (-scores).argsort(kind="stable").tolist():
        found = model.matches(query, documents[place])
        tokens = [[one.query] if way == "sparse" else [one.query, one.document] for one in found]
        rows = [
            [*names, f"{one.product:.2f}".replace("-", "−")] for names, one in zip(tokens, found, strict=True)
        ]
        wanted.append((f"{scores[place]:.2f}{TEXTS[1 + place]}", rows))
    assert read_tables(page) == wanted
    assert any(rows for _, rows in wanted)
    page.screenshot(tmp_path / "matches.png", whole=True)
    page.close()
    assert page.troubles == []
    assert all(url.startswith(address.url) for url in page.requests)


def test_each_model_is_asked_in_its_ways(server: StandIn, open_page: Open) -> None:
    match = {"query": "q", "document": "b", "product": 0.5}
    entries = [{"index": place, "score": 0.5, "matches": [match], "dropped": 0} for place in range(3)]
    server.models = MODELS
    server.answers["/v1/matches"] = {"data": entries}
    server.answers["/v1/embeddings"] = {
        "data": [{"index": place, "embedding": vector} for place, vector in enumerate(VECTORS[:4])]
    }
    page = open_page(TAB)
    for name, labels, ways in (
        ("both", ["Compare by", "Texts"], ("whole", "sparse", "multi")),
        ("words", ["Texts"], ("sparse",)),
        ("dense", ["Texts"], ("whole",)),
    ):
        choose(page, ".model", name)
        assert page.evaluate(LABELS) == labels
        fill(page, "Texts", "q\na\nb\nc")
        hint = page.evaluate(f"{PANEL}.querySelector('textarea').nextSibling.textContent")
        assert ("first is a query" in hint) == (name != "dense")
        for way in ways:
            if len(ways) > 1:
                choose(page, ".field", way)
            server.bodies.clear()
            compare(page)
            body = {"input": ["q", "a", "b", "c"]} if way == "whole" else {**ASKED, "kind": way}
            path = "/v1/embeddings" if way == "whole" else "/v1/matches"
            assert server.bodies == [(path, {"model": name, **body})]
            assert page.evaluate(f"{TABLES}.length") == (0 if way == "whole" else 3)
    choose(page, ".model", "words")
    fill(page, "Texts", "q")
    press_button(page, "Compare")
    assert error_line(page) == "Write at least two texts, one a line."


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1200, False)])
def test_any_tokens_and_products_are_shown(
    width: int, dark: bool, server: StandIn, open_page: Open, tmp_path: Path
) -> None:
    """Long ones, more than a table has rows for, below 0, from right to left, with HTML's signs; and none."""
    tokens = ["wide" * 100, "<b>x</b>", "\u05d0\u05d1", "a\u0000b", *map(str, range(70))]
    products = [2.0, -0.5, 0.25, *[0.125] * 71]
    matches = [
        {"query": token, "document": token, "product": product}
        for token, product in zip(tokens, products, strict=True)
    ]
    server.models = MODELS
    server.answers["/v1/matches"] = {
        "data": [
            {"index": 1, "score": sum(products), "matches": matches, "dropped": 0},
            {"index": 0, "score": -1e9, "matches": [], "dropped": 0},
        ]
    }
    page = open_page(TAB, width, 740, dark)
    fill(page, "Texts", f"q\nnothing\n{'text' * 100}")
    choose(page, ".field", "multi")
    compare(page)
    (_, rows), (title, none) = read_tables(page)
    assert len(rows) == 64 and title.endswith("nothing") and none == []
    assert rows[0][0] == rows[0][1] == f"{('wide' * 100)[:31]}…" and rows[0][2] == "2.00"
    assert rows[1:4] == [
        ["<b>x</b>"] * 2 + ["−0.50"],
        ["\u05d0\u05d1"] * 2 + ["0.25"],
        ["a␀b"] * 2 + ["0.13"],
    ]
    shown = page.evaluate(f"{PANEL}.querySelector('.result').textContent")
    assert "10 more add 1.25." in shown and "Nothing matches." in shown
    page.evaluate(f"{TABLES}.forEach((one) => {{ one.open = true; }})")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    regions = page.evaluate(f"[...{PANEL}.querySelectorAll('[role=region]')].map((one) => one.ariaLabel)")
    assert regions == [f"What matches in “{('text' * 100)[:39]}…”"]
    heads = page.evaluate(
        f"[...{PANEL}.querySelectorAll('details th[scope=col]')].map((one) => one.textContent)"
    )
    assert heads == ["Query", "Text", "Product"]
    page.screenshot(tmp_path / "any.png", whole=True)
