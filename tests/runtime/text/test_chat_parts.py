"""Chats: contents of text parts, conversations that are too long, and what the checkpoint asks for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime import TextGenerator
from planforge.runtime.errors import ContextLengthError, InputError
from planforge.runtime.text.chat import cut_chat, split_turns

from ...helpers.chat import READ_PARTS, TEMPLATES, load_reference, ours
from ...helpers.chat_templates import PLAIN, chat_of, kinds, texts
from ...helpers.decoder_graph import CONTEXT
from ...helpers.generation import TOKENIZER, generator


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
    chat = chat_of(READ_PARTS[name])
    reference = load_reference(kind, READ_PARTS[name])
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
    reference = load_reference(kind, TEMPLATES[name])
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
    assert split_turns(messages) == [[1, 2], [3, 4, 5, 6], [7]]
    assert split_turns(said("assistant", "user", "user")) == [[0], [1], [2]]
    assert split_turns(said("system", "developer")) == []


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


def messages_of(*contents: str) -> list[dict[str, str]]:
    """A system's message, then a user's and answers in turns."""
    roles = ["system", *("user", "assistant") * len(contents)]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def tokens_of(messages: Any) -> list[int]:
    return chat_of(PLAIN).encode(messages, TOKENIZER)


def test_messages_are_counted() -> None:
    model, _ = generator("inplace", chat=chat_of(PLAIN))
    messages = messages_of("abc", "bd")
    assert model.count_tokens(messages) == len(tokens_of(messages)) == 7
    assert model.count_tokens("abc") == 3
    with pytest.raises(InputError, match="has no chat template"):
        generator("inplace")[0].count_tokens(messages)
    with pytest.raises(InputError, match="messages must be a list"):
        model.count_tokens(None)  # type: ignore[arg-type]


def test_a_chat_that_is_too_long_loses_its_oldest_turns(caplog: pytest.LogCaptureFixture) -> None:
    model, steps = generator("inplace", chat=chat_of(PLAIN))
    messages = messages_of("aa", *["bcd" * 4] * 6, "aab")
    kept = [messages[0], *messages[5:]]
    assert len(tokens_of(messages)) > CONTEXT - 10 >= len(tokens_of(kept))
    with caplog.at_level(logging.WARNING, "planforge"):
        answer = model.chat(messages, max_new_tokens=10, truncation="tail")
    assert steps.fed[0] == tokens_of(kept)
    assert answer.prompt_tokens_cut == len(tokens_of(messages)) - len(tokens_of(kept))
    assert [record.getMessage() for record in caplog.records] == [
        f"the conversation has {len(tokens_of(messages))} tokens; its 4 oldest messages were dropped,"
        f" {answer.prompt_tokens_cut} tokens"
    ]
    assert len(answer.token_ids) == 10
    short = model.chat(messages_of("aa", "b"), max_new_tokens=10, truncation="tail")
    assert short.prompt_tokens_cut == 0


def test_what_is_never_dropped_must_fit() -> None:
    model, steps = generator("inplace", chat=chat_of(PLAIN))
    messages = messages_of("a" * 10, "b", "c", "d" * CONTEXT)
    with pytest.raises(
        ContextLengthError, match=r"the last message and the system message have together .* Shorten"
    ):
        model.chat(messages, truncation="tail")
    with pytest.raises(ContextLengthError, match="drop its oldest turns by truncation='tail'"):
        model.chat(messages)
    assert not steps.fed
    nearly = messages_of("a" * 10, "b", "c", "d" * (CONTEXT - 14))
    assert model.chat(nearly, truncation="tail").finish_reason == "context"  # as without cutting


def with_checkpoint(**settings: Any) -> TextGenerator:
    model, _ = generator("inplace", chat=chat_of(PLAIN))
    defaults = replace(model.defaults, **settings)
    return TextGenerator(model.decoder, TOKENIZER, defaults, max_length=model.max_length, chat=chat_of(PLAIN))


SAMPLES: dict[str, Any] = {"temperature": 3.0, "top_k": 7, "repetition_penalty": 1.2}
HELLO = messages_of("abc", "bd")
WORDED = "abcjbdk"


def test_a_chat_is_sampled_as_the_checkpoint_says() -> None:
    model = with_checkpoint(do_sample=True, max_new_tokens=12, **SAMPLES)
    answer = model.chat(HELLO, seed=5)
    assert answer.token_ids == model.generate(WORDED, max_new_tokens=12, seed=5, **SAMPLES).token_ids
    assert answer.token_ids == model.generate(WORDED, generation="checkpoint", seed=5).token_ids
    assert answer.text == "".join(map(str, model.stream_chat(HELLO, seed=5)))
    plain = model.generate(WORDED)
    assert len(plain.token_ids) == CONTEXT - len(WORDED)  # the usual 64 are more than fit
    assert plain.token_ids == with_checkpoint().generate(WORDED).token_ids
    assert model.chat(HELLO, generation=None).token_ids == plain.token_ids


def test_options_that_are_given_win() -> None:
    model = with_checkpoint(do_sample=True, **SAMPLES)
    penalty = {"repetition_penalty": 1.2, "max_new_tokens": 9}
    assert (
        model.chat(HELLO, max_new_tokens=9, temperature=0).token_ids
        == model.generate(WORDED, **penalty).token_ids  # type: ignore[call-overload]
    )
    hot = {**SAMPLES, "top_k": None, "seed": 3, "max_new_tokens": 9}
    given = model.chat(HELLO, top_k=None, seed=3, max_new_tokens=9)
    assert given.token_ids == model.generate(WORDED, **hot).token_ids
    beams = model.chat(HELLO, num_beams=2, max_new_tokens=3)  # which draw no tokens
    wanted = model.generate(WORDED, num_beams=2, max_new_tokens=3, repetition_penalty=1.2)
    assert (beams.token_ids, beams.score) == (wanted.token_ids, wanted.score)
    with pytest.raises(InputError, match=r"temperature=3\.0 does not go with num_beams=2"):
        model.chat(HELLO, num_beams=2, temperature=3.0)


def test_a_checkpoints_beams_give_way_to_what_does_not_go_with_them() -> None:
    model = with_checkpoint(num_beams=3, length_penalty=0.5, early_stopping=True, max_new_tokens=6)
    wanted = model.generate(WORDED, num_beams=3, length_penalty=0.5, early_stopping=True, max_new_tokens=6)
    answer = model.chat(HELLO)
    assert (answer.token_ids, answer.score) == (wanted.token_ids, wanted.score)
    greedy = model.generate(WORDED, max_new_tokens=6)
    assert "".join(map(str, model.stream_chat(HELLO))) == greedy.text
    for options in ({"num_beams": 1}, {"temperature": 1.0, "top_k": 1}, {"seed": 0}, {"stop": "#"}):
        alone: Any = model.chat(HELLO, **options)
        assert (alone.token_ids, alone.score) == (greedy.token_ids, None)
    assert model.generate(WORDED, max_new_tokens=6).score is None


@pytest.mark.parametrize("option", ["progress", "batch_size"])
def test_one_answer_takes_no_option_of_several(option: str) -> None:
    model, steps = generator("inplace", chat=chat_of(PLAIN))
    calls: list[Any] = [model.stream, model.chat, model.stream_chat]
    for call, asked in zip(calls, ("abc", HELLO, HELLO), strict=True):
        with pytest.raises(InputError, match=f"unknown option '{option}'"):
            call(asked, **{option: 1})
    assert not steps.fed


def test_what_a_checkpoint_does_not_mean_to_sample_is_greedy() -> None:
    model = with_checkpoint(do_sample=False, temperature=3.0, top_k=7)
    assert model.chat(HELLO).token_ids == model.generate(WORDED).token_ids


def test_the_log_tells_once_what_the_checkpoint_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    model = with_checkpoint(do_sample=True, **SAMPLES)
    with caplog.at_level(logging.INFO, "planforge"):
        model.generate("abc", max_new_tokens=1)
        assert not caplog.records
        for _ in range(2):
            model.chat(HELLO, top_k=2, max_new_tokens=1)
        with_checkpoint().chat(HELLO, max_new_tokens=1)
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[1] for line in told] == [
        "temperature=3.0, top_k=2, repetition_penalty=1.2, max_new_tokens=1",
        "greedy, max_new_tokens=1",
    ]
