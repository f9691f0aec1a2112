"""How answers are written, whole and in chunks: the calls of tools that they have, and their tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planforge.runtime.decoding.chunk import Chunk, Usage
from planforge.runtime.generate.generation import Generation, Timings
from planforge.runtime.generate.tools import read_tools
from planforge.runtime.server.forms import ChatForm
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.text import byte_level

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
BARE = '{"name": "look", "parameters": {"at": "sea"}}'
TOOLS = read_tools([{"type": "function", "function": {"name": "look"}}], "auto")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level().to_str().encode())


def make_answer(text: str) -> Generation:
    assert TOOLS is not None
    return Generation(
        text=text,
        token_ids=(),
        finish_reason="eos",
        logprobs=(),
        timings=Timings(0, 0, 0),
        usage=Usage(1, 1),
        tool_calls=TOOLS.find_calls(text),
    )


def stream(form: ChatForm, text: str, size: int) -> list[Any]:
    """Return the choices of the chunks of an answer that comes some letters at a time."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    chunks = [Chunk(piece, (), (), (), None, Usage(1, 1)) for piece in pieces]
    return [choice for chunk in chunks for choice in form.write_chunk(0, chunk)]


def join_text(choices: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me see. {CALL}", "Let me see. ", 1),
        (f"See [1] now. {CALL}", "See [1] now. ", 1),
        (f"a < b. {CALL}\n{CALL}\n", "a < b. ", 2),
        (f"{CALL} That is {{all}}. {CALL}", " That is {all}. ", 2),
        (CALL.removesuffix("</tool_call>"), None, 1),
        (f"  {BARE}", None, 1),
        (f"[{BARE}, {BARE}]", None, 2),
        (f"[TOOL_CALLS] [{BARE}]", None, 1),
        (f"<|python_tag|>{BARE}", None, 1),
    ],
)
def test_calls_of_tools(tokenizer: Tokenizer, text: str, content: str | None, calls: int) -> None:
    answer = make_answer(text)
    choice = ChatForm(tokenizer, logprobs=False, tools=True).write_answer(0, answer)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == content
    assert [call["type"] for call in choice["message"]["tool_calls"]] == ["function"] * calls
    for call in choice["message"]["tool_calls"]:
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "look", "arguments": '{"at": "sea"}'}
    for size in range(1, len(text) + 1):
        form = ChatForm(tokenizer, logprobs=False, tools=True)
        parts = stream(form, text, size)
        *texts, called, end = form.write_end(0, answer)
        assert join_text([*parts, *texts]) == (content or "")
        for number, call in enumerate(called["delta"]["tool_calls"]):
            assert call["index"] == number
            assert call["function"] == choice["message"]["tool_calls"][number]["function"]
        assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("1 < 2 and 3 > 2", ""),
        ("The items are [1, 2] {3}.", ""),
        ("[1] says so", ""),
        ("<b>bold</b>, then <tool", "<tool"),
        ("<|python|>", ""),
        ("plain words", ""),
        ("See <tool_call>nothing</tool_call>.", "<tool_call>nothing</tool_call>."),
        ('{"name": "nobody"}', '{"name": "nobody"}'),
        ("  ", "  "),
        ("", ""),
    ],
)
def test_what_only_looks_like_a_call_is_text(tokenizer: Tokenizer, text: str, late: str) -> None:
    """It streams as it comes, but for what is `late`: that could still have become a call."""
    for size in range(1, len(text) + 2):
        form = ChatForm(tokenizer, logprobs=False, tools=True)
        assert join_text(stream(form, text, size)) == text.removesuffix(late)
        end = form.write_end(0, make_answer(text))
        assert join_text(end) == late
        assert end[-1]["finish_reason"] == "stop"


def test_without_tools_nothing_is_held_back(tokenizer: Tokenizer) -> None:
    form = ChatForm(tokenizer, logprobs=False)
    assert join_text(stream(form, BARE, 3)) == BARE
    assert len(form.write_end(0, replace(make_answer(BARE), tool_calls=()))) == 1
