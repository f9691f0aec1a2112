"""GPT-2 124M on one thread: the CPU time of a token, and the part of it outside of the engine.

From step to step: the answer's text, which is decoded once behind the last step, is not in it.
"""

from __future__ import annotations

from pathlib import Path

from ..case import Case, Entry, Limit
from .decode import CHECKPOINT, generation
from .growth import ALONE

PRECISIONS = ("fp32", "int8", "int4")
OUTSIDE_MS = 0.15


def cases(work: Path) -> list[Case]:
    one = generation(1, 32, 64)
    entries = {
        precision: Entry("planforge", precision, CHECKPOINT, one, threads=1, settings={"engine_clock": True})
        for precision in PRECISIONS
    }
    return [
        Case(
            "overhead",
            "overhead",
            "GPT-2 124M, one thread: CPU ms per token outside of ONNX Runtime",
            entries,
            varies={"precision": ALONE},
            targets=tuple(Limit(name, "outside_ms", at_most=OUTSIDE_MS) for name in PRECISIONS),
            metric="outside_ms",
        )
    ]
