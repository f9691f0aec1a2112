"""The state of one prompt while it is answered: its text, also where decoding fails or it is cancelled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StopStringCriteria

from planforge.runtime.decoding.candidates import Chosen
from planforge.runtime.decoding.sampling import Sampling
from planforge.runtime.generate.request import GenerationRequest
from planforge.runtime.generate.row import Row
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.chat import KINDS, SPECIAL, load_reference, ours
from ...helpers.generation import LETTERS, TOKENIZER

PIECES = ["<|im_start|>", "<|im_end|>", "</s>", "a", "<", "i", "|", "im", "\n", " ", "é"]


def make_row(stop: str | Sequence[str] | None = None, tokenizer: Tokenizer = TOKENIZER) -> Row:
    request = GenerationRequest(sampling=Sampling(), stop=stop)
    return Row(tokenizer=tokenizer, prompt=[0], cut=0, room=50, request=request, eos=(), number=0)


def test_text_is_shown_once_though_an_exception_ends_its_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    row = make_row()
    row.token_ids += [0, 1, 2, 3]
    push = row.stream.push

    def fail_at_c(token: int) -> str:
        if LETTERS[token] == "c":
            raise ZeroDivisionError
        return push(token)

    monkeypatch.setattr(row.stream, "push", fail_at_c)
    with pytest.raises(ZeroDivisionError):
        row.make_chunk()
    assert row.make_chunk().text == "abd"


@pytest.mark.parametrize(("held", "text"), [("b", "a"), ("c", "ac")])
def test_a_cancelled_row_says_so_also_where_what_was_held_back_completes_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, held: str, text: str
) -> None:
    row = make_row(stop="b")
    row.token_ids.append(0)
    monkeypatch.setattr(row.stream, "finish", lambda: held)
    row.cancel()
    chunk = row.make_chunk()
    assert (chunk.text, chunk.finish_reason, row.stop.found) == (
        text,
        "cancelled",
        "b" if held == "b" else None,
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(
    written=st.lists(st.sampled_from(PIECES), min_size=1, max_size=8),
    cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 15)), min_size=1, max_size=2),
)
def test_an_answer_ends_where_transformers_ends_it(
    kind: str, written: list[str], cuts: list[tuple[int, int]]
) -> None:
    """Special tokens in stop strings, whole and in part, alone and between plain text."""
    tokenizer = ours(kind)
    ids = [token for piece in written for token in tokenizer.encode(piece, parse_special=True)]
    text = load_reference(kind).decode(ids)
    stops = [text[start : start + length] or "<|im" for start, length in cuts]
    criterion = StopStringCriteria(load_reference(kind), stops)
    ends = [n for n in range(1, len(ids) + 1) if criterion(torch.tensor([ids[:n]]), torch.empty(0)).item()]
    row = make_row(stops, tokenizer)
    for token in ids:
        if row.finish_reason is None:
            row.take(Chosen(tokens=[token], logprobs=None), 0)
    assert len(row.token_ids) == (ends[0] if ends else len(ids))
    assert (row.finish_reason == "stop") == bool(ends)
    shown = "".join(row.pieces)
    assert not any(token in shown for token in SPECIAL)
