"""Searches refuse options, prompts, logits and histories that are wrong, by name and with a way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planforge.runtime.decoding.beam import BeamSearch, Search
from planforge.runtime.decoding.constraints import Constraints, constrain
from planforge.runtime.errors import InputError

EOS = 0
PAD = 59
VOCABULARY = 60
MARIAN = Constraints(eos=(EOS,), suppressed=(PAD,))

BAD_SEARCHES: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 0}, "num_beams is 0; it must be an integer from 1; 1 searches greedily"),
    ({"num_beams": True}, "num_beams is True"),
    ({"num_beams": 2, "n_best": 3}, "n_best is 3; it must be at most num_beams, 2; lower it"),
    ({"n_best": 0}, "n_best is 0"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
    ({"early_stopping": "always"}, "early_stopping is 'always'; it must be True, False or 'never'"),
    ({"early_stopping": 1}, "early_stopping is 1"),
    ({"length_penalty": float("nan")}, "length_penalty is nan"),
    ({"length_penalty": "1"}, "length_penalty is '1'"),
    ({"length_penalty": True}, "length_penalty is True"),
    ({"length_penalty": -40, "max_new_tokens": 9}, r"length_penalty is -40; .* \(9 \*\* it\)"),
    ({"max_new_tokens": 2, "constraints": Constraints(eos=(), min_new_tokens=3)}, "min_new_tokens is 3"),
]
BAD_CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"eos": 0}, r"eos is 0; it must be a tuple of token ids; \(\) for none"),
    ({"eos": (-1,)}, "a token of eos is -1; it must be an integer from 0"),
    ({"suppressed": [1]}, r"suppressed is \[1\]"),
    ({"suppressed": ("a",)}, "a token of suppressed is 'a'"),
    ({"forced_bos": -1}, "forced_bos is -1; it must be an integer from 0; None forces nothing"),
    ({"forced_eos": True}, "forced_eos is True"),
    ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size is 0; .* from 1; None disables it"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1; .* 0 disables it"),
    ({"renormalize": 1}, "renormalize is 1; it must be True or False"),
]


def test_bad_options() -> None:
    for options, message in BAD_SEARCHES:
        with pytest.raises(InputError, match=f"^{message}"):
            Search(**{"constraints": MARIAN, **options})
    for options, message in BAD_CONSTRAINTS:
        with pytest.raises(InputError, match=f"^{message}"):
            Constraints(**{"eos": (EOS,), **options})


def test_bad_calls() -> None:
    search = Search(constraints=MARIAN, max_new_tokens=1)
    with pytest.raises(InputError, match="there are no prompts"):
        BeamSearch([], search)
    with pytest.raises(InputError, match="a prompt has no tokens"):
        BeamSearch([[PAD], []], search)
    for start in (-1, True, 1.0):
        with pytest.raises(InputError, match=f"a prompt's token is {start}; it must be an integer from 0"):
            BeamSearch([[PAD], [start]], search)  # type: ignore[list-item]
    beams = BeamSearch([[PAD]], search)
    logits = np.zeros((1, VOCABULARY), dtype=np.float32)
    for wrong in (logits[0], np.repeat(logits, 2, 0)):
        with pytest.raises(InputError, match=r"shape .* of 1 rows that is not done; give \(1, V\)"):
            beams.advance(wrong)
    with pytest.raises(InputError, match="the constraints name token 59, but the model's tokens are 0 to 40"):
        beams.advance(logits[:, :41])
    beams.advance(logits)
    with pytest.raises(InputError, match="that is done"):
        beams.advance(logits)
    wrong_histories: list[list[list[int]]] = [[], [[1], [1, 2]], [[], []]]
    for histories in wrong_histories:
        with pytest.raises(InputError, match=r"histories has \d rows of lengths .*; it must have 2 rows"):
            constrain(np.zeros((2, 60), np.float32), histories, MARIAN, 9)
