"""The Transformer (Vaswani et al., 2017): "Attention Is All You Need".

B batch, S source tokens, T new target tokens, P cached target tokens, V target vocabulary,
R = B * K rows of the decoder, K of them (its beams) for each source, H heads, D head size, E = H * D
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .activations import ACTIVATIONS
from .attention import AttentionCache, DynamicCache, KeyValue, PaddedAttention, SourceAttention, empty_past
from .config_checks import check_activation, check_bool, check_epsilon, check_multiple, check_whole

DECODER = "decoder"  # where a final norm may be alone
POSITIONS = ("interleaved", "concatenated", "learned")


@dataclass(frozen=True)
class TransformerConfig:
    """The Transformer's settings; the defaults are the paper's base model.

    Attributes:
        positions: "interleaved" sines and cosines as in the paper, "concatenated" ones (all sines first, as
            in tensor2tensor and Marian, with the paper's wavelengths), or "learned".
        norm_first: LayerNorm before each sublayer (pre-norm) instead of after its sum (post-norm).
        residual_from_norm: with norm_first, a sublayer's result is added to its normalized input; that of the
            encoder's feed-forward to the input as it is.
        final_norms: one more LayerNorm at the end of the encoder and of the decoder; "decoder": of that
            alone.
        share_layers: all layers of the encoder have the same weights, and all of the decoder have.
        bias: linear layers and LayerNorms have a bias.
        target_positions: positions are added in the decoder too.
        scale_embedding: words' embeddings times sqrt(d_model).
        share_embeddings: source and target words have one embedding.
        tie_word_embeddings: the output's weight is the target embedding.
        output_bias: the output has a bias.
    """

    source_vocab_size: int = 37000
    target_vocab_size: int = 37000
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_heads: int = 8
    decoder_heads: int = 8
    encoder_ffn: int = 2048
    decoder_ffn: int = 2048
    max_positions: int = 1024
    positions: str = "interleaved"
    activation: str = "relu"
    norm_first: bool = False
    residual_from_norm: bool = False
    final_norms: bool | str = False
    share_layers: bool = False
    bias: bool = True
    target_positions: bool = True
    layer_norm_eps: float = 1e-5
    scale_embedding: bool = True
    share_embeddings: bool = False
    tie_word_embeddings: bool = False
    output_bias: bool = False
    is_recurrent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole(self, "source_vocab_size", "target_vocab_size", "d_model", "max_positions")
        check_whole(self, "encoder_layers", "encoder_heads", "encoder_ffn")
        check_whole(self, "decoder_layers", "decoder_heads", "decoder_ffn")
        check_multiple(self, "d_model", of="encoder_heads")
        check_multiple(self, "d_model", of="decoder_heads")
        check_activation(self, "activation")
        check_epsilon(self, "layer_norm_eps")
        check_bool(self, "norm_first", "residual_from_norm", "scale_embedding", "share_embeddings")
        check_bool(self, "tie_word_embeddings", "output_bias", "share_layers", "bias", "target_positions")
        if self.final_norms != DECODER:
            check_bool(self, "final_norms")
        if self.residual_from_norm and not self.norm_first:
            raise ValueError("residual_from_norm is for norm_first, which is false")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r} is not one of {', '.join(POSITIONS)}")
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                f"source_vocab_size={self.source_vocab_size} and target_vocab_size={self.target_vocab_size}"
                " must be equal where share_embeddings is true"
            )

    @property
    def vocab_size(self) -> int:
        """Return the target's vocabulary size, as the target is generated."""
        return self.target_vocab_size

    @property
    def decoder_head_size(self) -> int:
        return self.d_model // self.decoder_heads

    @property
    def cross_layers(self) -> int:
        """Return how many keys and values a source has: one for all layers where those share weights."""
        return 1 if self.share_layers else self.decoder_layers

    @property
    def computes_positions(self) -> bool:
        """Return whether there are positions beyond those that the model was trained with."""
        return self.positions != "learned"

    def make_norm(self) -> nn.LayerNorm:
        """Return a LayerNorm."""
        return nn.LayerNorm(self.d_model, eps=self.layer_norm_eps, bias=self.bias)


class SinusoidalPositions(nn.Module):
    """Sinusoidal positions (3.5): PE(pos, 2i) = sin(pos / 10000^(2i/E)), PE(pos, 2i+1) the cosine."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("weight", torch.empty(config.max_positions, config.d_model), persistent=False)

    def fill(self, length: int) -> None:
        """Compute the table of the first positions, which no checkpoint needs to carry."""
        E = self.config.d_model
        wavelengths = 10000.0 ** (torch.arange(0, E, 2, dtype=torch.float64) / E)  # over 2 pi
        angles = torch.arange(length, dtype=torch.float64)[:, None] / wavelengths  # (length, E / 2)
        pair = angles.sin(), angles.cos()
        interleaved = self.config.positions == "interleaved"
        table = torch.stack(pair, dim=-1).flatten(1) if interleaved else torch.cat(pair, dim=-1)
        self.weight = table[:, :E].float()

    def forward(self, positions: Tensor) -> Tensor:
        return self.weight[positions]


class Embeddings(nn.Module):
    """Word embeddings (3.4) times sqrt(E), plus those of positions, if there are any."""

    def __init__(self, config: TransformerConfig, vocab_size: int, has_positions: bool = True) -> None:
        super().__init__()
        self.has_positions = has_positions
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.words = nn.Embedding(vocab_size, config.d_model)
        if has_positions:
            self.positions = (
                nn.Embedding(config.max_positions, config.d_model)
                if config.positions == "learned"
                else SinusoidalPositions(config)
            )

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.words(ids) * self.scale  # (B, T, E)
        return x + self.positions(positions) if self.has_positions else x


class Attention(nn.Module):
    """Multi-head attention (3.2.2), computed by the cache that `forward` gets."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias)
        self.key = nn.Linear(width, width, bias)
        self.value = nn.Linear(width, width, bias)
        self.output = nn.Linear(width, width, bias)

    def forward(self, x: Tensor, layer: int, cache: AttentionCache) -> Tensor:
        return self.merge_heads(cache.attend(layer, self.split(self.query(x)), *self.keys_values(x)))

    def keys_values(self, x: Tensor) -> KeyValue:
        """Return keys and values, each (B, H, T, D)."""
        return self.split(self.key(x)), self.split(self.value(x))

    def split(self, x: Tensor) -> Tensor:
        B, T, E = x.shape
        return x.view(B, T, self.heads, E // self.heads).transpose(1, 2)  # (B, H, T, D)

    def merge_heads(self, context: Tensor) -> Tensor:
        B, H, T, D = context.shape
        return self.output(context.transpose(1, 2).reshape(B, T, H * D))  # type: ignore[no-any-return]


class CrossAttention(Attention):
    """Attention of the decoder over the source, whose keys and values are computed once."""

    def attend(self, x: Tensor, layer: int, source: SourceAttention) -> Tensor:
        # The K rows of one source become one row of K * T queries: nothing of the source is repeated.
        folded = source.fold(x)  # (B, K * T, E)
        context = source.attend(layer, self.split(self.query(folded)))  # (B, H, K * T, D)
        return self.merge_heads(context).reshape(x.shape)


class FeedForward(nn.Module):
    """Two linear maps with an activation between (3.3)."""

    def __init__(self, width: int, inner: int, activation: str, bias: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(width, inner, bias)
        self.activation = ACTIVATIONS[activation]()
        self.output = nn.Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.activation(self.inner(x)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A sublayer with its sum and its LayerNorm."""

    def __init__(self, config: TransformerConfig, from_norm: bool | None = None) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.from_norm = config.residual_from_norm if from_norm is None else from_norm
        self.norm = config.make_norm()

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            normalized = self.norm(x)
            return (normalized if self.from_norm else x) + sublayer(normalized)
        return self.norm(x + sublayer(x))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config.d_model, config.encoder_heads, config.bias)
        self.attention_residual = Residual(config)
        self.feed_forward = FeedForward(config.d_model, config.encoder_ffn, config.activation, config.bias)
        self.feed_forward_residual = Residual(config, from_norm=False)

    def forward(self, x: Tensor, layer: int, cache: AttentionCache) -> Tensor:
        x = self.attention_residual(x, lambda y: self.attention(y, layer, cache))
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config.d_model, config.decoder_heads, config.bias)
        self.attention_residual = Residual(config)
        self.cross_attention = CrossAttention(config.d_model, config.decoder_heads, config.bias)
        self.cross_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config.d_model, config.decoder_ffn, config.activation, config.bias)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, layer: int, cache: AttentionCache, source: SourceAttention) -> Tensor:
        x = self.attention_residual(x, lambda y: self.attention(y, layer, cache))
        x = self.cross_attention_residual(x, lambda y: self.cross_attention.attend(y, layer, source))
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The encoder's stack (3.1). A custom one has the same inputs and outputs."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = config.make_norm() if config.final_norms is True else nn.Identity()

    def forward(self, x: Tensor, attention: AttentionCache) -> Tensor:
        """Return the memory (B, S, E) of an embedded source (B, S, E)."""
        for layer, block in enumerate(self.layers):
            x = block(x, layer, attention)
        return self.norm(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The decoder's stack (3.1). A custom one has the same methods, `keys_values` too."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.own_layers = config.cross_layers  # with weights of their own
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = config.make_norm() if config.final_norms else nn.Identity()

    def keys_values(self, memory: Tensor) -> list[KeyValue]:
        """Return each layer's keys and values (B, H, S, D) of the memory (B, S, E); one pair if all share."""
        own = [self.layers[layer] for layer in range(self.own_layers)]
        return [block.cross_attention.keys_values(memory) for block in own]  # type: ignore[operator, union-attr]

    def forward(self, x: Tensor, cache: AttentionCache, source: SourceAttention) -> Tensor:
        """Return the last hidden states (R, T, E) of an embedded target (R, T, E)."""
        for layer, block in enumerate(self.layers):
            x = block(x, layer, cache, source)
        return self.norm(x)  # type: ignore[no-any-return]


def share_weights(layers: nn.ModuleList) -> None:
    """Give all layers the first one's parameters. Modules stay their own: each runs once."""
    first, *others = layers
    for path, module in first.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            for other in others:
                setattr(other.get_submodule(path), name, parameter)


class Transformer(nn.Module):
    """The encoder-decoder Transformer; MarianMT is one.

    Args:
        config: sizes and choices.
        encoder, decoder: custom modules with the methods of `Encoder` and `Decoder`. They run in
            PyTorch only: they are neither saved nor exported.
    """

    def __init__(
        self, config: TransformerConfig, encoder: nn.Module | None = None, decoder: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.source = Embeddings(config, config.source_vocab_size)
        self.target = Embeddings(config, config.target_vocab_size, config.target_positions)
        self.encoder = Encoder(config) if encoder is None else encoder
        self.decoder = Decoder(config) if decoder is None else decoder
        self.output = nn.Linear(config.d_model, config.target_vocab_size, bias=config.output_bias)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make shared weights one tensor, as the config says, and fill the tables of positions."""
        if self.config.share_embeddings:
            self.target.words.weight = self.source.words.weight
        if self.config.tie_word_embeddings:
            self.output.weight = self.target.words.weight
        for stack in (self.encoder, self.decoder) if self.config.share_layers else ():
            if isinstance(stack, Encoder | Decoder):
                share_weights(stack.layers)
        self.limit_context(self.config.max_positions)

    def limit_context(self, length: int) -> None:
        """Compute the tables of positions for up to `length` tokens, or for those of the training."""
        if isinstance(self.source.positions, SinusoidalPositions):
            self.source.positions.fill(max(length, self.config.max_positions))
            if self.target.has_positions:
                self.target.positions = self.source.positions

    def custom_parts(self) -> list[str]:
        """Return the modules that are the caller's own, which only PyTorch can run."""
        parts = (("encoder", self.encoder, Encoder), ("decoder", self.decoder, Decoder))
        return [f"{name} ({type(own).__name__})" for name, own, ours in parts if type(own) is not ours]

    def forward(
        self,
        source_ids: Tensor,
        target_ids: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        *,
        source_bias: Tensor | None = None,
        target_bias: Tensor | None = None,
        cross_bias: Tensor | None = None,
    ) -> Tensor:
        """Return the logits (B, T, V) of the token after each target token, as in training.

        Args:
            source_ids: (B, S) int64, padded on the right.
            target_ids: (B, T) int64, padded on either side; no token sees a later one.
            source_mask: (B, S), 0 at padding; None when there is none.
            target_mask: (B, T), likewise.
            source_bias, target_bias, cross_bias: your own masks, in addition to those of padding and order:
                numbers that are added to the attention scores (B, H, S, S), (B, H, T, T), (B, H, T, S), or
                broadcast to them; 0 keeps, `MASKED` drops.
        """
        source_mask = torch.ones_like(source_ids) if source_mask is None else source_mask
        target_mask = torch.ones_like(target_ids) if target_mask is None else target_mask
        memory = self.encode(source_ids, PaddedAttention(source_mask, source_bias))
        source = SourceAttention(self.decoder.keys_values(memory), source_mask, cross_bias)  # type: ignore[operator]
        cache = DynamicCache(self.empty_past(len(target_ids)), target_mask, bias=target_bias)
        return self.output(self.hidden_states(target_ids, cache, source))  # type: ignore[no-any-return]

    def encode(self, source_ids: Tensor, attention: AttentionCache) -> Tensor:
        """Return the memory (B, S, E) of source_ids (B, S)."""
        x = self.source(source_ids, attention.positions(source_ids))  # (B, S, E)
        return self.encoder(x, attention)  # type: ignore[no-any-return]

    def step(
        self,
        target_ids: Tensor,
        source: SourceAttention,
        past: Sequence[KeyValue] | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Run one step over new target tokens, on top of a cache.

        Args:
            target_ids: (R, T) int64; of K rows for each source, they are adjacent.
            source: the keys and values that `Decoder.keys_values` gave.
            past: keys and values (R, H, P, D) of each layer, as the last step returned them.

        Returns:
            Logits (R, T, V), and the cache grown to (R, H, P + T, D).
        """
        R, T = target_ids.shape
        past = self.empty_past(R) if past is None else past
        mask = target_ids.new_ones(R, past[0][0].shape[2] + T)
        cache = DynamicCache(past, mask)
        return self.output(self.hidden_states(target_ids, cache, source)), cache.present

    def empty_past(self, rows: int) -> list[KeyValue]:
        """Return the past of a first step: keys and values (R, H, 0, D) of each layer."""
        c = self.config
        sizes = (c.decoder_layers, c.decoder_heads, c.decoder_head_size)
        return empty_past(sizes, rows, self.target.words.weight)

    def hidden_states(self, target_ids: Tensor, cache: AttentionCache, source: SourceAttention) -> Tensor:
        """Return the last hidden states (R, T, E), which the output layer reads, of target_ids (R, T)."""
        x = self.target(target_ids, cache.positions(target_ids))  # (R, T, E)
        return self.decoder(x, cache, source)  # type: ignore[no-any-return]
