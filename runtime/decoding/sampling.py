"""From logits to the next token: transformers' processors in their order, then one choice per row.

B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BackendError, InputError

Logits = npt.NDArray[np.floating]
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampling:
    """How one generate call chooses its tokens.

    With none of temperature, top_k and top_p given, the likeliest token is taken (greedy). With
    any of them, tokens are drawn, at temperature 1.0 unless it is given.

    Attributes:
        temperature: Divides the logits; finite and over 0, or None.
        top_k: Draw from the k likeliest tokens only; at least 1, or None for all.
        top_p: Draw from the likeliest tokens that together reach this probability; over 0 and at
            most 1, or None for all.
        repetition_penalty: Divides (or multiplies, if negative) the logits of tokens that the
            prompt or the answer already has; finite and over 0, where 1.0 does nothing. Works
            with greedy too.
        seed: Makes the draws repeatable; 0 or more, or None for new ones at each call.

    Raises:
        InputError: A value is of the wrong type or outside its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None:
            way_out = "omit it (None), with top_k and top_p, to take the likeliest token always"
            _check_positive("temperature", self.temperature, way_out)
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1, "None disables it")
        if self.top_p is not None:
            _check_positive("top_p", self.top_p, "None disables it", most=1.0)
        _check_positive("repetition_penalty", self.repetition_penalty, "1.0 disables it")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, "None draws differently at each call")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature is None and self.top_k is None and self.top_p is None


def row_generators(seed: int | None, rows: Iterable[int]) -> list[np.random.Generator]:
    """One random generator for each row, by its place in the caller's list of prompts.

    A row's draws depend on the seed and its number only: not on the other rows, the batch, or how
    a long list was cut into batches.
    """
    entropy = np.random.SeedSequence(seed).entropy
    sequences = (np.random.SeedSequence(entropy, spawn_key=(row,)) for row in rows)
    return [np.random.Generator(np.random.PCG64(sequence)) for sequence in sequences]


def process(
    logits: Logits, histories: Sequence[Sequence[int]], sampling: Sampling
) -> npt.NDArray[np.float32]:
    """Apply repetition penalty, temperature, top-k and top-p: transformers' order and arithmetic.

    Of equal logits at top-k's border all stay, as in transformers; at top-p's border the first
    stay, where transformers keeps arbitrary ones.

    Args:
        logits: (B, V), any float type; never modified.
        histories: The token ids that each row has so far, prompt included, padding left out. Ids
            without a logit are ignored.
        sampling: The options.

    Returns:
        (B, V) float32, -inf for tokens that must not be drawn.

    Raises:
        BackendError: A row has NaN, infinity, or nothing but -inf.
        InputError: B histories were not given, or temperature or repetition_penalty is so small
            or large that the logits leave float32.
    """
    check_logits(logits)
    if len(histories) != len(logits):
        raise InputError(f"histories has {len(histories)} rows, but logits has {len(logits)}")
    scores = logits.astype(np.float32)  # a copy, also of float32
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # looked at below
        if sampling.repetition_penalty != 1.0:
            for row, history in zip(scores, histories, strict=True):
                _penalize(row, history, np.float32(sampling.repetition_penalty))
        if sampling.temperature is not None:
            scores /= np.float32(sampling.temperature)
    if not np.isfinite(scores.max(axis=-1)).all():
        raise InputError(
            f"temperature={sampling.temperature} with repetition_penalty="
            f"{sampling.repetition_penalty} takes the logits out of float32; use values nearer to "
            "1, or temperature=None to take the likeliest token"
        )
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        border = np.partition(scores, -sampling.top_k, axis=-1)[:, -sampling.top_k, None]
        scores[scores < border] = -np.inf
    if sampling.top_p is not None and sampling.top_p < 1.0:
        for row in scores:
            _keep_top_p(row, sampling.top_p)
    return scores


def choose(
    logits: Logits,
    histories: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[np.random.Generator],
) -> npt.NDArray[np.int64]:
    """Choose the next token of each row.

    Greedy takes the first of equal logits. Otherwise each row takes one uniform number from its
    generator and the token at that point of its cumulative distribution.

    Args:
        logits: (B, V), any float type; never modified.
        histories: The token ids that each row has so far, prompt included, padding left out.
        sampling: The options.
        generators: A generator for each row, from ``row_generators``; not used when greedy.

    Returns:
        (B,) int64 token ids.

    Raises:
        BackendError: A row has NaN, infinity, or nothing but -inf.
        InputError: See ``process``; or B generators were not given.
    """
    scores = process(logits, histories, sampling)
    if sampling.greedy:
        likeliest: npt.NDArray[np.int64] = scores.argmax(axis=-1)
        return likeliest
    if len(generators) != len(scores):
        raise InputError(f"{len(generators)} generators were given for {len(scores)} rows")
    pairs = zip(scores, generators, strict=True)
    return np.array([_draw(row, generator) for row, generator in pairs], dtype=np.int64)


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """The log-probabilities of a model's own logits, before any processing.

    Args:
        logits: (B, V), any float type.

    Returns:
        (B, V) float64.

    Raises:
        BackendError: A row has NaN, infinity, or nothing but -inf.
    """
    check_logits(logits)
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def token_logprobs(logits: Logits, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The log-probability that the model itself gives to one token of each row.

    Args:
        logits: (B, V), any float type, before any processing.
        ids: (B,) int64.

    Returns:
        (B,) float64.

    Raises:
        BackendError: A row has NaN, infinity, or nothing but -inf.
    """
    check_logits(logits)
    highest = logits.max(axis=-1)
    total = np.exp(logits - highest[:, None]).sum(axis=-1, dtype=np.float64)
    picked = logits[np.arange(len(logits)), ids].astype(np.float64)
    return picked - highest - np.log(total)  # type: ignore[no-any-return]


def check_logits(logits: Logits) -> None:
    """Refuse logits from which no honest choice can be made.

    Raises:
        BackendError: A row of (B, V) has NaN, infinity, or nothing but -inf; names the row.
    """
    bad = ~np.isfinite(logits.max(axis=-1))  # the maximum of a row with NaN is NaN
    if bad.any():
        row = int(bad.argmax())
        found = {"nan": "NaN", "inf": "infinity"}.get(str(logits[row].max()), "nothing but -inf")
        raise BackendError(
            f"the engine's logits have {found} in row {row} of the batch; run `planforge verify` "
            "on the bundle, and try precision='fp32' if this is fp16"
        )


def _penalize(row: npt.NDArray[np.float32], history: Sequence[int], penalty: np.float32) -> None:
    ids = np.asarray(history, dtype=np.int64)
    ids = ids[(ids >= 0) & (ids < len(row))]
    seen = row[ids]
    row[ids] = np.where(seen < 0, seen * penalty, seen / penalty)


def _keep_top_p(row: npt.NDArray[np.float32], top_p: float) -> None:
    """Set to -inf what lies below the nucleus: the smallest, up to 1 - top_p together."""
    candidates = np.flatnonzero(row > -np.inf)
    ascending = np.sort(row[candidates])  # values alone: ten times faster than argsort
    weights = np.exp(ascending - ascending[-1])
    # torch adds in float64 and rounds each sum to float32; so does this.
    cumulative = np.cumsum(weights / weights.sum(), dtype=np.float64).astype(np.float32)
    removed = int(np.searchsorted(cumulative, np.float32(1 - top_p), side="right"))
    removed = min(removed, len(ascending) - 1)  # the likeliest always stays
    border, kept = ascending[removed], len(ascending) - removed
    ties = candidates[row[candidates] == border]
    above = int(np.count_nonzero(row > border))
    row[row < border] = -np.inf
    row[ties[kept - above :]] = -np.inf


def _draw(row: npt.NDArray[np.float32], generator: np.random.Generator) -> int:
    candidates = np.flatnonzero(row > -np.inf)
    kept = row[candidates].astype(np.float64)
    cumulative = np.cumsum(np.exp(kept - kept.max()))
    # The product stays below the total, and a token of probability 0 spans no interval.
    point = generator.random() * cumulative[-1]
    return int(candidates[np.searchsorted(cumulative, point, side="right")])


def _check_positive(name: str, value: Any, way_out: str, most: float = FLOAT32_MAX) -> None:
    allowed = "a finite number over 0" if most == FLOAT32_MAX else f"over 0 and at most {most:g}"
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 < value <= most:
        raise InputError(f"{name} is {value!r}; it must be {allowed}; {way_out}")


def check_integer(name: str, value: Any, least: int, way_out: str) -> None:
    """Refuse what is not an integer from `least`; True and False are none.

    Raises:
        InputError: It is not.
    """
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer or value < least:
        raise InputError(f"{name} is {value!r}; it must be an integer from {least}; {way_out}")
