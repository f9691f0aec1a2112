"""The likeliest tokens of each row alone, where the engine picks them: a few numbers instead of all logits.

N rows, K candidates, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.backend import Array
from ..bundle.artifact import CANDIDATES, Artifact
from .cache import LOGITS
from .sampling import Sampling, choose, token_logprobs

CANDIDATE = np.dtype([("id", np.int64), ("logit", np.float32), ("logprob", np.float64)])


def results_for(artifact: Artifact, sampling: Sampling) -> Sequence[str]:
    """The results that choosing a token needs: the candidates if they are enough, else all logits."""
    most = next((spec.axes[-1] for spec in artifact.outputs if spec.role == CANDIDATES[0]), 0)
    wanted = 1 if sampling.greedy else sampling.top_k
    if wanted is None or sampling.repetition_penalty != 1.0 or not isinstance(most, int) or wanted > most:
        return LOGITS
    return CANDIDATES


def scores_of(results: Mapping[str, Array]) -> Array:
    """What a step says of the next tokens: logits (N, V), or candidates (N, K) in the order of their ids."""
    if LOGITS[0] in results:
        return results[LOGITS[0]]
    logits, ids, log_sum = (results[name] for name in CANDIDATES)
    order = np.argsort(ids, axis=-1)
    found = np.empty(ids.shape, CANDIDATE)
    found["id"] = np.take_along_axis(ids, order, axis=-1)
    found["logit"] = np.take_along_axis(logits, order, axis=-1)
    # NaN anywhere among a row's logits is NaN in its sum, though no candidate may show it.
    found["logprob"] = found["logit"] - log_sum.astype(np.float64)
    found["logit"][~np.isfinite(log_sum[:, 0])] = np.nan
    return found


def choose_tokens(
    scores: Array,
    histories: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[np.random.Generator],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """The next token of each row, and its log-probability before any processing.

    Candidates give the token that all logits would give, but where more than K of a row's are equal at
    top_k's border.

    Args:
        scores: from `scores_of`, of the results that `results_for` names.
        histories: as for `choose`, which says what is raised.

    Returns:
        (N,) int64 and (N,) float64.
    """
    if scores.dtype != CANDIDATE:
        tokens = choose(scores, histories, sampling, generators)
        return tokens, token_logprobs(scores, tokens)
    picked = choose(scores["logit"], histories, sampling, generators)
    chosen = scores[np.arange(len(scores)), picked]
    return chosen["id"], chosen["logprob"]
