"""Computes an encoder-decoder's reference outputs: by our model, transformers', or optimum's graphs.

S source tokens, T target tokens, V vocabulary, L layers, H heads, D head size, K beams
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...models import KeyValue, PaddedAttention, Recurrent, SourceAttention, Transformer
from ...models.recurrent import SourceMemory
from ...models.recurrent_layers import States
from ...runtime.apps.check.metrics import Logits
from ...runtime.backends.backend import Array
from ...runtime.decoding.beam import BeamSearch, Hypothesis, Search
from ...runtime.decoding.sampling import compute_logprobs
from ..imported.plain_attention import CROSS, STATES
from ..reference_model import OnnxGraphs

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel


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

    def encode_source(self, source: Sequence[int]) -> list[Tensor]:
        """Return the results of an encoder's graph for a source: key and value of layer 0, of layer 1, ..."""
        return [tensor for pair in self.compute_keys_values(source) for tensor in pair]

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

    def search(
        self, source: Sequence[int], search: Search, run: ReferenceRun | None = None
    ) -> list[Hypothesis]:
        """Search the best targets, in a run that was just started if one is given."""
        beams = BeamSearch([[self.start]], search)
        run = run or self.start_run(source, search.num_beams)
        while not beams.done:
            run.copy_rows(beams.advance(run.decode(beams.tokens)))
        return beams.list_hypotheses()[0]

    def score(self, source: Sequence[int], target: Sequence[int]) -> float:
        """Return the mean log-probability of a target's tokens."""
        return compute_score(self.compute_results(source, target)[0], target)


class RecurrentReference(Reference):
    """A recurrent encoder-decoder of ours, which reads a target a token after the other."""

    @torch.no_grad()
    def encode_source(self, source: Sequence[int]) -> list[Tensor]:
        """Return memory and keys (1, S, ...), or a context (1, 1, M), and the first states (1, 1, H)."""
        seen, states = self.read_source(source)
        return [*seen.list_tensors(), *states[: len(states) - self.model.config.input_feeding]]

    def read_source(self, source: Sequence[int]) -> tuple[SourceMemory, States]:
        """Return what every step reads of a source, and the states that the first step begins with."""
        ids = torch.tensor([list(source)])
        found: tuple[SourceMemory, States] = self.model.encode(ids, torch.tensor([len(source)]))
        return found

    @torch.no_grad()
    def compute_results(self, source: Sequence[int], target: Sequence[int]) -> tuple[Logits, Logits]:
        seen, states = self.read_source(source)
        steps = []
        weights = []
        for token in [self.start, *target[:-1]]:
            x, states = self.model.step(torch.tensor([[token]]), states, seen)
            steps.append(x)
            weights += [] if seen.weights is None else [seen.weights]
        logits: Logits = self.model.output(torch.cat(steps, dim=1))[0].numpy()
        if not self.gives_attention:
            return logits, np.zeros((0, 0, len(target), 0), np.float32)
        attention: Logits = torch.cat(weights, dim=1)[None].numpy()  # (1, 1, T, S)
        return logits, attention

    @torch.no_grad()
    def start_run(self, source: Sequence[int], beams: int) -> ReferenceRun:
        return RecurrentRun(self.model, *self.read_source(source), beams)


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
        """Copy the history of rows, given as (from, to), never to a row that is copied from."""


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


class RecurrentRun:
    """Rows of our own recurrent model, whose states are all that their past has left."""

    def __init__(self, model: Recurrent, source: SourceMemory, states: States, beams: int) -> None:
        self.model = model
        self.source = source
        self.states = [state.repeat(beams, 1, 1) for state in states]

    @torch.no_grad()
    def decode(self, tokens: Sequence[int]) -> Logits:
        x, self.states = self.model.step(torch.tensor(tokens)[:, None], self.states, self.source)
        logits: Logits = self.model.output(x)[:, 0].numpy()
        return logits

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        parents = list(range(len(self.states[0])))
        for origin, row in copies:
            parents[row] = origin
        self.states = [state[parents] for state in self.states]


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


class OnnxTranslator(UncachedReference):
    """An encoder-decoder's graphs."""

    def encode(self, source: Sequence[int]) -> Array:
        ids = np.array([list(source)])
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        found: Array = self.model.encoder.run(["last_hidden_state"], given)[0]
        return found

    def compute_logits(self, states: Array, targets: Sequence[Sequence[int]]) -> Logits:
        return self.run_decoder(states, targets)["logits"]

    def run_decoder(self, states: Array, targets: Sequence[Sequence[int]]) -> dict[str, Array]:
        states = np.repeat(states, len(targets), axis=0)
        mask = np.ones(states.shape[:2], np.int64)
        given = {"input_ids": np.array(targets), STATES: states, "encoder_attention_mask": mask}
        found: dict[str, Array] = self.model.run(given)
        return found

    def compute_keys_values(self, source: Sequence[int]) -> list[KeyValue]:
        out = self.run_decoder(self.encode(source), [[self.start]])
        tensors = [torch.from_numpy(array) for name, array in out.items() if CROSS.fullmatch(name)]
        return list(zip(tensors[::2], tensors[1::2], strict=True))


def open_reference(model: ReferenceModel, start: int, gives_attention: bool = False) -> Reference:
    """Return the reference of a model of ours, of transformers' model, or of optimum's graphs."""
    if isinstance(model, Transformer | Recurrent):
        kind = RecurrentReference if model.config.is_recurrent else Reference
        return kind(model, start, gives_attention)
    return OnnxTranslator(model, start) if isinstance(model, OnnxGraphs) else HubReference(model, start)
