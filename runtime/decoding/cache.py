"""The two ways a decoder graph keeps its keys and values. Nothing here depends on these numbers.

B batch, T tokens of this step, P cached columns, H heads, D head size, N logit rows, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..backends.backend import Array, Buffer, Program
from ..bundle.manifest import Artifact, TensorSpec
from ..errors import ContextLengthError, InputError, ManifestError, MemoryLimitError


@dataclass(frozen=True)
class Context:
    """What every step of a batch sees beside its own tokens: the source of a translation.

    Attributes:
        inputs: host arrays by input name.
        buffers: what stays in the engine's memory, by input name.
    """

    inputs: Mapping[str, Array] = field(default_factory=dict)
    buffers: Mapping[str, Buffer] = field(default_factory=dict)


LOGITS = ("logits",)
NO_CONTEXT = Context()


@dataclass(frozen=True)
class PendingContext:
    """A context that is computed when there is room for it.

    Attributes:
        byte_count: what its buffers will take.
        compute: returns the context.
    """

    byte_count: int
    compute: Callable[[], Context]


NONE_PENDING = PendingContext(0, lambda: NO_CONTEXT)


class Cache(Protocol):
    """The cache of one batch, in the layout of one dialect."""

    def check_room(self, width: int) -> None:
        """Refuse `width` more columns when they don't fit.

        Raises:
            ContextLengthError: before anything was written.
        """
        ...

    def step(
        self, ids: Array, valid: Array, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        """Run the graph over new tokens on top of what is cached.

        Args:
            ids: (B, T) int64, padded on the dialect's side.
            valid: (B, T) bool, False at padding; rows that have ended are all padding.
            logit_rows: (N,) int64, flat indices into B * T.
            outputs: names of the results that are wanted.

        Returns:
            The results by name; "logits" are (N, V) float32.
        """
        ...

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        """Overwrite rows with copies of others.

        Args:
            copies: (source, target) rows; no target is a source.
        """
        ...

    def spread(self) -> None:
        """Copy each row to as many adjacent ones as `new_cache` left room for. At most once.

        So a prompt that several rows continue is computed once.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row; rows that have fewer stay as they are.

        The next step continues each row behind what it kept, with the results that it would have if the
        forgotten tokens had never been given, and check_room counts only what is kept. With fixed slots
        that is lower lengths: stale slots are overwritten or never read. May be called at any time
        between two steps, also before the first, and costs no engine call.

        Args:
            length: 0 or more.
        """
        ...


MASKED_COLUMNS = 32  # forgotten columns that stay in a growing cache, masked, before it is copied together


class GrowingCache:
    """`portable`: each step writes past + new into the other of two sets of buffers.

    Forgotten columns are masked first: moving the kept ones together is a copy of the whole past.
    """

    def __init__(
        self,
        program: Program,
        artifact: Artifact,
        batch: int,
        capacity: int,
        context: Context = NO_CONTEXT,
        copies: int = 1,
    ) -> None:
        self.copies = copies
        self.program = program
        self.context = context
        self.capacity = capacity
        self.columns = 0
        self.forgotten = 0  # columns of these that no row sees any more
        self.mask = np.zeros((batch, capacity), np.int64)
        self.names = [(i.name, o.name, i) for i, o in cache_pairs(artifact)]
        self.reads = {spec.name for spec in artifact.inputs}  # of imported graphs some read no positions
        self.past, self.present = (
            {
                name: program.allocate(name, cache_shape(spec, batch * copies, capacity))
                for name, _, spec in self.names
            }
            for _ in range(2)
        )

    def check_room(self, width: int) -> None:
        refuse_overflow(self.columns - self.forgotten + width, self.capacity)

    def step(
        self, ids: Array, valid: Array, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        B, T = ids.shape
        self.check_room(T)
        moved = self.compact_past(T) if self.forgotten else {}
        past = self.columns
        total = self.columns + T
        self.mask[:, past:total] = valid
        mask = self.mask[:, :total]
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        buffers = dict(self.context.buffers)
        for name, grown, spec in self.names:
            if not moved:
                buffers[name] = self.past[name].view(cache_shape(spec, B, past))
            buffers[grown] = self.present[name].view(cache_shape(spec, B, total))
        own = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logit_rows": logit_rows}
        read = {name: array for name, array in own.items() if name in self.reads}
        inputs = {**self.context.inputs, **moved, **read}
        results = self.program.run(inputs, buffers, outputs)
        self.past, self.present = self.present, self.past
        self.columns = total
        return results

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        for name, _, spec in self.names if copies else ():
            past = self.past[name].view(cache_shape(spec, len(self.mask), self.columns))
            for source, target in copies:
                past.copy_rows(source, target, self.columns)
        for source, target in copies:
            self.mask[target] = self.mask[source]

    def spread(self) -> None:
        rows = len(self.mask)
        self.mask = np.repeat(self.mask, self.copies, axis=0)
        for name, _, spec in self.names:
            past = self.past[name].view(cache_shape(spec, rows * self.copies, self.columns))
            spread_rows(past, rows, self.copies, self.columns)

    def truncate(self, length: int) -> None:
        mask = self.mask[:, : self.columns]
        mask[mask.cumsum(axis=1) > length] = 0
        seen = np.flatnonzero(mask.any(axis=0))
        self.forgotten = self.columns - len(seen)

    def compact_past(self, width: int) -> dict[str, Array]:
        """Return the past without forgotten columns, for one step of `width`, once it is worth a copy."""
        if self.forgotten <= MASKED_COLUMNS and self.columns + width <= self.capacity:
            return {}
        seen = np.flatnonzero(self.mask[:, : self.columns].any(axis=0))
        shapes = {name: cache_shape(spec, len(self.mask), self.columns) for name, _, spec in self.names}
        past = {name: self.past[name].view(shape).numpy()[:, :, seen] for name, shape in shapes.items()}
        self.mask[:, : len(seen)] = self.mask[:, seen]
        self.columns = len(seen)
        self.forgotten = 0
        return past


class SlotCache:
    """`inplace`: fixed slots, written where each row's tokens belong; the output is the input's memory."""

    def __init__(
        self,
        program: Program,
        artifact: Artifact,
        batch: int,
        capacity: int,
        context: Context = NO_CONTEXT,
        copies: int = 1,
    ) -> None:
        self.copies = copies
        self.program = program
        self.context = context
        self.capacity = capacity
        self.lengths = np.zeros(batch, np.int32)
        self.slots: list[Buffer] = []
        self.buffers = dict(context.buffers)
        self.names = [(spec.name, out.name) for spec, out in cache_pairs(artifact)]
        for spec, out in cache_pairs(artifact):
            slots = program.allocate(spec.name, cache_shape(spec, batch * copies, capacity))
            used = slots.view(cache_shape(spec, batch, capacity)) if copies > 1 else slots
            self.slots.append(slots)
            self.buffers |= {spec.name: used, out.name: used}

    def check_room(self, width: int) -> None:
        refuse_overflow(int(self.lengths.max()) + width, self.capacity)

    def step(
        self, ids: Array, valid: Array, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        T = ids.shape[1]
        counts = valid.sum(axis=1, dtype=np.int32)
        refuse_overflow(int((self.lengths + np.where(counts, T, 0)).max()), self.capacity)
        # A row that ended with its slots full has its last one overwritten, which nobody reads again.
        lengths = np.minimum(self.lengths, self.capacity - T).astype(np.int32)
        own = {"input_ids": ids, "past_lengths": lengths, "logit_rows": logit_rows}
        results = self.program.run({**self.context.inputs, **own}, self.buffers, outputs)
        # Padding was written beyond a row's length, where its next tokens overwrite it unread.
        self.lengths = self.lengths + counts
        return results

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for slots in self.slots:
                slots.copy_rows(source, target, int(self.lengths[source]))
            self.lengths[target] = self.lengths[source]

    def spread(self) -> None:
        for (name, out), slots in zip(self.names, self.slots, strict=True):
            spread_rows(slots, len(self.lengths), self.copies, int(self.lengths.max()))
            self.buffers |= {name: slots, out: slots}
        self.lengths = np.repeat(self.lengths, self.copies)

    def truncate(self, length: int) -> None:
        self.lengths = np.minimum(self.lengths, length)


def spread_rows(buffer: Buffer, rows: int, copies: int, length: int) -> None:
    """Copy each of the first `rows` rows of a buffer over `copies` adjacent ones, up to `length` slots."""
    for row in reversed(range(rows)):  # the last first: what is written over was copied, or was never used
        for target in range(row * copies, (row + 1) * copies):
            if target != row:
                buffer.copy_rows(row, target, length)


def refuse_overflow(needed: int, capacity: int) -> None:
    if needed > capacity:
        raise ContextLengthError(
            f"the cache holds {capacity} tokens per row, {needed} are needed", tokens=needed, limit=capacity
        )


class GroupQueryCache(SlotCache):
    """`ort`: as `inplace`, but several tokens on top of a past go row by row: its kernel takes no more."""

    def step(
        self, ids: Array, valid: Array, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        if min(ids.shape) == 1 or not self.lengths.any():
            return super().step(ids, valid, logit_rows, outputs)
        if self.context.buffers or tuple(outputs) != LOGITS:
            raise InputError("several tokens on top of a past that see a source run at batch 1 only")
        T = ids.shape[1]
        counts = valid.sum(axis=1, dtype=np.int32)
        refuse_overflow(int((self.lengths + counts).max()), self.capacity)
        found: dict[int, Array] = {}
        for b in np.flatnonzero(counts):
            wanted = [int(i) for i in logit_rows if i // T == b]
            inputs = {
                "input_ids": ids[b : b + 1, : counts[b]],
                "past_lengths": self.lengths[b : b + 1],
                # A graph computes one row at least.
                "logit_rows": np.asarray([i % T for i in wanted] or [0], np.int64),
            }
            row = {name: buffer.row(int(b)) for name, buffer in self.buffers.items()}
            results = self.program.run(inputs, row, outputs)["logits"]
            found |= dict(zip(wanted, results, strict=False))
        self.lengths = self.lengths + counts
        unread = results[0]  # of a row that takes in nothing
        return {"logits": np.stack([found.get(int(i), unread) for i in logit_rows])}


LAYOUTS: dict[str, type[GrowingCache | SlotCache]] = {
    "portable": GrowingCache,
    "inplace": SlotCache,
    "ort": GroupQueryCache,
}


def new_cache(
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


def check_memory(program: Program, artifact: Artifact, batch: int, capacity: int) -> None:
    """Refuse a cache that the engine's own memory has no room for.

    Raises:
        MemoryLimitError: says what is needed, what is free, and what would fit.
    """
    needed = cache_bytes(artifact, batch, capacity)
    free = program.free_memory()
    if free is None or needed <= free:
        return
    rows = free // cache_bytes(artifact, 1, capacity)
    fixed = next((a[2] for s, _ in cache_pairs(artifact) if isinstance((a := s.axis_names())[2], int)), None)
    smaller = (
        "a smaller max_length may"
        if fixed is None
        else "a plan built with a smaller --max length=N may"  # its slots are fixed
    )
    fits = f"a batch of {rows} would fit" if rows else f"not even one row would fit; {smaller}"
    raise MemoryLimitError(
        f"a cache for {batch} rows of {fixed or capacity} tokens needs {needed / 1e6:.1f} MB of the GPU's"
        f" memory, of which {free / 1e6:.1f} MB are free; {fits}",
        needed=needed,
        limit=free,
    )


def capacity_for(artifact: Artifact, lengths: Sequence[int], new_tokens: Sequence[int]) -> int:
    """Return the tokens per row that a batch needs.

    Args:
        lengths: tokens of each prompt.
        new_tokens: how many follow each; the last of them is never fed back.
    """
    if artifact.dialect == "portable":  # every row is as wide as the longest prompt, padding included
        return max(lengths) + max(new_tokens) - 1
    return max(length + count - 1 for length, count in zip(lengths, new_tokens, strict=True))


def cache_bytes(artifact: Artifact, batch: int, capacity: int) -> int:
    """Return the bytes that `new_cache` allocates."""
    sets = 2 if artifact.dialect == "portable" else 1
    return sets * sum(
        int(np.prod(cache_shape(spec, batch, capacity))) * np.dtype(spec.dtype).itemsize
        for spec, _ in cache_pairs(artifact)
    )


def cache_pairs(artifact: Artifact) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return each past input with the present output that continues it."""
    return [
        (spec, artifact.output("present" + spec.role.removeprefix("past")))
        for spec in artifact.inputs
        if spec.role.startswith("past.")
    ]


def cache_shape(spec: TensorSpec, batch: int, length: int) -> tuple[int, ...]:
    """Return (B, H, length, D) of one cache tensor."""
    axes = spec.axis_names()
    if len(axes) == 4 and isinstance(axes[2], int):  # a plan's slots
        refuse_overflow(length, axes[2])
        length = axes[2]
    if len(axes) != 4 or not isinstance(axes[1], int) or not isinstance(axes[3], int):
        raise ManifestError(f"cache {spec.name!r} has axes {axes}, meant are batch, heads, length, head size")
    return batch, axes[1], length, axes[3]
