"""Decodes with neighbours: at each end of a chunk they are looked up, and read by an encoder.

The step that completes a chunk runs its last token twice: what the encoder reads of the chunk is known only
then, and that token already sees the new neighbours. The first run's keys and values are forgotten.

B rows, T tokens of a step, M tokens of a chunk, K neighbours of it, R tokens of a neighbour, E hidden size
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..activations import count_batch_bytes
from ..backends.backend import Array, BoundGraph, Buffer, GraphRunner, Program
from ..bundle.manifest import Artifact, TensorSpec
from ..bundle.retrieval_defaults import RetrievalDefaults
from ..errors import InputError, ManifestError
from ..memory_budget import MemoryBudget
from .cache_shapes import find_cache_shape
from .caches import make_cache
from .decoder import Decoder
from .state import LOGITS, CacheState, Context, DecoderState, RowState, expand_rows

CHUNK = "chunk"  # the role of what the encoder reads of the decoder
# The encoder's sizes in a model's configuration, by the names that other encoders have for them.
SIZES = {
    "hidden_size": "encoder_size",
    "num_attention_heads": "encoder_heads",
    "intermediate_size": "encoder_intermediate_size",
}


class Found(Protocol):
    """A neighbour of a chunk."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Return its tokens, and those that follow it."""
        ...


# Returns the neighbours of each of some chunks (B, M), the nearest first.
Find: TypeAlias = "Callable[[Sequence[Sequence[int]]], Sequence[Sequence[Found]]]"


def find_nothing(chunks: Sequence[Sequence[int]]) -> list[list[Found]]:
    """Return no neighbours, as where there is no index."""
    return [[] for _ in chunks]


class NeighbourEncoder(GraphRunner):
    """Reads the neighbours of a chunk for each row; what the decoder reads of them stays in the engine."""

    def __init__(
        self,
        program: Program,
        artifact: Artifact,
        decoder: Artifact,
        defaults: RetrievalDefaults,
        budget: MemoryBudget | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(program, artifact, budget)
        self.defaults = defaults
        self.config = config or {}
        self.pairs = pair_cross_tensors(artifact, decoder)
        self.names = [artifact.input(role).name for role in ("neighbours", "neighbour_mask", CHUNK)]
        self.mask_name = decoder.input("source_mask").name
        self.chunk_name = decoder.output(CHUNK).name

    def allocate(self, rows: int) -> dict[str, Buffer]:
        """Return zeroed memory for what the decoder reads, by the names of its inputs."""
        return {
            read.name: self.program.allocate(written.name, find_cache_shape(written, rows, 0))
            for written, read in self.pairs
        }

    def count_bytes(self, rows: int) -> int:
        """Return the bytes of what the decoder reads, and of what the encoder computes."""
        kept = sum(
            math.prod(find_cache_shape(written, rows, 0)) * np.dtype(written.dtype).itemsize
            for written, _ in self.pairs
        )
        read = self.defaults.read_length  # all of which a neighbour's scores have, masked
        sizes = {ours: self.config.get(theirs) for ours, theirs in SIZES.items()}
        return kept + count_batch_bytes(sizes, rows * read, read)

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundGraph:
        """Return the graph bound to the decoder's memory that it writes into."""
        written = {own.name: buffers[read.name] for own, read in self.pairs}
        return self.program.bind(written, (), fixed=True)

    def encode(self, graph: BoundGraph, ids: Array, mask: Array, chunk: Array) -> None:
        """Read neighbours (B, K * R) beside a chunk (B, M, E), by a graph that was bound."""
        with self.turn():
            graph(dict(zip(self.names, (ids, mask, chunk), strict=True)))


def pad_neighbours(found: Sequence[Sequence[Found]], defaults: RetrievalDefaults) -> tuple[Array, Array]:
    """Return the ids and the mask (B, K * R) of each row's neighbours, padded with 0."""
    ids = np.zeros((len(found), defaults.neighbours, defaults.neighbour_length), np.int64)
    mask = np.zeros_like(ids)
    for row, neighbours in enumerate(found):
        for place, one in enumerate(neighbours[: defaults.neighbours]):
            tokens = one.token_ids[: defaults.neighbour_length]
            ids[row, place, : len(tokens)] = tokens
            mask[row, place, : len(tokens)] = 1
    return ids.reshape(len(found), -1), mask.reshape(len(found), -1)


def pair_cross_tensors(encoder: Artifact, decoder: Artifact) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return each output of the encoder with the decoder's input that reads it; refuse odd ones."""
    written = {spec.role: spec for spec in encoder.outputs}
    reads = {spec.role: spec for spec in decoder.inputs if spec.role.startswith("cross.")}
    if set(written) != set(reads) or any(
        (spec.dtype, spec.axis_names()[1:]) != (reads[role].dtype, reads[role].axis_names()[1:])
        for role, spec in written.items()
    ):
        raise ManifestError(f"{encoder.id} and {decoder.id} do not belong together")
    return [(spec, reads[role]) for role, spec in written.items()]


class RetrievalDecoder(Decoder):
    """A decoder whose rows stand at the same place of a chunk, and read the neighbours of the last one."""

    def __init__(
        self, program: Program, artifact: Artifact, encoder: NeighbourEncoder, find: Find = find_nothing
    ) -> None:
        super().__init__(program, artifact, encoder.budget, encoder.config)
        self.encoder = encoder
        self.find = find

    def make_state(self, batch: int, capacity: int, context: Context, copies: int) -> DecoderState:
        return RetrievalState(self, batch, capacity, copies)

    def run_together(self, lengths: Sequence[int]) -> bool:
        """Return whether rows of these lengths can: those of one length, as their chunks end together."""
        return len(set(lengths)) == 1

    def count_bytes(
        self, rows: int, capacity: int, reading: int | None = None, logit_rows: int | None = None
    ) -> int:
        return super().count_bytes(rows, capacity, reading, logit_rows) + self.encoder.count_bytes(rows)

    def close(self) -> None:
        self.encoder.close()
        super().close()


class StepResults:
    """What is wanted of a step that runs in parts: results of flat rows of its `width` columns."""

    def __init__(self, rows: Array, width: int) -> None:
        self.rows = [int(row) for row in rows]
        self.width = width
        self.found: dict[int, dict[str, Array]] = {}

    def find(self, begin: int, count: int) -> list[int]:
        """Return the rows that are wanted of so many columns."""
        return [row for row in self.rows if begin <= row % self.width < begin + count]

    def keep(self, rows: Sequence[int], results: Mapping[str, Array]) -> None:
        """Keep results of rows; later ones take the place of earlier ones."""
        for place, row in enumerate(rows):
            self.found[row] = {name: values[place] for name, values in results.items()}

    def join(self, outputs: Sequence[str]) -> dict[str, Array]:
        """Return the results of all rows, in their order."""
        return {name: np.stack([self.found[row][name] for row in self.rows]) for name in outputs}


class RetrievalState(CacheState):
    """Keys and values of all tokens, and what is read of the neighbours of the last complete chunk.

    `found` has the neighbours of each row's complete chunks.
    """

    def __init__(self, decoder: RetrievalDecoder, batch: int, capacity: int, copies: int) -> None:
        self.decoder = decoder
        self.encoder = decoder.encoder
        self.chunk_length = decoder.encoder.defaults.chunk_length
        super().__init__(decoder.program, decoder.artifact, batch, capacity, copies=copies)

    def allocate(self, batch: int) -> None:
        self.memory = self.encoder.allocate(batch * self.copies)
        self.buffers = {name: view_rows(buffer, batch) for name, buffer in self.memory.items()}
        self.encode = self.encoder.bind(self.buffers)
        self.inputs: dict[str, Array] = {}
        context = Context(self.inputs, self.buffers)
        cache = make_cache(self.program, self.artifact, batch, self.capacity, context, self.copies)
        assert isinstance(cache, CacheState)
        self.cache = cache
        self.forget_chunks(batch)

    def forget_chunks(self, rows: int) -> None:
        """Begin anew, without tokens and neighbours."""
        self.failure: BaseException | None = None  # of an earlier step
        self.length = 0  # tokens of each row
        self.tokens = np.zeros((rows, 0), np.int64)  # of the chunk that is not complete
        self.chunk: list[Array] = []  # what the encoder reads of them, (B, T, E) of each step
        self.found: list[list[Sequence[Found]]] = [[] for _ in range(rows)]
        self.inputs[self.encoder.mask_name] = np.zeros((rows, self.encoder.defaults.read_length), np.int64)

    def check_room(self, width: int) -> None:
        self.cache.check_room(width)

    def step(
        self, ids: Array, valid: Array | None, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        """See `DecoderState.step`. Rows that have ended go on with padding, as all stand at one place.

        Raises:
            InputError: rows of several tokens that are not all of one length.
        """
        if self.failure is not None:
            raise self.failure
        T = ids.shape[1]
        if T > 1 and valid is not None and not valid.all():
            raise InputError("prompts that run together must have as many tokens: their chunks end together")
        self.check_room(T)
        try:
            return self.run(ids, logit_rows, outputs)
        except BaseException as error:
            self.failure = error  # a part of the step was run: what would follow it is not known
            raise

    def run(self, ids: Array, logit_rows: Array, outputs: Sequence[str]) -> dict[str, Array]:
        """Run tokens (B, T) in parts that end with chunks; return the named outputs."""
        T = ids.shape[1]
        results = StepResults(logit_rows, T)
        begin = 0
        while begin < T:
            end = min(T, begin + self.chunk_length - self.tokens.shape[1])
            self.take(ids[:, begin:end], begin, outputs, results)
            self.tokens = np.concatenate([self.tokens, ids[:, begin:end]], axis=1)
            self.length += end - begin
            if self.tokens.shape[1] == self.chunk_length:
                self.read_neighbours()
                self.cache.truncate(self.length - 1)
                self.take(ids[:, end - 1 : end], end - 1, outputs, results)
                self.chunk.clear()
            begin = end
        return results.join(outputs)

    def take(self, ids: Array, begin: int, outputs: Sequence[str], results: StepResults) -> None:
        """Run tokens that see the same neighbours, from a column of a step on; keep what is wanted."""
        B, T = ids.shape
        names = (*outputs, self.encoder.chunk_name)
        if B == 1 or T == 1 or not self.length or not isinstance(self.cache, RowState):
            wanted = results.find(begin, T)
            rows = [row // results.width * T + row % results.width - begin for row in wanted]
            found = self.cache.step(ids, None, np.array(rows or [0], np.int64), names)  # a graph gives one
            self.chunk.append(found.pop(self.encoder.chunk_name))
            results.keep(wanted, found)
            return
        chunks = []
        for row, tokens in enumerate(ids.tolist()):  # of several tokens on a past its kernel takes one row
            wanted = [one for one in results.find(begin, T) if one // results.width == row]
            places = [one % results.width - begin for one in wanted] or [0]
            found = self.cache.step_row(row, tokens, places, names)
            chunks.append(found.pop(self.encoder.chunk_name))
            results.keep(wanted, found)
        self.chunk.append(np.concatenate(chunks))

    def read_neighbours(self) -> None:
        """Look up the neighbours of the complete chunk, and let the encoder read them, if there are any."""
        found = self.decoder.find(self.tokens.tolist())
        for row, neighbours in enumerate(found):
            self.found[row].append(neighbours)
        ids, mask = pad_neighbours(found, self.encoder.defaults)
        if mask.any():
            self.encoder.encode(self.encode, ids, mask, np.concatenate(self.chunk, axis=1))
        self.inputs[self.encoder.mask_name] = mask
        self.tokens = self.tokens[:, :0]

    def list_found(self, row: int, length: int) -> Sequence[Sequence[Found]]:
        if self.decoder.find is find_nothing:
            return ()
        return self.found[row][: length // self.chunk_length]

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        self.cache.copy_rows(copies)
        for buffer in self.buffers.values():
            for source, target in copies:
                buffer.copy_rows(source, target, buffer.shape[2])
        order = list(range(len(self.tokens)))
        for source, target in copies:
            order[target] = source
        self.choose_rows(order)

    def choose_rows(self, order: Sequence[int]) -> None:
        """Let each row have what one of them has in the host's memory."""
        self.tokens = self.tokens[order]
        self.chunk = [part[order] for part in self.chunk]
        self.found = [list(self.found[row]) for row in order]
        self.inputs[self.encoder.mask_name] = self.inputs[self.encoder.mask_name][order]

    def expand(self) -> None:
        rows = len(self.tokens)
        for name, buffer in self.memory.items():
            expand_rows(buffer, rows, self.copies, buffer.shape[2])
            self.buffers[name] = buffer
        self.encode = self.encoder.bind(self.buffers)
        self.cache.expand()
        self.choose_rows([row for row in range(rows) for _ in range(self.copies)])

    def truncate(self, length: int) -> int:
        """Forget all but `length` tokens; nothing is kept where they end in an earlier chunk."""
        if length >= self.length:
            return self.length
        kept = length - (self.length - len(self.tokens[0]))
        if kept < 0:
            self.cache.truncate(0)
            self.forget_chunks(len(self.tokens))
            return 0
        self.cache.truncate(length)
        self.chunk = [np.concatenate(self.chunk, axis=1)[:, :kept]]
        self.tokens = self.tokens[:, :kept]
        self.length = length
        return length

    def truncate_row(self, row: int, length: int) -> None:
        if len(self.tokens) > 1:
            raise InputError("rows that read neighbours go back together")
        self.truncate(length)

    def repeat(self, times: int) -> None:
        raise InputError("a text that reads neighbours cannot be repeated: each chunk has its own")


def view_rows(buffer: Buffer, rows: int) -> Buffer:
    """Return the memory of a buffer's first rows."""
    return buffer.view((rows, *buffer.shape[1:]))
