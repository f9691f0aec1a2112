"""How requests that are submitted share a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypedDict

Observer: TypeAlias = Callable[[str, float], None]
"""Gets the name of a measure and its value; called in the engine's thread, so it must return at once."""


def observe_nothing(measure: str, value: float) -> None:
    """Take no measures."""


class ScheduleOptions(TypedDict, total=False):
    """How requests that were submitted share a model; see `TextGenerator.submit`.

    Attributes:
        running: the most requests that are answered at a time; 8, or as many as the bundle allows. With a
            memory_limit fewer, where their caches do not fit.
        context: tokens of a request, prompt and answer; the model's unless given. Each running request may
            take the memory of so many.
        prefix_memory: bytes for the keys and values that earlier requests computed, for later ones that begin
            alike: a chat that goes on, instructions that many share. 256 MB unless given; what was unused for
            the longest time makes room. Rows of `context` tokens are kept, as many as fit.
        queue_size: the most requests that wait; further ones are refused. 128 unless given.
        share_prompts: whether a request may use what another client's computed; unless given it may. If not,
            no client learns from how soon its answer begins what another one asked.
        divide_queue: whether a client may have only as many requests waiting as places are left for others,
            so that none fills the queue; unless given it may fill it.
        observe: called with measures: "first_token" (seconds since the request was submitted),
            "between_tokens" (seconds), "batch" (requests in a step), "prompt" and "reused" (tokens of a
            prompt, and how many of them were computed before), "context" (tokens of a request that ended).
    """

    running: int
    context: int
    prefix_memory: int
    queue_size: int
    share_prompts: bool
    divide_queue: bool
    observe: Observer
