"""The Llama family (Touvron et al., 2023): decoders with rotary positions, RMSNorm and gated MLPs.

One model for Llama, Mistral, Qwen, SmolLM, Gemma, Phi, OLMo and Granite: what differs is its config, which
`llama_families` reads from each of their config.json files.

B batch, T new tokens, V vocabulary, E hidden size, M inner size of the MLP,
H heads of queries, K heads of keys and values, D head size
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .activations import ACTIVATIONS
from .attention import SLIDING, AttentionCache, AttentionKind
from .config_checks import (
    check_activation,
    check_bool,
    check_epsilon,
    check_multiple,
    check_number,
    check_whole,
)
from .experts import Experts
from .language_model import LanguageModel, check_layer_types
from .rotary import Rotary, RotaryTables


@dataclass(frozen=True)
class LlamaConfig:
    """The settings of a decoder of the Llama family; the defaults are Llama 2's (7B).

    Attributes:
        layer_types: for each layer whether it sees all tokens (`FULL`) or those of a window (`SLIDING`);
            empty means `FULL` throughout.
        window: how many tokens a sliding layer sees, the token itself included.
        rotary: the rotation of queries and keys.
        window_rotary: that of sliding layers, where it is another.
        unrotated: numbers of the layers without positions.
        qk_norm: "head" normalizes each head's queries and keys, "projection" all heads together.
        norms: where the RMSNorms of a block stand: "before" its attention and MLP, "after", or "both".
        attention_scale: multiplies the scores; None means D ** -0.5.
        attention_softcap, logits_softcap: c in c * tanh(x / c), of scores and of logits.
        num_experts: of each MLP that is a mixture of experts; 0 where none is.
        experts_per_token: how many of them each token uses.
        expert_size: the inner size of an expert's MLP.
        normalizes_experts: whether the shares of a token's experts are scaled to a sum of 1.
        dense_layers: numbers of the layers whose MLP is no mixture.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 4096
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] = ()
    window: int | None = None
    rotary: Rotary = field(default_factory=Rotary)
    window_rotary: Rotary | None = None
    unrotated: tuple[int, ...] = ()
    qk_norm: str | None = None
    norms: str = "before"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logits_scale: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalizes_experts: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        check_whole(self, "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
        check_multiple(self, "num_attention_heads", of="num_key_value_heads")
        check_activation(self, "hidden_act")
        check_epsilon(self, "rms_norm_eps")
        check_bool(self, "tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias")
        check_number(self, "embedding_scale", "residual_scale", "attention_scale", "logits_scale")
        check_number(self, "attention_softcap", "logits_softcap", above=0)
        check_layer_types(self, "num_hidden_layers")
        check_bool(self, "normalizes_experts")
        if self.num_experts:
            check_whole(self, "num_experts", "experts_per_token", "expert_size")
            if self.experts_per_token > self.num_experts:
                raise ValueError(
                    f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}"
                )

    @property
    def context(self) -> int:
        """Return the most tokens that the model takes."""
        return self.max_position_embeddings

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Return the layers, heads and head size of the keys and values that are cached."""
        return self.num_hidden_layers, self.num_key_value_heads, self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Return the widths of queries, keys and values, which one projection computes side by side."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        return queries, keys, keys

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return how many tokens each layer sees, the token itself included; None means all."""
        return tuple(self.attention_kind(layer).window for layer in range(self.num_hidden_layers))

    @property
    def computes_positions(self) -> bool:
        """Return whether there are positions beyond those that the model was trained with."""
        return all(rotary.is_fixed for rotary in (self.rotary, self.window_rotary) if rotary is not None)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def is_sliding(self, layer: int) -> bool:
        """Return whether a layer sees only a window."""
        return bool(self.layer_types) and self.layer_types[layer] == SLIDING

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return the scale, cap and mask of a layer's scores."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        window = self.window if self.is_sliding(layer) else None
        return AttentionKind(scale, window, self.attention_softcap)


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class SelfAttention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = config.head_dim
        self.kind = config.attention_kind(layer)
        self.qk_norm = config.qk_norm
        queries, keys, _ = config.qkv_sizes
        self.qkv_sizes = config.qkv_sizes
        self.qkv_proj = nn.Linear(config.hidden_size, sum(config.qkv_sizes), bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        if config.qk_norm is not None:
            each = config.qk_norm == "head"
            self.q_norm = RMSNorm(config.head_dim if each else queries, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim if each else keys, config.rms_norm_eps)

    def forward(self, x: Tensor, tables: RotaryTables | None, cache: AttentionCache) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv_proj(x).split(self.qkv_sizes, dim=-1)  # (B, T, H * D), twice (B, T, K * D)
        if self.qk_norm == "projection":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = self.split_heads(q)  # (B, H, T, D)
        k = self.split_heads(k)  # (B, K, T, D)
        v = self.split_heads(v)  # (B, K, T, D)
        if self.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        if tables is not None:
            q = cache.rotate(q, tables)
            k = cache.rotate(k, tables)
        context = cache.attend(self.layer, q, k, v, self.kind)  # (B, H, T, D)
        return self.o_proj(context.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]

    def split_heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, -1, self.head_size).transpose(1, 2)


class GatedMLP(nn.Module):
    """SwiGLU and GeGLU (Shazeer, 2020), by the activation of the gate."""

    def __init__(self, config: LlamaConfig, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.gate_proj(x)) * self.up_proj(x)  # (B, T, M)
        return self.down_proj(inner)  # type: ignore[no-any-return]


def make_mlp(config: LlamaConfig, layer: int) -> nn.Module:
    """Return the MLP of a layer, which may be a mixture of experts."""
    if not config.has_experts(layer):
        return GatedMLP(config, config.intermediate_size)
    return Experts(
        lambda: GatedMLP(config, config.expert_size),
        config.hidden_size,
        config.num_experts,
        config.experts_per_token,
        config.normalizes_experts,
    )


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.self_attn = SelfAttention(config, layer)
        self.mlp = make_mlp(config, layer)
        before = config.norms != "after"
        after = config.norms != "before"

        def norm(is_there: bool) -> nn.Module:
            return RMSNorm(config.hidden_size, config.rms_norm_eps) if is_there else nn.Identity()

        self.attention_norm = norm(before)
        self.attention_output_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp_output_norm = norm(after)

    def forward(self, x: Tensor, tables: RotaryTables | None, cache: AttentionCache) -> Tensor:
        attended = self.self_attn(self.attention_norm(x), tables, cache)
        x = x + self.scale(self.attention_output_norm(attended))
        return x + self.scale(self.mlp_output_norm(self.mlp(self.mlp_norm(x))))

    def scale(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1 else x * self.residual_scale


class Llama(LanguageModel):
    """A decoder of the Llama family, of any size, by config."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = self.make_tables(config.rotary)
        self.window_rotary = self.make_tables(config.window_rotary)
        self.tie_weights()

    def make_tables(self, rotary: Rotary | None) -> RotaryTables | None:
        """Return the cosines and sines of one rotation, for the whole context."""
        config = self.config
        return None if rotary is None else RotaryTables(rotary, config.head_dim, config.context)

    def limit_context(self, length: int) -> None:
        """Compute the rotary tables for texts of up to `length` tokens."""
        for tables in (self.rotary, self.window_rotary):
            if tables is not None:
                tables.fill(length)

    def tie_weights(self) -> None:
        """Tie the head's weight to the embedding, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def layer_states(self, input_ids: Tensor, cache: AttentionCache) -> Iterator[Tensor]:
        """Yield the embeddings and every layer's output, each (B, T, E), the last one normalized."""
        config = self.config
        x = self.embed_tokens(input_ids)  # (B, T, E)
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        cache.positions(input_ids, sorted(set(config.windows), key=str))
        for layer, block in enumerate(self.layers):
            yield x
            x = block(x, self.tables_of(layer), cache)
        yield self.norm(x)

    def tables_of(self, layer: int) -> RotaryTables | None:
        """Return a layer's rotary tables; None where it has no positions."""
        config = self.config
        if layer in config.unrotated:
            return None
        return self.window_rotary if self.window_rotary and config.is_sliding(layer) else self.rotary

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E)."""
        config = self.config
        logits: Tensor = self.lm_head(x)
        if config.logits_scale != 1:
            logits = logits * config.logits_scale
        if config.logits_softcap is not None:
            logits = torch.tanh(logits / config.logits_softcap) * config.logits_softcap
        return logits
