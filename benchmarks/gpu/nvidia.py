"""Reads facts about the measured GPU from nvidia-smi."""

from __future__ import annotations

import os
from collections.abc import Sequence

from planforge.runtime.apps.diagnostics.machine import ask_command

# The name is first: it is the only one that may hold a comma.
FACTS = (
    "name",
    "uuid",
    "compute_cap",
    "memory.total",
    "driver_version",
    "vbios_version",
    "persistence_mode",
    "power.limit",
    "clocks.max.sm",
    "clocks.max.mem",
)
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "pstate")
Value = float | str | None


def query(fields: Sequence[str]) -> dict[str, Value]:
    """Return nvidia-smi's fields for the GPU that CUDA calls 0; none without nvidia-smi."""
    command = (
        "nvidia-smi",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        "-i",
        first_gpu(),
    )
    return parse_fields(ask_command(*command)[0], fields)


def first_gpu() -> str:
    """Return the first GPU's number or UUID for nvidia-smi, which ignores CUDA's variables."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def parse_fields(table: str, fields: Sequence[str]) -> dict[str, Value]:
    """Return the first line of nvidia-smi's table; fields that the GPU lacks are None."""
    cells = table.partition("\n")[0].strip().rsplit(", ", len(fields) - 1)
    return dict(zip(fields, map(value_of, cells), strict=True)) if len(cells) == len(fields) else {}


def value_of(cell: str) -> Value:
    """Return a number, a text, or None for "[N/A]" and the like."""
    if cell.startswith("["):
        return None
    try:
        return float(cell)
    except ValueError:
        return cell


def used_mb() -> float | None:
    """Return the device memory that all programs use together; None where that is unknown."""
    found = query(["memory.used"]).get("memory.used")
    return found * 2**20 / 1e6 if isinstance(found, float) else None
