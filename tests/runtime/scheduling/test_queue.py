"""The fair queue: bounded, in a client's order, clients in turn."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, strategies

from planforge.runtime import InputError, QueueFullError
from planforge.runtime.scheduling.queue import FairQueue, count_places

Item = tuple[str, int]  # whose it is, and its number


def fill(counts: dict[str, int]) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(1000)
    for client, count in counts.items():
        for number in range(count):
            queue.put((client, number), client)
    return queue


def drain(queue: FairQueue[Item]) -> list[Item]:
    return [queue.take() for _ in range(len(queue))]


def in_turn(counts: dict[str, int]) -> list[Item]:
    """Every client's first item, then every client's second one, and so on."""
    most = max(counts.values(), default=0)
    return [(client, n) for n in range(most) for client, count in counts.items() if n < count]


COUNTS = strategies.dictionaries(strategies.sampled_from("abcde"), strategies.integers(1, 6))


@given(counts=COUNTS)
def test_clients_take_turns_and_keep_their_order(counts: dict[str, int]) -> None:
    queue = fill(counts)
    assert len(queue) == sum(counts.values())
    assert drain(queue) == in_turn(counts)
    assert len(queue) == 0


def test_a_thousand_requests_delay_another_client_by_one() -> None:
    queue = fill({"busy": 999})
    queue.put(("late", 0), "late")
    assert [queue.take() for _ in range(3)] == [("busy", 0), ("late", 0), ("busy", 1)]


@given(counts=COUNTS, data=strategies.data())
def test_removing_asks_in_turn_and_keeps_whose_turn_it_is(
    counts: dict[str, int], data: strategies.DataObject
) -> None:
    unwanted = data.draw(strategies.sets(strategies.sampled_from(in_turn(counts) or [("a", 0)])))
    queue = fill(counts)
    asked: list[Item] = []

    def is_wanted(item: Item) -> bool:
        asked.append(item)
        return item in unwanted

    removed = queue.remove(is_wanted)
    assert asked == in_turn(counts)
    assert removed == [item for item in asked if item in unwanted]
    kept: dict[str, list[Item]] = defaultdict(list)
    for item in sorted(set(asked) - unwanted):
        kept[item[0]].append(item)
    rounds = max(map(len, kept.values()), default=0)
    order = [client for client in counts if client in kept]
    assert len(queue) == sum(map(len, kept.values()))
    assert drain(queue) == [kept[c][n] for n in range(rounds) for c in order if n < len(kept[c])]


def test_equal_items_are_told_apart() -> None:
    queue: FairQueue[int] = FairQueue(4)
    for _ in range(3):
        queue.put(7)
    answers = iter([False, True, False])
    assert queue.remove(lambda _: next(answers)) == [7]
    assert len(queue) == 2


def test_it_is_bounded() -> None:
    queue: FairQueue[str] = FairQueue(2)
    queue.put("first", "a")
    queue.put("second", "b")
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        queue.put("third", "c")
    assert queue.take() == "first"
    queue.put("third", "c")
    queue.put_back("first", "a")  # who has had a turn is not refused
    assert len(queue) == 3
    with pytest.raises(QueueFullError):
        queue.put("fourth", "d")
    assert [queue.take() for _ in range(3)] == ["second", "third", "first"]


@given(clients=strategies.lists(strategies.sampled_from("abc")), limit=strategies.integers(1, 9))
def test_a_divided_queue_keeps_places_for_others(clients: list[str], limit: int) -> None:
    queue: FairQueue[Item] = FairQueue(limit, divided=True)
    counts: dict[str, int] = defaultdict(int)
    for client in clients:
        free = limit - len(queue)
        try:
            queue.put((client, counts[client]), client)
        except QueueFullError:
            assert counts[client] >= free
        else:
            counts[client] += 1
            assert counts[client] <= free
    assert all(count <= count_places(limit, divided=True) for count in counts.values())


def test_a_client_alone_has_the_places_that_are_counted() -> None:
    for limit, divided, places in ((9, True, 5), (8, True, 4), (1, True, 1), (9, False, 9)):
        queue: FairQueue[int] = FairQueue(limit, divided=divided)
        for number in range(places):
            queue.put(number, "a")
        with pytest.raises(QueueFullError):
            queue.put(0, "a")
        assert count_places(limit, divided) == places
        if divided and limit > 1:
            queue.put(0, "b")


def test_places_beyond_the_limit_for_those_whose_turn_comes_at_once() -> None:
    queue: FairQueue[int] = FairQueue(1)
    for number in range(3):
        queue.put(number, spare=2)
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        queue.put(3, spare=2)


def test_what_is_put_back_waits_behind_its_client_s_others() -> None:
    queue = fill({"a": 3})
    first = queue.take()
    queue.put_back(first, "a")
    assert drain(queue) == [("a", 1), ("a", 2), ("a", 0)]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_is_a_number_of_requests(limit: object) -> None:
    with pytest.raises(InputError, match="queue_size"):
        FairQueue(limit)  # type: ignore[arg-type]
