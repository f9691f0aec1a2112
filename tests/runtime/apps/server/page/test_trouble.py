"""Hostile text, keys, errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planforge.runtime.apps.explain.page import SHARED

from .....helpers.browser import Browser
from .....helpers.page import FIELDS, PANEL, Open, ask, error_line, fill, press_button, wait_for_text
from .....helpers.page_answers import make_answers
from .....helpers.page_server import CUT, END, EXPLANATIONS, PAGE, StandIn

HOSTILE = {
    "an image": "<img src=x onerror=\"window.hit = 1; fetch('https://example.com')\">",
    "a script": "</script><script>window.hit = 1</script></textarea><style>*{display:none}</style>",
    "a handler": "\"'><svg/onload=window.hit=1> javascript:window.hit=1 {{7*7}} ${window.hit=1}",
    "right to left": "\u202eevil\u2066 עברית العربية \u200f",
    "10,000 characters": "x" * 9_990 + " \U0001f600 e\u0301\n",
    "controls": "a\x00b\x07\x1b[2Jc\x7f",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_is_text(kind: str, server: StandIn, open_page: Open, tmp_path: Path) -> None:
    text = HOSTILE[kind]
    server.answers = make_answers(text, text)
    for model in server.models:
        model["id"] = f"{model['id']} {text}"
    page = open_page("chat", 360, 740)
    fill(page, "System prompt", text)
    ask(page, text)
    server.stream(text, END)
    wait_for_text(page, "Regenerate")
    sent = server.bodies[-1][1]
    assert sent["model"].startswith("llama-demo ") and sent["model"].endswith(text)
    shown = page.evaluate(f"[...{PANEL}.querySelectorAll('.text')].map((e) => e.textContent)")
    pictures = str.maketrans(
        {code: 0x2400 + code for code in range(32) if code not in (9, 10, 13)} | {127: 0x2421}
    )
    typed = text.translate(pictures)
    assert shown[1] == typed
    assert shown[0].replace("\u2400", "") == typed.replace("\u2400", "").rstrip("\n") or shown[0] == typed
    labels = {"completions": ["Text"], **{tab: list(fields) for tab, fields in FIELDS.items()}}
    for tab, fields in labels.items():
        page.click(f"#tab-{tab}")
        for label in fields:
            if label not in ("How many to show", "Beams"):
                lines = f"{text}\nb\nc\nd\ne" if label == "Texts" else text
                fill(page, label, f"[MASK] {lines}" if tab == "fill-mask" else lines)
        server.stream(text, END) if tab == "completions" else None
        page.evaluate(f"{PANEL}.querySelector('form').requestSubmit()")
        done = ".result:not([hidden]) .summary, .figures:not(:empty), .error:not(:empty)"
        page.wait(f"{PANEL}.querySelector('{done}')")
        assert page.evaluate("document.documentElement.scrollWidth") == 360, tab
        if kind == "a script":
            page.screenshot(tmp_path / f"{tab}.png", whole=True)
    server.answers["/v1/classify"] = (400, {"error": {"message": text, "param": text}})
    do_classify = f"{PANEL}.querySelector('form').requestSubmit()"
    page.click("#tab-classify")
    page.evaluate(do_classify)
    assert error_line(page)
    assert page.evaluate("typeof window.hit") == "undefined"
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    elements = "img:not(.picture), style, iframe, [onerror], [onload]"
    assert page.evaluate(f"document.querySelectorAll('{elements}').length") == 1
    page.troubles = [trouble for trouble in page.troubles if "status of 400" not in trouble]


def test_a_key_is_asked_for_and_kept(server: StandIn, open_page: Open, tmp_path: Path) -> None:
    server.key = "right"
    page = open_page()
    page.wait("document.activeElement.id === 'key-field'")
    page.screenshot(tmp_path / "key.png")
    page.type("with a space\x00")
    page.press("Enter")
    page.wait("document.getElementById('key-error').textContent.includes('without spaces')")
    page.evaluate("document.getElementById('key-field').value = ''")
    page.type("wrong")
    page.press("Enter")
    page.wait("document.getElementById('trouble-text').textContent.includes('wants a key')")
    page.wait("!document.getElementById('key').hidden")
    page.evaluate("document.getElementById('key-field').value = ''")
    page.type("right")
    page.press("Enter")
    page.wait(PANEL)
    assert page.evaluate("sessionStorage.getItem('planforge.key')") == "right"
    assert page.evaluate("Object.keys(localStorage).length") == 0
    page.go(f"{server.url}?again")
    page.wait(PANEL)
    refused = [trouble for trouble in page.troubles if "status of 401" in trouble]
    assert len(refused) == 2
    page.troubles = [trouble for trouble in page.troubles if trouble not in refused]


ERRORS = {
    "a refused value": (
        (400, {"error": {"message": "top_k is 0;\n it must be at least 1.", "param": "top_k"}}),
        "top_k is 0; it must be at least 1.",
    ),
    "a parameter": ((422, {"error": {"message": "Too long.", "param": "input"}}), "Too long (input)."),
    "no words": ((400, "nothing"), "The server refused this (400). Change it, then try again."),
    "a full queue": (
        (429, {"error": {"message": "full"}}),
        "The server is busy: full. Wait a moment, then try again.",
    ),
    "a fault": (
        (500, {"error": {"message": "out of memory"}}),
        "The server made a mistake: out of memory. Try again; its log says more.",
    ),
    "a model that went": (
        (404, {"error": {"message": "There is no model 'x'."}}),
        "There is no model 'x'. Reload the page to see which models it has now.",
    ),
    "another shape": ((200, {"data": []}), "The server's answer is not what this page expects."),
    "no JSON": ((200, "<b>hello"), "The server's answer is not what this page expects."),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_one_line_that_says_what_to_do(kind: str, server: StandIn, open_page: Open) -> None:
    answer, words = ERRORS[kind]
    server.answers["/v1/classify"] = answer
    page = open_page("classify")
    page.evaluate(f"{PANEL}.querySelector('form').requestSubmit()")
    line = error_line(page)
    assert line.startswith(words) and "\n" not in line
    assert page.evaluate(f"{PANEL}.querySelector('.main').hidden") is False
    server.answers = make_answers()
    page.evaluate(f"{PANEL}.querySelector('form').requestSubmit()")
    page.wait(f"{PANEL}.querySelector('.error').textContent === ''")
    page.troubles = [
        trouble for trouble in page.troubles if not re.search("status of 4|status of 5|^warning:", trouble)
    ]


def test_a_stream_that_breaks_says_so_and_the_question_stays(server: StandIn, open_page: Open) -> None:
    page = open_page()
    ask(page, "Tell me")
    server.stream(CUT)
    assert error_line(page).startswith("The connection ended before the answer did.")
    press_button(page, "Send again")
    server.stream("Half an ", {"error": {"message": "the model failed", "code": "x"}}, CUT)
    assert error_line(page).startswith("The server made a mistake: the model failed")
    wait_for_text(page, "Half an ")
    press_button(page, "Regenerate")
    server.stream("A whole one.", END)
    wait_for_text(page, "A whole one.")
    assert [len(body["messages"]) for _, body in server.bodies] == [1, 1, 1]


def test_what_is_missing_or_wrong_is_asked_for_before_anything_is_sent(
    server: StandIn, open_page: Open
) -> None:
    page = open_page()
    ask(page, " ")
    assert error_line(page) == "Write a message first."
    fill(page, "Temperature", "9")
    ask(page, "x")
    assert error_line(page) == "Temperature: give a number from 0 to 2."
    page.click("#tab-embeddings")
    fill(page, "Texts", "one")
    press_button(page, "Compare")
    assert error_line(page) == "Write at least two texts, one a line."
    page.click("#tab-fill-mask")
    fill(page, "Text", "none")
    press_button(page, "Fill")
    assert error_line(page) == "A gap is written [MASK]: put at least one into the text."
    press_button(page, "Put a gap here")
    assert page.evaluate(f"{PANEL}.querySelector('textarea').value").count("[MASK]") == 1
    page.click("#tab-translations")
    press_button(page, "Translate")
    assert error_line(page) == "Write something into “Text” first."
    assert server.bodies == []


def test_tabs_are_what_the_models_can_do(server: StandIn, open_page: Open) -> None:
    server.models = server.models[1:2]
    page = open_page()
    assert page.evaluate("[...document.querySelectorAll('#tabs button')].map((b) => b.textContent)") == [
        "Continue",
        "Explain",
    ]
    server.models = []
    page = open_page()
    assert "no model that this page can use" in page.text()
    server.models = [{"id": "x", "capabilities": ["chat"]}]
    page.click("#again")
    page.wait(PANEL)


def test_models_that_are_being_loaded_are_waited_for(server: StandIn, browser: Browser) -> None:
    server.loading = ["llama-demo", "<b>big</b>"]
    page = browser.open(server.url)
    page.wait("document.body.innerText.includes('The server is loading llama-demo, <b>big</b> …')")
    server.loading = []
    page.wait(PANEL)
    page.close()
    assert page.troubles == []


def test_the_files_hold_nothing_that_the_policy_forbids() -> None:
    drawing = [EXPLANATIONS / name for name in SHARED]
    for file in (*PAGE.iterdir(), *drawing):
        source = file.read_text(encoding="utf-8")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "style=",
        ):
            assert word not in source, (file.name, word)
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", source) == []
        assert re.findall(r"<script(?![^>]*src=)|<style|\son\w+=\"", source) == []
