"""The page, in a browser: chat that streams, stops and is edited; tasks; keys; errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

from ...helpers.browser import Browser, Page, running_browser
from ...helpers.page_answers import VECTORS, make_answers
from ...helpers.page_server import CUT, END, PAGE, StandIn, stand_in

Open = Callable[..., Page]
PANEL = "document.querySelector('main > section:not([hidden])')"
TABS = [
    "chat",
    "completions",
    "embeddings",
    "rerank",
    "classify",
    "tags",
    "answers",
    "fill-mask",
    "translations",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser, None, None]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def server() -> Generator[StandIn, None, None]:
    with stand_in() as server:
        yield server


@pytest.fixture
def open_page(browser: Browser, server: StandIn) -> Generator[Open, None, None]:
    """Open a tab of the page; in the end nothing may have gone wrong, and no request have left the server."""
    pages: list[Page] = []

    def open_tab(tab: str = "chat", width: int = 1200, height: int = 800, dark: bool = False) -> Page:
        page = browser.open(f"{server.url}#{tab}", width, height, dark=dark)
        pages.append(page)
        page.wait(f"{PANEL} ?? document.querySelector('#trouble:not([hidden])')")
        return page

    yield open_tab
    for page in pages:
        page.evaluate("1")  # hears what is still on its way
        page.close()
        assert page.troubles == []
        assert [url for url in page.requests if not url.startswith(server.url)] == []


def wait_for_text(page: Page, text: str) -> None:
    page.wait(f"{PANEL}?.innerText.includes({json.dumps(text)})")


def ask(page: Page, text: str) -> None:
    page.click(".composer textarea")
    page.type(text)
    page.press("Enter")


def error_line(page: Page) -> str:
    return str(page.wait(f"{PANEL}.querySelector('.error').textContent"))


def fill(page: Page, label: str, text: str) -> None:
    """Write into the field with this label."""
    script = (
        f"[...{PANEL}.querySelectorAll('label')].find((l) => l.textContent === {json.dumps(label)}).control"
    )
    page.evaluate(f"{script}.closest('details')?.setAttribute('open', '')")
    page.evaluate(f"(() => {{ const field = {script}; field.focus(); field.select(); }})()")
    if text:
        page.type(text)
    else:
        page.evaluate(f"{script}.value = ''")


def press_button(page: Page, words: str) -> None:
    found = (
        f"[...{PANEL}.querySelectorAll('button')].filter((b) => b.textContent === {json.dumps(words)}).at(-1)"
    )
    page.wait(f"{found} && !{found}.disabled && !{found}.hidden")
    page.evaluate(f"{found}.click()")


# ---- chat


def test_an_answer_appears_piece_by_piece(server: StandIn, open_page: Open, tmp_path: Path) -> None:
    page = open_page()
    fill(page, "System prompt", "Be brief.")
    for label, value in (("Temperature", "0.5"), ("Top p", "0.9"), ("Top k", "40"), ("Longest answer", "9")):
        fill(page, label, value)
    fill(page, "Seed", "7")
    ask(page, "What was there?")
    shown = ""
    for piece in ("And there ", "was ", "light."):
        server.stream(piece)
        shown += piece
        page.wait(f"{PANEL}.querySelector('.assistant .text').textContent === {json.dumps(shown)}")
    page.screenshot(tmp_path / "streaming.png")
    server.stream(END)
    wait_for_text(page, "Regenerate")
    figures = page.evaluate("document.querySelector('.assistant .figures').textContent")
    assert re.fullmatch(r"3 tokens · [\d.]+ tokens/s · first after \d+\.\d\d s", figures)
    assert page.evaluate("document.getElementById('status').textContent") == f"llama-demo answered: {shown}"
    ((path, body),) = server.bodies
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "llama-demo",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What was there?"},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_completion_tokens": 9,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("how", ["the button", "Escape"])
def test_stop_ends_the_request_and_keeps_what_came(how: str, server: StandIn, open_page: Open) -> None:
    page = open_page()
    ask(page, "Tell me")
    server.stream("Once ")
    wait_for_text(page, "Once")
    if how == "the button":
        press_button(page, "Stop")
    else:
        page.press("Escape")
    wait_for_text(page, "Stopped.")
    assert server.left.wait(60)
    server.left.clear()
    wait_for_text(page, "Once")
    press_button(page, "Regenerate")
    server.stream("Twice", END)
    wait_for_text(page, "Twice")
    assert "Once" not in page.text()
    assert [body["messages"] for _, body in server.bodies] == [[{"role": "user", "content": "Tell me"}]] * 2


def test_messages_are_edited_and_survive_a_reload(server: StandIn, open_page: Open, tmp_path: Path) -> None:
    page = open_page()
    for question, answer in (("one", "ONE"), ("two", "TWO")):
        ask(page, question)
        server.stream(answer, END)
        page.wait(
            f"{PANEL}.querySelectorAll('article').length % 2 === 0 && !{PANEL}.querySelector('[aria-busy]')"
        )
        wait_for_text(page, answer)
    page.wait(f"{PANEL}.querySelectorAll('.buttons button').length === 5")
    page.evaluate(f"{PANEL}.querySelectorAll('.user .buttons button')[0].click()")
    assert "What follows this message is replaced." in page.text()
    page.screenshot(tmp_path / "editing.png")
    page.press("Escape")
    assert "ONE" in page.text() and "TWO" in page.text()
    page.evaluate(f"{PANEL}.querySelectorAll('.user .buttons button')[0].click()")
    page.type("!")
    page.press("Enter")
    server.stream("OTHER", END)
    wait_for_text(page, "Regenerate")
    assert server.bodies[-1][1]["messages"] == [{"role": "user", "content": "one!"}]
    assert "TWO" not in page.text()
    page.evaluate(f"{PANEL}.querySelector('.assistant .buttons button').click()")
    page.type(" changed")
    press_button(page, "Save")
    page.go(f"{server.url}?again#chat")
    wait_for_text(page, "OTHER changed")
    ask(page, "three")
    server.stream("THREE", END)
    wait_for_text(page, "THREE")
    assert [message["content"] for message in server.bodies[-1][1]["messages"]] == [
        "one!",
        "OTHER changed",
        "three",
    ]
    press_button(page, "New chat")
    wait_for_text(page, "Nothing said yet")


def test_the_keyboard_reaches_everything(server: StandIn, open_page: Open) -> None:
    page = open_page()
    reached: list[str] = []
    for _ in range(40):
        page.press("Tab")
        describe = "document.activeElement.id.replace(/-\\d+$/, '') || document.activeElement.textContent"
        reached.append(page.evaluate(describe))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"no focus is seen at {reached[-1]}"
        if reached[-1] == "draft":
            break
    assert reached == [
        "Skip to the content", "theme", "tab-chat", "model", "New chat", "Options", "system",
        "temperature", "top_p", "top_k", "max_tokens", "seed", "draft",
    ]  # fmt: skip
    page.type("first")
    page.press("Enter", "Shift")
    page.type("second")
    page.press("Enter")
    server.stream("an ", "answer")
    wait_for_text(page, "an answer")
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Stop"
    page.press("Enter")
    wait_for_text(page, "Stopped.")
    assert page.evaluate("document.activeElement.textContent") == "Send"
    assert server.bodies[0][1]["messages"][0]["content"] == "first\nsecond"
    page.evaluate("document.getElementById('tab-chat').focus()")
    for key, tab in (
        ("ArrowDown", "completions"),
        ("End", "translations"),
        ("ArrowRight", "chat"),
        ("ArrowUp", TABS[-1]),
    ):
        page.press(key)
        assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        assert page.evaluate(f"{PANEL}.id") == f"panel-{tab}"


def test_every_field_and_picture_has_a_name(server: StandIn, open_page: Open) -> None:
    server.answers = make_answers()
    page = open_page()
    for tab in TABS[2:]:
        page.click(f"#tab-{tab}")
        if tab == "translations":
            fill(page, "Text", "3 May")
        page.evaluate(f"{PANEL}.querySelector('form').requestSubmit()")
        page.wait(f"{PANEL}.querySelector('.result:not([hidden]) .summary')")
    named = {
        "textbox",
        "searchbox",
        "spinbutton",
        "combobox",
        "button",
        "tab",
        "tabpanel",
        "image",
        "region",
        "log",
    }
    for tab in TABS:
        page.click(f"#tab-{tab}")
        for node in page.call("Accessibility.getFullAXTree")["nodes"]:
            if not node["ignored"] and node["role"]["value"] in named:
                assert node.get("name", {}).get("value"), f"{tab}: {node}"


# ---- a text that goes on


def test_a_text_goes_on_and_is_taken_back(server: StandIn, open_page: Open, tmp_path: Path) -> None:
    page = open_page("completions")
    fill(page, "Text", "Once upon")
    page.press("Enter", "Control")
    value = f"{PANEL}.querySelector('textarea').value"
    server.stream(" a")
    page.wait(f"{value} === 'Once upon a'")
    assert page.evaluate(f"{PANEL}.querySelector('textarea').readOnly")
    server.stream(" time", {"choices": [{"text": "", "finish_reason": "length"}]}, END)
    wait_for_text(page, "Ended at the longest answer")
    page.wait(f"!{PANEL}.querySelector('textarea').readOnly")
    page.screenshot(tmp_path / "continued.png")
    assert page.evaluate(value) == "Once upon a time"
    assert server.bodies == [
        (
            "/v1/completions",
            {
                "model": "llama-demo",
                "prompt": "Once upon",
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
    ]
    press_button(page, "Take it back")
    assert page.evaluate(value) == "Once upon"


# ---- tasks

ASKED = {
    "embeddings": {"input": ["a b", "c", "d", "e", "f"]},
    "rerank": {"query": "who?", "documents": ["first text", "second text"], "top_n": 2},
    "classify": {"input": "Good."},
    "tags": {"input": "😀bcde ghij."},
    "answers": {"question": "where?", "context": "The 😀bc tail"},
    "fill-mask": {"input": "x [MASK] y [MASK]"},
    "translations": {"input": "3 May", "num_beams": 4, "alignment": True},
}
LABELS = {
    "embeddings": {"Texts": "\na b\nc\n\nd\ne\nf\n"},
    "rerank": {"Question": "who?", "Texts": "first text\nsecond text", "How many to show": "2"},
    "classify": {"Text": "Good."},
    "tags": {"Text": "😀bcde ghij."},
    "answers": {"Question": "where?", "Text": "The 😀bc tail"},
    "fill-mask": {"Text": "x [MASK] y [MASK]"},
    "translations": {"Text": "3 May", "Beams": "4"},
}
SHOWN = {
    "embeddings": ["Texts 1 and 2 are the most alike (0.97)", "vector of 3 numbers"],
    "rerank": ["second text\n0.875", "first text\n0.250"],
    "classify": ["label: 75 %", "label\n75 %", "other\n25 %"],
    "tags": ["Found 2 stretches", "text (label)\n98 %"],
    "answers": ["text\n90 %"],
    "fill-mask": ["Gap 2", "text\n75 %", "dawn\n13 %"],
    "translations": ["What it looked at"],
}


def do_task(page: Page, tab: str) -> None:
    page.click(f"#tab-{tab}")
    for label, value in LABELS[tab].items():
        fill(page, label, value)
    page.evaluate(f"{PANEL}.querySelector('form').requestSubmit()")
    page.wait(f"{PANEL}.querySelector('.result:not([hidden]) .summary')")


@pytest.mark.parametrize("tab", ASKED)
def test_a_task_sends_and_draws(tab: str, server: StandIn, open_page: Open, tmp_path: Path) -> None:
    server.answers = make_answers()
    page = open_page(tab)
    do_task(page, tab)
    model = "transformer-demo" if tab == "translations" else "bert-demo"
    assert server.bodies == [(f"/v1/{tab}", {"model": model, **ASKED[tab]})]
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


# ---- any width, either colours


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1200])
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


# ---- hostile text

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
    labels = {"completions": ["Text"], **{tab: list(fields) for tab, fields in LABELS.items()}}
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
    assert page.evaluate("document.querySelectorAll('img, style, iframe, [onerror], [onload]').length") == 1
    page.troubles = [trouble for trouble in page.troubles if "status of 400" not in trouble]


# ---- keys and errors


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
    "a parameter": ((422, {"error": {"message": "Too long.", "param": "input"}}), "Too long. (input)"),
    "no words": ((400, "nothing"), "The server refused this (400). Change it, then try again."),
    "a full queue": (
        (429, {"error": {"message": "full"}}),
        "The server is busy. Wait a moment, then try again.",
    ),
    "a fault": (
        (500, {"error": {"message": "out of memory"}}),
        "The server made a mistake: out of memory Try again; its log says more.",
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
        "Continue"
    ]
    server.models = []
    page = open_page()
    assert "no model that this page can use" in page.text()
    server.models = [{"id": "x", "capabilities": ["chat"]}]
    page.click("#again")
    page.wait(PANEL)


def test_the_files_hold_nothing_that_the_policy_forbids() -> None:
    for file in PAGE.iterdir():
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
