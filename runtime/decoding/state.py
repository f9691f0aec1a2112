"""What decoding asks of the state that a decoder keeps between steps, whichever way a graph keeps it.

B batch, T tokens of this step, P cached columns (a row's tokens and its padding), H heads, D head size,
N logit rows, V vocabulary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..backends.backend import Array, Buffer, Program
from ..bundle.artifact import ADAPTERS, has_role
from ..bundle.manifest import Artifact, TensorSpec
from ..memory_budget import Lease
from .cache_shapes import pair_cache_tensors

LOGITS = ("logits",)


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


class DecoderState(ABC):
    """What one batch has computed so far: keys and values, or states of fixed size; see `make_cache`."""

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
        self.takes_adapters = has_role(artifact.inputs, ADAPTERS)
        self.adapters = np.zeros(batch, np.int64)  # of each row; 0 is none
        self.allocate(batch)

    def choose_adapters(self, rows: slice) -> dict[str, Array]:
        """Return the input that says which adapter each of some rows has, where the graph takes one."""
        return {ADAPTERS: self.adapters[rows]} if self.takes_adapters else {}

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

    def list_found(self, row: int, length: int) -> Sequence[Any]:
        """Return the neighbours of each chunk of a row's first tokens, where such are read; see `Find`."""
        return ()


class CacheState(DecoderState):
    """Keys and values of all tokens so far, so that the last ones can be forgotten again."""

    @cached_property
    def pairs(self) -> list[tuple[TensorSpec, TensorSpec]]:
        """Each past input with the present output that continues it."""
        return pair_cache_tensors(self.artifact)

    @abstractmethod
    def expand(self) -> None:
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
    def truncate_row(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of a row; see `RowState.find_kept`."""

    @abstractmethod
    def repeat(self, times: int) -> None:
        """Let every row hold its keys and values so many times, one behind the other; for comparisons.

        The newest tokens that a window sees must be there.
        """


class RowState(CacheState):
    """A state whose rows have lengths of their own, so that requests can join and leave row by row."""

    lengths: list[int]  # tokens of each row

    @abstractmethod
    def step_row(
        self, row: int, tokens: Sequence[int], logit_rows: Sequence[int], outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        """Run tokens of one row on top of what it holds, as a batch of one; return the named outputs."""

    @abstractmethod
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Overwrite a row with the first `length` tokens of another one."""

    @abstractmethod
    def find_kept(self, row: int, length: int) -> int:
        """Return `length`, or 0 where a row cannot go back to so many tokens."""

    def is_full(self, row: int) -> bool:
        """Return whether one more token of a row would take the place of another one."""
        return self.lengths[row] >= self.capacity

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            self.copy_row(source, target, self.lengths[source])

    def truncate(self, length: int) -> int:
        shorter = [min(held, length) for held in self.lengths]
        if any(self.find_kept(row, kept) < kept for row, kept in enumerate(shorter)):
            length = 0
        for row in range(len(shorter)):
            self.truncate_row(row, length)
        return length


def expand_rows(buffer: Buffer, rows: int, copies: int, length: int) -> None:
    """Copy each of the first `rows` rows of a buffer over `copies` adjacent ones, up to `length` slots."""
    for row in reversed(range(rows)):  # the last first: what is written over was copied, or was never used
        for target in range(row * copies, (row + 1) * copies):
            if target != row:
                buffer.copy_rows(row, target, length)
