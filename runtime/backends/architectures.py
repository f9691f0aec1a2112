"""The one table of NVIDIA's GPU architectures: the compute capability of each, and GPUs that have it."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Sources: https://developer.nvidia.com/cuda-gpus, and cuda-legacy-gpus for sm72 and older.
GPUS = {
    "sm70": ("V100",),
    "sm72": ("Jetson Xavier",),
    "sm75": ("RTX 20", "T4"),
    "sm80": ("A100", "A30"),
    "sm86": ("RTX 30", "A10"),
    "sm87": ("Jetson Orin",),
    "sm89": ("RTX 40", "L4", "L40S"),
    "sm90": ("H100", "H200"),
    "sm100": ("B200",),
    "sm101": ("Jetson Thor before CUDA 13",),
    "sm103": ("B300",),
    "sm110": ("Jetson Thor",),
    "sm120": ("RTX 50", "RTX PRO Blackwell"),
    "sm121": ("DGX Spark", "GB10"),
}
GEFORCE = re.compile(r"rtx([2-9]0)[5-9]0")  # a model; "RTX 5000 Ada" is of another kind
JETSON = ("sm72", "sm87", "sm101", "sm110")  # boards, whose GPUs run no plan for desktops


def describe_sm(sm: str) -> str:
    """Return a compute capability with GPUs that have it, as in "sm86 (RTX 30, A10)"."""
    names = ", ".join(GPUS.get(sm.removesuffix("+"), ()))
    later = " and later" if sm.endswith("+") else ""
    return f"{sm} ({names}{later})" if names else sm


def describe_sms(sms: Iterable[str]) -> str:
    """Return several compute capabilities with their GPUs, separated by commas."""
    return ", ".join(map(describe_sm, sms))


def find_sm(text: str) -> str:
    """Return the compute capability of "sm86", "86" or "RTX 30"; another text comes back in small letters."""
    lower = text.lower()
    if lower.isdecimal():
        return f"sm{lower}"
    named = {name.lower().replace(" ", ""): sm for sm, names in GPUS.items() for name in names}
    return named.get(lower.replace(" ", ""), lower)


def suggest_series(text: str) -> str:
    """Return the end of an error that refuses "RTX 3060": "; did you mean RTX 30 (sm86)?", else ""."""
    model = GEFORCE.search(text.lower().replace(" ", ""))
    series = f"RTX {model[1]}" if model else ""
    sm = find_sm(series)
    return f"; did you mean {series} ({sm})?" if sm in GPUS else ""
