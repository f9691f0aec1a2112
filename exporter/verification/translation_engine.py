"""The two graphs of an encoder-decoder on one engine, as a verification runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.backends.backend import Program
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.beam import BeamSearch, Hypothesis, Search
from ...runtime.decoding.decoder import Decoder, DecoderRun
from ...runtime.decoding.source import SourceEncoder
from ...runtime.load import translation_tokenizers
from .gate import Logits

if TYPE_CHECKING:
    from .translation_samples import Sample


class Engine:
    """An artifact with the partner that it runs with.

    Args:
        bundle: that has both.
        artifact: an encoder or a decoder.
        opened: opens a graph.
    """

    def __init__(self, bundle: Bundle, artifact: Artifact, opened: Callable[[Artifact], Program]) -> None:
        defaults = bundle.manifest.generation
        assert defaults is not None and defaults.decoder_start is not None

        def fit(other: Artifact) -> tuple[bool, bool]:
            return other.precision == artifact.precision, other.dialect == artifact.dialect

        encoder, decoder = (
            artifact
            if artifact.graph == graph
            else max((a for a in bundle.manifest.artifacts if a.graph == graph), key=fit)
            for graph in ("encoder", "decoder")
        )
        self.start = defaults.decoder_start
        self.source_tokenizer, self.target_tokenizer = translation_tokenizers(bundle)
        self.encoder = SourceEncoder(opened(encoder), encoder, decoder)
        self.decoder = Decoder(opened(decoder), decoder)

    def cross(self, samples: Sequence[Sample]) -> list[Logits]:
        """What the decoder would read of the sources, as one padded batch, at the known positions."""
        context = self.encoder.encode([s.source for s in samples])
        tensors = [context.buffers[read.name].numpy() for _, read in self.encoder.reads]
        return [
            np.stack(
                [t[b][:, list(s.positions)].swapaxes(0, 1).reshape(len(s.positions), -1) for t in tensors]
            ).astype(np.float32)
            for b, s in enumerate(samples)
        ]

    def run(self, samples: Sequence[Sample], beams: int, capacity: int) -> DecoderRun:
        return self.decoding([s.source for s in samples], beams, capacity)

    def decoding(self, sources: Sequence[Sequence[int]], beams: int, capacity: int) -> DecoderRun:
        """A decoder that looks at `sources`, with so many rows of each."""
        context = self.encoder.encode(sources)
        return self.decoder.start(len(sources) * beams, capacity, context)

    def teacher_forced(self, sample: Sample) -> Logits:
        """Feeds PyTorch's tokens through the cache: at once up to the first known step, then one by one."""
        run = self.run([sample], 1, len(sample.target))
        fed = [self.start, *sample.target[:-1]]
        out = [run.prefill([fed[: sample.steps[0] + 1]])]
        out += [run.decode([token]) for token in fed[sample.steps[0] + 1 : sample.steps[-1] + 1]]
        return np.concatenate(out)[[step - sample.steps[0] for step in sample.steps]]

    def at_once(self, sample: Sample) -> Logits:
        """PyTorch's tokens in one step, on top of nothing."""
        run = self.run([sample], 1, len(sample.target))
        ids = np.asarray([[self.start, *sample.target[:-1]]])
        return run.step(ids, np.ones_like(ids, bool), sample.steps)

    def attention(self, sample: Sample) -> list[Logits]:
        """What the known places look at, (L, H, len(steps), S), in each of two rows that share the source."""
        names = [s.name for s in self.decoder.artifact.outputs if s.role.startswith("cross_attention.")]
        run = self.run([sample], 2, len(sample.target))
        ids = np.asarray([[self.start, *sample.target[:-1]]] * 2)
        results = run.results(ids, np.ones_like(ids, bool), [0], names)
        both = np.stack([results[name] for name in names], axis=1)  # (2, L, H, T, S)
        return [row[:, :, list(sample.steps)] for row in both]

    def search(self, samples: Sequence[Sample], search: Search) -> list[list[Hypothesis]]:
        """The runtime's beam search."""
        beams = BeamSearch(len(samples), self.start, search)
        run = self.run(samples, search.num_beams, search.max_new_tokens)
        while not beams.done:
            copies = beams.advance(run.decode(beams.tokens))
            run.copy_rows(copies)
        return beams.hypotheses()

    def close(self) -> None:
        self.encoder.close()
        self.decoder.close()
