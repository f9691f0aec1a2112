"""Calls of one model share its byte budget: they wait for each other, or are refused by name."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from planforge.runtime import memory_budget
from planforge.runtime.backends.backend import Array, ArrayBuffer, Buffer, Shape
from planforge.runtime.decoding.decoder import Decoder, DecoderRun
from planforge.runtime.errors import ClosedError, MemoryLimitError
from planforge.runtime.memory_budget import MemoryBudget, Reservation

from ..helpers.decoder_graph import artifact
from ..helpers.fake_program import FakeProgram
from ..helpers.generation import DIALECTS, GRAPHS
from ..helpers.patience import PATIENCE, MemoryWaits


def test_without_a_limit_nothing_is_counted() -> None:
    budget = MemoryBudget(None, 10**12)
    assert budget.count_available() is None
    with budget.reserve(10**15, "a cache"):
        assert budget.count_held() == 0


def test_what_does_not_fit_alone_is_refused_with_the_sum() -> None:
    budget = MemoryBudget(3_000_000, 1_000_000)
    assert budget.count_available() == 2_000_000
    refused = pytest.raises(MemoryLimitError)
    with refused as caught, budget.reserve(2_000_001, "a cache of 8 x 64 tokens", "Generate fewer tokens"):
        pytest.fail("it does not fit")
    assert str(caught.value) == (
        "3.0 MB are needed: 1.0 MB of weights and 2.0 MB for a cache of 8 x 64 tokens;"
        " memory_limit is 3.0 MB. Generate fewer tokens"
    )
    assert (caught.value.needed, caught.value.limit) == (3_000_001, 3_000_000)
    with budget.reserve(2_000_000, "a cache"):
        assert budget.count_held() == 2_000_000
    assert budget.count_held() == 0


def test_calls_that_do_not_fit_beside_each_other_take_turns() -> None:
    budget = MemoryBudget(100, 10)
    most = 0
    counting = threading.Lock()

    def call(size: int) -> None:
        nonlocal most
        for _ in range(20):
            with budget.reserve(size, "a batch"), counting:
                most = max(most, budget.count_held())

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(call, size) for size in (90, 50, 40, 30, 20, 10, 1, 45)]:
            done.result(timeout=PATIENCE)
    assert 0 < most <= 90
    assert budget.count_held() == 0


def test_a_call_waits_until_another_thread_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = MemoryWaits(monkeypatch)
    budget = MemoryBudget(100, 0)
    order: list[str] = []

    def second() -> None:
        with budget.reserve(60, "a batch"):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with budget.reserve(60, "a batch"):
            waiting = pool.submit(second)
            waits.wait()
            order.append("first")
        waiting.result(timeout=PATIENCE)
    assert order == ["first", "second"]


def stream(budget: MemoryBudget) -> Iterator[int]:
    with budget.reserve(60, "a cache of 1 x 9 tokens"):
        yield 1
        yield 2


def test_a_thread_does_not_wait_for_its_own_stream() -> None:
    budget = MemoryBudget(100, 0)
    unfinished = stream(budget)
    next(unfinished)
    with pytest.raises(
        MemoryLimitError, match=r"that an unfinished call of this thread holds.*Finish or close"
    ):
        next(stream(budget))
    del unfinished
    gc.collect()
    assert next(stream(budget)) == 1  # an abandoned stream has given its bytes back


def work(decoder: Decoder) -> DecoderRun:
    """A run whose cache has done all that caches do."""
    run = decoder.start(2, 16, copies=2)
    run.prefill([[1, 2, 3], [4]])
    run.expand()
    run.truncate(2)
    run.copy_rows([(0, 1)])
    run.decode([1, 2, 3, 4])
    return run


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_caches_lease_is_its_last_field(dialect: str) -> None:
    run = work(Decoder(FakeProgram(GRAPHS[dialect]), artifact(dialect)))
    assert list(vars(run.cache))[-1] == "lease"  # fields are freed in this order


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_cache_gives_back_its_bytes_behind_its_buffers(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = FakeProgram(GRAPHS[dialect])
    budget = MemoryBudget(10**9)
    arrays: list[weakref.ref[Array]] = []
    alive: list[int] = []  # arrays, whenever bytes are given back
    allocate = program.allocate
    give_back = budget.give_back

    def allocate_watched(name: str, shape: Shape) -> Buffer:
        buffer = allocate(name, shape)
        assert isinstance(buffer, ArrayBuffer)
        arrays.append(weakref.ref(buffer.array))
        return buffer

    def give_back_watched(reservation: Reservation) -> None:
        alive.append(sum(array() is not None for array in arrays))
        give_back(reservation)

    monkeypatch.setattr(program, "allocate", allocate_watched)
    monkeypatch.setattr(budget, "give_back", give_back_watched)
    run = work(Decoder(program, artifact(dialect), budget))
    assert budget.count_held() > 0 and all(array() is not None for array in arrays)
    del run
    assert alive == [0]
    assert budget.count_held() == 0


def test_closing_wakes_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = MemoryWaits(monkeypatch)
    budget = MemoryBudget(100, 0)

    def wait() -> None:
        with budget.reserve(60, "a batch"):
            pytest.fail("there was no room")

    with ThreadPoolExecutor(1) as pool, budget.reserve(60, "a batch"):
        waiting = pool.submit(wait)
        waits.wait()
        assert not waiting.done()
        budget.close()
        with pytest.raises(ClosedError, match="was closed"):
            waiting.result(timeout=PATIENCE)


def test_who_waits_for_what_is_kept_meanwhile_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another call keeps when it ends is freed for who waits, though nobody tells."""
    waits = MemoryWaits(monkeypatch)
    budget = MemoryBudget(100, 0)
    running = budget.hold(60, "a cache")

    class Keeper:
        kept = False

        def drop(self) -> None:
            if self.kept:
                running.release()

    keeper = Keeper()
    budget.make_room_by(keeper.drop)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(budget.hold, 60, "a batch")
        try:
            waits.wait()
            assert not waiting.done()
            keeper.kept = True
            waiting.result(timeout=PATIENCE).release()
        finally:
            budget.close()
    assert budget.count_held() == 0


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "WAIT_TIMEOUT", 0.2)
    budget = MemoryBudget(100, 10)
    with ThreadPoolExecutor(1) as pool, budget.reserve(60, "a cache of 1 x 9 tokens"):
        waiting = pool.submit(budget.hold, 60, "a batch")
        try:
            with pytest.raises(
                MemoryLimitError, match=r"other calls held for 0 seconds \(a cache of 1 x 9 tokens\)"
            ) as caught:
                waiting.result(timeout=PATIENCE)
        finally:
            budget.close()
    assert (caught.value.needed, caught.value.limit) == (130, 100)


def test_memory_belongs_to_the_thread_that_used_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = MemoryWaits(monkeypatch)
    budget = MemoryBudget(100, 0)
    with ThreadPoolExecutor(1) as pool:
        reservation = pool.submit(budget.hold, 60, "a cache").result(timeout=PATIENCE)
        reservation.use()
        with pytest.raises(MemoryLimitError, match="of this thread"):
            budget.hold(60, "a batch")
        waiting = pool.submit(budget.hold, 60, "a batch")  # its own no more: it waits
        waits.wait()
        assert not waiting.done()
        reservation.release()
        reservation.release()
        waiting.result(timeout=PATIENCE).release()
