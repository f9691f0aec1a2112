"""GPT-2 (Radford et al., 2019), and its relatives GPT-1 (2018) and GPT-Neo (2021), by config.

B batch, T new tokens, V vocabulary, H heads, D head size, E = H * D
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from .language_model import LanguageModel, check_layer_types


@dataclass(frozen=True)
class GPT2Config:
    """GPT-2's settings, named as in Hugging Face's config.json; the defaults are GPT-2 small (124M).

    Attributes:
        norm_first: LayerNorm before attention and MLP, and behind the last layer; False: behind the sum of
            each with its input, as in GPT-1.
        qkv_bias: queries, keys and values have a bias.
        attention_scale: multiplies the scores; None means D ** -0.5.
        layer_types: for each layer whether it sees all tokens (`FULL`) or those of a window (`SLIDING`);
            empty means `FULL` throughout.
        window: how many tokens a sliding layer sees, the token itself included.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    norm_first: bool = True
    qkv_bias: bool = True
    attention_scale: float | None = None
    layer_types: tuple[str, ...] = ()
    window: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        if self.n_inner is not None:  # None means 4 * n_embd
            check_whole(self, "n_inner")
        check_multiple(self, "n_embd", of="n_head")
        check_activation(self, "activation_function")
        check_epsilon(self, "layer_norm_epsilon")
        check_bool(self, "tie_word_embeddings", "norm_first", "qkv_bias")
        check_number(self, "attention_scale", above=0)
        check_layer_types(self, "n_layer")

    @property
    def hidden_size(self) -> int:
        return self.n_embd

    @property
    def num_attention_heads(self) -> int:
        return self.n_head

    @property
    def intermediate_size(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def context(self) -> int:
        """Return the most tokens that the model takes."""
        return self.n_positions

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Return the layers, heads and head size of the keys and values that are cached."""
        return self.n_layer, self.n_head, self.head_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return how many tokens each layer sees, the token itself included; None means all."""
        return tuple(self.attention_kind(layer).window for layer in range(self.n_layer))

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return the scale and mask of a layer's scores."""
        is_sliding = bool(self.layer_types) and self.layer_types[layer] == SLIDING
        return AttentionKind(self.attention_scale, self.window if is_sliding else None)


class SelfAttention(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.kind = config.attention_kind(layer)
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.qkv_bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: AttentionCache) -> Tensor:
        B, T, E = x.shape
        q, k, v = (self.heads(t) for t in self.c_attn(x).split(E, dim=-1))  # each (B, H, T, D)
        context = cache.attend(self.layer, q, k, v, self.kind)  # (B, H, T, D)
        return self.c_proj(context.transpose(1, 2).reshape(B, T, E))  # type: ignore[no-any-return]

    def heads(self, x: Tensor) -> Tensor:
        B, T, E = x.shape
        return x.view(B, T, self.n_head, E // self.n_head).transpose(1, 2)  # (B, H, T, D)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.intermediate_size)
        self.activation = ACTIVATIONS[config.activation_function]()
        self.c_proj = nn.Linear(config.intermediate_size, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = SelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: AttentionCache) -> Tensor:
        if not self.norm_first:
            x = self.ln_1(x + self.attn(x, cache))
            return self.ln_2(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT2(LanguageModel):
    """GPT-2 small to XL, DistilGPT-2, GPT-1, GPT-Neo and any size between, by config."""

    config: GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = (
            nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon) if config.norm_first else nn.Identity()
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the head's weight to the embedding, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def layer_states(self, input_ids: Tensor, cache: AttentionCache) -> Iterator[Tensor]:
        """Yield the embeddings and every layer's output, each (B, T, E), the last one normalized."""
        windows = sorted(set(self.config.windows), key=str)
        x = self.wte(input_ids) + self.wpe(cache.positions(input_ids, windows))  # (B, T, E)
        for block in self.h:
            yield x
            x = block(x, cache)
        yield self.ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E)."""
        return self.lm_head(x)  # type: ignore[no-any-return]
