"""What a scheduler is set to: the queue and its clients, shared prompts, a smaller context."""

from __future__ import annotations

from typing import Any

import pytest

from planforge.runtime.errors import ContextLengthError, InputError

from ...helpers.decoder_graph import CONTEXT
from ...helpers.gate import gated
from ...helpers.generation import generator
from ...helpers.patience import PATIENCE


@pytest.mark.parametrize(("divided", "places"), [(False, 5), (True, 3)])
def test_a_client_may_submit_as_many_at_once_as_are_counted(divided: bool, places: int) -> None:
    """Those that start at once need no place in the queue; a divided queue keeps places for others."""
    with gated(running=2, queue_size=3, divide_queue=divided) as (model, _):
        assert model.count_places() == places
        for _ in range(places):
            model.submit("abc", max_new_tokens=1, client="one")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2 does not go with submit"),
        ({"speculative": "prompt-lookup"}, "speculative='prompt-lookup' does not go with submit"),
        ({"reuse_prompt": True}, "reuse_prompt=True does not go with submit"),
        ({"on_token": print}, "on_token=.* does not go with submit"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"temprature": 1}, "unknown option 'temprature'"),
    ],
)
def test_what_a_submitted_request_cannot_have_is_refused_at_the_call(
    options: dict[str, Any], message: str
) -> None:
    with generator("inplace")[0] as model, pytest.raises(InputError, match=message):
        model.submit("abc", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"running": 0}, "running=0 must be an integer from 1 to 8"),
        ({"context": CONTEXT + 1}, f"context={CONTEXT + 1} must be an integer from 2 to {CONTEXT}"),
        ({"prefix_memory": -1}, "prefix_memory=-1"),
        ({"queue_size": 0}, "queue_size=0"),
        ({"share_prompts": "no"}, "share_prompts='no' must be True or False"),
        ({"divide_queue": 1}, "divide_queue=1 must be True or False"),
        ({"runing": 2}, "did you mean 'running'"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with generator("inplace")[0] as model, pytest.raises(InputError, match=message):
        model.schedule(**options)


def test_settings_come_before_the_first_request() -> None:
    with generator("inplace")[0] as model:
        model.submit("abc", max_new_tokens=1).result(PATIENCE)
        with pytest.raises(InputError, match="before the first submit"):
            model.schedule(running=2)


def test_a_smaller_context_counts_for_prompts_too() -> None:
    with generator("inplace")[0] as model:
        model.schedule(context=10)
        with pytest.raises(ContextLengthError, match="the context holds 10"):
            model.submit("abcdefghijk")
        answer = model.submit("abcdefgh", max_new_tokens=50).result(PATIENCE)
        assert (len(answer.token_ids), answer.finish_reason) == (2, "context")


def test_a_refused_request_leaves_the_settings_open() -> None:
    with generator("inplace")[0] as model:
        with pytest.raises(InputError):
            model.submit("")
        model.schedule(running=2)
        assert len(model.submit("abc", max_new_tokens=2).result(PATIENCE).token_ids) == 2
