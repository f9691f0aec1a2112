"""Candidates: each row's likeliest tokens, which the engine picks, instead of all its logits.

N rows, K candidates, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..backends.backend import Array
from ..bundle.artifact import CANDIDATES, Artifact
from .cache import LOGITS
from .sampling import Logits, Sampling, choose, token_logprobs

CANDIDATE = np.dtype([("id", np.int64), ("logit", np.float32), ("log_sum", np.float32)])


@dataclass(frozen=True)
class Chosen:
    """The next token of each row, and what was asked for beside it.

    Attributes:
        tokens: (N,) int64.
        logprobs: (N,) float64, before any processing; None unless asked for.
        likeliest: ids (N, M) int64 of the likeliest tokens, the likeliest first, and their log-probabilities
            (N, M) float64; None unless asked for.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64] | None
    likeliest: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None = None


def results_for(artifact: Artifact, sampling: Sampling, top_logprobs: int = 0) -> Sequence[str]:
    """Return the results that choosing a token needs: the candidates if they are enough, else all logits."""
    picked = next((spec.axes[-1] for spec in artifact.outputs if spec.role == CANDIDATES[0]), 0)
    wanted = 1 if sampling.greedy else sampling.top_k
    if wanted is None or sampling.processes or top_logprobs or not isinstance(picked, int) or wanted > picked:
        return LOGITS
    return CANDIDATES


def scores_of(results: Mapping[str, Array]) -> Array:
    """Return a step's scores of the next tokens: logits (N, V), or candidates (N, K) ordered by id."""
    if LOGITS[0] in results:
        return results[LOGITS[0]]
    logits, ids, log_sum = (results[name] for name in CANDIDATES)
    order = np.argsort(ids, axis=-1)
    candidates = np.empty(ids.shape, CANDIDATE)
    candidates["id"] = np.take_along_axis(ids, order, axis=-1)
    candidates["logit"] = np.take_along_axis(logits, order, axis=-1)
    candidates["log_sum"] = log_sum
    # NaN anywhere among a row's logits is NaN in its sum, though no candidate may show it.
    candidates["logit"][~np.isfinite(log_sum[:, 0])] = np.nan
    return candidates


def choose_tokens(
    scores: Array,
    histories: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[np.random.Generator],
    logprobs: bool = True,
    top_logprobs: int = 0,
) -> Chosen:
    """Choose the next token of each row.

    Candidates give the token that all logits would give, but where more than K of a row's are equal at
    top_k's border.

    Args:
        scores: from `scores_of`, of the results that `results_for` names.
        histories: as for `choose`, which says what is raised.
        logprobs: whether to compute the tokens' log-probabilities.
        top_logprobs: how many of the likeliest tokens to give too; needs all logits.
    """
    if scores.dtype == CANDIDATE:
        assert not top_logprobs, "results_for asks for logits"
        picked = choose(scores["logit"], histories, sampling, generators)
        chosen = scores[np.arange(len(scores)), picked]
        return Chosen(
            tokens=chosen["id"],
            logprobs=chosen["logit"] - chosen["log_sum"].astype(np.float64) if logprobs else None,
        )
    tokens = choose(scores, histories, sampling, generators)
    return Chosen(
        tokens=tokens,
        logprobs=token_logprobs(scores, tokens) if logprobs else None,
        likeliest=likeliest_tokens(scores, top_logprobs) if top_logprobs else None,
    )


def likeliest_tokens(logits: Logits, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return each row's likeliest tokens under the model itself, the likeliest first.

    Args:
        logits: (N, V), any float type, before any processing.
        count: at least 1; more than V gives all.

    Returns:
        ids (N, count) int64 and their log-probabilities (N, count) float64; of equal ones the lower id first.

    Raises:
        BackendError: a row has NaN, infinity, or nothing but -inf.
    """
    count = min(count, logits.shape[-1])
    ids = np.sort(np.argpartition(logits, -count, axis=-1)[:, -count:], axis=-1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=-1), axis=-1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=-1)
    return ids, token_logprobs(logits, ids)
