"""Keys and values in fixed slots, where each row has a length of its own: the dialects `inplace` and `ort`.

B batch, T tokens of this step
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.backend import Array, BoundGraph, Buffer
from ..bundle.artifact import CANDIDATES, RECENT, TOTAL, WINDOW_TOTAL
from ..errors import InputError
from .cache_shapes import SPARE, find_cache_shape, refuse_overflow
from .state import LOGITS, RowState, expand_rows


class StaticCache(RowState):
    """`inplace`: fixed slots, written where each row's tokens belong; the output is the input's memory."""

    def allocate(self, batch: int) -> None:
        self.lengths = [0] * batch
        self.slots: list[Buffer] = []
        # By their rows, outputs, and whether they have one token that the engine may capture.
        self.steps: dict[tuple[int, tuple[str, ...], bool], BoundGraph] = {}
        self.buffers = dict(self.context.buffers)
        for spec, out in self.pairs:
            shape = find_cache_shape(spec, batch * self.copies, self.capacity, self.artifact.window)
            slots = self.program.allocate(spec.name, shape)
            used = slots.view((batch, *shape[1:])) if self.copies > 1 else slots
            self.slots.append(slots)
            self.buffers |= {spec.name: used, out.name: used}

    def check_room(self, width: int) -> None:
        refuse_overflow(max(self.lengths) + width, self.capacity)

    def step(
        self, ids: Array, valid: Array | None, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        B, T = ids.shape
        counts = [T] * B if valid is None else valid.sum(axis=1).tolist()
        starts = self.lengths[:B]
        grown = [length + count for length, count in zip(starts, counts, strict=True)]
        if max(starts) + T > self.capacity:
            going = [length + T for length, count in zip(starts, counts, strict=True) if count]
            refuse_overflow(max(going, default=0), self.capacity)
            # A row that ended with its slots full has its last one overwritten, which nobody reads again.
            starts = [min(length, self.capacity - T) for length in starts]
        own = {"input_ids": ids, "logit_rows": logit_rows, **self.place(starts, T)}
        own |= self.choose_adapters(slice(B))
        kind = (B, tuple(outputs), T == 1 and self.program.captures_steps)
        results = (self.steps.get(kind) or self.bind_step(*kind))({**self.context.inputs, **own})
        # Padding was written beyond a row's length, where its next tokens overwrite it unread.
        self.lengths[:B] = grown
        return results

    def step_row(
        self, row: int, tokens: Sequence[int], logit_rows: Sequence[int], outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        T = len(tokens)
        refuse_overflow(self.lengths[row] + T, self.capacity)
        sources = [buffer.shape[0] for buffer in self.context.buffers.values()]
        source = row * max(sources, default=1) // len(self.lengths)  # several rows may follow one
        inputs = {
            "input_ids": np.asarray([tokens], np.int64),
            "logit_rows": np.asarray(logit_rows, np.int64),
            **{name: array[source : source + 1] for name, array in self.context.inputs.items()},
            **self.place(self.lengths[row : row + 1], T, row),
            **self.choose_adapters(slice(row, row + 1)),
        }
        buffers = {
            name: buffer.row(source if name in self.context.buffers else row)
            for name, buffer in self.buffers.items()
        }
        results = self.program.run(inputs, buffers, outputs)
        self.lengths[row] += T
        return results

    def copy_row(self, source: int, target: int, length: int) -> None:
        for slots in self.slots:
            slots.copy_rows(source, target, min(length, slots.shape[2]))
        self.lengths[target] = length
        self.adapters[target] = self.adapters[source]

    def truncate_row(self, row: int, length: int) -> None:
        self.lengths[row] = min(self.lengths[row], length)

    def find_kept(self, row: int, length: int) -> int:
        return length

    def bind_step(self, rows: int, outputs: tuple[str, ...], is_single: bool) -> BoundGraph:
        """Return the graph bound to the first rows, for later steps of as many."""
        buffers = self.buffers
        if rows < len(self.lengths):
            buffers = {name: buffer.view((rows, *buffer.shape[1:])) for name, buffer in buffers.items()}
        bound = self.program.bind(buffers, outputs, fixed=is_single)
        self.steps[rows, outputs, is_single] = bound
        return bound

    def place(self, lengths: Sequence[int], width: int, first: int = 0) -> dict[str, Array]:
        """Return the inputs that say behind how many tokens `width` go, of each row from the first on."""
        return {"past_lengths": np.array(lengths, np.int32)}

    def expand(self) -> None:
        for (past, present), slots in zip(self.pairs, self.slots, strict=True):
            expand_rows(slots, len(self.lengths), self.copies, min(max(self.lengths), slots.shape[2]))
            self.buffers |= {past.name: slots, present.name: slots}
        self.buffers |= self.context.buffers  # which may have as many rows now
        self.steps = {}  # which were bound to fewer rows
        self.lengths = [length for length in self.lengths for _ in range(self.copies)]
        self.adapters = np.repeat(self.adapters, self.copies)

    def repeat(self, times: int) -> None:
        for row, length in enumerate(self.lengths):
            for slots in self.slots:
                if slots.shape[2] >= times * length:
                    for time in range(1, times):
                        slots.copy_slots(row, 0, time * length, length)
        self.lengths = [length * times for length in self.lengths]


class GroupQueryCache(StaticCache):
    """`ort`: as `inplace`, but several tokens on top of a past go row by row: its kernel takes no more.

    Layers that see a window may have fewer slots, which hold a row's newest tokens: when they are full, what
    no window will reach is dropped, and the rest moves to their beginning.
    """

    def allocate(self, batch: int) -> None:
        super().allocate(batch)
        self.starts = np.zeros(batch, np.int32)  # the position of each row's first slot of these layers
        pairs = zip(self.pairs, self.slots, strict=True)
        self.recent = [slots for (past, _), slots in pairs if RECENT in past.axis_names()]
        # Older bundles compute totals in the graph, which is right on a CPU.
        self.totals = {TOTAL, WINDOW_TOTAL} & {spec.name for spec in self.artifact.inputs}

    def step(
        self, ids: Array, valid: Array | None, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        if 1 in ids.shape or not any(self.lengths):
            return super().step(ids, valid, logit_rows, outputs)
        if not set(outputs) <= {*LOGITS, *CANDIDATES}:
            raise InputError(
                "a step of several tokens and several rows after a past returns only logits, not"
                f" {', '.join(outputs)}: run it row by row"
            )
        B, T = ids.shape
        counts = np.full(B, T) if valid is None else valid.sum(axis=1)
        grown: list[int] = (counts + self.lengths).tolist()
        refuse_overflow(max(grown), self.capacity)
        found: dict[int, dict[str, Array]] = {}  # a logit row's results
        for b in np.flatnonzero(counts):
            wanted = [int(i) for i in logit_rows if i // T == b]
            rows = [i % T for i in wanted] or [0]  # a graph computes one row at least
            results = self.step_row(int(b), ids[b, : counts[b]].tolist(), rows, outputs)
            for number, row in enumerate(wanted):
                found[row] = {name: results[name][number] for name in outputs}
        unread = {name: results[name][0] for name in outputs}  # of a row that takes in nothing
        each = [found.get(int(i), unread) for i in logit_rows]
        return {name: np.stack([one[name] for one in each]) for name in outputs}

    def place(self, lengths: Sequence[int], width: int, first: int = 0) -> dict[str, Array]:
        placed = super().place(lengths, width, first)
        # A captured step keeps its totals. By total = width the kernel tells a prompt's first step.
        has_capacity = width == 1 and self.program.captures_steps
        if TOTAL in self.totals:
            total = self.capacity if has_capacity else max(lengths) + width
            placed[TOTAL] = np.array(total, np.int32)
        if self.recent:
            for row, length in enumerate(lengths, first):
                self.make_room(row, length, width)
            starts = self.starts[first : first + len(lengths)]
            placed["window_starts"] = starts
            if WINDOW_TOTAL in self.totals:
                filled = (placed["past_lengths"] - starts).max() + width
                total = self.recent[0].shape[2] if has_capacity else filled
                placed[WINDOW_TOTAL] = np.array(total, np.int32)
        return placed

    def make_room(self, row: int, length: int, width: int) -> None:
        """Drop a row's oldest slots of layers with windows, if `width` more tokens do not fit behind them."""
        slots = self.recent[0].shape[2]
        held = length - int(self.starts[row])
        if held + width > slots:
            assert self.artifact.window is not None
            kept = min(held, self.artifact.window + SPARE)
            refuse_overflow(kept + width, slots)
            for buffer in self.recent:
                buffer.copy_slots(row, held - kept, 0, kept)
            self.starts[row] += held - kept

    def is_full(self, row: int) -> bool:
        if self.recent and self.lengths[row] - self.starts[row] >= self.recent[0].shape[2]:
            return True
        return super().is_full(row)

    def expand(self) -> None:
        super().expand()
        self.starts = np.repeat(self.starts, self.copies)

    def copy_row(self, source: int, target: int, length: int) -> None:
        super().copy_row(source, target, length)
        self.starts[target] = self.starts[source]

    def truncate_row(self, row: int, length: int) -> None:
        super().truncate_row(row, length)
        if length == 0:
            self.starts[row] = 0

    def find_kept(self, row: int, length: int) -> int:
        if self.recent:  # 0 where what a window then needs is gone
            assert self.artifact.window is not None
            first_seen = max(0, length + 1 - self.artifact.window)  # by the next token
            if self.starts[row] > first_seen:
                return 0
        return length

    def repeat(self, times: int) -> None:
        if self.recent:  # slots that are too few have a text's end, which its repetition has too
            lengths = np.array(self.lengths)
            later = lengths * times
            starts = np.where(later > self.recent[0].shape[2], later - lengths + self.starts, 0)
            self.starts = starts.astype(np.int32)
        super().repeat(times)
