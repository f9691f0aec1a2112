"""The interface of a system of the benchmarks; a new one is a file in this folder, and its name in a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

Tick = Callable[[], None]
MEAN = {"pooling": "mean", "normalized": True}  # what every embedder does


class Skip(Exception):  # noqa: N818 - it is not an error
    """An exception for a system that can't do this here; the reason is shown."""


class Session(Protocol):
    """A loaded model, made by `System.generate`, `System.embed` or `System.translate` for that work.

    One that measures something itself has a method `figures` too, which returns it by name.
    """

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        """Do a piece of work, a `case.Work` as JSON, once.

        Args:
            work: what to do.
            tick: to be called whenever the next token of every row is known, where a system can tell.

        Returns:
            The new token ids of each row, or (N, E) vectors.
        """

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of the last run: the parts of `alike.REPORTED` that its process can't know.

        Not timed, so that it may count.
        """


class System:
    """A way of running a model. Its process loads what it needs; this class loads nothing.

    Attributes:
        name: in tables.
        packages: the distributions that its process needs.
        classes: its names for precisions, each with the class of precisions that it is compared in.
        differences: parts of a description in which it cannot be like others, and why.
    """

    name: str = ""
    packages: tuple[str, ...] = ()
    classes: Mapping[str, str] = {"fp32": "fp32"}
    differences: Mapping[str, str] = {}

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        """Convert a checkpoint's folder into the empty folder `out`.

        A system that does not is given the checkpoint itself to open. Raises Skip where it can't.
        """

    def gathered_tables(self, precision: str) -> int:
        """Return how many fp32 copies of the vocabulary's table a decoder stores only to look rows up.

        The one that the output layer reads is none of them.
        """
        return 0

    def code_stamp(self) -> str:
        """Return a stamp that changes when `prepare` may write something else, besides packages' versions."""
        return ""

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        """Return a session for "generate".

        settings has "tokens" and "batch", the most tokens of a row, prompt and answer, and the most rows.
        """
        raise Skip(f"{self.name} does not generate text here")

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        """Return a session for "embed": mean over the tokens' last hidden states, normalized.

        settings has "max_length": of a longer text the end is cut off.
        """
        raise Skip(f"{self.name} does not embed here")

    def translate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        """Return a session for "translate"."""
        raise Skip(f"{self.name} does not translate here")
