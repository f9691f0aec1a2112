"""From logits to the next token: transformers' processors in their order, then one choice per row.

B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, log
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BackendError, InputError
from .checks import FLOAT32_MAX, check_integer, check_positive, is_number
from .constraints import Constraints, constrain
from .processors import (
    LogitsProcessor,
    forbid_repeats,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_counts,
    penalize_repeats,
    run_processor,
)
from .rules import add_sequence_bias

Logits = npt.NDArray[np.floating]
PENALTIES = ("frequency_penalty", "presence_penalty")  # as OpenAI has them
# The likeliest to blame first.
PROCESSORS = ("logit_bias", "no_repeat_ngram_size", "repetition_penalty", *PENALTIES)
MAX_PENALTY = 2.0  # as OpenAI has it
MIN_TEMPERATURE = float(np.finfo(np.float32).smallest_normal)  # what is below may be read as 0
# Below this the sum of exponentials needs no shift by the highest logit: 2^60 of them can be added in
# float32, and above -40 what counts in the sum does not vanish.
SAFE_EXPONENT = 40.0


@dataclass(frozen=True)
class Sampling:
    """How one call chooses its tokens; `GenerationOptions` says what the fields mean."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_p: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logits_processor: LogitsProcessor | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    structured: bool = False  # whether each row has a mask of the tokens that may come
    constraints: Constraints | None = None  # rules of the checkpoint, and min_new_tokens; None has none

    def __post_init__(self) -> None:
        if self.temperature is not None and not (is_number(self.temperature) and self.temperature == 0):
            hint = "0, or omit it (None) with top_k, top_p and min_p, to take the likeliest token always"
            check_positive("temperature", self.temperature, hint)
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1, "None disables it")
        if self.top_p is not None:
            check_positive("top_p", self.top_p, "None disables it", most=1.0)
        if self.min_p is not None:
            check_positive("min_p", self.min_p, "None disables it", most=1.0)
        check_positive("repetition_penalty", self.repetition_penalty, "1.0 disables it")
        if self.no_repeat_ngram_size is not None:
            check_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 1, "None disables it")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, "None samples differently at each call")
        for name in PENALTIES:
            penalty = getattr(self, name)
            if not is_number(penalty) or not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise InputError(
                    f"{name} is {penalty!r}; it must be a number from -2 to 2; 0 disables it", option=name
                )
        check_bias(self.logit_bias)
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise InputError(
                f"logits_processor is {self.logits_processor!r:.80}; it must be a function of the token ids"
                " and the logits, or None",
                option="logits_processor",
            )

    @cached_property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        if self.temperature is not None:
            return self.temperature == 0
        return self.top_k is None and self.top_p is None and self.min_p is None

    @cached_property
    def processes(self) -> bool:
        """Whether it changes logits in other ways than by leaving out those that are not likely enough."""
        return (
            self.repetition_penalty != 1.0
            or self.no_repeat_ngram_size is not None
            or bool(self.logit_bias)
            or self.penalizes_counts
            or self.logits_processor is not None
            or self.constraints is not None
            or self.structured
        )

    @property
    def penalizes_counts(self) -> bool:
        """Whether tokens that the answer has are made less likely, or more."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @cached_property
    def bias(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The tokens of logit_bias, and what is added to each."""
        bias = self.logit_bias or {}
        ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        added = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        return ids, added

    def check_vocabulary(self, V: int) -> None:
        """Refuse a bias of tokens that a model of V tokens does not have."""
        if self.logit_bias and (highest := max(self.logit_bias)) >= V:
            raise InputError(
                f"logit_bias names token {highest}, but the model's tokens are 0 to {V - 1}; take the ids "
                "from the model's own tokenizer",
                option="logit_bias",
            )


def make_generators(seed: int | None, rows: Iterable[int]) -> list[np.random.Generator]:
    """Return a random generator for each row; its draws depend on the seed and the row's number alone."""
    entropy = np.random.SeedSequence(seed).entropy
    sequences = (np.random.SeedSequence(entropy, spawn_key=(row,)) for row in rows)
    return [np.random.Generator(np.random.PCG64(sequence)) for sequence in sequences]


def process(
    logits: Logits, histories: Sequence[Sequence[int]], sampling: Sampling
) -> npt.NDArray[np.float32]:
    """Apply all processors that the options name: transformers' order and arithmetic.

    That order is logit_bias, sequence_bias, OpenAI's two penalties, repetition_penalty,
    no_repeat_ngram_size, the other constraints, logits_processor, and unless greedy temperature, top_k,
    top_p, min_p. The penalties are about the tokens behind a history's `prompt_length`. Of equal logits at
    top-k's border all stay, as in transformers; at top-p's border the first stay, where transformers keeps
    arbitrary ones.

    Logits (B, V) of any float type are never modified; the result is float32, -inf for tokens that must not
    be drawn. Histories are the tokens of each row, prompt included; ids without a logit are ignored.
    """
    check_logits(logits)
    if len(histories) != len(logits):
        raise InputError(f"histories has {len(histories)} rows, but logits has {len(logits)}")
    scores = logits.astype(np.float32)  # a copy, also of float32
    if sampling.processes:
        run_processors(scores, histories, sampling)
    if sampling.greedy:
        return scores
    if sampling.temperature is not None:
        scores = divide_by_temperature(scores, sampling.temperature)
    if sampling.top_k is not None:
        keep_top_k(scores, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        for row in scores:
            keep_top_p(row, sampling.top_p)
    if sampling.min_p is not None:
        keep_min_p(scores, sampling.min_p)
    return scores


def divide_by_temperature(scores: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float32]:
    """Return finite or -inf scores (B, V) divided by a temperature.

    Where that would leave float32, each row is shifted to a highest score of 0 first, which changes no
    probability: the lower the temperature, the fewer tokens but the likeliest are left.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # looked at below
        divided: npt.NDArray[np.float32] = scores / np.float32(temperature)
        if np.isfinite(divided.max(axis=-1)).all():
            return divided
        shifted = scores - scores.max(axis=-1, keepdims=True)
        divided = shifted / np.float32(max(temperature, MIN_TEMPERATURE))
        return divided


def run_processors(
    scores: npt.NDArray[np.float32], histories: Sequence[Sequence[int]], sampling: Sampling
) -> None:
    """Apply what does not depend on whether tokens are drawn."""
    sampling.check_vocabulary(scores.shape[-1])
    ids, added = sampling.bias
    constraints = sampling.constraints
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # looked at below
        scores[:, ids] += added
        if constraints is not None:
            add_sequence_bias(scores, histories, constraints.rules.sequence_bias)
        if sampling.penalizes_counts:
            frequency = np.float32(sampling.frequency_penalty)
            presence = np.float32(sampling.presence_penalty)
            for row, history in zip(scores, histories, strict=True):
                answer = history[find_prompt_length(history) :]
                penalize_counts(row, answer, frequency, presence)
        if sampling.repetition_penalty != 1.0:
            for row, history in zip(scores, histories, strict=True):
                penalize_repeats(row, history, np.float32(sampling.repetition_penalty))
    for row, history in zip(scores, histories, strict=True):
        if sampling.no_repeat_ngram_size is not None:
            forbid_repeats(row[None], [history], sampling.no_repeat_ngram_size)
        if constraints is not None:
            constrain(row[None], [history], constraints, prompt_length=find_prompt_length(history))
        if sampling.logits_processor is not None:
            run_processor(sampling.logits_processor, history, row)
    check_scores(scores, sampling)


def find_prompt_length(history: Sequence[int]) -> int:
    """Return how many of a row's tokens are not of its answer; a plain list is all answer."""
    return getattr(history, "prompt_length", 0)


def check_scores(scores: npt.NDArray[np.float32], sampling: Sampling) -> None:
    """Refuse scores from which nothing can be chosen; the model's own logits were sound.

    The error is about the first of the processors that change them.
    """
    highest = scores.max(axis=-1)  # NaN of a row with NaN
    if np.isfinite(highest).all():
        return
    defaults = Sampling()
    names = [name for name in PROCESSORS if getattr(sampling, name) != getattr(defaults, name)]
    changed = [f"{name}={getattr(sampling, name)!r:.40}" for name in names]
    if sampling.logits_processor is not None:
        names.append("logits_processor")
        changed.append("logits_processor")
    if sampling.constraints is not None:
        changed.append(sampling.constraints.describe())
    if sampling.structured:
        changed.append("the structure of the answer")
    empty = np.isneginf(highest[~np.isfinite(highest)]).all()
    outcome = "leaves no token to choose" if empty else "makes the logits overflow float32"
    raise InputError(
        f"{' with '.join(changed)} {outcome}; use less extreme values", option=names[0] if names else None
    )


def choose(
    logits: Logits,
    histories: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[np.random.Generator],
) -> list[int]:
    """Choose the next token of each row of logits (B, V), processed as by `process`.

    Greedy takes the first of equal logits. Otherwise each row takes one uniform number from its generator,
    of which there is one per row, and the token at that point of its cumulative distribution.
    """
    if sampling.greedy:
        if sampling.processes:
            logits = process(logits, histories, sampling)
        likeliest = []
        for b in range(len(logits)):  # numpy's own iteration ends with an IndexError, which takes 10 us
            row = logits[b]
            token = int(row.argmax())  # the first NaN of a row that has one
            if not isfinite(row.item(token)):
                check_logits(logits)
            likeliest.append(token)
        return likeliest
    scores = process(logits, histories, sampling)
    if len(generators) != len(scores):
        raise InputError(f"{len(generators)} generators were given for {len(scores)} rows")
    return [draw(row, generator) for row, generator in zip(scores, generators, strict=True)]


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Return the log-probabilities (B, V) float64 of a model's own logits (B, V) of any float type."""
    check_logits(logits)
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def compute_logprobs(logits: Logits, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the log-probabilities that the model itself gives to tokens, (B,) or (B, N).

    Logits are (B, V) of any float type, before any processing. A row at a time stays in the processor's
    caches.
    """
    logprobs = np.empty(ids.shape)
    for b, (row, tokens) in enumerate(zip(logits, ids, strict=True)):
        log_sum = compute_log_sum(row)
        if not isfinite(log_sum):
            check_logits(logits)
        logprobs[b] = row[tokens].astype(np.float64) - log_sum
    return logprobs


def compute_log_sum(row: Logits, highest: float | None = None) -> float:
    """Return the logarithm of the sum of the exponentials of logits (V,) of any float type.

    It is not finite where the highest is not, which is looked for unless given.
    """
    row = np.asarray(row, np.float32)
    if highest is None:
        highest = float(np.maximum.reduce(row))  # of a row with NaN, NaN
    if abs(highest) < SAFE_EXPONENT:
        return log(np.add.reduce(np.exp(row)))
    if not isfinite(highest):
        return highest
    return highest + log(np.add.reduce(np.exp(row - np.float32(highest))))


def check_logits(logits: Logits) -> None:
    """Raise a BackendError where a row of logits (B, V) has NaN, infinity, or nothing but -inf."""
    bad = ~np.isfinite(logits.max(axis=-1))  # the maximum of a row with NaN is NaN
    if bad.any():
        row = int(bad.argmax())
        highest = {"nan": "NaN", "inf": "infinity"}.get(str(logits[row].max()), "nothing but -inf")
        raise BackendError(
            f"the engine's logits have {highest} in row {row} of the batch; run `planforge verify` "
            "on the bundle, and try precision='fp32' if this is fp16"
        )


def draw(row: npt.NDArray[np.float32], generator: np.random.Generator) -> int:
    candidates = np.flatnonzero(row > -np.inf)
    kept = row[candidates].astype(np.float64)
    cumulative = np.cumsum(np.exp(kept - kept.max()))
    # The product stays below the total, and a token of probability 0 spans no interval.
    point = generator.random() * cumulative[-1]
    return int(candidates[np.searchsorted(cumulative, point, side="right")])


def check_bias(bias: Any) -> None:
    """Refuse what is no mapping of token ids to numbers."""
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise InputError(
            f"logit_bias is {bias!r:.80}; it must map token ids to numbers; None adds nothing",
            option="logit_bias",
        )
    for token, added in bias.items():
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            raise InputError(
                f"a token of logit_bias is {token!r}; it must be an integer from 0; leave it out",
                option="logit_bias",
            )
        if not is_number(added) or not -np.inf <= added <= FLOAT32_MAX:
            raise InputError(
                f"logit_bias[{token}] is {added!r}; it must be a number, or -inf to forbid the token;"
                " None adds nothing",
                option="logit_bias",
            )
