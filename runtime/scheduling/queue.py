"""A bounded queue of requests in which clients take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from ..errors import QueueFullError
from ..option_checks import check_whole

T = TypeVar("T")
MISSING: Any = object()  # behind the requests of a client that has fewer than another


class FairQueue(Generic[T]):
    """Requests that wait: those of one client in their order, and clients in turn.

    A client with a thousand requests delays another one's only request by one of its own. Its user holds a
    lock; the queue has none.

    Args:
        limit: the most requests that wait.
        divided: whether a client may have only as many of them as places are left for others. One alone fills
            half of the queue, two a third each, and the last place is for a client that has none waiting.
    """

    def __init__(self, limit: int, *, divided: bool = False) -> None:
        check_whole("queue_size", limit, 1)
        self.limit = limit
        self.divided = divided
        self._by_client: OrderedDict[str, deque[T]] = OrderedDict()  # the client whose turn it is first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, item: T, client: str = "", *, spare: int = 0) -> None:
        """Let a request wait; raises a QueueFullError where too many do.

        Args:
            item: the request.
            client: whose it is.
            spare: how many more than the limit may wait, as their turn comes at once.
        """
        refusal = self.find_refusal(client, spare=spare)
        if refusal is not None:
            raise QueueFullError(refusal)
        self.put_back(item, client)

    def find_refusal(self, client: str = "", *, spare: int = 0) -> str | None:
        """Return why a client's next request could not wait; None where it could."""
        places = self.limit + spare - self._count
        if places < 1:
            return f"{self._count} requests wait already; try again later"
        waiting = len(self._by_client.get(client, ()))
        if self.divided and waiting >= places:
            return (
                f"{waiting} requests of this client wait already, and others need places too; try again later"
            )
        return None

    def put_back(self, item: T, client: str = "") -> None:
        """Let a request that was taken wait again, behind its client's others, however many there are."""
        self._by_client.setdefault(client, deque()).append(item)
        self._count += 1

    def take(self) -> T:
        """Return the next request, of the client whose turn it is."""
        client, items = self._by_client.popitem(last=False)
        item = items.popleft()
        self._count -= 1
        if items:
            self._by_client[client] = items  # behind the other clients
        return item

    def __iter__(self) -> Iterator[T]:
        """Yield every client's first request, then the second ones, and so on."""
        lines = zip_longest(*self._by_client.values(), fillvalue=MISSING)
        for items in lines:
            yield from (item for item in items if item is not MISSING)

    def remove(self, is_wanted: Callable[[T], bool]) -> list[T]:
        """Return the requests of which this is true; they wait no longer.

        They are returned in the order in which the queue yields them. Whose turn it is stays as it was.
        """
        if not self._count:
            return []
        wanted = [item for item in self if is_wanted(item)]
        gone = set(map(id, wanted))
        for client, items in list(self._by_client.items()):
            kept = deque(item for item in items if id(item) not in gone)
            if kept:
                self._by_client[client] = kept
            else:
                del self._by_client[client]
        self._count -= len(wanted)
        return wanted


def count_places(limit: int, divided: bool) -> int:
    """Return how many of a queue's places one client may have if nobody else has any."""
    return (limit + 1) // 2 if divided else limit
