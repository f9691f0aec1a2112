"""What decoding asks of a cache of keys and values, whichever way a graph keeps them.

B batch, T tokens of this step, P cached columns (a row's tokens and its padding), H heads, D head size,
N logit rows, V vocabulary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..backends.backend import Array, Buffer, Program
from ..bundle.manifest import Artifact
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
        """Forget all but the first `length` tokens of a row."""

    @abstractmethod
    def repeat(self, times: int) -> None:
        """Let every row hold its keys and values so many times, one behind the other; for comparisons.

        The newest tokens that a window sees must be there.
        """


def expand_rows(buffer: Buffer, rows: int, copies: int, length: int) -> None:
    """Copy each of the first `rows` rows of a buffer over `copies` adjacent ones, up to `length` slots."""
    for row in reversed(range(rows)):  # the last first: what is written over was copied, or was never used
        for target in range(row * copies, (row + 1) * copies):
            if target != row:
                buffer.copy_rows(row, target, length)
