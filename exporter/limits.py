"""How far an engine's results may be from PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..runtime.diagnostics.metrics import Measured, Metrics

# The one table of caps, in fp32, fp16, int8 and int4. fp32 engines add in another order, nothing more.
TABLE = {
    "max_error": (1e-4, 0.1, 1.0, 4.0),
    "mean_kl": (1e-8, 1e-3, 0.005, 0.1),  # KL is in nats
    "cosine_gap": (1e-8, 1e-3, 0.01, 0.1),
    "mean_cosine_gap": (1e-8, 1e-3, 0.001, 0.01),
    "text_kl": (1e-8, 1e-3, 0.005, 0.1),
    "top1_changes": (0.005, 0.02, 0.02, 0.1),
    "perplexity_change": (1e-4, 0.002, 0.01, 0.08),
}
CAPS = {
    precision: {name: caps[column] for name, caps in TABLE.items()}
    for column, precision in enumerate(("fp32", "fp16", "int8", "int4"))
}
CAPS |= {"fp32-kv8": CAPS["int8"], "int8-kv8": CAPS["int8"], "int4-kv8": CAPS["int4"]}
GAP_FACTOR = 3.0  # an engine may differ by this much more than rounding does in PyTorch
# These grow with the square of the values' error, so three times the error is nine times as much.
QUADRATIC = ("mean_kl", "cosine_gap", "mean_cosine_gap", "text_kl")
# Shares of a text of some hundred words: one more or less says nothing of the engine, so the cap alone holds.
COUNTED = ("top1_changes", "perplexity_change")
MOST = {"mean_cosine_gap": "cosine_gap"}  # a case has some of the vectors: their mean is at most the largest

Gaps: TypeAlias = "dict[str, Measured]"  # by the beginning of their limits' names


def compute_limits(
    precision: str, gap: Measured | None, names: Sequence[str] = Metrics.LIMITED
) -> dict[str, float]:
    """Return a precision's limits: at least fp32's, for an engine adds in another order in every precision.

    `gap` has the metrics of PyTorch with weights and results rounded to that precision, against itself
    unrounded; None for fp32, which rounds nothing. ValueError where it is not finite: it judges nothing.
    """
    caps = {name: CAPS[precision][name] for name in names}
    if gap is None:
        return caps
    if not gap.finite:
        raise ValueError(f"rounded to {precision}, the PyTorch model itself is not finite")
    limits = {}
    for name, cap in caps.items():
        factor = GAP_FACTOR ** (2 if name in QUADRATIC else 1)
        lost = factor * getattr(gap, MOST.get(name, name))
        limits[name] = cap if name in COUNTED else max(CAPS["fp32"][name], min(cap, lost))
    return limits
