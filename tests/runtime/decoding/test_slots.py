"""Rows that requests share: what each computes is what it would compute alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.decoding.decoder import Decoder
from planforge.runtime.decoding.slots import MIN_KEPT, RequestSlot, RequestSlots, SharedSlots, make_slots

from ...helpers.decoder_graph import CONTEXT, V, artifact, assert_close, expected
from ...helpers.fake_program import FakeProgram
from ...helpers.generation import DIALECTS, GRAPHS

RUNNING = 3


@dataclass
class Taken:
    """A slot, and the tokens that were given to it or are still to be."""

    slot: RequestSlot
    prompt: list[int]
    given: list[int] = field(default_factory=list)

    @property
    def is_started(self) -> bool:
        return len(self.given) >= len(self.prompt)


def make(dialect: str, kept: int, running: int = RUNNING) -> RequestSlots:
    decoder = Decoder(FakeProgram(GRAPHS[dialect]), artifact(dialect))
    return make_slots(decoder, running, kept, CONTEXT)


def long_prompt(start: int, length: int = MIN_KEPT) -> list[int]:
    return [(start * 3 + i * i) % V for i in range(length)]


prompts = st.builds(
    lambda start, length, end: [*long_prompt(start, length), *end],
    st.integers(0, 3),
    st.integers(0, 40),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=6),
)
moves = st.one_of(
    st.tuples(st.just("take"), prompts),
    st.tuples(st.just("prefill"), st.integers(1, 20)),
    st.tuples(st.just("decode"), st.lists(st.integers(0, V - 1), min_size=RUNNING, max_size=RUNNING)),
    st.tuples(st.just("leave"), st.integers(0, RUNNING - 1)),
)


@settings(deadline=None, max_examples=150)
@given(
    dialect=st.sampled_from(DIALECTS), kept=st.integers(0, 2), moves=st.lists(moves, min_size=5, max_size=40)
)
def test_every_request_computes_what_it_would_alone(
    dialect: str, kept: int, moves: list[tuple[str, object]]
) -> None:
    slots = make(dialect, kept)
    taken: list[Taken] = []
    for move, argument in moves:
        if move == "take":
            assert isinstance(argument, list)
            got = slots.acquire(argument)
            assert (got is None) == (len(taken) == RUNNING)
            if got is not None:
                slot, held = got
                assert held < len(argument)
                taken.append(Taken(slot, argument, argument[:held]))
        elif move == "prefill":
            assert isinstance(argument, int)
            for one in taken:
                piece = one.prompt[len(one.given) : len(one.given) + argument]
                if piece:
                    scores = slots.prefill(one.slot, piece)
                    one.given += piece
                    assert_close(scores, expected(one.given)[-1:])
                    break
        elif move == "decode":
            assert isinstance(argument, list)
            going = [one for one in taken if one.is_started and len(one.given) < CONTEXT]
            if going:
                tokens = argument[: len(going)]
                scores = slots.decode([one.slot for one in going], tokens)
                for one, token in zip(going, tokens, strict=True):
                    one.given.append(token)
                assert_close(scores, np.stack([expected(one.given)[-1] for one in going]))
        elif taken:
            assert isinstance(argument, int)
            slots.release(taken.pop(argument % len(taken)).slot)


@pytest.mark.parametrize("dialect", ["inplace", "ort"])
def test_a_prompt_that_begins_like_a_running_or_an_ended_one_is_not_computed_again(dialect: str) -> None:
    slots = make(dialect, kept=2)
    shared = long_prompt(1)
    first, held = slots.acquire([*shared, 1]) or pytest.fail("no slot")
    assert held == 0
    slots.prefill(first, [*shared, 1])
    second, held = slots.acquire([*shared, 2]) or pytest.fail("no slot")  # while the first one runs
    assert held == len(shared)
    slots.prefill(second, [2])
    slots.release(first)
    slots.release(second)
    third, held = slots.acquire([*shared, 2, 3]) or pytest.fail("no slot")
    assert held == len(shared) + 1
    assert_close(slots.prefill(third, [3]), expected([*shared, 2, 3])[-1:])


def test_what_a_scope_computed_is_its_own() -> None:
    """A prompt of another scope begins anew, and takes nothing from the first scope that it could keep."""
    slots = make("inplace", kept=2, running=2)
    shared = long_prompt(1)
    for scope, held in (("a", 0), ("b", 0), ("a", len(shared)), ("", 0), ("b", len(shared))):
        slot, found = slots.acquire([*shared, 1], scope) or pytest.fail("no slot")
        assert found == held
        scores = slots.prefill(slot, [*shared, 1][found:])
        assert_close(scores, expected([*shared, 1])[-1:])
        slots.release(slot)


@pytest.mark.parametrize(("running", "kept"), [(1, 2), (3, 0), (2, 1)])
@pytest.mark.parametrize(("asked", "held"), [(3, MIN_KEPT), (2, MIN_KEPT), (1, MIN_KEPT), (0, 0)])
def test_what_was_unused_for_the_longest_time_makes_room(
    running: int, kept: int, asked: int, held: int
) -> None:
    """Rows that no request has keep prompts too, so three rows keep three."""
    slots = make("inplace", kept, running)
    for start in (0, 1, 2, 3):
        slot, _ = slots.acquire([*long_prompt(start), start]) or pytest.fail("no slot")
        slots.prefill(slot, [*long_prompt(start), start])
        slots.decode([slot], [1])
        slots.release(slot)
    _, found = slots.acquire([*long_prompt(asked), 9]) or pytest.fail("no slot")
    assert found == held


def test_a_chat_survives_a_stranger_that_shares_its_instructions() -> None:
    """A request that shares a small part of what a free row holds copies it, and leaves the rest."""
    slots = make("inplace", kept=1, running=1)
    instructions = long_prompt(1, 20)
    chat = [*instructions, *long_prompt(2, 30)]
    for prompt in (chat, [*instructions, 5], [*chat, 7]):
        slot, held = slots.acquire(prompt) or pytest.fail("no slot")
        slots.prefill(slot, prompt[held:])
        slots.release(slot)
    assert held == len(chat)


def test_a_step_runs_no_more_rows_than_it_has_requests_once_some_have_ended() -> None:
    widths: list[int] = []

    def graph(given: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]) -> object:
        widths.append(len(given["input_ids"]))
        return GRAPHS["inplace"](given)

    slots = make_slots(Decoder(FakeProgram(graph), artifact("inplace")), RUNNING, 0, CONTEXT)  # type: ignore[arg-type]
    taken = []
    for start in range(RUNNING):
        slot, _ = slots.acquire(long_prompt(start)) or pytest.fail("no slot")
        slots.prefill(slot, long_prompt(start))
        taken.append(slot)
    slots.release(taken[0])
    widths.clear()
    scores = slots.decode(taken[1:], [1, 2])
    assert widths == [2]
    assert_close(scores, np.stack([expected([*long_prompt(start), start])[-1] for start in (1, 2)]))


def test_rows_that_reach_the_end_of_the_context_stay_right() -> None:
    slots = make("inplace", kept=1, running=2)
    full = long_prompt(0, CONTEXT)
    first, _ = slots.acquire(full) or pytest.fail("no slot")
    second, _ = slots.acquire([1, 2]) or pytest.fail("no slot")
    slots.prefill(first, full)
    slots.prefill(second, [1, 2])
    slots.release(first)
    assert_close(slots.decode([second], [3]), expected([1, 2, 3])[-1:])  # moves into the first one's row
    again, held = slots.acquire(full) or pytest.fail("no slot")
    assert held == CONTEXT - 1
    assert isinstance(slots, SharedSlots)
    assert_close(slots.prefill(again, full[held:]), expected(full)[-1:])
