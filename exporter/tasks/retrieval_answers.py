"""Computes PyTorch's answers of a decoder that reads neighbours.

T tokens, M tokens of a chunk, L complete chunks, K neighbours of a chunk, R tokens of a neighbour, N places,
V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...runtime.apps.check.case import Case, CaseSet, Known, Row
from ...runtime.apps.check.decoder import reduce
from ...runtime.apps.check.metrics import Logits
from ...runtime.apps.check.retrieval import DECODER, ENCODER, RetrievalEngine, sample_neighbours
from ...runtime.apps.check.translator import stack_places
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.bundle.retrieval_defaults import RetrievalDefaults
from ...runtime.decoding.retrieval import NeighbourEncoder, RetrievalDecoder, pad_neighbours
from .base import OpenProgram, find_partner, list_wanted
from .image_answers import is_known

if TYPE_CHECKING:
    from torch import Tensor

    from ..reference_model import ReferenceModel
    from .rounding import Rounding

KEPT = ((6,), (3,), (1,))  # places of a text, in golden data; the first that fits


class Reference:
    """The model in PyTorch, in fp32; of a rounding only keys and values are rounded here."""

    def __init__(self, model: Any, defaults: RetrievalDefaults, rounding: Rounding | None = None) -> None:
        from .piecewise import PiecewiseCache
        from .rounding import RoundedCache

        self.model = model
        self.defaults = defaults
        self.make_cache: Any = PiecewiseCache
        if rounding is not None and rounding.cache_scales:
            self.make_cache = partial(RoundedCache, rounding.cache_scales)

    def find(self, chunks: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the ids and the mask (L, K * R) of the neighbours of chunks."""
        import torch

        found = sample_neighbours(chunks, self.defaults, self.model.config.vocab_size)
        ids, mask = pad_neighbours(found, self.defaults)
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def compute_logits(self, tokens: Sequence[int]) -> Logits:
        """Return the logits (T, V) behind each token of a text, which is read at once."""
        import torch

        from ...models.retro import TextNeighbours

        M = self.defaults.chunk_length
        chunks = [tokens[begin : begin + M] for begin in range(0, len(tokens) - M + 1, M)]
        ids, mask = self.find(chunks)
        shape = (1, len(chunks), self.defaults.neighbours, self.defaults.neighbour_length)
        text = torch.tensor([list(tokens)])
        with torch.no_grad():
            cache = self.make_cache(self.model.empty_past(1), torch.ones_like(text))
            neighbours = TextNeighbours(self.model, ids.view(shape), mask.view(shape))
            logits: Logits = self.model.logits(self.model.hidden_states(text, cache, neighbours))[0].numpy()
        return logits

    def read_chunk(self, tokens: Sequence[int]) -> Tensor:
        """Return what the encoder reads of a text's first chunk, (1, M, E)."""
        run = ReferenceRun(self)
        run.read(tokens)
        return run.seen.chunk

    def encode(self, tokens: Sequence[int], chunk: Tensor) -> list[Tensor]:
        """Return the keys and values of a chunk's neighbours, beside the decoder's states (1, M, E) of it."""
        import torch

        with torch.no_grad():
            pairs = self.model.encode(*self.find([tokens]), chunk)
        return [tensor for pair in pairs for tensor in pair]


class ReferenceRun:
    """A text that is read in steps, each on top of the one before, as the runtime reads it."""

    def __init__(self, reference: Reference) -> None:
        import torch

        from ...models.retro import KnownNeighbours

        self.reference = reference
        self.model = reference.model
        self.past = self.model.empty_past(1)
        config = self.model.config
        width = config.neighbours * config.neighbour_length
        zeros = torch.zeros(1, config.num_attention_heads, width, config.head_size)
        self.pairs = [(zeros, zeros)] * len(config.cross_layers)
        mask = torch.zeros(1, width, dtype=torch.long)
        self.seen = KnownNeighbours(self.pairs, mask, self.model.query_tables)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits (1, T, V) behind some tokens, which all see the same neighbours."""
        import torch

        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            mask = torch.ones(1, self.past[0][0].shape[2] + len(tokens), dtype=torch.long)
            cache = self.reference.make_cache(self.past, mask)
            logits: Tensor = self.model.logits(self.model.hidden_states(ids, cache, self.seen))
            self.past = cache.present
        return logits

    def complete(self, tokens: Sequence[int], chunk: Tensor) -> Tensor:
        """Read the neighbours of a complete chunk, and its last token again; return the logits (1, 1, V)."""
        import torch

        from ...models.retro import KnownNeighbours

        ids, mask = self.reference.find([tokens])
        if mask.any():
            with torch.no_grad():
                self.pairs = self.model.encode(ids, mask, chunk)
        self.seen = KnownNeighbours(self.pairs, mask, self.model.query_tables)
        self.past = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in self.past]
        return self.read(tokens[-1:])


def open_reference(model: ReferenceModel, bundle: Bundle, rounding: Rounding | None = None) -> Reference:
    """Return the reference that answers."""
    defaults = bundle.manifest.retrieval
    assert defaults is not None
    return Reference(model, defaults, rounding)


def open_engine(bundle: Bundle, artifact: Artifact, open_program: OpenProgram) -> RetrievalEngine:
    """Open a graph with the other one that fits it best."""
    decoder = find_partner(bundle, artifact, DECODER)
    encoder = find_partner(bundle, artifact, ENCODER)
    defaults = bundle.manifest.retrieval
    assert defaults is not None
    reading = NeighbourEncoder(open_program(encoder), encoder, decoder, defaults)
    return RetrievalEngine(RetrievalDecoder(open_program(decoder), decoder, reading))


def calibrate(reference: Reference, case_set: CaseSet) -> None:
    """Run PyTorch over the texts to calibrate with."""
    for text in case_set.calibration:
        reference.compute_logits(text.tokens)


def read_row(reference: Reference, case_set: CaseSet, case: Case, row: Row) -> object:
    """Run PyTorch over what a row of a case reads, in the steps of the runtime; return the last logits."""
    import torch

    tokens = case_set.texts[row.text].tokens
    if case.graph == ENCODER:
        return reference.encode(tokens, torch.from_numpy(case_set.answers["chunk"][row.text].values)[None])
    M = reference.defaults.chunk_length
    run = ReferenceRun(reference)
    parts: list[Tensor] = []
    begin = 0
    for end in sorted({*range(M, row.ends[-1] + 1, M), *row.ends}):
        logits = run.read(tokens[begin:end])
        parts.append(run.seen.chunk)
        if end % M == 0:
            logits = run.complete(tokens[end - M : end], torch.cat(parts, dim=1))
            parts = []
        begin = end
    return logits[0].numpy()


def answer_texts(
    reference: Reference, case_set: CaseSet, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Known]]]:
    """Yield PyTorch's answers to texts, by their numbers and outputs."""
    for number in numbers:
        yield number, answer_text(reference, case_set, number)


def answer_text(reference: Reference, case_set: CaseSet, number: int) -> dict[str, Known]:
    """Return PyTorch's answers at the wanted places of a text, or of a chunk's neighbours, by output.

    A rounded model's encoder reads the same chunk as an unrounded one's, as a graph's does.
    """
    import torch

    tokens = case_set.texts[number].tokens
    known = list_wanted(case_set, number)
    if "cross" in known:
        chunk = known["chunk"]
        if not is_known(chunk):
            chunk = Known(chunk.positions, reference.read_chunk(tokens)[0].numpy())
        found = reference.encode(tokens, torch.from_numpy(chunk.values)[None])
        places = known["cross"].positions
        cross = stack_places([tensor[0].numpy() for tensor in found], places)
        return {"cross": Known(places, cross), "chunk": chunk}
    wanted = {output: one.positions for output, one in known.items()}
    end = max(int(places[-1]) for places in wanted.values()) + 1
    logits = reference.compute_logits(tokens[:end])
    return {
        output: Known(places, reduce(case_set, output, number, places, logits[places]))
        for output, places in wanted.items()
    }
