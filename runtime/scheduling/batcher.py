"""Batches across requests: one thread runs a model's engine on what many callers ask of it.

A request has parts, such as its texts. At each turn the thread takes parts of the requests that wait, as many
as a budget allows, runs them together, and gives every request its own results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from ..errors import InputError
from ..option_checks import check_whole
from .options import Observer, observe_nothing
from .queue import FairQueue
from .worker import EngineThread, has_passed

P = TypeVar("P")  # a part of a request
V = TypeVar("V")  # what the engine makes of a part
R = TypeVar("R")  # one of a request's results, made of one or several parts

IsWanted: TypeAlias = Callable[[int], bool]
"""Returns whether anybody still waits for a part of a turn."""

Add: TypeAlias = Callable[[int, V], "tuple[int, R] | None"]


class PendingResults(Future[list[R]]):
    """The results of a request, when they are there.

    Attributes:
        tokens: that the model reads for it; of a text that is read in windows, some several times.
    """

    tokens = 0


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How requests share an engine.

    Attributes:
        queue_size: the most requests that wait.
        divide_queue: whether a client may have only as many of them as places are left for others.
        turn: the most that the parts of one turn cost together, in the unit of the model's `cost`; a part
            that costs more has a turn of its own.
        observe: called in the engine's thread with measures of "batch" (requests in a turn) and "context"
            (the cost of a request that ended).
    """

    queue_size: int
    turn: int
    divide_queue: bool = False
    observe: Observer = observe_nothing

    def __post_init__(self) -> None:
        check_whole("queue_size", self.queue_size, 1)
        check_whole("turn_tokens", self.turn, 1)


@dataclass(eq=False)
class BatchRequest(Generic[P, V, R]):
    """One request, whose parts may run in several turns.

    Attributes:
        kind: requests whose kinds are equal may run together.
        costs: of each part.
        order: the parts that had no turn yet, the costliest first. They are taken from the end, so that
            those that run together are of similar cost.
    """

    kind: object
    parts: Sequence[P]
    costs: Sequence[int]
    add: Add[V, R]
    client: str
    deadline: float | None  # of time.monotonic()
    future: PendingResults[R] = field(default_factory=PendingResults)
    results: dict[int, R] = field(default_factory=dict)
    missing: int = 0  # parts without an output
    order: list[int] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.future.tokens = sum(self.costs)
        self.missing = len(self.parts)
        self.order = sorted(range(len(self.parts)), key=lambda part: (-self.costs[part], -part))

    def take(self, most: int) -> list[int]:
        """Return parts that cost so much together, at most; they had their turn."""
        taken: list[int] = []
        while self.order and self.costs[self.order[-1]] <= most:
            taken.append(self.order.pop())
            most -= self.costs[taken[-1]]
        return taken

    @property
    def next_cost(self) -> int:
        """What the next part costs."""
        return self.costs[self.order[-1]]

    def accept(self, part: int, output: V) -> None:
        """Take what the engine made of a part; the last one ends the request."""
        result = self.add(part, output)
        if result is not None:
            self.results[result[0]] = result[1]
        self.missing -= 1
        if not self.missing and self._end():
            self.future.set_result([self.results[number] for number in sorted(self.results)])

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless it has ended or was cancelled."""
        if self._end():
            self.future.set_exception(error)

    @property
    def is_wanted(self) -> bool:
        """Whether it was not cancelled, and its deadline has not passed."""
        return not (self.future.cancelled() or has_passed(self.deadline))

    def _end(self) -> bool:
        """Return whether the future may be set: the request had neither ended before nor been cancelled."""
        if self.ended:
            return False
        self.ended = True
        return self.future.set_running_or_notify_cancel()


Turn: TypeAlias = list[tuple[BatchRequest[P, V, R], int]]  # parts that run together, with whose they are


class Batcher(EngineThread[BatchRequest[P, V, R]], Generic[P, V, R]):
    """Runs the requests of many callers on one engine. Close it, which ends what waits.

    Each turn begins with the request whose turn it is, clients taking turns, and is filled with others of its
    kind. A request that is larger than a turn has several, and others have theirs in between.

    Args:
        run: runs parts of one kind together, and yields outputs by the parts' indices as they are computed.
            It may leave out parts that are not wanted any more, as a function says that it is given. If it
            fails, the requests are run one by one, so that only those fail that are to blame.
        cost: what a part costs, such as its tokens.
        settings: how requests share the engine.
    """

    def __init__(
        self,
        run: Callable[[Any, Sequence[P], IsWanted], Iterable[Mapping[int, V]]],
        cost: Callable[[P], int],
        settings: BatchSettings,
    ) -> None:
        super().__init__("planforge-batcher", make_queue(settings), settings.observe)
        self._run_parts = run
        self._cost = cost
        self._turn: Turn[P, V, R] = []  # that runs
        self.settings = settings

    def configure(self, settings: BatchSettings) -> None:
        """Change how requests share the engine, before the first one."""
        with self.changed:
            if self.thread is not None:
                raise InputError("schedule() must be called before the first submit(), not after it")
            self.settings = settings
            self.observer = settings.observe
            self.waiting = make_queue(settings)

    def submit(
        self,
        kind: object,
        parts: Sequence[P],
        add: Add[V, R] | None = None,
        *,
        client: str = "",
        deadline: float | None = None,
    ) -> PendingResults[R]:
        """Let a request wait for its turn; raises a QueueFullError or a ClosedError.

        `Future.cancel` ends it at the next turn; a deadline that passed ends it there with a DeadlineError.

        Args:
            kind: requests whose kinds are equal may run together.
            parts: what is to be run.
            add: gets the index of each part and its output, in any order, in the engine's thread; returns a
                result and its number when one is complete. Without it outputs are the results.
            client: whose request it is.
            deadline: of time.monotonic().
        """
        costs = [self._cost(part) for part in parts]
        request: BatchRequest[P, V, R] = BatchRequest(
            kind, parts, costs, add or keep_output, client, deadline
        )
        if not parts:
            request.future.set_result([])
            return request.future
        if self.waiting.find_refusal(client) is not None:
            self.end_unwanted()
        self.put(request, client)
        return request.future

    def count_requests(self) -> tuple[int, int]:
        """Return how many requests wait, and how many run."""
        return len(self.waiting), len(self.list_running())

    def list_running(self) -> list[BatchRequest[P, V, R]]:
        return list_requests(self._turn)

    def fail(self, request: BatchRequest[P, V, R], error: BaseException) -> None:
        request.fail(error)

    def run_turn(self) -> None:
        self.end_unwanted()
        self._turn = self._take_turn()
        if self._turn:
            self._run_turn(self._turn)
            self._put_back(self._turn)
        self._turn = []  # while it waits it keeps nothing alive

    def _take_turn(self) -> Turn[P, V, R]:
        """Take the next request from those that wait, and others of its kind that the budget has room for.

        Those of similar cost come first, whoever's they are: the first keeps all turns fair.
        """
        with self.changed:
            if not self.waiting:
                return []
            first = self.waiting.take()
            left = self.settings.turn
            parts = first.take(left) or [first.order.pop()]
            turn = [(first, part) for part in parts]
            left -= sum(first.costs[part] for part in parts)
            like = [request for request in self.waiting if request.kind == first.kind]
            cost = first.costs[parts[-1]]
            like.sort(key=lambda request: abs(request.next_cost - cost))  # padding costs time too
            for request in like:
                taken = request.take(left)
                turn += [(request, part) for part in taken]
                left -= sum(request.costs[part] for part in taken)
            joined = {request for request, _ in turn}
            self.waiting.remove(joined.__contains__)
            return turn

    def _run_turn(self, turn: Turn[P, V, R]) -> None:
        self.observe("batch", len(list_requests(turn)))
        missing = dict(enumerate(turn))
        try:
            parts = [request.parts[part] for request, part in turn]
            for outputs in self._run_parts(turn[0][0].kind, parts, lambda index: turn[index][0].is_wanted):
                for index, output in outputs.items():
                    self._accept(*missing.pop(index), output)
        except Exception as error:
            requests = list_requests(missing.values())
            if len(requests) == 1:
                requests[0].fail(error)
                return
            for request in requests:  # not all of them are to blame
                self._run_turn([(one, part) for one, part in missing.values() if one is request])

    def _accept(self, request: BatchRequest[P, V, R], part: int, output: V) -> None:
        """Give a request a part's output."""
        if request.ended:
            return
        try:
            request.accept(part, output)
        except Exception as error:  # of what makes its results
            request.fail(error)
        if request.ended:
            self.observe("context", sum(request.costs))

    def _put_back(self, turn: Turn[P, V, R]) -> None:
        """Let requests that have parts left wait for their next turn, but for those that are unwanted."""
        going = [request for request in list_requests(turn) if not request.ended]
        unwanted = [request for request in going if not request.is_wanted]
        with self.changed:
            for request in going:
                if request.order and request not in unwanted:
                    self.waiting.put_back(request, request.client)
        for request in unwanted:
            self.end(request)


def make_queue(settings: BatchSettings) -> FairQueue[BatchRequest[P, V, R]]:
    """Return an empty queue for requests."""
    return FairQueue(settings.queue_size, divided=settings.divide_queue)


def list_requests(turn: Iterable[tuple[BatchRequest[P, V, R], int]]) -> list[BatchRequest[P, V, R]]:
    """Return the requests that have parts in a turn, each of them once."""
    return list(dict.fromkeys(request for request, _ in turn))


def keep_output(part: int, output: Any) -> tuple[int, Any]:
    """Return an output as the result of its part."""
    return part, output
