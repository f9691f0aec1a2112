"""Computes how far an engine's results may be from PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from ..runtime.apps.check.judge import COUNTED
from ..runtime.apps.check.metrics import MEAN_OF, Measured, Metrics, measure_spread
from ..runtime.apps.proof.intervals import find_wilson_interval
from ..runtime.backends.backend import Array
from .precisions import PRECISIONS

# The one table of caps, in fp32, fp16, int8 and int4. fp32 engines add in another order, nothing more.
TABLE = {
    "max_error": (1e-4, 0.1, 1.0, 4.0),
    "mean_kl": (1e-8, 1e-3, 0.005, 0.1),  # KL is in nats
    "cosine_gap": (1e-8, 1e-3, 0.01, 0.1),
    "mean_cosine_gap": (1e-8, 1e-3, 0.001, 0.01),
    "rank_changes": (0.005, 0.02, 0.05, 0.15),
    "rms_error": (1e-4, 0.01, 0.05, 0.2),
    "path_error": (1e-4, 0.05, 0.2, 0.5),
    "text_kl": (1e-8, 1e-3, 0.005, 0.1),
    "probability_error": (1e-4, 0.05, 0.2, 0.5),
    "label_changes": (0.005, 0.02, 0.02, 0.1),
    "top1_changes": (0.005, 0.02, 0.02, 0.1),
    "perplexity_change": (1e-4, 0.002, 0.01, 0.08),
}
COLUMNS = ("fp32", "fp16", "int8", "int4")
CAPS = {
    precision: {name: caps[COLUMNS.index(kind.loses_like)] for name, caps in TABLE.items()}
    for precision, kind in PRECISIONS.items()
}
GAP_FACTOR = 3.0  # an engine may differ by this much more than rounding does in PyTorch
# These grow with the square of the values' error, so three times the error is nine times as much.
QUADRATIC = ("mean_kl", "cosine_gap", "mean_cosine_gap", "text_kl")
# Shares of a text of some hundred words: one more or less says nothing of the engine.
SHARES = ("top1_changes", "label_changes")  # of what is counted
DEVIATIONS = 2.58  # of a counted share, that another text of as many tokens may have: 99 of 100 are inside
MOST = {"mean_cosine_gap": "cosine_gap"}  # a case has some of the vectors: their mean is at most the largest

Gaps: TypeAlias = "dict[str, Measured]"  # by the beginning of their limits' names
Accepted: TypeAlias = "Mapping[str, float]"  # by metrics' names, in place of their caps where it is larger
NOTHING_ACCEPTED: Accepted = MappingProxyType({})


def compute_limits(
    precision: str,
    gap: Measured | None,
    names: Sequence[str] = Metrics.LIMITED,
    accepted: Accepted = NOTHING_ACCEPTED,
) -> dict[str, float]:
    """Return a precision's limits: at least fp32's, for an engine adds in another order in every precision.

    `gap` has the metrics of PyTorch with weights and results rounded to that precision, against itself
    unrounded; of fp32 those against PyTorch in float64, or None where they are not known. ValueError where
    it is not finite: it judges nothing. `accepted` raises caps, but those of fp32.
    """
    caps = {name: CAPS[precision][name] for name in names}
    if gap is None:  # nor is it known how many labels are counted: as few as have a share
        few = {name: find_upper_bound(cap, MEAN_OF) for name, cap in caps.items() if name == "label_changes"}
        return caps | few
    if not gap.finite:
        raise ValueError(f"rounded to {precision}, the PyTorch model itself is not finite")
    limits = {}
    for name, cap in caps.items():
        own = getattr(gap, MOST.get(name, name))
        least = CAPS["fp32"][name]
        if precision == "fp32" and name != "label_changes":
            limits[name] = max(least, find_factor(name) * own)
            continue
        cap = max(cap, accepted.get(name, 0.0))
        if name in SHARES:
            # Where PyTorch itself changes more of them, an engine may change as many.
            limits[name] = find_upper_bound(max(own, least, min(cap, GAP_FACTOR * own)), gap.rows)
        elif name in COUNTED:
            limits[name] = max(caps[name], min(cap, find_factor(name) * own))
        else:
            limits[name] = max(least, min(cap, find_factor(name) * own))
    return limits


def find_factor(name: str) -> float:
    """Return how many times PyTorch's own loss an engine may lose."""
    return GAP_FACTOR ** (2 if name in QUADRATIC else 1)


def find_upper_bound(share: float, count: int) -> float:
    """Return the largest true share that is likely if `count` draws show `share`: Wilson's interval."""
    return find_wilson_interval(share, count, DEVIATIONS).high


def measure_distance(got: Array, want: Array, min_scale: float = 1e-6) -> float:
    """Return the largest difference in units of the spread of `want`; of integers any at all is infinite.

    So is another shape.
    """
    if got.shape != want.shape:
        return math.inf
    if not want.size:
        return 0.0
    if want.dtype.kind != "f":
        return 0.0 if np.array_equal(got, want) else math.inf
    exact = want.astype(np.float64)
    if not (finite := np.isfinite(exact)).all():  # a mask's -inf has to be one
        if not np.array_equal(got[~finite], exact[~finite]):
            return math.inf
        got = got[finite]
        exact = exact[finite]
        if not exact.size:
            return 0.0
    return float(np.abs(got - exact).max()) / max(measure_spread(exact), min_scale)
