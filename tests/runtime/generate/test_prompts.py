"""What counts as a prompt, and how its tokens are counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from planforge.runtime import Generation, InputError

from ...helpers.generation import TOKENIZER, generator, joined

IDS = TOKENIZER.encode("abc")


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": lambda ids: tuple(np.int64(token) for token in ids),
    **{name: partial(np.asarray, dtype=name) for name in ("int64", "int32", "uint8")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_are_a_prompt(kind: str) -> None:
    model, _ = generator("inplace")
    ids = KINDS[kind](IDS)
    wanted = model.generate("abc", max_new_tokens=4)
    found = model.generate(ids, max_new_tokens=4)
    assert isinstance(found, Generation) and found.token_ids == wanted.token_ids
    several = model.generate([ids, "abc", ids[:2]], max_new_tokens=4)
    assert [answer.usage.prompt_tokens for answer in several] == [3, 3, 2]
    assert several[0].token_ids == several[1].token_ids == wanted.token_ids
    assert joined(model.stream(ids, max_new_tokens=4)) == wanted.text
    (iterated,) = model.iterate(iter([ids]), max_new_tokens=4)
    assert iterated.token_ids == wanted.token_ids
    assert model.score(ids) == model.score("abc")


@pytest.mark.parametrize(
    ("prompt", "words"), [(None, "a prompt must be a str or"), (["abc"], "integers, not str")]
)
def test_a_stream_has_one_prompt(prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        generator("inplace")[0].stream(prompt)


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.int64), np.zeros(3), np.array(3), np.array(["a"])])
def test_another_array_is_no_prompt(array: Any) -> None:
    model, steps = generator("inplace")
    with pytest.raises(InputError, match=r"an array of shape .* is not a prompt, which must have one axis"):
        model.generate(array)
    with pytest.raises(InputError, match="the prompt is empty"):
        model.generate(np.zeros(0, np.int64))
    assert not steps.fed


def test_a_tuple_of_two_texts_is_not_taken_for_two_prompts() -> None:
    model, steps = generator("inplace")
    for call in (model.generate, model.iterate):
        with pytest.raises(InputError, match=r"could be a pair or two texts; two texts: \[a, b\]"):
            call(("a", "b"))
    assert not steps.fed
    assert len(model.generate((IDS, "b"), max_new_tokens=1)) == 2


def test_the_tokens_that_are_counted_are_those_that_the_model_reads() -> None:
    for prefix in ((), (5,)):
        model, _ = generator("inplace", prefix=prefix)
        answer = model.generate("abc", max_new_tokens=1)
        assert model.count_tokens("abc") == answer.usage.prompt_tokens == 3 + len(prefix)
