"""Keys and values that grow with each step, padded on the left: the dialect `portable`.

B batch, T tokens of this step, P cached columns (a row's tokens and its padding), H heads, D head size
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.backend import Array, Buffer
from ..bundle.manifest import TensorSpec
from .cache_shapes import find_cache_shape, refuse_overflow
from .state import LOGITS, CacheState, expand_rows

MASKED_COLUMNS = 32  # forgotten columns that stay, masked, before the kept ones are copied together


class DynamicCache(CacheState):
    """`portable`: each step writes past + new, (B, H, P + T, D), into the other of two sets of buffers.

    Forgotten columns are masked first: moving the kept ones together is a copy of the whole past.
    """

    def allocate(self, batch: int) -> None:
        self.columns = 0
        self.forgotten = 0  # columns of these that no row sees any more
        self.rebuilt: dict[str, Array] = {}  # the past that the next step sees instead
        self.mask = np.zeros((batch, self.capacity), np.int64)
        self.reads = {spec.name for spec in self.artifact.inputs}  # some imported graphs read no positions
        self.past, self.present = (
            {
                past.name: self.program.allocate(
                    past.name, find_cache_shape(past, batch * self.copies, self.capacity)
                )
                for past, _ in self.pairs
            }
            for _ in range(2)
        )

    def view_past(self, spec: TensorSpec) -> Buffer:
        """Return the columns of one input that are filled."""
        return self.past[spec.name].view(find_cache_shape(spec, len(self.mask), self.columns))

    def check_room(self, width: int) -> None:
        refuse_overflow(self.columns - self.forgotten + width, self.capacity)

    def step(
        self, ids: Array, valid: Array | None, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        B, T = ids.shape
        self.check_room(T)
        if self.forgotten:
            self.compact_past(T)
        total = self.columns + T
        self.mask[:, self.columns : total] = 1 if valid is None else valid
        mask = self.mask[:, :total]
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, self.columns :]
        buffers = dict(self.context.buffers)
        for past, present in self.pairs:
            if not self.rebuilt:
                buffers[past.name] = self.view_past(past)
            buffers[present.name] = self.present[past.name].view(find_cache_shape(past, B, total))
        own = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logit_rows": logit_rows}
        read = {name: array for name, array in own.items() if name in self.reads}
        read |= self.choose_adapters(slice(B))
        results = self.program.run({**self.context.inputs, **self.rebuilt, **read}, buffers, outputs)
        self.rebuilt = {}
        self.past, self.present = self.present, self.past
        self.columns = total
        return results

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        for past, _ in self.pairs:
            view = self.view_past(past)
            for source, target in copies:
                view.copy_rows(source, target, self.columns)
        for source, target in copies:
            self.mask[target] = self.mask[source]
            self.adapters[target] = self.adapters[source]

    def expand(self) -> None:
        rows = len(self.mask)
        self.mask = np.repeat(self.mask, self.copies, axis=0)
        self.adapters = np.repeat(self.adapters, self.copies)
        for past, _ in self.pairs:
            expand_rows(self.view_past(past), rows, self.copies, self.columns)

    def truncate(self, length: int) -> int:
        mask = self.mask[:, : self.columns]
        mask[mask.cumsum(axis=1) > length] = 0
        self.forgotten = self.columns - len(self.find_seen_columns())
        return length

    def truncate_row(self, row: int, length: int) -> None:
        mask = self.mask[row, : self.columns]
        mask[mask.cumsum() > length] = 0

    def find_seen_columns(self) -> Array:
        return np.flatnonzero(self.mask[:, : self.columns].any(axis=0))

    def repeat(self, times: int) -> None:
        self.rebuild_past(np.tile(np.arange(self.columns), times))

    def compact_past(self, width: int) -> None:
        """Drop forgotten columns before a step of `width`, once it is worth a copy."""
        if self.forgotten > MASKED_COLUMNS or self.columns + width > self.capacity:
            self.rebuild_past(self.find_seen_columns())
            self.forgotten = 0

    def rebuild_past(self, columns: Array) -> None:
        """Let the past have these of its columns."""
        self.rebuilt = {spec.name: self.view_past(spec).numpy()[:, :, columns] for spec, _ in self.pairs}
        self.mask[:, : len(columns)] = self.mask[:, columns]
        self.columns = len(columns)
