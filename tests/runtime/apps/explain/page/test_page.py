"""The page of an explanation in a browser: what counted, by pointer and by keyboard, and that it is safe."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime.apps.explain.page import make_page

from .....helpers.browser import Browser
from .....helpers.explanation_page import (
    CURRENT,
    FIGURES,
    READING,
    SIDE,
    STATUS,
    Show,
    check_tints,
    choose,
    open_view,
    percent,
    serving_folder,
    shares_of,
    token,
)
from .....helpers.made_explanation import (
    METHODS,
    make_classification,
    make_generation,
    make_target,
    make_tokens,
    make_translation,
)

MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "generation": make_generation,
    "translation": make_translation,
    "classification": make_classification,
}
HOSTILE = [
    "</script><script>window.bad = 1</script>",
    "<!--<script>",
    '<img src="x" onerror="window.bad = 1">',
    "'\"`${window.bad = 1}\\",
    "\u2028\u2029",
    "{{data}}{{policy}}",
    "]]>&lt;&amp;",
    "\u202ereversed",
    "\x00\x1b[31m",
    "\ufffd",
    "\ud800",
    "",
]


@pytest.mark.parametrize("method", METHODS)
def test_the_pointer_tints_what_counted(method: str, show: Show) -> None:
    data = make_generation()
    page = show(data)
    choose(page, "Method", method)
    for place in (3, 7):
        target = data["targets"][place]
        page.hover(token(target["token"]))
        assert page.evaluate(CURRENT) == target["token"]
        shares = shares_of(data["saliency"][method][place])
        check_tints(page, shares)
        signed = method != "gradient_norm"
        strongest = sorted(range(len(shares)), key=lambda i: -abs(shares[i]))[:8]
        names = [data["tokens"][i]["text"].replace(" ", "␣").replace("\n", "↵") for i in strongest]
        lines = page.evaluate(SIDE).split("\n")
        start = lines.index("Counted most") + 1
        assert lines[start : start + 16 : 2] == names
        assert lines[start + 1 : start + 17 : 2] == [percent(shares[i], signed=signed) for i in strongest]
        page.hover(token(2))
        assert f"counted {percent(shares[2], signed=signed)}" in page.evaluate(READING)
    later = page.evaluate(
        "[...document.querySelectorAll('.token.later')].map((t) => Number(t.dataset.token))"
    )
    assert later == list(range(data["targets"][7]["token"], len(data["tokens"])))


def test_the_likeliest_are_bars(show: Show) -> None:
    data = make_generation()
    target = data["targets"][2]
    target["likeliest"] = [one for one in target["likeliest"] if one["text"] != target["text"]]
    page = show(data)
    page.hover(token(target["token"]))
    text = page.evaluate(SIDE)
    assert f"probability {percent(target['probability'])}, logit {target['logit']:.2f}" in text
    rows = [*target["likeliest"], {"text": target["text"], "probability": target["probability"]}]
    expected = [one["text"].replace(" ", "␣") for one in rows]
    lines = text.split("\n")
    assert lines[lines.index("The likeliest in this place") + 1 :: 2] == expected
    assert lines[lines.index("The likeliest in this place") + 2 :: 2] == [
        percent(one["probability"]) for one in rows
    ]
    last = "[...document.querySelectorAll('.beside .shares')].at(-1)"
    bars = page.evaluate(
        f"[...{last}.querySelectorAll('.share')].map((b) => b.style.getPropertyValue('--share'))"
    )
    assert [float(bar) for bar in bars] == pytest.approx([one["probability"] for one in rows])
    assert page.evaluate(f"{last}.querySelector('.own').innerText").startswith(expected[-1])


def test_keys_go_from_token_to_token(show: Show) -> None:
    data = make_generation()
    places = [target["token"] for target in data["targets"]]
    page = show(data)
    page.evaluate(f"document.querySelector({token(places[0])!r}).focus()")
    for key, place in (("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("End", -1), ("Home", 0)):
        page.press(key)
        assert page.evaluate("Number(document.activeElement.dataset.token)") == places[place], key
        assert page.evaluate(CURRENT) == places[place]
        shares = shares_of(data["saliency"]["gradient_norm"][place])
        check_tints(page, shares)
        reached = (
            "[...document.querySelectorAll('.token[tabindex=\"0\"]')].map((t) => Number(t.dataset.token))"
        )
        assert page.evaluate(reached) == [places[place]]
        strongest = int(np.argmax(np.abs(shares)))
        spoken = f"{data['tokens'][strongest]['text'].replace(' ', '␣')} {percent(shares[strongest])}"
        assert spoken in page.evaluate(STATUS)
    page.press("ArrowLeft")
    assert page.evaluate(CURRENT) == places[0]


def test_a_click_holds_and_escape_lets_go(show: Show) -> None:
    data = make_generation()
    first, second, third = (target["token"] for target in data["targets"][2:5])
    page = show(data)
    page.hover(token(first))
    assert page.evaluate("document.querySelector('[aria-pressed=true]')") is None
    page.click(token(first))
    held = page.evaluate(FIGURES)
    page.hover(token(second))
    assert page.evaluate(CURRENT) == first
    assert page.evaluate(FIGURES) == held
    assert page.evaluate("[...document.querySelectorAll('[aria-pressed=true]')].length") == 1
    page.press("Escape")
    page.hover(token(third))
    assert page.evaluate(CURRENT) == third
    assert page.evaluate(FIGURES) != held
    assert page.evaluate("document.querySelector('[aria-pressed=true]')") is None
    page.press("Enter")  # of the token that has the focus: the one clicked
    assert page.evaluate(CURRENT) == first
    assert page.evaluate(f"document.querySelector({token(first)!r}).getAttribute('aria-pressed')") == "true"


def test_labels_are_buttons(show: Show) -> None:
    data = make_classification()
    page = show(data)
    texts = page.evaluate("[...document.querySelectorAll('.label')].map((l) => l.innerText)")
    assert texts == [f"{one['text']} {percent(one['probability'])}" for one in data["targets"]]
    page.hover(".label:nth-child(2)")
    check_tints(page, shares_of(data["saliency"]["gradient_norm"][1]))
    page.click(".label:nth-child(3)")
    assert page.evaluate("document.querySelector('.label.held').innerText").startswith("negative")
    check_tints(page, shares_of(data["saliency"]["gradient_norm"][2]))
    page.press("ArrowLeft")
    assert page.evaluate("document.activeElement.innerText").startswith("neutral")
    check_tints(page, shares_of(data["saliency"]["gradient_norm"][1]))


def test_a_score_has_neither_labels_nor_alternatives(show: Show) -> None:
    data = make_classification(("score",))
    data["lens"] = {"layers": ["embeddings"], "ranks": [[1]], "likeliest": [["score"]], "watched": []}
    page = show(data)
    check_tints(page, shares_of(data["saliency"]["gradient_norm"][0]))
    text = page.text()
    assert "value 3.21" in text
    assert "Layers" not in text
    assert "likeliest" not in text
    assert "Question" in text


def test_a_likeness_tells_whose_words_these_are(show: Show) -> None:
    data = make_classification(("likeness",)) | {"kind": "similarity", "other": "<b>I was moved.</b>"}
    data["tokens"] = [token | {"part": "text"} for token in data["tokens"]]
    page = show(data)
    lead = page.evaluate("document.querySelector('.lead').textContent")
    assert "it counted for the likeness;" in lead
    assert "the first text; it was compared with “<b>I was moved.</b>”." in lead
    assert page.evaluate("document.querySelector('.words h3').textContent") == "First text"
    lead = show(make_classification()).evaluate("document.querySelector('.lead').textContent")
    assert "it counted for the label at hand;" in lead
    assert "first text" not in lead


def test_what_integrated_gradients_miss_is_told(show: Show) -> None:
    data = make_generation()
    data["missing"] = [-0.013 if place == 3 else 0.2 for place in range(len(data["targets"]))]
    page = show(data)
    page.hover(token(data["targets"][3]["token"]))
    assert "add up" not in page.evaluate(SIDE)
    choose(page, "Method", "integrated_gradients")
    assert "give or take 1.3 % of it." in page.evaluate(SIDE)


def test_views_are_there_where_their_data_is(show: Show) -> None:
    data = make_generation()
    names = "[...document.querySelectorAll('.tabs:not([hidden]) button')].map((b) => b.dataset.view)"
    assert show(data).evaluate(names) == ["words", "lens", "neurons", "attention"]
    assert show(data | {"lens": None, "neurons": None}).evaluate(names) == ["words", "attention"]
    page = show(data | {"lens": None, "neurons": None, "attention": [], "saliency": {}})
    assert page.evaluate(names) == []
    assert "The likeliest in this place" in page.text()
    assert "Method" not in page.text()
    page = show(data | {"saliency": {"occlusion": data["saliency"]["occlusion"]}})
    assert page.evaluate("document.querySelectorAll('.choice option').length") == 1
    check_tints(page, shares_of(data["saliency"]["occlusion"][0]))
    page = show(data | {"targets": [], "saliency": {}, "lens": None})
    assert page.evaluate(names) == ["neurons", "attention"]


def test_tabs_are_chosen_by_arrow_keys(show: Show) -> None:
    page = show(make_generation())
    page.evaluate("document.querySelector('.tabs [aria-selected=true]').focus()")
    for key, view in (("ArrowRight", "lens"), ("End", "attention"), ("ArrowRight", "words")):
        page.press(key)
        assert page.evaluate("document.activeElement.dataset.view") == view
        assert page.evaluate("document.querySelector('[role=tabpanel]').dataset.view") == view


@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_is_wider_than_a_phone(kind: str, show: Show) -> None:
    dark = kind == "translation"
    page = show(MAKERS[kind](), 360, dark)
    views = page.evaluate("[...document.querySelectorAll('.tabs button')].map((b) => b.dataset.view)")
    for view in views:
        open_view(page, view)
        assert page.evaluate("document.documentElement.scrollWidth") == 360, view
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    page.evaluate(f"document.getElementById('theme').value = '{'light' if dark else 'dark'}'")
    page.evaluate("document.getElementById('theme').dispatchEvent(new Event('change'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_colours_that_were_chosen_stay(dark: bool, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(make_page(make_classification()), encoding="utf-8")
    with serving_folder(tmp_path) as url:  # of files on disk, Chromium sometimes forgets what they kept
        page = browser.open(f"{url}page.html", dark=dark)
        chosen = "light" if dark else "dark"
        page.evaluate(f"document.getElementById('theme').value = {chosen!r}")
        page.evaluate("document.getElementById('theme').dispatchEvent(new Event('change'))")
        page.go(f"{url}page.html?again")
        page.wait("location.search === '?again' && document.querySelector('.explain')")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if dark else "rgb(21, 24, 28)")
        assert page.evaluate("document.getElementById('theme').value") == chosen
        page.close()
        assert page.troubles == []
        assert {one.partition("?")[0] for one in page.requests if not one.startswith("data:")} == {
            f"{url}page.html"
        }


def test_hostile_tokens_stay_text(show: Show) -> None:
    rng = np.random.default_rng(0)
    data = make_generation(HOSTILE, HOSTILE)
    data["model"] = f"&lt;</title>{HOSTILE[0]}"
    for target in data["targets"]:
        target["likeliest"] = make_target(rng, target["text"], 0)["likeliest"]
    data["lens"]["likeliest"] = [[HOSTILE[2]] * len(HOSTILE) for _ in data["lens"]["layers"]]
    data["lens"]["watched"][0]["text"] = HOSTILE[0]
    page = show(data)
    assert page.evaluate("document.querySelectorAll('.token').length") == 2 * len(HOSTILE)
    for view in ("words", "lens", "neurons", "attention"):
        open_view(page, view)
        for place in range(len(HOSTILE), 2 * len(HOSTILE) - 1):
            page.evaluate(f"document.querySelector({token(place)!r}).click()")
    page.evaluate("document.querySelector('.tabs button').click()")
    assert page.evaluate("typeof window.bad") == "undefined"
    assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
    texts = page.evaluate("[...document.querySelectorAll('.token')].map((t) => t.textContent)")
    assert texts[:4] == HOSTILE[:4]
    assert texts[4:9] == ["[U+2028][U+2029]", HOSTILE[5], HOSTILE[6], "[U+202E]reversed", "\u2400\u241b[31m"]
    assert page.evaluate("document.title") == f"Why {data['model']} answered so"
    assert page.evaluate("document.querySelector('h2').textContent") == f"Why {data['model']} answered so"


def test_the_page_says_what_its_policy_allows() -> None:
    text = make_page(make_generation(HOSTILE, HOSTILE))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "unsafe" not in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    inside = re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL)
    assert [name for name, _ in inside] == ["script", "style", "script"]
    for _, code in inside:
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert not re.search(r"\b(src|href)=\"(?!data:)", text.replace(text[text.index("<main") :], ""))


def test_the_policy_holds(show: Show) -> None:
    page = show(make_generation())
    add = "document.body.append(Object.assign(document.createElement('{}'), {}))"
    page.evaluate(add.format("script", "{textContent: 'window.bad = 1'}"))
    page.evaluate(add.format("p", "{innerHTML: '<b style=\"color: red\" id=styled>x</b>'}"))
    asked = page.evaluate("fetch('https://example.com/').then(() => 'answered', () => 'refused')")
    assert asked == "refused"
    assert page.evaluate("typeof window.bad") == "undefined"
    assert page.evaluate("getComputedStyle(document.getElementById('styled')).color") != "rgb(255, 0, 0)"
    assert len([one for one in page.troubles if "Content Security Policy" in one]) >= 3
    page.troubles.clear()
    page.requests.clear()


def test_data_comes_through() -> None:
    data = make_generation(HOSTILE, HOSTILE)
    data["lens"]["logprobs"] = np.array([[1.5, np.nan]], np.float32)
    data["missing"] = (np.float32(0.5), float("inf"))
    text = make_page(data)
    written = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert written is not None
    assert written[1].isascii()
    assert "<" not in written[1]
    expected = data | {"missing": [0.5, None]}
    expected["lens"] = data["lens"] | {"logprobs": [[1.5, None]]}
    assert json.loads(written[1]) == expected


def test_special_tokens_stay_with_their_text(show: Show) -> None:
    data = make_translation()
    page = show(data)
    parts = page.evaluate("[...document.querySelectorAll('.words .part')].map((p) => p.innerText)")
    assert [part.strip().split(" ")[0] for part in parts] == ["The", "<pad>Der"]
    assert [part.strip().split(" ")[-1] for part in parts] == ["trees.</s>", "Apfelbäume.</s>"]
    places = [target["token"] for target in data["targets"]]
    assert (
        page.evaluate("[...document.querySelectorAll('.stop')].map((t) => Number(t.dataset.token))") == places
    )
    special = make_tokens(special=["<s>"], text=["A"]) + make_tokens(pair=["B"], special=["</s>"])
    page = show(
        make_classification()
        | {"tokens": special, "targets": [], "lens": None, "saliency": {}, "attention": []}
    )
    parts = page.evaluate("[...document.querySelectorAll('.words .part')].map((p) => p.textContent)")
    assert parts == ["<s>A", "B</s>"]
