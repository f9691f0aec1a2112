"""How large the tensors of a cache are, and whether an engine has room for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.backend import Program
from ..bundle.artifact import RECENT
from ..bundle.manifest import Artifact, TensorSpec
from ..errors import ContextLengthError, ManifestError, MemoryLimitError

PREFILL_CHUNK = 256  # tokens per prefill step: bounds the scores' memory whatever the prompt's length
# Slots behind a window that keep what it has left: so many of the newest tokens may be forgotten again.
SPARE = 64


def count_recent_slots(window: int) -> int:
    """Return the slots of a layer that sees a window."""
    return window + SPARE + PREFILL_CHUNK


def refuse_overflow(needed: int, capacity: int) -> None:
    if needed > capacity:
        raise ContextLengthError(
            f"the cache holds {capacity} tokens per row, {needed} are needed", tokens=needed, limit=capacity
        )


def find_capacity(artifact: Artifact, lengths: Sequence[int], new_tokens: Sequence[int]) -> int:
    """Return the tokens per row that a batch of prompts needs; the last new token is never fed back."""
    if artifact.dialect == "portable":  # every row is as wide as the longest prompt, padding included
        return max(lengths) + max(new_tokens) - 1
    return max(length + count - 1 for length, count in zip(lengths, new_tokens, strict=True))


def count_cache_bytes(artifact: Artifact, batch: int, capacity: int) -> int:
    """Return the bytes that `make_cache` allocates."""
    sets = 2 if artifact.dialect == "portable" else 1
    kept = [spec for spec in artifact.inputs if spec.role.startswith(("past.", "state."))]
    return sets * sum(
        int(np.prod(find_cache_shape(spec, batch, capacity, artifact.window))) * np.dtype(spec.dtype).itemsize
        for spec in kept
    )


def check_memory(program: Program, artifact: Artifact, batch: int, capacity: int) -> None:
    """Refuse a cache that the engine's own memory has no room for; say what would fit."""
    needed = count_cache_bytes(artifact, batch, capacity)
    free = program.free_memory()
    if free is None or needed <= free:
        return
    rows = free // count_cache_bytes(artifact, 1, capacity)
    lengths = [past.axis_names()[2] for past, _ in pair_cache_tensors(artifact)]
    slots = next((length for length in lengths if isinstance(length, int)), None)  # of a plan
    smaller = "a smaller max_length" if slots is None else "a plan built with a smaller --max length=N"
    fits = f"a batch of {rows} would fit" if rows else f"not even one row would fit; {smaller} may"
    raise MemoryLimitError(
        f"a cache for {batch} rows of {slots or capacity} tokens needs {needed / 1e6:.1f} MB of GPU memory;"
        f" {free / 1e6:.1f} MB are free; {fits}",
        needed=needed,
        limit=free,
    )


def pair_cache_tensors(artifact: Artifact) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return each past input with the present output that continues it."""
    return [
        (spec, artifact.output("present" + spec.role.removeprefix("past")))
        for spec in artifact.inputs
        if spec.role.startswith("past.")
    ]


def find_cache_shape(spec: TensorSpec, batch: int, length: int, window: int | None = None) -> tuple[int, ...]:
    """Return (B, H, length, D) of one cache tensor; (B, length, M) or (B, 1, M) of a recurrent model's.

    Of a plan, whose slots are fixed, with those; of a layer that sees a window, with slots for the window,
    what is to be forgotten again, and a step.
    """
    match spec.axis_names():
        case (_, int(single), int(size)):
            return batch, single, size
        case (_, str(_), int(size)):
            return batch, length, size
        case (_, int(heads), int(slots), int(size)):
            refuse_overflow(length, slots)
            return batch, heads, slots, size
        case (_, int(heads), str(axis), int(size)):
            if axis == RECENT and window is not None:
                length = min(length, count_recent_slots(window))
            return batch, heads, length, size
        case axes:
            raise ManifestError(
                f"cache {spec.name!r} has axes {axes}, expected batch, heads, length, head size"
            )


def count_step_tokens(artifact: Artifact, batch: int, rows: int, length: int) -> int:
    """Return the most tokens, padding included, that a decoder reads at one time."""
    if artifact.reads_source and not artifact.reads_neighbours:
        return max(rows, batch)  # a translation begins with one token
    return max(rows, batch * min(length, PREFILL_CHUNK))
