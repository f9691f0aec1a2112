"""Keeps a prompt's keys and values for the next prompt that begins alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .decoder import DecoderRun


class PromptReuse:
    """At most one run of batch 1 that nobody uses, and the tokens that its cache holds.

    A run is taken out while it is used: two threads never share one, and the one that ends last is kept.
    """

    def __init__(self) -> None:
        # Its pop and append are atomic. A lock would not do: an abandoned stream gives its run back when it
        # is collected, which may happen inside any call of any thread.
        self._kept: deque[tuple[Sequence[int], int, DecoderRun]] = deque(maxlen=1)

    @contextmanager
    def run(
        self, history: Sequence[int], start: Callable[[], DecoderRun], adapter: int = 0
    ) -> Iterator[tuple[DecoderRun, int]]:
        """Yield a run for a prompt, and how many of its tokens, at most all but the last, it holds already.

        The answer's tokens are to be appended to the history, the prompt, and all but the last be fed. When
        the block ends, or its generator is abandoned, the run is kept, unless an error ended it.
        """
        try:
            held, other, run = self._kept.pop()
        except IndexError:
            held, other = (), adapter
            run = start()
        known = run.truncate(0 if other != adapter else count_common(held, history[:-1]))
        run.set_adapter(0, adapter)
        try:
            yield run, known
        except GeneratorExit:
            self._keep(history, adapter, run)
            raise
        self._keep(history, adapter, run)

    def drop(self) -> None:
        """Free what is kept."""
        self._kept.clear()

    def _keep(self, history: Sequence[int], adapter: int, run: DecoderRun) -> None:
        if not run.decoder.closed:
            self._kept.append((history[:-1], adapter, run))


def count_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of two sequences' common prefix, in tokens."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
