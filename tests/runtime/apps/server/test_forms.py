"""How answers are written, whole and in chunks: the calls of tools that they have, and their tokens."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from planforge.runtime.apps.server import call_splitter
from planforge.runtime.apps.server.forms import ChatForm, CompletionForm
from planforge.runtime.apps.server.json_text import encode_json
from planforge.runtime.decoding.chunk import Chunk, TopLogprob, Usage
from planforge.runtime.generate.generation import Generation, Timings
from planforge.runtime.generate.tools import read_tools
from planforge.runtime.text.tokenizer import Tokenizer

from ....helpers.text import END, KINDS, byte_level, tiny

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
BARE = '{"name": "look", "parameters": {"at": "sea"}}'
WRITTEN = json.dumps({"name": "look", "arguments": '{"at": "sea"}'})  # arguments as in OpenAI's API
NO_OBJECT = json.dumps({"name": "look", "arguments": "[1]"})
NAMES = ["look", "now"]
TOOLS = read_tools([{"type": "function", "function": {"name": name}} for name in NAMES], "auto")
MARKS = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]


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
    return [choice for chunk in chunks for choice in to_builtins(form.write_chunk(0, chunk))]


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
        (f"Now. {CALL.replace('sea', '</tool_call> <tool_call>')} That is all.", "Now.  That is all.", 1),
        (f"Now. <|tool_call|>[{BARE}]<|/tool_call|>", "Now. ", 1),
        ('See <function_calls>look(at="</function_calls>")</function_calls>', "See ", 1),
        (f"{BARE}; {BARE}", None, 2),
        ('[TOOL_CALLS]look[ARGS]{"at": "sea"}', None, 1),
        (f"  {BARE}", None, 1),
        (f"[{BARE}, {BARE}]", None, 2),
        (f"[TOOL_CALLS] [{BARE}]", None, 1),
        (f"<|python_tag|>{BARE}", None, 1),
        (BARE.replace("sea", "<tool_call>"), None, 1),
        (f"Use <tool_call> tags.\n{CALL}", "Use <tool_call> tags.\n", 1),  # such a mark is text
        (f"<tool_call></tool_call>{CALL} Not <tool_call>x.", "<tool_call></tool_call> Not <tool_call>x.", 1),
        (f"<function_calls> or <|tool_call|>: {CALL}", "<function_calls> or <|tool_call|>: ", 1),
        ("<function_calls> (say).<function_calls>\nlook(at='sea')", "<function_calls> (say).", 1),
        (f"<tool_call>{WRITTEN}</tool_call>", None, 1),
        (f"{WRITTEN}; {BARE}", None, 2),
        ('look {"at": "sea"}\nlook[ARGS]{"at": "sea"}', None, 2),
        ('lookoutlook12{"at": "sea"}', None, 1),  # with an id
        ('look[CALL_ID]a1B2[ARGS]{"at": "sea"}', None, 1),
    ],
)
def test_calls_of_tools(tokenizer: Tokenizer, text: str, content: str | None, calls: int) -> None:
    answer = make_answer(text)
    choice: Any = to_builtins(ChatForm(tokenizer, logprobs=False, tools=NAMES).write_answer(0, answer))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == content
    assert [call["type"] for call in choice["message"]["tool_calls"]] == ["function"] * calls
    for call in choice["message"]["tool_calls"]:
        assert call["id"].startswith("call_")
        assert call["function"]["name"] == "look"
        assert json.loads(call["function"]["arguments"])["at"] in text
    for size in range(1, len(text) + 1):
        form = ChatForm(tokenizer, logprobs=False, tools=NAMES)
        parts = stream(form, text, size)
        *texts, called, end = to_builtins(form.write_end(0, answer))
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
        ("loo", "loo"),
        ("look at it", ""),
        ("look[1] {2}", ""),
        ("lookout, now", ""),
        ("lookouts", "lookouts"),  # with a part of an id
        ("look {at}", "look {at}"),
        ("now and then", ""),
        ("[]" + BARE, ""),
        (";" + BARE, ""),
        ("See <tool_call>nothing</tool_call>.", "<tool_call>nothing</tool_call>."),
        ('{"name": "nobody"}', '{"name": "nobody"}'),
        (WRITTEN.replace("sea", "\t"), WRITTEN.replace("sea", "\t")),
        (f"<tool_call>{NO_OBJECT}", f"<tool_call>{NO_OBJECT}"),
        ("Use <tool_call> tags.", "<tool_call> tags."),
        ("  ", "  "),
        ("", ""),
    ],
)
def test_what_only_looks_like_a_call_is_text(tokenizer: Tokenizer, text: str, late: str) -> None:
    """It streams as it comes, but for what is `late`: that could still have become a call."""
    for size in range(1, len(text) + 2):
        form = ChatForm(tokenizer, logprobs=False, tools=NAMES)
        assert join_text(stream(form, text, size)) == text.removesuffix(late)
        end = to_builtins(form.write_end(0, make_answer(text)))
        assert join_text(end) == late
        assert end[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("number", ["", "a1B2c3D4e"])
def test_mistrals_marks_that_tokenizers_leave_out(number: str) -> None:
    """tokenizers says what the text of the tokens is."""
    raw = byte_level()
    raw.add_special_tokens(MARKS)
    call = f'[TOOL_CALLS]look{number and "[CALL_ID]" + number}[ARGS]{{"at": "sea"}}'
    ids = raw.encode(call + call).ids
    text = raw.decode(ids, skip_special_tokens=True)
    assert not any(mark in text for mark in MARKS)
    tokenizer = Tokenizer(raw.to_str().encode())
    answer = make_answer(text)
    called = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    assert called == [("look", {"at": "sea"})] * 2
    form = ChatForm(tokenizer, logprobs=False, tools=NAMES)
    assert stream(form, text, 5) == []
    choice, end = to_builtins(form.write_end(0, answer))
    assert len(choice["delta"]["tool_calls"]) == 2 and end["finish_reason"] == "tool_calls"


CALLS = [
    CALL,
    BARE,
    WRITTEN,
    f"[{BARE}]",
    *(f'look{mark}{{"at": "sea"}}' for mark in ("", " ", "[ARGS]", "a1B2c3D4e")),
]
PARTS = [*NAMES, *MARKS, CALL, BARE, "<tool_call>", "</tool_call>", "<function_calls>", "</function_calls>"]
PARTS += [
    "<|python_tag|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "look(at='sea')",
    '{"at": "sea"}',
    "[",
    "]",
    "{}",
]
PARTS += ["a1B2c3D4e", ";", " ", "\n", "a", "1", "<", ",", "#", "'", '"']


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(st.one_of(st.sampled_from(CALLS), st.sampled_from(PARTS)), max_size=5),
    size=st.integers(1, 12),
)
def test_streams_have_the_text_and_calls_of_whole_answers(
    tokenizer: Tokenizer, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    answer = make_answer(text)
    whole = to_builtins(ChatForm(tokenizer, logprobs=False, tools=NAMES).write_answer(0, answer))["message"]
    form = ChatForm(tokenizer, logprobs=False, tools=NAMES)
    choices = [*stream(form, text, size), *to_builtins(form.write_end(0, answer))]
    assert join_text(choices) == (whole["content"] or "")
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [call["function"] for call in whole.get("tool_calls", ())]


def test_a_long_call_is_not_read_again_with_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    judge = call_splitter.judge_beginning

    def count(text: str, names: Collection[str]) -> bool | None:
        judged.append(len(text))
        return judge(text, names)

    monkeypatch.setattr(call_splitter, "judge_beginning", count)
    for text in (BARE.replace("sea", "sea" * 3000), " \n" * 3000 + "no", "a" + "<" * 3000, CALL * 100):
        splitter = call_splitter.CallSplitter(NAMES)
        judged.clear()
        for letter in text:
            splitter.push(letter)
            assert sum(map(len, splitter._held)) < 20 or splitter._calls or splitter._begins
        assert sum(judged) < 3 * len(text)


@pytest.mark.parametrize(
    ("text", "city"),
    [
        ('{"name": "look", "arguments": {"at": "\\ud83d"}}', "\ud83d"),
        ('<tool_call>{"name": "look", "arguments": {"at": "é\\udE00"}}</tool_call>', "é\ude00"),
        ('look{"at": "\\ud83d\\ude00"}', "😀"),
        ("<function_calls>look(at='\\ud83d')</function_calls>", "\ud83d"),
        ("<function_calls>look(at='\\ud83d\\ude00')</function_calls>", "😀"),
    ],
)
def test_half_a_surrogate_pair_is_escaped(tokenizer: Tokenizer, text: str, city: str) -> None:
    answer = make_answer(text)
    whole = json.loads(encode_json(ChatForm(tokenizer, logprobs=False, tools=NAMES).write_answer(0, answer)))
    (call,) = whole["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": city}
    assert ("é" in call["function"]["arguments"]) == ("é" in city)
    (called, _) = json.loads(
        encode_json(ChatForm(tokenizer, logprobs=False, tools=NAMES).write_end(0, answer))
    )
    assert called["delta"]["tool_calls"][0]["function"] == call["function"]


def test_without_tools_nothing_is_held_back(tokenizer: Tokenizer) -> None:
    form = ChatForm(tokenizer, logprobs=False)
    assert join_text(stream(form, BARE, 3)) == BARE
    assert len(form.write_end(0, replace(make_answer(BARE), tool_calls=()))) == 1


def make_spelled(tokenizer: Tokenizer, pieces: list[str], text: str) -> Generation:
    """Return an answer of these tokens, each with itself and the first one as the likeliest."""
    ids = [tokenizer.find_id(piece) for piece in pieces]
    assert None not in ids
    tokens = tuple(int(token or 0) for token in ids)
    likeliest = tuple(
        tuple(
            TopLogprob(token_id=one, text="", logprob=-float(n))
            for n, one in enumerate({token: 0, tokens[0]: 0})
        )
        for token in tokens
    )
    logprobs = tuple(-float(number) for number in range(len(tokens)))
    return replace(make_answer(text), token_ids=tokens, logprobs=logprobs, top_logprobs=likeliest)


def list_chunks(tokenizer: Tokenizer, answer: Generation) -> list[Chunk]:
    """Return an answer's chunks, of a token each."""
    decoder = tokenizer.stream()
    left = answer.text
    chunks = []
    for number, token in enumerate(answer.token_ids):
        is_last = number == len(answer.token_ids) - 1
        text = decoder.push(token) + (decoder.finish() if is_last else "")
        shown = text if left.startswith(text) else ""  # a stop string's is held back
        left = left.removeprefix(shown)
        one = slice(number, number + 1)
        reason = answer.finish_reason if is_last else None
        chunks.append(
            Chunk(
                shown, (token,), answer.logprobs[one], answer.top_logprobs[one], reason, Usage(1, number + 1)
            )
        )
    assert left == ""
    return chunks


@pytest.mark.parametrize(
    ("pieces", "text", "tokens", "offsets"),
    [
        (["a", "Ã", "©", "!"], "aé!", ["a", r"bytes:\xc3", r"bytes:\xa9", "!"], [0, 1, 1, 2]),
        (["a", "b", "c", "d"], "ab", ["a", "b", "c", "d"], [0, 1, 2, 2]),  # "cd" stopped it
        (["a", "Ã"], "a\ufffd", ["a", r"bytes:\xc3"], [0, 1]),
        (["日本", END], "日本", ["日本", END], [0, 2]),
    ],
)
def test_a_completions_tokens_have_their_places_in_its_text(
    tokenizer: Tokenizer, pieces: list[str], text: str, tokens: list[str], offsets: list[int]
) -> None:
    answer = make_spelled(tokenizer, pieces, text)
    whole = CompletionForm(tokenizer, logprobs=True).write_answer(0, answer)
    logprobs: Any = to_builtins(whole.logprobs)
    assert (logprobs["tokens"], logprobs["text_offset"]) == (tokens, offsets)
    assert max(offsets) <= len(text)
    assert logprobs["token_logprobs"] == list(answer.logprobs)
    assert [set(top) for top in logprobs["top_logprobs"]] == [{token, tokens[0]} for token in tokens]
    form = CompletionForm(tokenizer, logprobs=True)
    parts: list[Any] = [
        to_builtins(choice)
        for chunk in list_chunks(tokenizer, answer)
        for choice in form.write_chunk(0, chunk)
    ]
    assert "".join(part["text"] for part in parts) == text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [entry for part in parts for entry in part["logprobs"][name] or []]
        assert streamed == logprobs[name]
    end = 0
    for part in parts[:-1]:  # each has the tokens of its own text
        end += len(part["text"])
        assert all(offset < end for offset in part["logprobs"]["text_offset"])


def test_a_chats_tokens_have_their_bytes(tokenizer: Tokenizer) -> None:
    answer = make_spelled(tokenizer, ["a", "Ã", "©"], "aé")
    choice = ChatForm(tokenizer, logprobs=True).write_answer(0, answer)
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert [one.token for one in content] == ["a", r"\xc3", r"\xa9"]
    assert bytes(byte for one in content for byte in one.bytes).decode() == "aé"
    assert [top.token for top in content[2].top_logprobs] == [r"\xa9", "a"]


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("word_ends", "words")])
def test_tokens_joined_are_the_text(kind: str, continues: bool) -> None:
    """Of a tokenizer of each kind; tokenizers says what the text is."""
    tokenizer = tiny(kind)
    context = tokenizer.find_context(tokenizer.encode("ab")) if continues else []
    ids = tokenizer.encode("ab abab" if kind == "wordpiece" else "ab a b")
    text = tokenizer.decode([*context, *ids]).removeprefix(tokenizer.decode(context))
    answer = replace(make_answer(text), token_ids=tuple(ids), logprobs=(-1.0,) * len(ids))
    chat = ChatForm(tokenizer, logprobs=True)
    completion = CompletionForm(tokenizer, logprobs=True)
    chat.continues = completion.continues = [continues]
    content = chat.write_answer(0, answer).logprobs
    tokens = completion.write_answer(0, answer).logprobs
    assert content is not None
    assert tokens is not None
    assert bytes(byte for one in content.content for byte in one.bytes).decode() == text
    assert "".join(tokens.tokens) == text


@pytest.mark.parametrize(
    ("continues", "chosen", "keys"),
    [
        (True, "▁a", [" a", "a", "ab"]),
        (False, "▁a", ["a", "token_id:3", "ab"]),
        (False, "a", ["▁a", "a", "ab"]),
        (False, "ab", ["a", "token_id:3", "ab"]),
    ],
)
def test_likely_tokens_that_read_alike_are_told_apart(continues: bool, chosen: str, keys: list[str]) -> None:
    """Of three likely tokens two read alike at the beginning of a text; what was chosen keeps its text."""
    tokenizer = tiny("metaspace")
    ids = [tokenizer.find_id(piece) or 0 for piece in ("▁a", "a", "ab")]
    top = tuple(TopLogprob(token_id=token, text="", logprob=-float(n)) for n, token in enumerate(ids))
    token = tokenizer.find_id(chosen) or 0
    own = -float(ids.index(token))
    answer = replace(make_answer("a"), token_ids=(token,), logprobs=(own,), top_logprobs=(top,))
    form = CompletionForm(tokenizer, logprobs=True)
    form.continues = [continues]
    logprobs = form.write_answer(0, answer).logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{key: -float(n) for n, key in enumerate(keys)}]
    assert logprobs.top_logprobs[0][logprobs.tokens[0]] == own
