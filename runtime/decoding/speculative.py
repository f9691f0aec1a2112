"""Prompt lookup: guesses what comes next from what came before, for the model to verify in one pass."""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (16, 8, 5, 3, 2)  # of the n-grams that are looked up, the longest first: it is right the most often
MAX_DRAFTS = 16
# A draft costs time, which a wrong one loses. So a match must have 2 tokens, and 3 after a draft of which
# nothing was right: text that repeats nothing has matches of 2 all the time.
MIN_MATCH = 2
MIN_AFTER_FAILURE = 3


class PromptLookup:
    """Drafts for one row: what followed the latest earlier occurrence of its newest tokens.

    As many tokens are drafted as that occurrence is long, counted up to `MAX_DRAFTS`: what has been right
    for long will stay right for long. Costs some microseconds a token, whatever the history's length. The
    history, the row's tokens, prompt included, is read again at each `draft`, so it may grow.

    Example:
        >>> PromptLookup([7, 1, 2, 3, 9, 7, 1, 2]).draft(16)
        [3, 9, 7]
    """

    def __init__(self, history: Sequence[int]) -> None:
        self.history = history
        self.least = MIN_MATCH
        self._indexed = 0  # tokens of the history whose preceding n-grams are in the index
        # n -> {n-gram: the position behind its latest occurrence that has a token there}
        self._behind: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in SIZES}

    def draft(self, most: int) -> list[int]:
        """Return at most `most` tokens that may come next; none without a match that is long enough."""
        self._index()
        start = self._find()
        if start is None or most < 1:
            return []
        length = self._match(start)
        if length < self.least:
            return []
        period = len(self.history) - start  # an occurrence so near that it overlaps what follows repeats
        return [self.history[start + i % period] for i in range(min(length, most))]

    def update(self, accepted: int) -> None:
        """Note how many tokens of the last draft, which had some, were right."""
        self.least = MIN_MATCH if accepted else MIN_AFTER_FAILURE

    def _index(self) -> None:
        history = self.history
        for end in range(self._indexed, len(history)):
            for size, behind in self._behind.items():
                if size <= end:
                    behind[tuple(history[end - size : end])] = end
        self._indexed = len(history)

    def _find(self) -> int | None:
        """Return the position behind the latest earlier occurrence of the longest n-gram that has one."""
        for size, behind in self._behind.items():
            start = behind.get(tuple(self.history[-size:]))
            if start is not None:
                return start
        return None

    def _match(self, start: int) -> int:
        """Return how many tokens before `start` equal those at the end, up to `MAX_DRAFTS`."""
        history = self.history
        length = 0
        while length < min(MAX_DRAFTS, start) and history[start - 1 - length] == history[-1 - length]:
            length += 1
        return length
