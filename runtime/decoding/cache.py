"""The two ways a decoder graph keeps its keys and values. Nothing here sees their numbers.

B batch, T tokens of this step, P cached columns, H heads, D head size, N logit rows, V vocabulary
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..backends.backend import Array, Buffer, Program
from ..bundle.manifest import Artifact, TensorSpec
from ..errors import ManifestError


class Cache(Protocol):
    """The cache of one batch, in the layout of one dialect."""

    capacity: int

    def step(self, ids: Array, valid: Array, logit_rows: Array) -> Array:
        """Runs the graph over new tokens on top of what is cached.

        Args:
            ids: (B, T) int64, padded on the dialect's side.
            valid: (B, T) bool, False at padding.
            logit_rows: (N,) int64, flat indices into B * T.

        Returns:
            Logits (N, V) float32.
        """
        ...


class GrowingCache:
    """`portable`: each step writes past + new into the other of two sets of buffers."""

    def __init__(self, program: Program, artifact: Artifact, batch: int, capacity: int) -> None:
        self.program = program
        self.capacity = capacity
        self.columns = 0
        self.mask = np.zeros((batch, capacity), np.int64)
        self.names = [(i.name, o.name, i) for i, o in cache_pairs(artifact)]
        self.past, self.present = (
            {name: program.allocate(name, cache_shape(spec, batch, capacity)) for name, _, spec in self.names}
            for _ in range(2)
        )

    def step(self, ids: Array, valid: Array, logit_rows: Array) -> Array:
        B, T = ids.shape
        past, total = self.columns, self.columns + T
        self.mask[:, past:total] = valid
        mask = self.mask[:, :total]
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        buffers: dict[str, Buffer] = {}
        for name, grown, spec in self.names:
            buffers[name] = self.past[name].view(cache_shape(spec, B, past))
            buffers[grown] = self.present[name].view(cache_shape(spec, B, total))
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "logit_rows": logit_rows,
        }
        logits = self.program.run(inputs, buffers)["logits"]
        self.past, self.present = self.present, self.past
        self.columns = total
        return logits


class SlotCache:
    """`inplace`: fixed slots, written where each row's tokens belong; the output is the input's memory."""

    def __init__(self, program: Program, artifact: Artifact, batch: int, capacity: int) -> None:
        self.program = program
        self.capacity = capacity
        self.lengths = np.zeros(batch, np.int32)
        self.buffers: dict[str, Buffer] = {}
        for spec, out in cache_pairs(artifact):
            buffer = program.allocate(spec.name, cache_shape(spec, batch, capacity))
            self.buffers |= {spec.name: buffer, out.name: buffer}

    def step(self, ids: Array, valid: Array, logit_rows: Array) -> Array:
        inputs = {"input_ids": ids, "past_lengths": self.lengths, "logit_rows": logit_rows}
        logits = self.program.run(inputs, self.buffers)["logits"]
        # Padding was written beyond a row's length, where its next tokens overwrite it unread.
        self.lengths = self.lengths + valid.sum(axis=1, dtype=np.int32)
        return logits


LAYOUTS: dict[str, type[GrowingCache | SlotCache]] = {"portable": GrowingCache, "inplace": SlotCache}


def new_cache(program: Program, artifact: Artifact, batch: int, capacity: int) -> Cache:
    """An empty cache for `batch` rows of up to `capacity` tokens."""
    if artifact.dialect not in LAYOUTS:
        raise ManifestError(
            f"artifact {artifact.id} has dialect {artifact.dialect!r}, known are {list(LAYOUTS)}"
        )
    return LAYOUTS[artifact.dialect](program, artifact, batch, capacity)


def cache_bytes(artifact: Artifact, batch: int, capacity: int) -> int:
    """What `new_cache` allocates."""
    sets = 2 if artifact.dialect == "portable" else 1
    return sets * sum(
        int(np.prod(cache_shape(spec, batch, capacity))) * np.dtype(spec.dtype).itemsize
        for spec, _ in cache_pairs(artifact)
    )


def cache_pairs(artifact: Artifact) -> list[tuple[TensorSpec, TensorSpec]]:
    """Each past input with the present output that continues it."""
    return [
        (spec, artifact.output("present" + spec.role.removeprefix("past")))
        for spec in artifact.inputs
        if spec.role.startswith("past.")
    ]


def cache_shape(spec: TensorSpec, batch: int, length: int) -> tuple[int, ...]:
    """(B, H, length, D) of one cache tensor."""
    _, heads, _, head_size = spec.axis_names()
    assert isinstance(heads, int) and isinstance(head_size, int)
    return batch, heads, length, head_size
