"""The state of one prompt while it is answered: its text, also where decoding fails or it is cancelled."""

from __future__ import annotations

import pytest

from planforge.runtime.decoding.sampling import Sampling
from planforge.runtime.generate.request import GenerationRequest
from planforge.runtime.generate.row import Row

from ...helpers.generation import LETTERS, TOKENIZER


def make_row(stop: str | None = None) -> Row:
    request = GenerationRequest(sampling=Sampling(), stop=stop)
    return Row(tokenizer=TOKENIZER, prompt=[0], cut=0, room=50, request=request, eos=(), number=0)


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
