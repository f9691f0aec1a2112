"""Rows that requests share: what each computes is what it would compute alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.decoding.decoder import Decoder
from planforge.runtime.decoding.seats import LEAST_KEPT, Seat, Seats, SharedSeats, make_seats

from ...helpers.decoder_graph import CONTEXT, V, artifact, assert_close, expected
from ...helpers.fake_program import FakeProgram
from ...helpers.generation import DIALECTS, GRAPHS

RUNNING = 3


@dataclass
class Taken:
    """A seat, and the tokens that were given to it or are still to be."""

    seat: Seat
    prompt: list[int]
    given: list[int] = field(default_factory=list)

    @property
    def is_started(self) -> bool:
        return len(self.given) >= len(self.prompt)


def make(dialect: str, kept: int, running: int = RUNNING) -> Seats:
    decoder = Decoder(FakeProgram(GRAPHS[dialect]), artifact(dialect))
    return make_seats(decoder, running, kept, CONTEXT)


def long_prompt(start: int, length: int = LEAST_KEPT) -> list[int]:
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
    seats = make(dialect, kept)
    taken: list[Taken] = []
    for move, argument in moves:
        if move == "take":
            assert isinstance(argument, list)
            got = seats.take(argument)
            assert (got is None) == (len(taken) == RUNNING)
            if got is not None:
                seat, held = got
                assert held < len(argument)
                taken.append(Taken(seat, argument, argument[:held]))
        elif move == "prefill":
            assert isinstance(argument, int)
            for one in taken:
                piece = one.prompt[len(one.given) : len(one.given) + argument]
                if piece:
                    scores = seats.prefill(one.seat, piece)
                    one.given += piece
                    assert_close(scores, expected(one.given)[-1:])
                    break
        elif move == "decode":
            assert isinstance(argument, list)
            going = [one for one in taken if one.is_started and len(one.given) < CONTEXT]
            if going:
                tokens = argument[: len(going)]
                scores = seats.decode([one.seat for one in going], tokens)
                for one, token in zip(going, tokens, strict=True):
                    one.given.append(token)
                assert_close(scores, np.stack([expected(one.given)[-1] for one in going]))
        elif taken:
            assert isinstance(argument, int)
            seats.leave(taken.pop(argument % len(taken)).seat)


@pytest.mark.parametrize("dialect", ["inplace", "ort"])
def test_a_prompt_that_begins_like_a_running_or_an_ended_one_is_not_computed_again(dialect: str) -> None:
    seats = make(dialect, kept=2)
    shared = long_prompt(1)
    first, held = seats.take([*shared, 1]) or pytest.fail("no seat")
    assert held == 0
    seats.prefill(first, [*shared, 1])
    second, held = seats.take([*shared, 2]) or pytest.fail("no seat")  # while the first one runs
    assert held == len(shared)
    seats.prefill(second, [2])
    seats.leave(first)
    seats.leave(second)
    third, held = seats.take([*shared, 2, 3]) or pytest.fail("no seat")
    assert held == len(shared) + 1
    assert_close(seats.prefill(third, [3]), expected([*shared, 2, 3])[-1:])


def test_what_a_scope_computed_is_its_own() -> None:
    """A prompt of another scope begins anew, and takes nothing from the first scope that it could keep."""
    seats = make("inplace", kept=2, running=2)
    shared = long_prompt(1)
    for scope, held in (("a", 0), ("b", 0), ("a", len(shared)), ("", 0), ("b", len(shared))):
        seat, found = seats.take([*shared, 1], scope) or pytest.fail("no seat")
        assert found == held
        scores = seats.prefill(seat, [*shared, 1][found:])
        assert_close(scores, expected([*shared, 1])[-1:])
        seats.leave(seat)


@pytest.mark.parametrize(("running", "kept"), [(1, 2), (3, 0), (2, 1)])
@pytest.mark.parametrize(("asked", "held"), [(3, LEAST_KEPT), (2, LEAST_KEPT), (1, LEAST_KEPT), (0, 0)])
def test_what_was_unused_for_the_longest_time_makes_room(
    running: int, kept: int, asked: int, held: int
) -> None:
    """Rows that no request has keep prompts too, so three rows keep three."""
    seats = make("inplace", kept, running)
    for start in (0, 1, 2, 3):
        seat, _ = seats.take([*long_prompt(start), start]) or pytest.fail("no seat")
        seats.prefill(seat, [*long_prompt(start), start])
        seats.decode([seat], [1])
        seats.leave(seat)
    _, found = seats.take([*long_prompt(asked), 9]) or pytest.fail("no seat")
    assert found == held


def test_a_chat_survives_a_stranger_that_shares_its_instructions() -> None:
    """A request that shares a small part of what a free row holds copies it, and leaves the rest."""
    seats = make("inplace", kept=1, running=1)
    instructions = long_prompt(1, 20)
    chat = [*instructions, *long_prompt(2, 30)]
    for prompt in (chat, [*instructions, 5], [*chat, 7]):
        seat, held = seats.take(prompt) or pytest.fail("no seat")
        seats.prefill(seat, prompt[held:])
        seats.leave(seat)
    assert held == len(chat)


def test_a_step_runs_no_more_rows_than_it_has_requests_once_some_have_ended() -> None:
    widths: list[int] = []

    def graph(given: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]) -> object:
        widths.append(len(given["input_ids"]))
        return GRAPHS["inplace"](given)

    seats = make_seats(Decoder(FakeProgram(graph), artifact("inplace")), RUNNING, 0, CONTEXT)  # type: ignore[arg-type]
    taken = []
    for start in range(RUNNING):
        seat, _ = seats.take(long_prompt(start)) or pytest.fail("no seat")
        seats.prefill(seat, long_prompt(start))
        taken.append(seat)
    seats.leave(taken[0])
    widths.clear()
    scores = seats.decode(taken[1:], [1, 2])
    assert widths == [2]
    assert_close(scores, np.stack([expected([*long_prompt(start), start])[-1] for start in (1, 2)]))


def test_rows_that_reach_the_end_of_the_context_stay_right() -> None:
    seats = make("inplace", kept=1, running=2)
    full = long_prompt(0, CONTEXT)
    first, _ = seats.take(full) or pytest.fail("no seat")
    second, _ = seats.take([1, 2]) or pytest.fail("no seat")
    seats.prefill(first, full)
    seats.prefill(second, [1, 2])
    seats.leave(first)
    assert_close(seats.decode([second], [3]), expected([1, 2, 3])[-1:])  # moves into the first one's row
    again, held = seats.take(full) or pytest.fail("no seat")
    assert held == CONTEXT - 1
    assert isinstance(seats, SharedSeats)
    assert_close(seats.prefill(again, full[held:]), expected(full)[-1:])
