"""Runs the cases of a decoder that reads neighbours: a text's own tokens say which it finds.

M tokens of a chunk, K neighbours of it, R tokens of a neighbour, E hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from ...bundle.manifest import Artifact
from ...bundle.retrieval_defaults import RetrievalDefaults
from ...decoding.retrieval import RetrievalDecoder, pad_neighbours
from .case import Case, CaseSet, Encoding, Known, Location
from .decoder import run
from .judge import Limits, Seen, compare_known
from .outcome import Outcome
from .translator import stack_places

ENCODER = "encoder"
DECODER = "decoder"
ALIKE = 0.5  # the share of a neighbour's tokens that are its chunk's


@dataclass(frozen=True)
class SampledNeighbour:
    """A neighbour that no index has."""

    token_ids: tuple[int, ...]


def sample_neighbours(
    chunks: Sequence[Sequence[int]], defaults: RetrievalDefaults, vocabulary: int
) -> list[list[SampledNeighbour]]:
    """Return neighbours of chunks, which follow from their tokens alone; some are short, some or all missing.

    A part of their tokens are the chunk's, so that attention finds what is alike, as in real ones.
    """
    found = []
    for chunk in chunks:
        random = np.random.default_rng(np.asarray(chunk, np.int64).astype(np.uint32))
        count = (0, defaults.neighbours - 1, *(defaults.neighbours,) * 3)[random.integers(5)]
        found.append(
            [sample_neighbour(random, chunk, defaults.neighbour_length, vocabulary) for _ in range(count)]
        )
    return found


def sample_neighbour(
    random: np.random.Generator, chunk: Sequence[int], longest: int, vocabulary: int
) -> SampledNeighbour:
    """Return a neighbour of a chunk: a half of its tokens are the chunk's, moved by some places."""
    length = longest if random.integers(2) else int(random.integers(1, longest + 1))
    own = (
        np.resize(np.roll(chunk, int(random.integers(len(chunk)))), length) % vocabulary
    )  # places are no ids
    other = random.integers(vocabulary, size=length)
    return SampledNeighbour(tuple(np.where(random.random(length) < ALIKE, own, other).tolist()))


class RetrievalEngine:
    """A decoder and its encoder in the runtime's own loop, with neighbours that no index has."""

    encoding: ClassVar[Encoding | None] = None

    def __init__(self, decoder: RetrievalDecoder) -> None:
        self.decoder = decoder
        self.encoder = decoder.encoder
        (*_, vocabulary) = decoder.artifact.output("logits").axes
        assert isinstance(vocabulary, int)
        self.find = partial(sample_neighbours, defaults=self.encoder.defaults, vocabulary=vocabulary)
        decoder.find = self.find

    @property
    def artifacts(self) -> tuple[Artifact, Artifact]:
        return self.encoder.artifact, self.decoder.artifact

    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        if case.graph == ENCODER:
            return self.read_chunks(case_set, case)
        return run(self.decoder, case_set, case)

    def read_chunks(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        """Yield what the decoder would read of chunks' neighbours, beside PyTorch's states of the chunks."""
        chunks = [case_set.texts[row.text].tokens for row in case.rows]
        ids, mask = pad_neighbours(self.find(chunks), self.encoder.defaults)
        states = np.stack([case_set.answers["chunk"][row.text].values for row in case.rows])
        buffers = self.encoder.allocate(len(chunks))
        self.encoder.encode(self.encoder.bind(buffers), ids, mask, states.astype(np.float32))
        tensors = [buffers[read.name].numpy() for _, read in self.encoder.pairs]
        for row, one in enumerate(case.rows):
            known = case_set.answers["cross"].get(one.text)
            if known is not None:
                values = stack_places([tensor[row] for tensor in tensors], known.positions)
                yield Seen(one.text, {"cross": Known(known.positions, values)}, Location(case, 0, row))

    def compare(self, case_set: CaseSet, cases: Sequence[Case], limits: Limits) -> Outcome:
        return compare_known(self.run, case_set, cases, limits)

    def close(self) -> None:
        self.decoder.close()
