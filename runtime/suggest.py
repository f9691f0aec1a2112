"""Suggests what a mistyped name was probably meant to be."""

from __future__ import annotations

from collections.abc import Collection

# Formats of numbers that PlanForge does not make: whoever names one has not mistyped another.
FORMATS = (
    "bf16", "bfloat16", "tf32", "fp64", "float64", "fp8", "fp6", "fp4", "nf4", "mxfp8", "mxfp4", "nvfp4",
    "int64", "int32", "int16", "int6", "int5", "int3", "int2", "int1", "uint16", "uint8", "uint4",
)  # fmt: skip
PREFIX = 3  # letters in common are enough: jetson, jetpack


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of an error that refuses a name: "; did you mean 'fp16'?", or "" if none is alike."""
    if name.lower().partition("-")[0] in FORMATS:
        return ""
    import difflib  # only when a name is refused: every program imports this module

    lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.7)
    if not close and len(name) >= PREFIX:
        close = [other for other in lower if other.startswith(name.lower()[:PREFIX])]
    if not close:
        return ""
    return f"; did you mean {' or '.join(repr(lower[other]) for other in close)}?"
