"""Candidates: each row's likeliest tokens, which the engine picks, instead of all its logits.

N rows, K candidates, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.backend import Array
from ..bundle.artifact import CANDIDATES, Artifact
from .sampling import Logits, Sampling, check_logits, choose, compute_log_sum, compute_logprobs
from .state import LOGITS

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Which tokens may come next: (V,)."""

CANDIDATE = np.dtype([("id", np.int64), ("logit", np.float32), ("log_sum", np.float32)])


class Chosen(NamedTuple):
    """The next token of each row, and what was asked for beside it; None where it was not.

    Log-probabilities are the model's own, before any processing.
    """

    tokens: list[int]
    logprobs: list[float] | None
    # Ids of the M likeliest tokens, the likeliest first, and their log-probabilities: (N, M) both.
    likeliest: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None = None


def choose_results(artifact: Artifact, sampling: Sampling, top_logprobs: int = 0) -> Sequence[str]:
    """Return the results that choosing a token needs: the candidates if they are enough, else all logits."""
    wanted = 1 if sampling.greedy else sampling.top_k
    if wanted is None or sampling.processes or top_logprobs:
        return LOGITS
    counts = {spec.role: spec.axes[-1] for spec in artifact.outputs}
    count = counts.get(CANDIDATES[0], 0)
    return CANDIDATES if isinstance(count, int) and wanted <= count else LOGITS


def read_scores(results: Mapping[str, Array]) -> Array:
    """Return a step's scores of the next tokens: logits (N, V), or candidates (N, K) ordered by id."""
    if LOGITS[0] in results:
        return results[LOGITS[0]]
    logits, ids, log_sum = (results[name] for name in CANDIDATES)
    order = np.argsort(ids, axis=-1)
    ids = np.take_along_axis(ids, order, axis=-1)
    logits = np.take_along_axis(logits, order, axis=-1)
    candidates = np.empty(ids.shape, CANDIDATE)
    candidates["id"] = ids
    candidates["logit"] = logits
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
    masks: Sequence[Mask] | None = None,
) -> Chosen:
    """Choose the next token of each row, of those that its mask allows if there are masks.

    A mask comes before all processors; log-probabilities are those without it.

    The scores are from `read_scores`, of the results that `choose_results` names; `top_logprobs` needs all
    logits. Candidates give the token that all logits would give, but where more than K of a row's are equal
    at top_k's border, once divided by the temperature.
    """
    if scores.dtype.names is not None:
        assert not top_logprobs, "choose_results asks for logits"
        picked = choose(scores["logit"], histories, sampling, generators)
        chosen = scores[np.arange(len(scores)), picked]
        own = chosen["logit"] - chosen["log_sum"].astype(np.float64)
        return Chosen(tokens=chosen["id"].tolist(), logprobs=own.tolist() if logprobs else None)
    allowed = scores
    if masks is not None:
        check_logits(scores)  # of tokens that must not come too
        allowed = np.where(masks, scores, -np.inf).astype(np.float32)
    tokens = choose(allowed, histories, sampling, generators)
    likeliest = sampling.greedy and not sampling.processes and masks is None
    return Chosen(
        tokens=tokens,
        logprobs=[compute_logprob(scores[b], t, likeliest) for b, t in enumerate(tokens)]
        if logprobs
        else None,
        likeliest=find_likeliest(scores, top_logprobs) if top_logprobs else None,
    )


def compute_logprob(logits: Logits, token: int, likeliest: bool) -> float:
    """Return the log-probability that sound logits (V,) give to a token, perhaps the likeliest one."""
    logit: float = logits.item(token)
    return logit - compute_log_sum(logits, highest=logit if likeliest else None)


def find_likeliest(logits: Logits, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the ids of each row's likeliest tokens, the likeliest first, and their log-probabilities.

    Of equal ones the lower id comes first; a count above V gives all.
    """
    count = min(count, logits.shape[-1])
    ids = np.sort(np.argpartition(logits, -count, axis=-1)[:, -count:], axis=-1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=-1), axis=-1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=-1)
    return ids, compute_logprobs(logits, ids)
