"""What models have in common whose requests run in batches."""

from __future__ import annotations

from typing import Any, ClassVar

from ..errors import InputError
from ..model import Model
from ..option_checks import check_switch
from .batcher import Batcher, BatchSettings
from .options import Observer, observe_nothing

QUEUE_SIZE = 1024


class BatchedModel(Model):
    """Base of the models whose requests run in batches; see `Batcher`."""

    _TURN_TOKENS: ClassVar[int]
    _batcher: Batcher[Any, Any, Any]

    def schedule(
        self,
        *,
        queue_size: int = QUEUE_SIZE,
        divide_queue: bool = False,
        turn_tokens: int | None = None,
        observe: Observer = observe_nothing,
    ) -> None:
        """Say how submitted requests share the engine, before the first.

        Args:
            queue_size: the most requests that wait; further ones are refused.
            divide_queue: whether a client may have only as many requests waiting as places are left for
                others, so that none fills the queue.
            turn_tokens: tokens of texts that run before another request has its turn. More cost less time
                for each text, and let a short request wait longer behind a long one. A longer text, or a
                longer window of a text, has a turn of its own.
            observe: called in the engine's thread with measures: "batch" (requests in a turn) and "context"
                (tokens of a request that ended). It must return at once.
        """
        if not callable(observe):
            raise InputError(f"observe={observe!r:.80} must be a function that takes a measure and its value")
        check_switch("divide_queue", divide_queue)
        turn = self._TURN_TOKENS if turn_tokens is None else turn_tokens
        settings = BatchSettings(queue_size=queue_size, divide_queue=divide_queue, turn=turn, observe=observe)
        self._batcher.configure(settings)

    def count_requests(self) -> tuple[int, int]:
        """Return how many submitted requests wait, and how many run."""
        return self._batcher.count_requests()


def refuse_options(options: Any, hints: dict[str, str]) -> None:
    """Refuse options that do not go with submit, each of which has a way out."""
    for name, hint in hints.items():
        if options.get(name):
            raise InputError(f"{name}={options[name]!r:.80} does not go with submit; {hint}")
