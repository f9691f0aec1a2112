"""The chat and the text that goes on: they stream, stop, are edited; all by keyboard too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .....helpers.page import PANEL, TABS, Open, ask, fill, press_button, wait_for_text
from .....helpers.page_answers import make_answers
from .....helpers.page_server import END, StandIn


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
        ("End", TABS[-1]),
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
                "max_tokens": 64,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
    ]
    press_button(page, "Take it back")
    assert page.evaluate(value) == "Once upon"
