"""The graphs that explain a model: its layers' states, the answer of each layer, and gradients.

B batch, T tokens, S source tokens, E hidden size, H heads, M neurons of an MLP, V vocabulary, C classes,
N hidden states, K tokens that are asked for

All read whole texts of one length, without padding and without a cache. `gradients` differentiates scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...models.attention import (
    PLAIN,
    AttentionKind,
    SourceAttention,
    Windows,
    attention_weights,
)
from ...models.encoder import Encoder
from ...models.language_model import LanguageModel
from ...models.masked import MASKED
from ...models.rotary import RotaryTables
from ...models.transformer import Transformer
from ...runtime.apps.explain.objectives import COSINE, LENS_TOKENS, SIGMOID, SOFTMAX


@dataclass(frozen=True)
class Stack:
    """The place of the parts of a model's stack of layers, as paths of modules."""

    words: str  # the embedding of tokens
    layers: str
    neurons: str  # in a layer: the projection that reads the MLP's neurons
    norm: str  # behind the last layer; "" where there is none


STACKS = {
    "GPT2": Stack("wte", "h", "mlp.c_proj", "ln_f"),
    "Llama": Stack("embed_tokens", "layers", "mlp.down_proj", "norm"),
    "Bert": Stack("embeddings.words", "layers", "output", ""),
    "ModernBert": Stack("words", "layers", "mlp.output", "norm"),
}
SOURCE = Stack("source.words", "encoder.layers", "feed_forward.output", "encoder.norm")
TARGET = Stack("target.words", "decoder.layers", "feed_forward.output", "decoder.norm")


class WholeText:
    """Attention over a whole text; `weights` has each layer's (B, H, T, T) after a forward pass."""

    def __init__(self, causal: bool) -> None:
        self.causal = causal
        self.weights: dict[int, Tensor] = {}
        self.biases: dict[int | None, Tensor] = {}  # by window

    def positions(self, input_ids: Tensor, windows: Windows = (None,)) -> Tensor:
        """Return position ids (1, T), and make the masks."""
        self.position_ids = torch.arange(input_ids.shape[1])[None]
        self.biases = {window: self.make_bias(window) for window in windows}
        return self.position_ids

    def make_bias(self, window: int | None) -> Tensor:
        """Return the mask (1, 1, T, T) of later tokens, and of those outside of a window."""
        behind = self.position_ids.mT - self.position_ids  # (T, T)
        hidden = behind < 0 if self.causal else torch.zeros_like(behind, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (behind.abs() >= window)
        return torch.where(hidden, MASKED, 0.0)[None, None]

    def rotate(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """Return queries or keys (B, h, T, D) with the rotary embedding applied."""
        return tables.rotate(x, self.position_ids)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = PLAIN) -> Tensor:
        """Return the attention of q (B, H, T, D) over k and v, which groups of heads may share."""
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k = k.repeat_interleave(group, dim=1)
            v = v.repeat_interleave(group, dim=1)
        self.weights[layer] = attention_weights(q, k, self.biases[kind.window], kind)
        return self.weights[layer] @ v


class Recording:
    """The results of a stack's layers in a forward pass."""

    def __init__(self) -> None:
        self.embeddings: list[Tensor] = []  # one: (B, T, E)
        self.hidden: list[Tensor] = []  # of the embeddings and each layer, before the final norm: (B, T, E)
        self.activations: list[Tensor] = []  # of each layer: (B, T, M)


@contextmanager
def record(model: nn.Module, stack: Stack) -> Iterator[Recording]:
    """Record the results of a stack's layers in the block's forward pass."""
    kept = Recording()
    layers = list(model.get_submodule(stack.layers).children())
    with ExitStack() as hooks:
        words = model.get_submodule(stack.words)
        hooks.enter_context(words.register_forward_hook(lambda m, args, out: kept.embeddings.append(out)))
        hooks.enter_context(layers[0].register_forward_pre_hook(lambda m, args: kept.hidden.append(args[0])))
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(lambda m, args, out: kept.hidden.append(out)))
            projection = layer.get_submodule(stack.neurons)
            hooks.enter_context(
                projection.register_forward_pre_hook(lambda m, args: kept.activations.append(args[0]))
            )
        yield kept


@contextmanager
def embed_as(model: nn.Module, words: str, embeddings: Tensor) -> Iterator[Tensor]:
    """Let the embedding of tokens return these (B, T, E) in the block; yield ids of their shape."""
    with model.get_submodule(words).register_forward_hook(lambda module, args, out: embeddings):
        yield torch.zeros(embeddings.shape[:2], dtype=torch.int64)


def finish(model: nn.Module, stack: Stack, x: Tensor) -> Tensor:
    """Return hidden states behind the final norm, if the model has one."""
    return model.get_submodule(stack.norm)(x) if stack.norm else x


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Return the entry x[b, index[b]] of each row, as a product: the gradient of indexing would scatter."""
    chosen = torch.arange(x.shape[1]) == index[:, None]  # (B, axis 1)
    return (x * chosen.view(*chosen.shape, *[1] * (x.dim() - 2))).sum(1)


def score(logits: Tensor, target: Tensor, objective: Tensor) -> Tensor:
    """Return for each row (B, V) its target's logit, or its probability by softmax or sigmoid."""
    logit = pick(logits, target)  # (B,)
    softmax = pick(logits.softmax(-1), target)
    # Against a logit of 0: engines' own sigmoids are exact to 1e-7, and tiny probabilities are below that.
    sigmoid = torch.stack([torch.zeros_like(logit), logit], dim=-1).softmax(-1)[:, 1]
    return torch.where(objective == SOFTMAX, softmax, torch.where(objective == SIGMOID, sigmoid, logit))


class LayersOfDecoder(nn.Module):
    """GPT-2's or a Llama's embeddings, hidden states, attention weights and neurons, of input_ids (B, T).

    Where the first layer reads the embeddings as they are, they are its hidden states alone.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.stack = STACKS[type(model).__name__]

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        attention = WholeText(causal=True)
        with record(self.model, self.stack) as kept:
            self.model.hidden_states(input_ids, attention)
        embeddings = [] if kept.embeddings[0] is kept.hidden[0] else kept.embeddings
        return (*embeddings, *kept.hidden, *attention.weights.values(), *kept.activations)


class LayersOfEncoder(nn.Module):
    """An encoder's embeddings, hidden states, attention weights and neurons."""

    def __init__(self, model: Encoder) -> None:
        super().__init__()
        self.model = model
        self.stack = STACKS[type(model).__name__]

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> tuple[Tensor, ...]:
        attention = WholeText(causal=False)
        with record(self.model, self.stack) as kept:
            self.model.hidden_states(input_ids, token_type_ids, attention)
        return (*kept.embeddings, *kept.hidden, *attention.weights.values(), *kept.activations)


class LayersOfTransformer(nn.Module):
    """Both stacks' embeddings, hidden states, attention weights and neurons, and the cross-attention."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source_ids: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        own = WholeText(causal=False)
        target = WholeText(causal=True)
        with record(self.model, SOURCE) as of_source, record(self.model, TARGET) as of_target:
            source = read_source(self.model, source_ids, own)
            self.model.hidden_states(input_ids, target, source)
        B, T = input_ids.shape
        H = self.model.config.decoder_heads
        cross = [weights.reshape(B, H, T, source_ids.shape[1]) for weights in source.weights.values()]
        return (
            *of_source.embeddings,
            *of_source.hidden,
            *own.weights.values(),
            *of_source.activations,
            *of_target.embeddings,
            *of_target.hidden,
            *target.weights.values(),
            *of_target.activations,
            *cross,
        )


def read_source(model: Transformer, source_ids: Tensor, attention: WholeText) -> SourceAttention:
    """Return a decoder's attention over a source without padding."""
    memory = model.encode(source_ids, attention)
    return SourceAttention(model.decoder.keys_values(memory), torch.ones_like(source_ids))  # type: ignore[operator]


class Lens(nn.Module):
    """The answer that hidden states (N, E) of any layer give, through the final norm and the head.

    Returns the rank (N, K) int64 and log-probability (N, K) of tokens (N, K), and the ten likeliest tokens
    (N, 10) with their log-probabilities (N, 10).
    """

    def __init__(self, model: LanguageModel | Transformer) -> None:
        super().__init__()
        self.model = model

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (N, V) of hidden states."""
        model = self.model
        if isinstance(model, Transformer):
            return model.output(finish(model, TARGET, hidden))  # type: ignore[no-any-return]
        return model.logits(finish(model, STACKS[type(model).__name__], hidden))

    def forward(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits = self.compute_logits(hidden)
        chosen = logits.gather(1, tokens)  # (N, K)
        above = (logits[:, None] > chosen[:, :, None]).to(torch.int32)  # (N, K, V)
        rank = above.sum(-1, dtype=torch.int32).to(torch.int64) + 1
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(min(LENS_TOKENS, logits.shape[1]), dim=-1)
        return rank, logprobs.gather(1, tokens), ids, values


class LensOfEncoder(nn.Module):
    """The result of an encoder's head, or its vector of a text, for hidden states (N, T, E) of any layer."""

    def __init__(self, model: Encoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        return read_text(self.model, finish(self.model, STACKS[type(self.model).__name__], hidden))


def read_text(model: Encoder, x: Tensor) -> Tensor:
    """Return the logits of a classifier, else a text's vector, of the last hidden states (B, T, E)."""
    mask = torch.ones(x.shape[:2], dtype=torch.int64)
    outputs = model.head_outputs(x, mask)
    if "sequence_classification" in outputs:
        return outputs["sequence_classification"]
    if "sentence_embedding" in outputs:
        return outputs["sentence_embedding"]
    return nn.functional.normalize(x.mean(1))  # as the runtime makes one where a checkpoint does not say


class ScoreOfDecoder(nn.Module):
    """The score to explain for a decoder: the target's logit or probability behind the token at `row`."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, embeddings: Tensor, row: Tensor, target: Tensor, objective: Tensor) -> Tensor:
        words = STACKS[type(self.model).__name__].words
        with embed_as(self.model, words, embeddings) as ids:
            x = self.model.hidden_states(ids, WholeText(causal=True))
        return score(self.model.logits(pick(x, row)), target, objective)


class ScoreOfTransformer(nn.Module):
    """The score to explain for a translation: the target's logit or probability behind the token at `row`."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, source_embeddings: Tensor, embeddings: Tensor, row: Tensor, target: Tensor, objective: Tensor
    ) -> Tensor:
        model = self.model
        with (
            embed_as(model, SOURCE.words, source_embeddings) as source_ids,
            embed_as(model, TARGET.words, embeddings) as ids,
        ):
            source = read_source(model, source_ids, WholeText(causal=False))
            x = model.hidden_states(ids, WholeText(causal=True), source)
        return score(model.output(pick(x, row)), target, objective)


class ScoreOfEncoder(nn.Module):
    """The score to explain for a classifier or ranker: the logit or probability of a label."""

    def __init__(self, model: Encoder) -> None:
        super().__init__()
        self.model = model

    def read(self, embeddings: Tensor, segments: Tensor | None) -> Tensor:
        """Return a text's logits or vector, from its embeddings (B, T, E)."""
        with embed_as(self.model, STACKS[type(self.model).__name__].words, embeddings) as ids:
            x = self.model.hidden_states(ids, segments, WholeText(causal=False))[-1]
        return read_text(self.model, x)

    def forward(self, embeddings: Tensor, *rest: Tensor) -> Tensor:
        """Return the score; `rest` is token_type_ids (B, T), if any, target (B,) and objective (1,)."""
        *segments, target, objective = rest
        logits = self.read(embeddings, segments[0] if segments else None)
        return score(logits, target, objective)


class ScoreOfVector(ScoreOfEncoder):
    """The score to explain for a text's vector: the logit or probability of a linear head on top of it.

    By the objective `COSINE` the head is on top of the vector at length 1: another text's gives the cosine.
    """

    def forward(self, embeddings: Tensor, *rest: Tensor) -> Tensor:
        """Return the score; `rest` is token_type_ids, if any, weight (C, F), bias (C,), target, objective."""
        *segments, weight, bias, target, objective = rest
        vector = self.read(embeddings, segments[0] if segments else None)
        vector = torch.where(objective == COSINE, nn.functional.normalize(vector), vector)
        return score(vector @ weight.mT + bias, target, objective)
