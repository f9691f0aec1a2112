"""How `planforge run` prints a result: a line of JSON, or lines for a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .console import emit, format_json

# Tasks of which a text may have several lines, or none; a blank line stands between two texts.
SEVERAL_LINES = ("embed_sparse", "embed_multi", "embed_hybrid", "features", "fill_mask", "tag", "answer")


def format_vector(vector: Any) -> str:
    return " ".join(f"{number:.6g}" for number in vector)


def list_weights(result: Any) -> list[str]:
    """Return a line for each token with a weight, the largest first."""
    pairs = sorted(zip(result.tokens, result.values, strict=True), key=lambda pair: -pair[1])
    return [f"{token}\t{weight:.4f}" for token, weight in pairs]


def list_vectors(result: Any) -> list[str]:
    """Return a line for each token with its vector."""
    return [
        f"{token}\t{format_vector(vector)}"
        for token, vector in zip(result.tokens, result.vectors, strict=True)
    ]


LINES: dict[str, Callable[[Any], list[str]]] = {
    "embed": lambda r: [format_vector(r.vector)],
    "embed_sparse": list_weights,
    "embed_multi": list_vectors,
    "embed_hybrid": lambda r: [format_vector(r.vector), *list_weights(r.sparse), *list_vectors(r.multi)],
    "features": list_vectors,
    "classify": lambda r: [f"{r.label}\t{r.score:.4f}"],
    "rank": lambda r: [f"{r.score:.4f}\t{r.text}"],
    "next_sentence": lambda r: [f"{'follows' if r.is_next else 'does not follow'}\t{r.probability:.4f}"],
    "fill_mask": lambda r: [
        "\t".join(f"{fill.token} {fill.score:.4f}" for fill in fills) for fills in r.masks
    ],
    "tag": lambda r: [f"{e.label}\t{e.text}\t{e.start}-{e.end}\t{e.score:.4f}" for e in r.entities],
    "answer": lambda r: [f"{a.text}\t{a.start}-{a.end}\t{a.score:.4f}" for a in r.answers],
}


class Printer:
    """Prints the results of one task, in order; `several` candidates or labels each in a line of its own.

    With `neighbours` those that were read stand below each answer.
    """

    def __init__(self, task: str, as_json: bool, several: bool = False, neighbours: bool = False) -> None:
        self._task = task
        self._as_json = as_json
        self._several = several
        self._neighbours = neighbours
        self._count = 0

    def show(self, pair: tuple[Any, Any] | None) -> None:
        """Print a text's result, or what stands for a blank line, which is None."""
        if self._as_json:
            emit(format_json(None if pair is None else self._make_value(*pair)))
            return
        if self._count and (self._several or self._task in SEVERAL_LINES):
            emit("")
        self._count += 1
        for line in [""] if pair is None else self._format_lines(*pair):
            emit(line)

    def _make_value(self, text: Any, result: Any) -> dict[str, Any]:
        value: dict[str, Any] = result.to_json()
        return {"prompt": text, **value} if self._task == "generate" else value

    def _format_lines(self, text: Any, result: Any) -> Iterable[str]:
        if self._task == "classify" and self._several:
            best_first = sorted(result.probabilities.items(), key=lambda item: -item[1])
            return [f"{label}\t{score:.4f}" for label, score in best_first]
        if self._task not in ("generate", "translate"):
            return LINES[self._task](result)
        before = text if self._task == "generate" else ""
        if self._several:
            return [f"{before}{one.text}\t{one.score:.4f}" for one in result.candidates]
        return [before + result.text, *(list_neighbours(result) if self._neighbours else ())]


def list_neighbours(generation: Any) -> Iterable[str]:
    """Yield a line for each neighbour that was read of an answer's chunks."""
    if not generation.neighbours:
        yield "no neighbours were read: no chunk ends in this text, or there is no index"
    for number, neighbours in enumerate(generation.neighbours):
        yield f"neighbours of chunk {number}:" if neighbours else f"chunk {number} has no neighbours"
        for one in neighbours:
            yield f"  {one.distance:.3f}  {one.document}, token {one.start}: {' '.join(one.text.split())}"
