"""Runs the encoder of an encoder-decoder; what the decoder reads of it stays in the engine's memory.

B sources, S tokens of the longest, H heads, D head size
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..activations import count_batch_bytes
from ..backends.backend import GraphRunner, Program
from ..backends.buckets import find_bucket
from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact, TensorSpec
from ..decoding.cache_shapes import find_cache_shape
from ..decoding.decoder import pad
from ..decoding.state import Context, PendingContext
from ..errors import ManifestError
from ..memory_budget import MemoryBudget


class SourceEncoder(GraphRunner):
    """An opened encoder graph, whose outputs the decoder reads: keys and values, or its first states."""

    def __init__(
        self,
        program: Program,
        artifact: Artifact,
        decoder: Artifact,
        budget: MemoryBudget | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(program, artifact, budget)
        self.config = config or {}  # whose sizes a memory limit needs
        self.reads = pair_cross_tensors(artifact, decoder)
        # A decoder without attention reads none.
        self.masks = [spec.name for spec in decoder.inputs if spec.role == "source_mask"]
        self.max_batch = artifact.axis("batch").max

    def prepare(self, sources: Sequence[Sequence[int]]) -> PendingContext:
        """Return what `encode` is to compute, and the memory that it takes."""
        longest = self.find_width(sources)
        return PendingContext(self.count_context_bytes(len(sources), longest), partial(self.encode, sources))

    def find_width(self, sources: Sequence[Sequence[int]]) -> int:
        """Return how many tokens sources are padded to."""
        longest = max(len(source) for source in sources)
        if not self.program.captures_steps or self.budget.limit is not None:
            return longest
        return find_bucket(longest, self.artifact.axis("tokens").max)

    def count_context_bytes(self, batch: int, tokens: int) -> int:
        """Return what encoding sources takes, padded to so many tokens: activations, and what is kept.

        The decoder's keys and values of them are kept.
        """
        kept = sum(
            math.prod(find_cache_shape(output, batch, tokens)) * np.dtype(output.dtype).itemsize
            for output, _ in self.reads
        )
        return kept + count_batch_bytes(self.config, batch * tokens, tokens, self.artifact.graph)

    def encode(self, sources: Sequence[Sequence[int]]) -> Context:
        """Encode token ids of sources, padded to the longest; return what the decoder sees of them."""
        ids, valid = pad(sources, self.artifact.padding_side, self.find_width(sources))
        mask = valid.astype(np.int64)
        values = {"ids": ids, "mask": mask, "lengths": valid.sum(axis=1, dtype=np.int32)}
        inputs = {spec.name: values[spec.role] for spec in self.artifact.inputs}
        with self.turn():
            written = {
                output.name: self.program.allocate(output.name, find_cache_shape(output, *ids.shape))
                for output, _ in self.reads
            }
            self.program.bind(written, fixed=True)(inputs)
        masks = dict.fromkeys(self.masks, mask)
        return Context(masks, {read.name: written[output.name] for output, read in self.reads})


def pair_cross_tensors(encoder: Artifact, decoder: Artifact) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return each of the encoder's outputs with the decoder's input that reads it; refuse odd ones."""
    written = {spec.role: spec for spec in encoder.outputs}
    reads = {spec.role: spec for spec in decoder.inputs if spec.is_given_by_encoder}
    if not reads or set(reads) != set(written):
        odd = sorted(set(reads) ^ set(written))
        raise ManifestError(
            f"{encoder.id} and {decoder.id} do not belong together: {odd[:4]} are on one side only"
        )
    for role, spec in reads.items():
        sizes = [[axis for axis in s.axis_names() if isinstance(axis, int)] for s in (spec, written[role])]
        if sizes[0] != sizes[1] or spec.dtype != written[role].dtype:
            raise ManifestError(
                f"{encoder.id} and {decoder.id} do not belong together: {role} is {written[role].dtype}"
                f" {written[role].axis_names()} on one side and {spec.dtype} {spec.axis_names()} on the other"
            )
    return [(written[role], spec) for role, spec in reads.items()]


def check_same_export(bundle: Bundle, encoder: Artifact, decoder: Artifact) -> None:
    """Refuse graphs that were exported at different times, or between which a tensor differs."""
    if encoder.data != decoder.data:
        raise ManifestError(
            f"{bundle.folder}: {encoder.id} and {decoder.id} come from different exports: their weights are"
            f" {', '.join(encoder.data)} and {', '.join(decoder.data)}"
        )
    pair_cross_tensors(encoder, decoder)
