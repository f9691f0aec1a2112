"""The two graphs of an encoder-decoder on one engine, as golden data drives them.

L layers, H heads, S source tokens, R rows: the beams of all sources, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...decoding.beam import BeamSearch, Hypothesis, Search
from ...decoding.decoder import Decoder, DecoderRun
from ...decoding.sampling import compute_logprobs
from ...text.tokenizer import Tokenizer
from ...translate.source_encoder import SourceEncoder
from .metrics import Logits
from .translations import Sample


class Follower(Protocol):
    """The model in PyTorch, which is fed what an engine's search feeds its rows."""

    errors: list[float]  # the largest of each step and source, in units of the logits' spread

    def compare(self, logits: Logits, tokens: Sequence[int], active: Sequence[bool]) -> None:
        """Compare the engine's logits (R, V) with the model's, where rows are still searched."""

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy rows as the engine does."""


class Engine:
    """An encoder and a decoder that reads what it writes; every target begins with the token `start`."""

    def __init__(
        self, encoder: SourceEncoder, decoder: Decoder, start: int, tokenizers: tuple[Tokenizer, Tokenizer]
    ) -> None:
        self.encoder = encoder
        self.decoder = decoder
        self.start = start
        self.source_tokenizer, self.target_tokenizer = tokenizers

    def read_cross(self, sources: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> list[Logits]:
        """Return what the decoder would read of sources, as one padded batch, at some places of each."""
        context = self.encoder.encode(sources)
        tensors = [context.buffers[read.name].numpy() for _, read in self.encoder.reads]
        return [
            np.stack([t[b][:, list(own)].swapaxes(0, 1).reshape(len(own), -1) for t in tensors]).astype(
                np.float32
            )
            for b, own in enumerate(places)
        ]

    def start_run(self, sources: Sequence[Sequence[int]], beams: int, capacity: int) -> DecoderRun:
        """Start a decoder run that reads `sources`, with so many rows of each."""
        return self.decoder.start(len(sources) * beams, capacity, self.encoder.prepare(sources))

    def force_tokens(self, sample: Sample) -> Logits:
        """Feed PyTorch's tokens through the cache: at once up to the first known step, then one by one."""
        run = self.start_run([sample.source], 1, len(sample.target))
        fed = [self.start, *sample.target[:-1]]
        out = [run.prefill([fed[: sample.steps[0] + 1]])]
        out += [run.decode([token]) for token in fed[sample.steps[0] + 1 : sample.steps[-1] + 1]]
        return np.concatenate(out)[[step - sample.steps[0] for step in sample.steps]]

    def run_at_once(self, sample: Sample) -> Logits:
        """Run PyTorch's tokens in one step, without a past."""
        run = self.start_run([sample.source], 1, len(sample.target))
        ids = np.asarray([[self.start, *sample.target[:-1]]])
        return run.step(ids, np.ones_like(ids, bool), sample.steps)

    def score(self, sample: Sample, target: Sequence[int]) -> float:
        """Return the mean log-probability of a target's tokens, taken one by one."""
        run = self.start_run([sample.source], 1, len(target))
        logits = [run.decode([token]) for token in (self.start, *target[:-1])]
        return float(compute_logprobs(np.concatenate(logits), np.asarray(target)).mean())

    def read_attention(self, sample: Sample) -> list[Logits]:
        """Return what the known places attend to, (L, H, len(steps), S), for two rows that share a source."""
        names = [s.name for s in self.decoder.artifact.outputs if s.role.startswith("cross_attention.")]
        run = self.start_run([sample.source], 2, len(sample.target))
        ids = np.asarray([[self.start, *sample.target[:-1]]] * 2)
        results = run.run_graph(ids, np.ones_like(ids, bool), [0], names)
        both = np.stack([results[name] for name in names], axis=1)  # (2, L, H, T, S)
        return [row[:, :, list(sample.steps)] for row in both]

    def search(
        self, samples: Sequence[Sample], search: Search, follower: Follower | None = None
    ) -> list[list[Hypothesis]]:
        """Return the best targets of each sample, with a follower beside the engine, if there is one."""
        beams = BeamSearch([[self.start]] * len(samples), search)
        run = self.start_run([s.source for s in samples], search.num_beams, search.max_new_tokens)
        while not beams.done:
            logits = run.decode(beams.tokens)
            if follower is not None:
                follower.compare(logits, beams.tokens, beams.active)
            copies = beams.advance(logits)
            run.copy_rows(copies)
            if follower is not None:
                follower.copy_rows(copies)
        return beams.list_hypotheses()

    def close(self) -> None:
        self.encoder.close()
        self.decoder.close()
