"""How answers that call tools are written, whole and in chunks."""

from __future__ import annotations

from typing import Any

import pytest

from planforge.runtime.decoding.chunk import Chunk, Usage
from planforge.runtime.generate.generation import Generation, Timings
from planforge.runtime.generate.tools import ToolCall
from planforge.runtime.server.forms import ChatForm
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.text import byte_level

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level().to_str().encode())


def make_answer(text: str, *calls: ToolCall) -> Generation:
    return Generation(
        text=text,
        token_ids=(),
        finish_reason="eos",
        logprobs=(),
        timings=Timings(0, 0, 0),
        usage=Usage(1, 1),
        tool_calls=calls,
    )


def stream(form: ChatForm, answer: Generation) -> list[Any]:
    """Return the choices of an answer that comes three letters at a time."""
    pieces = [answer.text[i : i + 3] for i in range(0, len(answer.text), 3)]
    choices: list[Any] = []
    for piece in pieces:
        choices += form.write_chunk(0, Chunk(piece, (), (), (), None, Usage(1, 1)))
    return choices + form.write_end(0, answer)


def test_a_call_of_a_tool(tokenizer: Tokenizer) -> None:
    answer = make_answer(f"Let me see. {CALL}", ToolCall("look", '{"at": "sea"}'))
    form = ChatForm(tokenizer, logprobs=False, tools=True)
    choice = form.write_answer(0, answer)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see. "
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "look", "arguments": '{"at": "sea"}'}
    *parts, called, end = stream(form, answer)
    assert "".join(part["delta"]["content"] for part in parts) == "Let me see. "
    assert called["delta"]["tool_calls"][0]["function"] == call["function"]
    assert called["delta"]["tool_calls"][0]["index"] == 0
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")


def test_what_only_looks_like_a_call_is_text(tokenizer: Tokenizer) -> None:
    for text in ("1 < 2 and 3 > 2", '{"name": "nobody"}', "[1, 2]", "plain words", "", "  "):
        choices = stream(ChatForm(tokenizer, logprobs=False, tools=True), make_answer(text))
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert choices[-1]["finish_reason"] == "stop"
