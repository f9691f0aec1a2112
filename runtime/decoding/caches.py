"""Which cache a graph's dialect needs; a recurrent decoder has a state instead."""

from __future__ import annotations

from ..backends.backend import Program
from ..bundle.manifest import Artifact
from ..errors import ManifestError
from .cache_shapes import check_memory
from .dynamic_cache import DynamicCache
from .fixed_state import FixedState
from .state import NO_CONTEXT, Context, DecoderState, RowState
from .static_cache import GroupQueryCache, StaticCache

LAYOUTS: dict[str, type[DecoderState]] = {
    "portable": DynamicCache,
    "inplace": StaticCache,
    "ort": GroupQueryCache,
}


def make_cache(
    program: Program,
    artifact: Artifact,
    batch: int,
    capacity: int,
    context: Context = NO_CONTEXT,
    copies: int = 1,
) -> DecoderState:
    """Return an empty cache of `batch` rows of `capacity` tokens, with room for `copies` times as many."""
    if artifact.dialect not in LAYOUTS:
        raise ManifestError(
            f"artifact {artifact.id} has dialect {artifact.dialect!r}, known are {list(LAYOUTS)}"
        )
    check_memory(program, artifact, batch * copies, capacity)
    if artifact.keeps_state:
        return FixedState(program, artifact, batch, capacity, context)
    return LAYOUTS[artifact.dialect](program, artifact, batch, capacity, context, copies)


def has_row_lengths(artifact: Artifact) -> bool:
    """Return whether the rows of a graph's cache have lengths of their own."""
    return issubclass(LAYOUTS[artifact.dialect], RowState) and not artifact.reads_neighbours
