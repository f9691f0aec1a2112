"""Contents that are lists of text parts, and conversations that are too long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.errors import InputError
from planforge.runtime.text.chat_turns import cut_chat, turns_of

from .helpers_chat import READ_PARTS, TEMPLATES, ours, witness
from .test_runtime_chat import chat_of, kinds, texts


@st.composite
def with_parts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation in turns whose contents are lists of text parts."""
    count = draw(st.sampled_from([1, 3]))
    parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3)
    return [{"role": ("user", "assistant")[i % 2], "content": draw(parts)} for i in range(count)]


@settings(deadline=None, max_examples=100)
@given(name=st.sampled_from(sorted(READ_PARTS)), kind=kinds, messages=with_parts())
def test_a_template_that_reads_parts_gets_them_as_in_transformers(
    name: str, kind: str, messages: list[dict[str, Any]]
) -> None:
    chat, reference = chat_of(READ_PARTS[name]), witness(kind, READ_PARTS[name])
    how: dict[str, Any] = {"return_dict": False, "add_generation_prompt": True}
    found = chat.encode(messages, ours(kind), parse_special=True)
    assert found == reference.apply_chat_template(messages, **how)
    sanitized = reference.apply_chat_template(messages, sanitize_control_tokens=True, **how)
    assert chat.encode(messages, ours(kind)) == sanitized


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(sorted(TEMPLATES)), kind=kinds, messages=with_parts())
def test_a_template_that_reads_texts_gets_the_parts_as_one(
    name: str, kind: str, messages: list[dict[str, Any]]
) -> None:
    joined = [
        {**message, "content": "".join(part["text"] for part in message["content"])} for message in messages
    ]
    reference = witness(kind, TEMPLATES[name])
    wanted = reference.apply_chat_template(
        joined, return_dict=False, add_generation_prompt=True, sanitize_control_tokens=True
    )
    assert chat_of(TEMPLATES[name]).encode(messages, ours(kind)) == wanted


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            [{"type": "image", "url": "x.png"}],
            r"\['content'\]\[0\] has the type 'image'; the model reads text",
        ),
        ([{"text": "x"}], r"\[0\] has the type None"),
        ([{"type": "text", "text": "x"}, "y"], r"\['content'\]\[1\] is str; a content's parts must be"),
        ([{"type": "text"}], r"\[0\]: 'text' must be a text, but is missing"),
        ([{"type": "text", "text": 3}], r"\[0\]: 'text' must be a text, but is int"),
    ],
)
def test_parts_that_are_no_texts_are_named(content: Any, words: str) -> None:
    for template in (TEMPLATES["chatml"], READ_PARTS["either"]):
        with pytest.raises(InputError, match=r"^messages\[0\].*" + words):
            chat_of(template).encode([{"role": "user", "content": content}], ours("byte_level"))


def said(*roles: str) -> list[dict[str, str]]:
    """Messages of one letter each, by turns a, b, c ..."""
    return [{"role": role, "content": chr(ord("a") + index)} for index, role in enumerate(roles)]


def test_turns_begin_with_a_users_message() -> None:
    messages = said("system", "user", "assistant", "user", "assistant", "tool", "assistant", "user")
    assert turns_of(messages) == [[1, 2], [3, 4, 5, 6], [7]]
    assert turns_of(said("assistant", "user", "user")) == [[0], [1], [2]]
    assert turns_of(said("system", "developer")) == []


LONG = said("system", "user", "assistant", "user", "assistant", "user", "assistant", "user")


@pytest.mark.parametrize(
    ("limit", "kept", "dropped"),
    [(8, "abcdefgh", 0), (7, "adefgh", 2), (6, "adefgh", 2), (5, "afgh", 4), (3, "ah", 6), (1, "ah", 6)],
)
def test_the_fewest_oldest_turns_are_dropped_and_never_the_system(
    limit: int, kept: str, dropped: int
) -> None:
    def encode(messages: Any) -> list[int]:
        return [ord(message["content"]) for message in messages]

    cut = cut_chat(LONG, encode, limit)
    assert "".join(map(chr, cut.tokens)) == kept
    assert (cut.dropped_messages, cut.dropped_tokens) == (dropped, dropped)


def test_a_conversation_without_a_user_is_left_as_it_is() -> None:
    cut = cut_chat(said("system"), lambda messages: [1, 2, 3], 1)
    assert (cut.tokens, cut.dropped_messages) == ([1, 2, 3], 0)
