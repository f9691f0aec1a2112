"""The two ways a decoder graph keeps its keys and values. Nothing here depends on these numbers.

B batch, T tokens of this step, P cached columns (a row's tokens and its padding), H heads, D head size,
N logit rows, V vocabulary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..backends.backend import Array, BoundGraph, Buffer, Program
from ..bundle.artifact import RECENT
from ..bundle.manifest import Artifact, TensorSpec
from ..errors import InputError, ManifestError
from ..memory_budget import Lease
from .cache_shapes import SPARE, check_memory, find_cache_shape, pair_cache_tensors, refuse_overflow

LOGITS = ("logits",)
MASKED_COLUMNS = 32  # forgotten columns that stay in a growing cache, masked, before it is copied together


@dataclass(frozen=True)
class Context:
    """What every step of a batch sees beside its own tokens: the source of a translation."""

    inputs: Mapping[str, Array] = field(default_factory=dict)  # host arrays by input name
    buffers: Mapping[str, Buffer] = field(default_factory=dict)  # in the engine's memory, by input name


@dataclass(frozen=True)
class PendingContext:
    """A context that is computed when there is room for the bytes of its buffers."""

    byte_count: int
    compute: Callable[[], Context]


NO_CONTEXT = Context()
NONE_PENDING = PendingContext(0, lambda: NO_CONTEXT)


class Cache(ABC):
    """The keys and values of one batch, in the layout of one dialect; see `make_cache`."""

    lease: Lease | None = None  # on the memory of its buffers

    def __init__(
        self,
        program: Program,
        artifact: Artifact,
        batch: int,
        capacity: int,
        context: Context = NO_CONTEXT,
        copies: int = 1,
    ) -> None:
        self.program = program
        self.artifact = artifact
        self.capacity = capacity
        self.context = context
        self.copies = copies
        self.pairs = pair_cache_tensors(artifact)
        self.allocate(batch)

    @abstractmethod
    def allocate(self, batch: int) -> None:
        """Allocate memory for `batch` rows and their copies."""

    @abstractmethod
    def check_room(self, width: int) -> None:
        """Raise a ContextLengthError, before anything is written, where `width` more columns don't fit."""

    @abstractmethod
    def step(
        self, ids: Array, valid: Array | None, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        """Run the graph over new tokens on top of what is cached; return the named outputs.

        Args:
            ids: (B, T) int64, padded on the dialect's side.
            valid: (B, T) bool, False at padding; rows that have ended are all padding. None without any.
            logit_rows: (N,) int64, flat indices into B * T; "logits" are (N, V) float32.
        """

    @abstractmethod
    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        """Overwrite rows with others, as (source, target); no target is a source."""

    @abstractmethod
    def spread(self) -> None:
        """Copy each row to as many adjacent ones as there is room for: a prompt that several rows continue.

        At most once.
        """

    @abstractmethod
    def truncate(self, length: int) -> int:
        """Forget all but the first `length` tokens of every row; rows that have fewer stay as they are.

        The next step continues each row behind what it kept, as if the forgotten tokens had never been
        given. May be called before the first step too, and costs no engine call.

        Returns:
            `length`, or 0 where what a window then needs is gone: nothing is kept.
        """

    @abstractmethod
    def repeat(self, times: int) -> None:
        """Let every row hold its keys and values so many times, one behind the other; for comparisons.

        The newest tokens that a window sees must be there.
        """


class GrowingCache(Cache):
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

    def spread(self) -> None:
        rows = len(self.mask)
        self.mask = np.repeat(self.mask, self.copies, axis=0)
        for past, _ in self.pairs:
            spread_rows(self.view_past(past), rows, self.copies, self.columns)

    def truncate(self, length: int) -> int:
        mask = self.mask[:, : self.columns]
        mask[mask.cumsum(axis=1) > length] = 0
        self.forgotten = self.columns - len(self.find_seen_columns())
        return length

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


class SlotCache(Cache):
    """`inplace`: fixed slots, written where each row's tokens belong; the output is the input's memory."""

    def allocate(self, batch: int) -> None:
        self.lengths = [0] * batch
        self.slots: list[Buffer] = []
        self.steps: dict[tuple[int, tuple[str, ...]], BoundGraph] = {}  # by their rows and outputs
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
        bound = self.steps.get((B, tuple(outputs))) or self.bind_step(B, tuple(outputs))
        results = bound({**self.context.inputs, **own})
        # Padding was written beyond a row's length, where its next tokens overwrite it unread.
        self.lengths[:B] = grown
        return results

    def step_row(
        self, row: int, tokens: Sequence[int], logit_rows: Sequence[int], outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        """Run tokens of one row on top of what it holds, as a batch of one; return the named outputs."""
        T = len(tokens)
        refuse_overflow(self.lengths[row] + T, self.capacity)
        inputs = {
            "input_ids": np.asarray([tokens], np.int64),
            "logit_rows": np.asarray(logit_rows, np.int64),
            **self.place(self.lengths[row : row + 1], T, row),
        }
        buffers = {name: buffer.row(row) for name, buffer in self.buffers.items()}
        results = self.program.run(inputs, buffers, outputs)
        self.lengths[row] += T
        return results

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Overwrite a row with the first `length` tokens of another one."""
        for slots in self.slots:
            slots.copy_rows(source, target, min(length, slots.shape[2]))
        self.lengths[target] = length

    def truncate_row(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of a row."""
        self.lengths[row] = min(self.lengths[row], length)

    def find_kept(self, row: int, length: int) -> int:
        """Return `length`, or 0 where what a window then needs of a row is gone."""
        return length

    def bind_step(self, rows: int, outputs: tuple[str, ...]) -> BoundGraph:
        """Return the graph bound to the first rows, for all later steps of as many."""
        buffers = self.buffers
        if rows < len(self.lengths):
            buffers = {name: buffer.view((rows, *buffer.shape[1:])) for name, buffer in buffers.items()}
        bound = self.steps[rows, outputs] = self.program.bind(buffers, outputs)
        return bound

    def place(self, lengths: Sequence[int], width: int, first: int = 0) -> dict[str, Array]:
        """Return the inputs that say behind how many tokens `width` go, of each row from the first on."""
        return {"past_lengths": np.array(lengths, np.int32)}

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for slots in self.slots:
                slots.copy_rows(source, target, min(self.lengths[source], slots.shape[2]))
            self.lengths[target] = self.lengths[source]

    def spread(self) -> None:
        for (past, present), slots in zip(self.pairs, self.slots, strict=True):
            spread_rows(slots, len(self.lengths), self.copies, min(max(self.lengths), slots.shape[2]))
            self.buffers |= {past.name: slots, present.name: slots}
        self.steps = {}  # which were bound to fewer rows
        self.lengths = [length for length in self.lengths for _ in range(self.copies)]

    def truncate(self, length: int) -> int:
        self.lengths = [min(kept, length) for kept in self.lengths]
        return length

    def repeat(self, times: int) -> None:
        for row, length in enumerate(self.lengths):
            for slots in self.slots:
                if slots.shape[2] >= times * length:
                    for time in range(1, times):
                        slots.copy_slots(row, 0, time * length, length)
        self.lengths = [length * times for length in self.lengths]


class GroupQueryCache(SlotCache):
    """`ort`: as `inplace`, but several tokens on top of a past go row by row: its kernel takes no more.

    Layers that see a window may have fewer slots, which hold a row's newest tokens: when they are full, what
    no window will reach is dropped, and the rest moves to their beginning.
    """

    def allocate(self, batch: int) -> None:
        super().allocate(batch)
        self.starts = np.zeros(batch, np.int32)  # the position of each row's first slot of these layers
        pairs = zip(self.pairs, self.slots, strict=True)
        self.recent = [slots for (past, _), slots in pairs if RECENT in past.axis_names()]

    def step(
        self, ids: Array, valid: Array | None, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        if 1 in ids.shape or not any(self.lengths):
            return super().step(ids, valid, logit_rows, outputs)
        if self.context.buffers or tuple(outputs) != LOGITS:
            raise InputError("several tokens on top of a past that see a source run at batch 1 only")
        B, T = ids.shape
        counts = np.full(B, T) if valid is None else valid.sum(axis=1)
        grown: list[int] = (counts + self.lengths).tolist()
        refuse_overflow(max(grown), self.capacity)
        logits: dict[int, Array] = {}  # by logit row
        for b in np.flatnonzero(counts):
            wanted = [int(i) for i in logit_rows if i // T == b]
            rows = [i % T for i in wanted] or [0]  # a graph computes one row at least
            results = self.step_row(int(b), ids[b, : counts[b]].tolist(), rows, outputs)["logits"]
            logits |= dict(zip(wanted, results, strict=False))
        unread = results[0]  # of a row that takes in nothing
        return {"logits": np.stack([logits.get(int(i), unread) for i in logit_rows])}

    def place(self, lengths: Sequence[int], width: int, first: int = 0) -> dict[str, Array]:
        placed = {"past_lengths": np.array(lengths, np.int32)}
        if self.recent:
            for row, length in enumerate(lengths, first):
                self.make_room(row, length, width)
            placed["window_starts"] = self.starts[first : first + len(lengths)]
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

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        super().copy_rows(copies)
        for source, target in copies:
            self.starts[target] = self.starts[source]

    def spread(self) -> None:
        super().spread()
        self.starts = np.repeat(self.starts, self.copies)

    def copy_row(self, source: int, target: int, length: int) -> None:
        super().copy_row(source, target, length)
        self.starts[target] = self.starts[source]

    def truncate_row(self, row: int, length: int) -> None:
        super().truncate_row(row, length)
        if length == 0:
            self.starts[row] = 0

    def find_kept(self, row: int, length: int) -> int:
        if self.recent:
            assert self.artifact.window is not None
            first_seen = max(0, length + 1 - self.artifact.window)  # by the next token
            if self.starts[row] > first_seen:
                return 0
        return length

    def truncate(self, length: int) -> int:
        if self.recent:
            assert self.artifact.window is not None
            first_seen = max(0, length + 1 - self.artifact.window)  # by the next token
            if ((np.array(self.lengths) > length) & (self.starts > first_seen)).any():
                length = 0
                self.starts[:] = 0
        return super().truncate(length)

    def repeat(self, times: int) -> None:
        if self.recent:  # slots that are too few have a text's end, which its repetition has too
            lengths = np.array(self.lengths)
            later = lengths * times
            starts = np.where(later > self.recent[0].shape[2], later - lengths + self.starts, 0)
            self.starts = starts.astype(np.int32)
        super().repeat(times)


LAYOUTS: dict[str, type[Cache]] = {"portable": GrowingCache, "inplace": SlotCache, "ort": GroupQueryCache}


def make_cache(
    program: Program,
    artifact: Artifact,
    batch: int,
    capacity: int,
    context: Context = NO_CONTEXT,
    copies: int = 1,
) -> Cache:
    """Return an empty cache for `batch` rows of `capacity` tokens, with room for `copies` times as many."""
    if artifact.dialect not in LAYOUTS:
        raise ManifestError(
            f"artifact {artifact.id} has dialect {artifact.dialect!r}, known are {list(LAYOUTS)}"
        )
    check_memory(program, artifact, batch * copies, capacity)
    return LAYOUTS[artifact.dialect](program, artifact, batch, capacity, context, copies)


def spread_rows(buffer: Buffer, rows: int, copies: int, length: int) -> None:
    """Copy each of the first `rows` rows of a buffer over `copies` adjacent ones, up to `length` slots."""
    for row in reversed(range(rows)):  # the last first: what is written over was copied, or was never used
        for target in range(row * copies, (row + 1) * copies):
            if target != row:
                buffer.copy_rows(row, target, length)
