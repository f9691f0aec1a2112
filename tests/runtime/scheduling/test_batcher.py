"""Batches across requests, on engines that a test holds in its hand."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from planforge.runtime import ClosedError, DeadlineError, InputError, QueueFullError
from planforge.runtime.scheduling import worker
from planforge.runtime.scheduling.batcher import Batcher, BatchSettings
from planforge.runtime.scheduling.worker import find_deadline

from ...helpers.patience import PATIENCE, turn_clocks, wait_until


class HeldEngine:
    """Runs turns one by one, when the test lets it; a part's output is the part in capitals.

    Attributes:
        turns: the parts of each turn that began, with their kind.
        bad: parts that make their turn fail.
    """

    def __init__(self) -> None:
        self.turns: list[tuple[object, list[str]]] = []
        self.bad: set[str] = set()
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def run(
        self, kind: object, parts: Sequence[str], is_wanted: Callable[[int], bool]
    ) -> Iterator[dict[int, str]]:
        self.turns.append((kind, list(parts)))
        self.began.release()
        assert self.may_end.acquire(timeout=PATIENCE)
        for index in filter(is_wanted, reversed(range(len(parts)))):  # outputs come in any order
            if parts[index] in self.bad:
                raise RuntimeError(f"{parts[index]} is bad")
            yield {index: parts[index].upper()}

    def wait(self) -> list[str]:
        """Return the parts of the next turn once it began."""
        assert self.began.acquire(timeout=PATIENCE)
        return self.turns[-1][1]

    def let(self, turns: int) -> None:
        for _ in range(turns):
            self.may_end.release()


class Case:
    """A batcher on a held engine whose first turn, of the part "first", has begun and is held."""

    def __init__(self, turn: int = 4, queue_size: int = 100, **settings: Any) -> None:
        self.engine = HeldEngine()
        limits = BatchSettings(turn=turn, queue_size=queue_size, **settings)
        self.batcher: Batcher[str, str, str] = Batcher(self.engine.run, lambda part: len(part), limits)
        self.first = self.submit(["first"])
        assert self.engine.wait() == ["first"]

    def submit(
        self, parts: Sequence[str], kind: object = "kind", timeout: Any = None, **options: Any
    ) -> Future[list[str]]:
        return self.batcher.submit(kind, parts, deadline=find_deadline(timeout), **options)

    def finish(self) -> list[list[str]]:
        """Let all turns run; return the parts of those after the first."""
        self.engine.let(1000)
        wait_until(lambda: not any(self.batcher.count_requests()))
        self.batcher.close()
        return [parts for _, parts in self.engine.turns[1:]]


def test_requests_of_a_kind_run_together_and_get_their_own_results() -> None:
    case = Case(turn=4)
    futures = [case.submit([letter, letter * 2]) for letter in "ab"]
    assert case.batcher.count_requests() == (2, 1)
    turns = case.finish()
    assert case.first.result() == ["FIRST"]
    assert [future.result() for future in futures] == [["A", "AA"], ["B", "BB"]]
    assert turns == [["a", "aa", "b"], ["bb"]]  # as much as a turn may cost


def test_parts_above_the_budget_run_alone() -> None:
    case = Case(turn=3)
    long = case.submit(["x" * 9, "y" * 8])
    short = case.submit(["a"])
    assert case.finish() == [["y" * 8], ["a"], ["x" * 9]]
    assert long.result() == ["X" * 9, "Y" * 8] and short.result() == ["A"]


def test_a_large_request_takes_turns_with_small_ones() -> None:
    case = Case(turn=4)
    large = case.submit([f"{n}" for n in range(10)])
    small = case.submit(["s"])
    assert case.finish() == [["0", "1", "2", "3"], ["s", "4", "5", "6"], ["7", "8", "9"]]
    assert large.result() == [f"{n}" for n in range(10)] and small.result() == ["S"]


def test_parts_of_similar_cost_run_together() -> None:
    case = Case(turn=6)
    case.submit(["aaa", "b", "ccc", "d", "ee"])
    assert case.finish() == [["b", "d", "ee"], ["aaa", "ccc"]]


def test_requests_of_similar_cost_run_together() -> None:
    case = Case(turn=6)
    for text in ("aa", "bbbb", "cc", "dd"):
        case.submit([text])
    case.engine.let(1)
    assert sorted(case.engine.wait()) == ["aa", "cc", "dd"]
    case.engine.let(1)
    assert case.engine.wait() == ["bbbb"]
    case.finish()


def test_clients_take_turns() -> None:
    case = Case(turn=1)
    for number in range(3):
        case.submit([f"{number}"], client="busy")
    case.submit(["x"], client="late")
    assert case.finish() == [["0"], ["x"], ["1"], ["2"]]


def test_an_observer_that_raises_is_told_no_more(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def refuse(measure: str, value: float) -> None:
        told.append(measure)
        raise ArithmeticError(measure)

    case = Case(observe=refuse)
    second = case.submit(["a"])
    case.finish()
    assert case.first.result() == ["FIRST"] and second.result() == ["A"]
    assert told == ["batch"]
    assert "the observer of measures raised, and gets no more" in caplog.text


def test_a_turn_is_shared_between_clients() -> None:
    case = Case(turn=3)
    for number in range(4):
        case.submit([f"{number}"], client="busy")
    case.submit(["x"], client="late")
    assert case.finish() == [["0", "x", "1"], ["2", "3"]]


def test_other_kinds_are_not_starved() -> None:
    """A turn belongs to who waits first, however many of another kind wait, or come meanwhile."""
    case = Case(turn=2)
    for number in range(4):
        case.submit([f"{number}"], kind="usual", client="busy")
    case.submit(["x"], kind="other", client="late")
    case.engine.let(1)
    assert case.engine.wait() == ["0", "1"]
    for number in range(4, 8):
        case.submit([f"{number}"], kind="usual", client="busy")
    assert case.finish()[1] == ["x"]
    assert [kind for kind, _ in case.engine.turns] == ["kind", "usual", "other", "usual", "usual", "usual"]


def test_joining_a_turn_costs_no_turn_of_one_s_own() -> None:
    """A client whose requests join those of others still has its other kind's turn."""
    case = Case(turn=2)
    for number in range(3):
        case.submit([f"a{number}"], kind="usual", client="a")
    case.submit(["x"], kind="other", client="b")
    for number in range(3):
        case.submit([f"b{number}"], kind="usual", client="b")
    assert case.finish()[1] == ["x"]


def test_only_the_request_that_is_to_blame_fails() -> None:
    case = Case(turn=10)
    case.engine.bad = {"b"}
    futures = {parts: case.submit(list(parts)) for parts in ("ax", "bc", "dy")}
    turns = case.finish()
    assert futures["ax"].result() == ["A", "X"] and futures["dy"].result() == ["D", "Y"]
    with pytest.raises(RuntimeError, match="b is bad"):
        futures["bc"].result()
    assert turns[0] == list("axbcdy")  # computed from the end: y, d and c are not computed again
    assert turns[1:] == [list("ax"), list("b")]


def test_a_failure_while_results_are_made_is_its_request_s_alone() -> None:
    case = Case(turn=10)

    def add(index: int, output: str) -> tuple[int, str]:
        raise ValueError("no result of this")

    bad = case.submit(["a", "b"], add=add)
    good = case.submit(["c"])
    case.finish()
    with pytest.raises(ValueError, match="no result of this"):
        bad.result()
    assert good.result() == ["C"]


def test_a_result_may_need_several_parts() -> None:
    case = Case(turn=3)
    seen: dict[int, str] = {}

    def add(index: int, output: str) -> tuple[int, str] | None:
        seen[index] = output
        return (0, "".join(seen[n] for n in sorted(seen))) if len(seen) == 5 else None

    joined = case.submit(list("abcde"), add=add)
    case.finish()
    assert joined.result() == ["ABCDE"]


def test_what_waits_can_be_cancelled() -> None:
    case = Case(turn=2)
    unwanted, other = case.submit(["a"]), case.submit(["b"])
    assert unwanted.cancel()
    assert case.finish() == [["b"]]
    with pytest.raises(CancelledError):
        unwanted.result()
    assert concurrent.futures.wait([unwanted, other], PATIENCE).not_done == set()


def test_the_rest_of_a_large_request_can_be_cancelled() -> None:
    case = Case(turn=2)
    large = case.submit(list("abcdef"))
    case.engine.let(1)
    assert case.engine.wait() == ["a", "b"]
    assert large.cancel()
    assert case.finish() == [["a", "b"]]
    assert concurrent.futures.wait([large], PATIENCE).not_done == set()


def test_a_turn_that_runs_asks_what_is_still_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = turn_clocks(monkeypatch, worker)
    case = Case(turn=10)
    gone, late, wanted = case.submit(list("ab")), case.submit(["c"], timeout=1000), case.submit(["d"])
    case.engine.let(1)
    assert case.engine.wait() == list("abcd")
    assert gone.cancel()
    clock.ahead = 1001
    case.finish()
    assert wanted.result() == ["D"]
    with pytest.raises(DeadlineError, match="deadline passed"):
        late.result()
    assert concurrent.futures.wait([gone], PATIENCE).not_done == set()


def test_a_deadline_that_passed_ends_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = turn_clocks(monkeypatch, worker)
    case = Case(turn=2)
    late, patient = case.submit(["a"], timeout=1000), case.submit(["b"], timeout=9000)
    clock.ahead = 1001
    assert case.finish() == [["b"]]
    with pytest.raises(DeadlineError, match="deadline passed"):
        late.result()
    assert patient.result() == ["B"]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 10**400, "1", True])
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    case = Case()
    with pytest.raises(InputError, match="timeout"):
        case.submit(["a"], timeout=timeout)
    assert case.finish() == []


def test_the_queue_is_bounded() -> None:
    case = Case(queue_size=2)
    waiting = [case.submit(["a"]), case.submit(["b"])]
    with pytest.raises(QueueFullError, match="2 requests wait"):
        case.submit(["c"])
    waiting[0].cancel()
    waiting.append(case.submit(["d"]))  # what was cancelled takes no place
    assert case.finish() == [["b", "d"]]
    assert [future.result() for future in waiting[1:]] == [["B"], ["D"]]


def test_closing_ends_what_waits() -> None:
    case = Case(turn=1)
    waiting = [case.submit(["a", "b"]), case.submit(["c"])]
    case.engine.let(1)
    assert case.engine.wait() == ["a"]
    closing = threading.Thread(target=case.batcher.close)
    closing.start()
    wait_until(lambda: case.batcher.closed)
    case.engine.let(1)
    closing.join(PATIENCE)
    assert not closing.is_alive()
    for future in waiting:
        with pytest.raises(ClosedError):
            future.result(PATIENCE)
    assert case.first.result() == ["FIRST"]
    with pytest.raises(ClosedError):
        case.submit(["d"])
    case.batcher.close()


def test_closing_before_the_first_request_starts_no_thread() -> None:
    unused: Batcher[str, str, str] = Batcher(HeldEngine().run, len, BatchSettings(turn=1, queue_size=1))
    assert unused.submit("kind", []).result() == []
    unused.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "planforge-batcher"]


def test_a_request_may_be_submitted_by_a_callback_of_another() -> None:
    case = Case()
    later: list[Future[list[str]]] = []
    case.first.add_done_callback(lambda _: later.append(case.submit(["a"])))
    case.finish()
    assert later[0].result() == ["A"]


def test_measures_are_told() -> None:
    measures: list[tuple[str, float]] = []
    case = Case(turn=4, observe=lambda name, value: measures.append((name, value)))
    case.submit(["a", "bb"])
    case.submit(["c"])
    case.finish()
    assert measures == [("batch", 1), ("context", 5), ("batch", 2), ("context", 1), ("context", 3)]


def test_settings_come_before_the_first_request() -> None:
    case = Case()
    with pytest.raises(InputError, match=r"schedule\(\) must be called before the first submit\(\)"):
        case.batcher.configure(BatchSettings(turn=1, queue_size=1))
    case.finish()
    for name, values in {"turn_tokens": (0, "x"), "queue_size": (0, None)}.items():
        for value in values:
            settings: dict[str, Any] = {"turn": 1, "queue_size": 1}
            settings["turn" if name == "turn_tokens" else name] = value
            with pytest.raises(InputError, match=name):
                BatchSettings(**settings)
