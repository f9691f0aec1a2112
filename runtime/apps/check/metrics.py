"""Measures the difference between two engines' results.

N rows, V vocabulary or classes, E width of a vector
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ...decoding.sampling import log_softmax
from ...encode.pooling import sigmoid, softmax

Logits = npt.NDArray[np.float32]

LIKELIEST = 5  # tokens that are compared as a set
SPREAD_OF_LARGEST = 0.05  # a tensor's spread is at least this share of its largest value: sums round by that
CACHED_VALUES = 2**16  # whose softmax fits a core's cache: of more, memory would take most of the time
MEAN_OF = 8  # vectors at least; the mean of fewer says no more than the worst of them


class PlainFields:
    """What all metrics share: their fields as JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; None where one is not finite."""
        return {name: make_plain(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Metrics(PlainFields):
    """How far logits are from the reference's."""

    max_error: float  # the largest difference of two logits, in units of `measure_scale` the reference
    mean_error: float  # the mean one, in the same units
    mean_kl: float  # of the reference's distribution to the engine's, in nats, averaged over rows
    top1_agreement: float  # share of rows whose likeliest token is the same
    top5_agreement: float  # share of the reference's five likeliest tokens that are among the engine's five
    flip_margin: float  # the reference's largest where the likeliest differs: 0.01 is rounding, 3.0 a bug
    finite: bool  # no NaN and no infinity on either side
    rows: int  # that were compared

    LIMITED: ClassVar[tuple[str, ...]] = ("max_error", "mean_kl")


@dataclass(frozen=True)
class ValueMetrics(PlainFields):
    """How far values are from the reference's that have no distribution, as those of a regression."""

    max_error: float  # as those of `Metrics`
    mean_error: float
    finite: bool
    rows: int

    LIMITED: ClassVar[tuple[str, ...]] = ("max_error",)


@dataclass(frozen=True)
class LabelMetrics(ValueMetrics):
    """How far the logits of independent labels are from the reference's, and what a user reads of them."""

    top1_agreement: float  # share of rows all of whose labels are the same
    flip_margin: float  # the reference's largest logit where a label differs
    probability_error: float  # the largest difference of two probabilities
    label_flips: int  # rows whose label is another one
    label_changes: float  # their share, of more than `MEAN_OF` rows of real text; else 0

    LIMITED: ClassVar[tuple[str, ...]] = ("max_error", "probability_error", "label_changes")


@dataclass(frozen=True)
class ClassMetrics(LabelMetrics):
    """How far the logits of classes are from the reference's, of which a row has one.

    `top1_agreement` and `flip_margin` are those of `Metrics`, of a label in place of a token.
    """

    mean_kl: float  # as those of `Metrics`
    top5_agreement: float

    LIMITED: ClassVar[tuple[str, ...]] = ("max_error", "mean_kl", "probability_error", "label_changes")


@dataclass(frozen=True)
class VectorMetrics(PlainFields):
    """How far vectors are from the reference's."""

    max_error: float  # the largest difference of two values, in units of the reference's standard deviation
    cosine_gap: float  # 1 - the smallest cosine of a vector and its reference
    mean_cosine_gap: float  # 1 - the mean cosine, of the vectors of at least `MEAN_OF` texts; else 0
    finite: bool  # no NaN and no infinity on either side
    rows: int  # vectors that were compared

    LIMITED: ClassVar[tuple[str, ...]] = ("max_error", "cosine_gap", "mean_cosine_gap")


@dataclass(frozen=True)
class RankingMetrics(PlainFields):
    """How far the order of texts is from the reference's, where each is a query for all the others."""

    rank_changes: float  # share of the ten best texts that are not among the reference's ten
    kendall_tau: float  # of all texts' order, averaged over queries: 1 where it is the same
    finite: bool
    rows: int  # best texts that were compared, of all queries

    LIMITED: ClassVar[tuple[str, ...]] = ("rank_changes",)


@dataclass(frozen=True)
class ScoreMetrics(PlainFields):
    """How far the scores of whole sequences are from those that the model gives the same tokens."""

    score_error: float  # the largest difference of two mean log-probabilities
    finite: bool  # no NaN and no infinity among them
    rows: int  # sequences that were compared

    LIMITED: ClassVar[tuple[str, ...]] = ("score_error",)


@dataclass(frozen=True)
class ErrorMetrics(PlainFields):
    """How far logits are from the reference's where no more is kept: of random batches, along a search."""

    max_error: float  # the largest difference of two logits, in units of their spread
    finite: bool  # no NaN and no infinity on either side
    rows: int  # that were compared

    LIMITED: ClassVar[tuple[str, ...]] = ("max_error",)


@dataclass(frozen=True)
class FieldMetrics(PlainFields):
    """Tells how far fields (C, H, W), such as predicted noise, are from the reference's."""

    rms_error: float  # the largest root-mean-square difference of a field, relative to the reference's own
    finite: bool
    rows: int  # fields that were compared

    LIMITED: ClassVar[tuple[str, ...]] = ("rms_error",)


@dataclass(frozen=True)
class PathMetrics(PlainFields):
    """Tells how far what steps end with is from the reference's: each step reads what the one before gave."""

    path_error: float  # as the rms_error of `FieldMetrics`
    finite: bool
    rows: int

    LIMITED: ClassVar[tuple[str, ...]] = ("path_error",)


@dataclass(frozen=True)
class TextMetrics(PlainFields):
    """What a decoder loses on real text."""

    text_kl: float  # of the engine from the reference, in nats, averaged over the known rows
    top1_changes: float  # share of positions where another token is the likeliest
    perplexity_change: float  # as a share of the reference's perplexity; a gain counts as none
    finite: bool
    rows: int  # how many positions were compared

    LIMITED: ClassVar[tuple[str, ...]] = ("text_kl", "top1_changes", "perplexity_change")


def summarize_text(
    kl: Sequence[npt.NDArray[Any]], changed: Sequence[npt.NDArray[Any]], lost: Sequence[npt.NDArray[Any]]
) -> TextMetrics:
    """Return the metrics of finite results: KL divergences, other tokens, and lost log-probabilities."""
    return TextMetrics(
        text_kl=float(np.concatenate(kl).mean()),
        top1_changes=float(np.concatenate(changed).mean()),
        perplexity_change=max(0.0, math.expm1(float(np.concatenate(lost).mean()))),
        finite=True,
        rows=sum(map(len, changed)),
    )


class Measured(Protocol):
    """What all metrics have: whether everything was finite, and the names of those that have a limit."""

    LIMITED: ClassVar[tuple[str, ...]]

    @property
    def finite(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    def to_json(self) -> dict[str, Any]: ...


def measure(got: Logits, want: Logits) -> Metrics:
    """Compare logits (N, V) row by row."""
    if not (is_finite(got) and is_finite(want)):
        return Metrics(math.nan, math.nan, math.nan, 0.0, 0.0, math.inf, False, len(want))
    best = want.argmax(-1)
    chosen = got.argmax(-1)
    every = np.arange(len(want))
    margins = want[every, best] - want[every, chosen]
    largest = total = 0.0
    shared = []
    for rows in cut_rows(want):
        errors = np.abs(got[rows] - want[rows])
        largest = max(largest, float(errors.max()))
        total += float(errors.sum(dtype=np.float64))
        shared.append(measure_shared_likeliest(got[rows], want[rows]))
    scale = measure_scale(want)
    return Metrics(
        max_error=largest / scale,
        mean_error=total / want.size / scale,
        mean_kl=float(measure_kl(want, got).mean()),
        top1_agreement=float((best == chosen).mean()),
        top5_agreement=float(np.concatenate(shared).mean()),
        flip_margin=float(margins.max()),
        finite=True,
        rows=len(want),
    )


def measure_errors(got: Logits, want: Logits) -> ValueMetrics:
    """Compare values (N, V) that have no distribution."""
    found = measure(got, want)
    return ValueMetrics(found.max_error, found.mean_error, found.finite, found.rows)


def measure_labels(got: Logits, want: Logits, *, independent: bool, of_texts: bool = True) -> LabelMetrics:
    """Compare a classifier's logits (N, V); of `independent` labels each has a probability of its own."""
    found = vars(measure(got, want))
    kind: type[LabelMetrics] = ClassMetrics
    if independent:
        kind = LabelMetrics
        del found["mean_kl"], found["top5_agreement"]
    rows = len(want)
    if not found["finite"]:
        return kind(**found, probability_error=math.nan, label_flips=rows, label_changes=math.nan)
    activation = sigmoid if independent else softmax
    error = float(np.abs(activation(got) - activation(want)).max())
    differs = (got > 0) != (want > 0) if independent else (got.argmax(-1) != want.argmax(-1))[:, None]
    flipped = differs.any(-1)
    flips = int(flipped.sum())
    if independent:
        found["top1_agreement"] = 1 - flips / rows
        found["flip_margin"] = float(np.abs(want)[differs].max(initial=0.0))
    share = flips / rows if of_texts and rows > MEAN_OF else 0.0
    return kind(**found, probability_error=error, label_flips=flips, label_changes=share)


def cut_rows(logits: Logits) -> Iterator[slice]:
    """Yield slices of some rows of logits (N, V), for work whose results are larger than they are."""
    step = max(1, CACHED_VALUES // logits.shape[-1])
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


def is_finite(logits: Logits) -> bool:
    """Tell whether logits (N, V) have no NaN and no infinity."""
    return all(bool(np.isfinite(logits[rows]).all()) for rows in cut_rows(logits))


def measure_max_error(got: Logits, want: Logits) -> float:
    """Return what `measure` says of it, and nothing else."""
    if not (is_finite(got) and is_finite(want)):
        return math.nan
    return max(float(np.abs(got[rows] - want[rows]).max()) for rows in cut_rows(want)) / measure_scale(want)


def measure_error(got: Logits, want: Logits, scale: float) -> float:
    """Return the largest difference in units of `scale`; infinite where a value is not finite."""
    error = float(np.abs(got.astype(np.float64) - want).max()) / scale
    return error if math.isfinite(error) else math.inf


def measure_shared_likeliest(got: Logits, want: Logits) -> npt.NDArray[np.float64]:
    """Return the share of the `LIKELIEST` tokens that both sides have, for each row."""
    count = min(LIKELIEST, want.shape[-1])
    both = [np.argpartition(logits, -count, axis=-1)[:, -count:] for logits in (got, want)]
    return np.array([len(np.intersect1d(a, b)) / count for a, b in zip(*both, strict=True)])


def measure_vectors(
    got: Logits, want: Logits, min_scale: float = 1e-6, of_texts: bool = False
) -> VectorMetrics:
    """Compare vectors (N, E), or of whole texts; `min_scale` is the smallest unit of an error.

    The unit is the spread of what is not 0: of sparse weights nearly all are.
    """
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return VectorMetrics(math.nan, math.nan, math.nan, False, len(want))
    a = got.astype(np.float64)
    b = want.astype(np.float64)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosines = (a * b).sum(-1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    cosines[~a.any(-1) & ~b.any(-1)] = 1.0  # both are zero
    return VectorMetrics(
        max_error=float(np.abs(a - b).max()) / max(measure_spread(b[b != 0]), min_scale),
        cosine_gap=max(0.0, 1.0 - float(cosines.min())),
        mean_cosine_gap=max(0.0, 1.0 - float(cosines.mean())) if of_texts and len(want) >= MEAN_OF else 0.0,
        finite=True,
        rows=len(want),
    )


def measure_fields(pairs: Sequence[tuple[Logits, Logits]]) -> FieldMetrics:
    """Compare fields (N, ...) with the reference's, of sizes that may differ from pair to pair."""
    errors = [
        measure_rms(own.astype(np.float64) - wanted) / max(measure_rms(wanted), np.finfo(np.float32).tiny)
        for got, want in pairs
        for own, wanted in zip(got, want, strict=True)
    ]
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
    return FieldMetrics(worst if math.isfinite(worst) else math.nan, math.isfinite(worst), len(errors))


def measure_rms(array: npt.NDArray[Any]) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.square(array, dtype=np.float64).mean()))


def measure_spread(array: npt.NDArray[np.float64]) -> float:
    """Return the unit in which differences of a tensor's values are measured; 0 without values."""
    if not array.size:
        return 0.0
    return max(float(array.std()), SPREAD_OF_LARGEST * float(np.abs(array).max()))


def measure_scale(logits: Logits) -> float:
    """Return the unit of logits' errors, so that a model with large logits is not judged by a finer grain."""
    squares = 0.0
    for rows in cut_rows(logits):
        centred = logits[rows] - logits[rows].mean(-1, keepdims=True)  # softmax sees no offset of a whole row
        squares += float(np.square(centred).sum(dtype=np.float64))
    return max(1.0, math.sqrt(squares / logits.size))


def measure_kl(want: Logits, got: Logits) -> npt.NDArray[np.float64]:
    """Return KL(want || got) of each row of finite logits, in nats; 0 where rounding leaves it below zero."""
    divergence = np.empty(len(want))
    for rows in cut_rows(want):
        log_p, log_q = (log_softmax(logits[rows]) for logits in (want, got))
        divergence[rows] = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return np.maximum(divergence, 0.0)


def make_plain(value: Any) -> Any:
    """Return a value as JSON can hold it: None for NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
