"""An encoder-decoder's reference outputs in PyTorch, which every engine is compared with.

S source tokens, T target tokens, V vocabulary, L layers, H heads, D head size, K beams
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...models import KeyValue, PaddedAttention, SourceAttention, Transformer
from ...runtime.apps.check.metrics import DrawMetrics, Logits, ScoreMetrics, measure, measure_scale
from ...runtime.decoding.beam import BeamSearch, Hypothesis, Search
from ...runtime.decoding.sampling import compute_logprobs
from ..limits import Gaps
from .draw import measure_draws
from .rounding import Rounding

if TYPE_CHECKING:
    from ...runtime.apps.check.draws import Draws
    from ...runtime.apps.check.translations import Sample


def make_reference(model: Any, start: int, gives_attention: bool = False) -> Reference:
    """Return the reference for our own Transformer, for transformers' model, or for optimum's graphs."""
    if isinstance(model, Transformer):
        return Reference(model, start, gives_attention)
    from .onnx_reference import OnnxGraphs, OnnxTranslator

    if isinstance(model, OnnxGraphs):
        return OnnxTranslator(model, start)
    return HubReference(model, start)


def compute_score(logits: Logits, target: Sequence[int]) -> float:
    """Return the mean log-probability of a target's tokens, from its logits (T, V)."""
    return float(compute_logprobs(logits, np.asarray(target)).mean())


class Reference:
    """The model in PyTorch, in fp32. Sources are computed one by one, without padding."""

    def __init__(self, model: Any, start: int, gives_attention: bool = False) -> None:
        self.model = model
        self.start = start  # the token that every target begins with
        self.gives_attention = gives_attention  # whether `compute_results` returns the attention too

    @torch.no_grad()
    def compute_keys_values(self, source: Sequence[int]) -> list[KeyValue]:
        """Return the cross-attention keys and values of a source: L pairs of (1, H, S, D)."""
        ids = torch.tensor([list(source)])
        memory = self.model.encode(ids, PaddedAttention(torch.ones_like(ids)))
        found: list[KeyValue] = self.model.decoder.keys_values(memory)
        return found

    def stack_keys_values(self, source: Sequence[int]) -> Logits:
        """Return `compute_keys_values` as (2 * L, S, H * D): key and value of layer 0, of layer 1, ..."""
        tensors = [tensor[0] for pair in self.compute_keys_values(source) for tensor in pair]  # (H, S, D)
        flat = [tensor.transpose(0, 1).flatten(1) for tensor in tensors]
        array: Logits = torch.stack(flat).numpy()
        return array

    @torch.no_grad()
    def compute_results(self, source: Sequence[int], target: Sequence[int]) -> tuple[Logits, Logits]:
        """Return a target's logits (T, V), at once and uncached, and its attention (L, H, T, S) or none."""
        mask = torch.ones(1, len(source), dtype=torch.int64)
        seen = SourceAttention(self.compute_keys_values(source), mask)
        logits, _ = self.model.step(torch.tensor([[self.start, *target[:-1]]]), seen)
        weights = [weights[0] for weights in seen.weights.values()] if self.gives_attention else []
        attention = torch.stack(weights) if weights else torch.zeros(0, 0, len(target), 0)
        return logits[0].numpy(), attention.numpy()

    def start_run(self, source: Sequence[int], beams: int) -> ReferenceRun:
        """Start a run of so many rows that read one source."""
        return CachedRun(self.model, self.compute_keys_values(source), beams)

    def search(self, source: Sequence[int], search: Search) -> list[Hypothesis]:
        """Search the best targets."""
        beams = BeamSearch([[self.start]], search)
        run = self.start_run(source, search.num_beams)
        while not beams.done:
            run.copy_rows(beams.advance(run.decode(beams.tokens)))
        return beams.list_hypotheses()[0]

    def score(self, source: Sequence[int], target: Sequence[int]) -> float:
        """Return the mean log-probability of a target's tokens."""
        return compute_score(self.compute_results(source, target)[0], target)

    def answer_draws(self, draws: Draws) -> Draws:
        """Return the draws with what their sources and texts come to, each computed at once."""
        from ...runtime.apps.check.draws import choose_places

        pairs = list(zip(draws.sources, draws.texts, strict=True))
        # The model is fed a target but for its last token, so there has to be one more.
        logits = [self.compute_results(source, [*text[1:], 0])[0] for source, text in pairs]
        known = tuple(array[:, list(draws.columns)] for array in logits)
        cross = (self.stack_keys_values(source)[:, list(choose_places(source))] for source, _ in pairs)
        return replace(draws, logits=known, scale=measure_scale(np.concatenate(known)), cross=tuple(cross))

    def measure_gaps(self, samples: Sequence[Sample], rounding: Rounding, draws: Draws | None = None) -> Gaps:
        """Compare the rounded model with itself unrounded; keys are the prefixes of the limits' names."""
        from ...runtime.apps.check.draws import PREFIX
        from ...runtime.apps.check.translations import measure_attention, measure_cross

        with rounding.apply(self.model):
            both = [self.compute_results(s.source, s.target) for s in samples]
            cross = [self.stack_keys_values(s.source)[:, list(s.positions)] for s in samples]
            searched = [(s, beam) for s in samples for beam in s.beams]
            found = [self.compute_results(s.source, beam.token_ids)[0] for s, beam in searched]
            drawn = None if draws is None else self.answer_draws(draws)
        logits = [logits[list(s.steps)] for (logits, _), s in zip(both, samples, strict=True)]
        exact = [s.cross for s in samples]
        gaps: Gaps = {"": measure(np.concatenate(logits), np.concatenate([s.logits for s in samples]))}
        if draws is not None and drawn is not None:
            gaps[PREFIX] = measure_draws(drawn, draws)
            cross += drawn.cross
            exact += draws.cross
        gaps["cross."] = measure_cross(cross, exact)
        if searched:
            gaps |= self.measure_searches(searched, found)
        if self.gives_attention:
            looked = [attention[:, :, list(s.steps)] for (_, attention), s in zip(both, samples, strict=True)]
            gaps["attention."] = measure_attention(looked, [s.attention for s in samples])
        return gaps

    def measure_rounded_searches(
        self, searched: Sequence[tuple[Sample, Hypothesis]], rounding: Rounding
    ) -> Gaps:
        """Compare the rounded model with itself unrounded along targets of beam searches."""
        with rounding.apply(self.model):
            found = [self.compute_results(s.source, beam.token_ids)[0] for s, beam in searched]
        return self.measure_searches(searched, found)

    def measure_searches(
        self, searched: Sequence[tuple[Sample, Hypothesis]], found: Sequence[Logits]
    ) -> Gaps:
        """Compare the logits and scores that rounding gives the targets of beam searches."""
        from ...runtime.apps.check.draws import measure_error
        from ...runtime.apps.check.translators import SEARCH

        scores = []
        errors = []
        for (sample, beam), logits in zip(searched, found, strict=True):
            scores.append(abs(compute_score(logits, beam.token_ids) - beam.score))
            exact, _ = self.compute_results(sample.source, beam.token_ids)
            errors.append(measure_error(logits, exact, measure_scale(sample.logits)))
        worst = float(np.max(scores))
        error = max(errors)
        return {
            "score": ScoreMetrics(worst, math.isfinite(worst), len(scores)),
            SEARCH: DrawMetrics(error, math.isfinite(error), len(errors)),
        }


class UncachedReference(Reference, ABC):
    """An encoder-decoder of another library: each step computes the whole target again."""

    @abstractmethod
    def encode(self, source: Sequence[int]) -> Any:
        """Return the encoder's output for a source."""

    @abstractmethod
    def compute_logits(self, states: Any, targets: Sequence[Sequence[int]]) -> Logits:
        """Return the logits (K, T, V) of K targets of one source, each with the start token."""

    def compute_results(self, source: Sequence[int], target: Sequence[int]) -> tuple[Logits, Logits]:
        logits = self.compute_logits(self.encode(source), [[self.start, *target[:-1]]])
        return logits[0], np.zeros((0, 0, len(target), 0), np.float32)

    def start_run(self, source: Sequence[int], beams: int) -> ReferenceRun:
        return UncachedRun(self, self.encode(source), beams)


class ReferenceRun(Protocol):
    """Rows of one source, fed a token each at a time."""

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Return the logits (K, V) that follow a token of each row."""

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy what rows were fed, as (from, to); never to a row that is copied from."""


class CachedRun:
    """Rows of our own Transformer, with a copy of the source for each."""

    def __init__(self, model: Transformer, source: Sequence[KeyValue], beams: int) -> None:
        self.model = model
        copies = (beams, 1, 1, 1)
        memory = [(k.repeat(copies), v.repeat(copies)) for k, v in source]
        S = memory[0][0].shape[2]
        self.everything = SourceAttention(memory, torch.ones(beams, S, dtype=torch.int64))
        self.past: list[KeyValue] | None = None

    @torch.no_grad()
    def decode(self, tokens: Sequence[int]) -> Logits:
        logits, self.past = self.model.step(torch.tensor(tokens)[:, None], self.everything, self.past)
        last: Logits = logits[:, -1].numpy()
        return last

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self.past is not None
        parents = list(range(len(self.past[0][0])))
        for origin, row in copies:
            parents[row] = origin
        self.past = [(k[parents], v[parents]) for k, v in self.past]


class UncachedRun:
    """Rows of another library's model, which computes each step anew."""

    def __init__(self, reference: UncachedReference, states: Any, beams: int) -> None:
        self.reference = reference
        self.states = states
        self.rows: list[list[int]] = [[] for _ in range(beams)]

    def decode(self, tokens: Sequence[int]) -> Logits:
        self.rows = [[*row, int(token)] for row, token in zip(self.rows, tokens, strict=True)]
        return self.reference.compute_logits(self.states, self.rows)[:, -1]

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        for origin, row in copies:
            self.rows[row] = self.rows[origin]


class HubReference(UncachedReference):
    """An encoder-decoder of transformers."""

    @torch.no_grad()
    def encode(self, source: Sequence[int]) -> Tensor:
        encoded = self.model.get_encoder()(torch.tensor([list(source)]), return_dict=True)
        found: Tensor = encoded.last_hidden_state
        return found

    @torch.no_grad()
    def compute_logits(self, states: Tensor, targets: Sequence[Sequence[int]]) -> Logits:
        fed = torch.tensor(targets)
        shared = (states.expand(len(targets), -1, -1),)
        out = self.model(encoder_outputs=shared, decoder_input_ids=fed, use_cache=False)
        logits: Logits = out.logits.numpy()
        return logits

    @torch.no_grad()
    def compute_keys_values(self, source: Sequence[int]) -> list[KeyValue]:
        start = torch.tensor([[self.start]])
        out = self.model(torch.tensor([list(source)]), decoder_input_ids=start, use_cache=True)
        return [(layer.keys, layer.values) for layer in out.past_key_values.cross_attention_cache.layers]
