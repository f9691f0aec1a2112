"""Defines why a comparison failed: messages with fields, so that nobody has to parse their words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Failure(str):
    """A message; what is known beside it is in the attributes of the classes below."""

    def add(self, text: str) -> Self:
        """Return the failure with more words behind its own."""
        longer = type(self)(f"{self}{text}")
        vars(longer).update(vars(self))
        return longer


class NotFinite(Failure):
    """Results have NaN or infinity."""


class Exceeded(Failure):
    """A metric is over its limit."""

    metric: str  # with what limits' names begin with

    @classmethod
    def of(cls, metric: str, value: float, limit: float) -> Self:
        """Return the failure of a metric that is over its limit."""
        failure = cls(f"{metric} is {value:.3g}, at most {limit:.3g} is allowed")
        failure.metric = metric
        return failure


class OtherToken(Failure):
    """An engine, free to choose, took another token than PyTorch, and rounding does not explain it."""


class NodeFault(Failure):
    """A node of a graph is, holds or gives something else than the model."""

    value: str  # the name of the node's first result, which no other node has

    @classmethod
    def of(cls, value: str, words: str) -> Self:
        """Return the failure of the node that gives a value."""
        fault = cls(words)
        fault.value = value
        return fault
