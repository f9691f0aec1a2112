"""The other views of an explanation's page: layers, neurons, attention."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest

from .....helpers.explanation_page import (
    CURRENT,
    READING,
    SHARES,
    SIDE,
    STATUS,
    Show,
    check_tints,
    choose,
    open_view,
    percent,
    token,
)
from .....helpers.made_explanation import (
    make_classification,
    make_generation,
    make_translation,
    read_attention,
)

RANKS = (
    "[...document.querySelectorAll('.lens tbody tr')]"
    ".map((row) => [...row.cells].slice(1).map((cell) => Number(cell.innerText)))"
)
REACHED = (
    "[...document.querySelectorAll('.lens td[tabindex=\"0\"]')]"
    ".map((cell) => [Number(cell.dataset.row), Number(cell.dataset.column)])"
)
START = """(() => {
  const [, x, y] = document.querySelector('.lines path').getAttribute('d').match(/M([\\d.]+) ([\\d.]+)/);
  const frame = document.querySelector('.words').getBoundingClientRect();
  const token = document.querySelector('.token.current').getBoundingClientRect();
  const edges = [token.top, token.bottom].map((edge) => Math.abs(y - (edge - frame.top)));
  return [x - (token.x + token.width / 2 - frame.x), Math.min(...edges)];
})()"""
DEPTHS = "[...document.querySelectorAll('.lens tbody td')].map((c) => Number(c.className.slice(6)))"
LEAD = "document.querySelector('.explain .lead').textContent"
NOTE = "document.querySelector('.lens').closest('.wide').previousSibling.textContent"
LINES = (
    "[...document.querySelectorAll('.lines path')].map((p) =>"
    " [Number(p.dataset.token), Number(p.getAttribute('stroke-width'))])"
)


def spell(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "↵")


def cell(row: int, column: int) -> str:
    return f".lens [data-row='{row}'][data-column='{column}']"


def test_ranks_are_a_table(show: Show) -> None:
    data = make_generation()
    lens = data["lens"]
    page = show(data, view="lens")
    ranks = np.array(lens["ranks"])
    assert page.evaluate(RANKS) == lens["ranks"]
    heads = page.evaluate("[...document.querySelectorAll('.lens thead th')].map((h) => h.textContent)")
    assert heads == [spell(target["text"]) for target in data["targets"]]
    depths = np.array(page.evaluate(DEPTHS)).reshape(ranks.shape)
    assert set(depths[ranks == 1]) == {10}
    assert (depths[ranks > 1] < 10).any()
    order = np.argsort(ranks, axis=None)
    assert (np.diff(depths.ravel()[order]) <= 0).all()
    page.hover(cell(2, 4))
    word, likeliest = spell(data["targets"][4]["text"]), spell(lens["likeliest"][2][4])
    assert (
        page.evaluate(NOTE)
        == f"After layer 2: the likeliest is {likeliest}, and {word} has rank {ranks[2, 4]}."
    )
    assert page.evaluate(CURRENT) == data["targets"][4]["token"]


def test_cells_are_reached_by_keys(show: Show) -> None:
    data = make_generation()
    page = show(data, view="lens")
    assert page.evaluate(REACHED) == [[6, 0]]
    page.evaluate(f"document.querySelector({cell(6, 0)!r}).focus()")
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown"):
        page.press(key)
    assert page.evaluate(REACHED) == [[5, 1]]
    assert page.evaluate("document.activeElement.dataset.row") == "5"
    assert page.evaluate(STATUS) == page.evaluate(NOTE)
    assert f"has rank {data['lens']['ranks'][5][1]}." in page.evaluate(STATUS)


def test_watched_words_have_tables_of_their_own(show: Show) -> None:
    data = make_generation()
    page = show(data, view="lens")
    for place, watched in enumerate(data["lens"]["watched"]):
        choose(page, "Ranks of", str(place))
        assert page.evaluate(RANKS) == watched["ranks"]
        page.hover(cell(1, 3))
        word = spell(watched["text"])
        in_place = f", in the place of {spell(data['targets'][3]['text'])}"
        assert page.evaluate(NOTE).startswith(f"After layer 1{in_place}: the likeliest is ")
        assert page.evaluate(NOTE).endswith(f"and {word} has rank {watched['ranks'][1][3]}.")
        page.hover(cell(0, 0))
    choose(page, "Ranks of", "")
    assert page.evaluate(RANKS) == data["lens"]["ranks"]
    labels = show(make_classification(), view="lens")
    assert labels.evaluate("document.querySelector('.controls select')") is None


def test_a_group_of_neurons_tints_the_text(show: Show) -> None:
    data = make_generation()
    page = show(data, view="neurons")
    assert page.evaluate("document.querySelectorAll('.factor .sparkline path').length") == 5

    def check(factor: int) -> None:
        row = np.array(data["neurons"]["activations"][factor])
        check_tints(page, (row / row.max()).tolist(), faintest=0.1, tone=factor)
        pressed = "[...document.querySelectorAll('.factor')].map((f) => f.getAttribute('aria-pressed'))"
        assert page.evaluate(pressed) == [str(place == factor).lower() for place in range(5)]

    check(0)
    page.click(".factor:nth-of-type(3)")
    check(2)
    page.evaluate("document.querySelector('.factor:nth-of-type(5)').focus()")
    page.press("Enter")
    check(4)
    named = page.evaluate("[...document.querySelectorAll('.factor')][4].innerText")
    for place in data["neurons"]["tokens"][4]:
        assert spell(data["tokens"][place]["text"]) in named
    layers = data["neurons"]["layers"][4]
    assert f"{percent(max(layers))} of it in layer {np.argmax(layers) + 1}" in named
    row = data["neurons"]["activations"][4]
    page.hover(token(5))
    assert f"group 5 has {percent(row[5] / max(row))} of its strongest" in page.evaluate(READING)


@pytest.mark.parametrize(("layer", "head"), [(5, None), (0, None), (2, 3)])
def test_lines_go_to_what_a_token_looks_at(layer: int, head: int | None, show: Show) -> None:
    data = make_generation()
    weights = read_attention(data["attention"][0]) / 255
    page = show(data, view="attention")
    choose(page, "Layer", str(layer))
    if head is not None:
        choose(page, "Head", str(head))
    among = weights[layer].mean(0) if head is None else weights[layer, head]
    for place in (20, len(among) - 1):
        page.hover(token(place))
        page.wait(f"{CURRENT} === {place}")
        row = [*among[place].tolist(), 0.0]
        check_tints(page, row)
        strongest = sorted(range(len(row)), key=lambda i: -row[i])
        expected = [i for i in strongest[:16] if row[i] >= 0.02 and i != place]
        lines = page.evaluate(LINES)
        assert sorted(to for to, _ in lines) == sorted(expected)
        assert dict(lines) == pytest.approx({to: 1 + 7 * row[to] for to in expected}, abs=0.006)
        assert percent(row[strongest[0]]) in page.evaluate(SIDE)
    assert page.evaluate(START) == pytest.approx([0, 0], abs=0.11)
    open_view(page, "words")
    assert page.evaluate(LINES) == []


def test_attention_from_a_translation_to_its_text(show: Show) -> None:
    data = make_translation()
    page = show(data, view="attention")
    for kind, entry in enumerate(data["attention"]):
        choose(page, "Attention", str(kind))
        first, end = entry["queries"]
        page.wait(f"document.querySelectorAll('.stop').length === {end - first}")
        page.evaluate(f"document.querySelector({token(end - 1)!r}).click()")
        page.wait(f"{CURRENT} === {end - 1} && document.querySelector('.beside h3')")
        row = [0.0] * len(data["tokens"])
        row[slice(*entry["keys"])] = (read_attention(entry)[-1, :, -1].mean(0) / 255).tolist()
        most = max(row)
        page.wait(f"Math.max(...{SHARES}) === 1")
        assert page.evaluate(SHARES) == pytest.approx([weight / most for weight in row], abs=6e-4)
        assert page.evaluate(STATUS).startswith(f"{spell(data['tokens'][end - 1]['text'])} looks most at ")
        page.press("Escape")


def test_what_was_written_is_beside_the_token_that_led_to_it(show: Show) -> None:
    data = make_generation()
    page = show(data, view="attention")
    assert "To see why a token was written, choose the one before it" in page.evaluate(LEAD)
    first = data["targets"][0]
    for place, told in ((first["token"] - 1, True), (first["token"] - 2, False)):
        page.hover(token(place))
        page.wait(f"{SIDE}.startsWith({spell(data['tokens'][place]['text'])!r})")
        assert ("The one after it" in page.evaluate(SIDE)) is told
    page.hover(token(first["token"] - 1))
    page.wait(f"{SIDE}.includes({'The one after it: ' + spell(first['text'])!r})")
    labels = show(make_classification(), view="attention")
    assert "written" not in labels.evaluate(LEAD)


def test_attention_that_is_next_to_nothing_is_told(show: Show) -> None:
    data = make_generation()
    entry = data["attention"][0]
    entry["weights"] = base64.b64encode(zlib.compress(bytes(read_attention(entry).size))).decode()
    page = show(data)
    page.click(".tabs [data-view=attention]")
    page.wait("document.querySelector('.beside h4')")
    assert "All get next to nothing." in page.evaluate(SIDE)
    assert page.evaluate(LINES) == []
    assert set(page.evaluate(SHARES)) == {0}


def test_lines_follow_the_width(show: Show) -> None:
    page = show(make_generation(), view="attention")
    page.evaluate("[...document.querySelectorAll('.stop')].at(-1).click()")
    page.wait("document.querySelector('.lines path')")
    paths = "[...document.querySelectorAll('.lines path')].map((p) => p.getAttribute('d')).join()"
    before = page.evaluate(paths)
    page.resize(400, 800)
    page.wait(f"{paths} !== {before!r}")
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_attention_is_unpacked_when_it_is_looked_at(show: Show) -> None:
    data = make_generation()
    data["attention"][0]["weights"] = "AAAA"
    page = show(data)
    assert "unpacked" not in page.text()
    page.click(".tabs [data-view=attention]")
    page.wait("document.querySelector('.beside .error')")
    assert "The attention can't be unpacked" in page.evaluate(SIDE)
