"""GPT-2 (Radford et al., 2019): "Language Models are Unsupervised Multitask Learners".

B batch, T new tokens, V vocabulary, H heads, D head size, E = H * D
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, nn

from .activations import ACTIVATIONS
from .attention import AttentionCache
from .config_checks import check_activation, check_bool, check_epsilon, check_multiple, check_whole
from .language_model import LanguageModel


@dataclass(frozen=True)
class GPT2Config:
    """GPT-2's settings, named as in Hugging Face's config.json; the defaults are GPT-2 small (124M)."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        if self.n_inner is not None:  # None means 4 * n_embd
            check_whole(self, "n_inner")
        check_multiple(self, "n_embd", of="n_head")
        check_activation(self, "activation_function")
        check_epsilon(self, "layer_norm_epsilon")
        check_bool(self, "tie_word_embeddings")

    @property
    def mlp_size(self) -> int:
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
        """Return how many tokens each layer sees: all."""
        return (None,) * self.n_layer


class SelfAttention(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, layer: int, cache: AttentionCache) -> Tensor:
        B, T, E = x.shape
        q, k, v = (self.heads(t) for t in self.c_attn(x).split(E, dim=-1))  # each (B, H, T, D)
        context = cache.attend(layer, q, k, v)  # (B, H, T, D)
        return self.c_proj(context.transpose(1, 2).reshape(B, T, E))  # type: ignore[no-any-return]

    def heads(self, x: Tensor) -> Tensor:
        B, T, E = x.shape
        return x.view(B, T, self.n_head, E // self.n_head).transpose(1, 2)  # (B, H, T, D)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.mlp_size)
        self.activation = ACTIVATIONS[config.activation_function]()
        self.c_proj = nn.Linear(config.mlp_size, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, cache: AttentionCache) -> Tensor:
        x = x + self.attn(self.ln_1(x), layer, cache)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT2(LanguageModel):
    """GPT-2 small to XL, DistilGPT-2 and any size between, by config."""

    config: GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the head's weight to the embedding, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def hidden_states(self, input_ids: Tensor, cache: AttentionCache) -> Tensor:
        """Return the last hidden states (B, T, E), which the head reads, of input_ids (B, T)."""
        x = self.wte(input_ids) + self.wpe(cache.positions(input_ids))  # (B, T, E)
        for layer, block in enumerate(self.h):
            x = block(x, layer, cache)
        return self.ln_f(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E)."""
        return self.lm_head(x)  # type: ignore[no-any-return]


# The published checkpoints keep each Linear's weight the other way round, as TensorFlow's Conv1D did,
CONV1D = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
# and carry the causal mask along as buffers.
MASK_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
