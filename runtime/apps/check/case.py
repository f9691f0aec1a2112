"""Defines cases as data: texts, the rows that read them in steps, what is measured, and PyTorch's answers.

N places of a text
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...bundle.manifest import Artifact
from .cases import Skipped, find_room, skip_batches, skip_too_long
from .files import choose_evenly

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]
Runner: TypeAlias = Literal["forced", "every", "greedy", "once", "attention", "beams"]
DecoderKind: TypeAlias = Literal["logits", "columns", "passages", "layers", "attention", "beams"]
Kind: TypeAlias = (
    DecoderKind | Literal["vectors", "values", "scores", "labels", "flags", "ranking", "fields", "paths"]
)

CASES = ("cases", "few", "replays", "ranges")  # the fields of a set that have some


class Noise(NamedTuple):
    """The noise that a picture is made of.

    Attributes:
        seed: of the generator.
        height: of the latents.
        width: of the latents.
    """

    seed: int
    height: int
    width: int


@dataclass(frozen=True)
class Text:
    """Tokens that a row reads.

    Attributes:
        tokens: their ids.
        continues: how many tokens PyTorch adds to them; 0 once `answer` has.
        past: how many of the first tokens have their keys and values in a cache `repeats` times.
        repeats: how often, one behind the other. Positions are counted in `tokens`, without repetitions.
        segments: of each token, 0 for the first text of a pair and 1 for the second; empty where all are 0.
        source: the number of the text that a translator's encoder reads beside it.
        quotes: whether `tokens` are places in what PyTorch writes behind the texts that it continues, -1 for
            the token that targets begin with. `answer` looks them up.
        noise: of a prompt, what its picture is made of.
        adapter: the slot of the one that reads it; 0 is none.
    """

    tokens: tuple[int, ...]
    continues: int = 0
    past: int = 0
    repeats: int = 1
    segments: tuple[int, ...] = ()
    source: int | None = None
    quotes: bool = False
    noise: Noise | None = None
    adapter: int = 0

    def count(self, end: int | None = None) -> int:
        """Return how many tokens of a cache the first `end` take, or all of them."""
        length = len(self.tokens) + self.continues if end is None else end
        return length + (self.repeats - 1) * min(self.past, length)


@dataclass(frozen=True)
class Row:
    """A row of a batch: which text it reads, and how many of its tokens it has read behind each step."""

    text: int
    ends: tuple[int, ...]


class Measure(NamedTuple):
    """What is measured of a case, and which limits it has.

    Attributes:
        kind: "logits" of whole rows, the "columns" of some tokens, "passages" of which every token is
            predicted; of an encoder "vectors", a regression's "values", "scores" (a value from each token,
            all of a text are one vector), "labels" of which one is chosen, "flags" of which each is chosen
            by itself, the "ranking" of texts by their vectors; of a translator the keys and values of
            "layers", each by itself, "attention", and "beams"; of pictures "fields", and "paths" of which
            each step reads what the one before gave.
        outputs: what is compared with PyTorch's.
        limited: the metrics that have limits.
        prefix: of the limits' names.
        of_texts: whether means over texts, and shares of them, count.
        similarity: how texts are compared that are ranked.
    """

    kind: Kind
    outputs: tuple[str, ...]
    limited: tuple[str, ...]
    prefix: str = ""
    of_texts: bool = False
    similarity: str = ""


@dataclass(frozen=True)
class Case:
    """Rows that a graph reads together, in several steps.

    Attributes:
        name: in words; cases of one name are one comparison.
        graph: "decoder", ...
        rows: of one batch, all of as many steps.
        measures: what is compared of it.
        runner: "forced" compares what follows each step; "every" each token's, of a single row; "greedy" lets
            the engine choose the tokens behind the first step; "once" reads whole texts, as an encoder does;
            "attention" reads a target at once, in rows that share a source; "beams" searches.
        shares_past: the first step is read once, by the row that reads most of it, and copied.
        chunk: how many tokens of a row one run of the graph reads at most; 0 leaves it to the runtime.
        spare: slots of the cache behind those that are needed: what is written too far shows in results then,
            and else the engine itself would raise an error.
        is_costly: a quick look at PyTorch's answers leaves out the texts that it reads.
        is_padded: whether its name says that rows are padded: a graph that fails in such cases alone has a
            fault that single texts do not show.
    """

    name: str
    graph: str
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]
    runner: Runner = "forced"
    shares_past: bool = False
    chunk: int = 0
    spare: int = 0
    is_costly: bool = False
    is_padded: bool = False

    def list_steps(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield where each row's text is cut in each step: its begin and its end."""
        begins = (0,) * len(self.rows)
        for ends in zip(*(row.ends for row in self.rows), strict=True):
            yield tuple(zip(begins, ends, strict=True))
            begins = ends


class Location(NamedTuple):
    """A step of a case, and a row in it."""

    case: Case
    step: int
    row: int


class Encoding(NamedTuple):
    """What a translator's encoder takes, beside its decoder."""

    rows: int  # sources at once
    tokens: int  # of a source


class Searching(NamedTuple):
    """How beams are searched."""

    num_beams: int
    max_new_tokens: int
    eos: tuple[int, ...]
    suppressed: tuple[int, ...]


class Denoising(NamedTuple):
    """Says how pictures are made.

    Attributes:
        steps: as the user counts them.
        guidance_scale: how much a prompt counts.
        negative: the number of the text that it counts more than.
    """

    steps: int
    guidance_scale: float
    negative: int


class Known(NamedTuple):
    """Values at some positions of a text; those behind its token at position 0, 1, ..."""

    positions: Integers  # (N,) ascending
    values: Array  # (N, ...); (0,) where they are wanted and not known yet

    @classmethod
    def wanted(cls, positions: Sequence[int]) -> Known:
        """Return positions whose values are to be found."""
        return cls(np.asarray(positions, np.int64), np.empty(0, np.float32))

    def find_values(self, positions: Integers) -> Array:
        """Return the values at positions, all of which are among the known ones."""
        places = np.searchsorted(self.positions, positions)
        if not np.array_equal(self.positions[np.minimum(places, len(self.positions) - 1)], positions):
            raise ValueError("values are kept for other positions than those that are compared")
        return self.values[places]

    def thin(self, most: int) -> Known:
        """Return the values at `most` of the positions, the first and last among them."""
        keep = list(choose_evenly(len(self.positions), most))
        return Known(self.positions[keep], self.values[keep])

    def take_last(self, most: int) -> Known:
        """Return the values at the last positions."""
        return Known(self.positions[-most:], self.values[-most:])


Answers: TypeAlias = Mapping[str, Mapping[int, Known]]  # by output and text


@dataclass(frozen=True)
class CaseSet:
    """Texts, the cases that read them, and what PyTorch answers.

    Attributes:
        texts: what rows read.
        cases: in the order in which they run.
        columns: tokens of the vocabulary, of whose logits "columns" are.
        answers: PyTorch's, at the positions where they are wanted.
        left_out: what the level of verification does without, in words.
        calibration: texts that no case reads, to calibrate with; files do without.
        search: how a translator's beams are searched.
        denoising: how pictures are made.
        few: cases to compare a graph in that is run node by node, which is slow.
        replays: of each graph a case of a little real text, in which a node at fault is looked for.
        ranges: of each graph a case of as much real text as the ranges of its results need.
    """

    texts: tuple[Text, ...]
    cases: tuple[Case, ...]
    answers: Answers
    columns: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    calibration: tuple[Text, ...] = ()
    search: Searching | None = None
    denoising: Denoising | None = None
    few: tuple[Case, ...] = ()
    replays: tuple[Case, ...] = ()
    ranges: tuple[Case, ...] = ()

    def list_sources(self, case: Case) -> list[tuple[int, ...]]:
        """Return what a translator's encoder reads for a case: of rows that share a past a single source."""
        rows = case.rows[:1] if case.shares_past else case.rows
        return [
            self.texts[number].tokens for row in rows if (number := self.texts[row.text].source) is not None
        ]

    def fit(self, case: Case, artifact: Artifact, encoding: Encoding | None = None) -> list[Case]:
        """Return a case in batches as a graph takes them, without rows and steps that are too long.

        `encoding` is what a translator's encoder takes of a case's sources.
        """
        size = artifact.axis("batch")
        at_once = size.max
        if case.runner == "beams":
            assert self.search is not None
            at_once //= self.search.num_beams
        rows = [row for row in case.rows if self.count_first(case, row) <= find_room(artifact)]
        if encoding is not None:
            at_once = at_once if case.shares_past else min(at_once, encoding.rows)
            rows = [row for row in rows if self.count_source(row) <= encoding.tokens]
        parts = [
            tuple(rows[begin : begin + at_once])
            for begin in range(0, len(rows) if at_once else 0, at_once or 1)
        ]
        cases = [self.cut(replace(case, rows=part), find_room(artifact)) for part in parts]
        return [one for one in cases if len(one.rows) >= size.min]

    def count_source(self, row: Row) -> int:
        """Return how many tokens the source of a row has; 0 of a row that has none."""
        source = self.texts[row.text].source
        return 0 if source is None else len(self.texts[source].tokens)

    def count_first(self, case: Case, row: Row) -> int:
        """Return how many tokens a row has when something of it is compared first."""
        if case.runner in ("greedy", "once", "beams"):
            return self.texts[row.text].count()
        return 1 if case.runner == "every" else self.texts[row.text].count(row.ends[case.shares_past])

    def cut(self, case: Case, room: int) -> Case:
        """Return a case with as many of its steps as there is room for; without rows if that is none."""
        if case.runner == "every":
            rows = [replace(row, ends=tuple(min(end, room) for end in row.ends)) for row in case.rows]
            return replace(case, rows=tuple(rows))
        least = 2 if case.shares_past else 1
        for steps in range(len(case.rows[0].ends), least - 1, -1):
            rows = [replace(row, ends=row.ends[:steps]) for row in case.rows]
            shorter = replace(case, rows=tuple(rows))
            if self.count_columns(shorter) <= room:
                return shorter
        return replace(case, rows=())

    def list_skipped(self, artifact: Artifact, encoding: Encoding | None = None) -> list[Skipped]:
        """Return what `fit` leaves out of a graph's cases by name: whole rows, and last steps of rows."""
        counts: dict[str, int] = {}
        left: dict[tuple[str, str], list[Case]] = {}
        for case in self.cases:
            if case.graph != artifact.graph:
                continue
            counts[case.name] = counts.get(case.name, 0) + len(case.rows)
            kept = [row for part in self.fit(case, artifact, encoding) for row in part.rows]
            begun = {identify(case, row) for row in kept}
            rows = tuple(row for row in case.rows if identify(case, row) not in begun)
            cut = tuple(row for row in case.rows if row not in kept and row not in rows)
            for what, some in (("", rows), ("the last steps of ", cut)):
                if some:
                    left.setdefault((case.name, what), []).append(replace(case, rows=some))
        skipped = []
        for (name, what), cases in left.items():
            what += f"{sum(len(case.rows) for case in cases)} of {counts[name]} rows of {name!r}"
            tokens = max(map(self.count_columns, cases))
            rows_at_once = max(len(case.rows) for case in cases)
            if tokens > find_room(artifact):
                skipped.append(skip_too_long(artifact, what, tokens))
            else:
                skipped.append(skip_batches(artifact, what, rows_at_once, tokens))
        return skipped

    def count_columns(self, case: Case) -> int:
        """Return how many tokens wide a cache gets in which the rows are padded in each step."""
        first, *others = list_widths(case.rows)
        if case.runner in ("greedy", "beams"):
            others = [min(self.texts[row.text].count() - row.ends[0] for row in case.rows)]
        repeats = max(self.texts[row.text].repeats for row in case.rows)
        return first * repeats + sum(others)

    def list_texts(self, kind: Kind) -> list[int]:
        """Return the numbers of the texts that cases with a measure of this kind read, in their order."""
        read = {
            row.text
            for case in self.cases
            for row in case.rows
            if any(measure.kind == kind for measure in case.measures)
        }
        return sorted(read)

    def restrict(self, texts: Collection[int]) -> CaseSet:
        """Return the set with the cases that read none but these texts, and with answers to these alone."""
        answers = {
            output: {text: known for text, known in by_text.items() if text in texts}
            for output, by_text in self.answers.items()
        }
        kept: dict[str, Any] = {
            name: tuple(case for case in getattr(self, name) if all(row.text in texts for row in case.rows))
            for name in CASES
        }
        return replace(
            self,
            **kept,
            answers={output: by_text for output, by_text in answers.items() if by_text},
        )


def list_widths(rows: Sequence[Row]) -> list[int]:
    """Return how many tokens wide each step of rows is that are padded in it."""
    widths: list[int] = np.diff([row.ends for row in rows], prepend=0).max(axis=0).tolist()
    return widths


def identify(case: Case, row: Row) -> tuple[int, int]:
    """Return what tells a row of a case from the others, also where some of its steps are left out."""
    return row.text, 0 if case.runner == "every" else row.ends[0]
