"""CLIP (Radford et al., 2021): a text and a picture get vectors that are alike where they belong together.

https://arxiv.org/abs/2103.00020, with the names of transformers' checkpoints.

B batch, T tokens, P patches, S = P + 1 with the class token, E hidden size, F features of a vector, N heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import scaled_dot_product_attention
from .config_checks import check_epsilon, check_multiple, check_whole
from .masked import MASKED

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # OpenAI's
    "gelu": F.gelu,  # OpenCLIP's
}
OLD_END = 2  # an eos_token_id of configs that meant the token with the largest id


@dataclass(frozen=True)
class ClipLayersConfig:
    """The settings that the layers of both sides have.

    Attributes:
        projection_dim: F of the vectors that are compared; None of a text encoder without a projection.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection_dim: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        check_multiple(self, "hidden_size", "num_attention_heads")
        check_epsilon(self, "layer_norm_eps")
        if self.projection_dim is not None:
            check_whole(self, "projection_dim")
        if self.hidden_act not in list(ACTIVATIONS):
            raise ValueError(f"hidden_act={self.hidden_act!r} is not one of {sorted(ACTIVATIONS)}")


@dataclass(frozen=True)
class ClipTextConfig(ClipLayersConfig):
    """The settings of a text encoder; the defaults are those of CLIP ViT-L/14."""

    vocab_size: int = 49408
    max_position_embeddings: int = 77
    eos_token_id: int = OLD_END

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "vocab_size", "max_position_embeddings")
        check_whole(self, "eos_token_id", least=0)


@dataclass(frozen=True)
class ClipVisionConfig(ClipLayersConfig):
    """The settings of a picture encoder; the defaults are those of CLIP ViT-B/32."""

    image_size: int = 224
    patch_size: int = 32
    num_channels: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "image_size", "patch_size", "num_channels")
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size={self.patch_size} is larger than image_size={self.image_size}")

    @property
    def patches(self) -> int:
        """Return P."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class ClipConfig:
    """The settings of both sides; both project to vectors of `text.projection_dim`."""

    text: ClipTextConfig
    vision: ClipVisionConfig

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens that the text side knows."""
        return self.text.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Return the most tokens of a text."""
        return self.text.max_position_embeddings


class Attention(nn.Module):
    """Attention with as many keys and values as queries."""

    def __init__(self, config: ClipLayersConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return (B, T, E) of (B, T, E); the bias (T, T) hides what a token must not see."""
        q = self.split(self.q_proj(x))
        k = self.split(self.k_proj(x))
        v = self.split(self.v_proj(x))
        y = scaled_dot_product_attention(q, k, v, bias)  # (B, N, T, E / N)
        return self.out_proj(y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> Tensor:
        """Return (B, N, T, E / N) of (B, T, E)."""
        B, T, E = x.shape
        return x.view(B, T, self.heads, E // self.heads).transpose(1, 2)


class Mlp(nn.Module):
    """Two linear layers around an activation."""

    def __init__(self, config: ClipLayersConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and two linear layers; each reads its input normalized, and is added to it."""

    def __init__(self, config: ClipLayersConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = Mlp(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), bias)
        return x + self.mlp(self.layer_norm2(x))  # type: ignore[no-any-return]


class EndPooling(nn.Module):
    """Reads a text's vector at its first end token."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end

    def forward(self, states: Tensor, input_ids: Tensor) -> Tensor:
        """Return (B, E) of states (B, T, E) and tokens (B, T)."""
        ends = input_ids.int() if self.end == OLD_END else (input_ids == self.end).int()
        return states[torch.arange(len(states)), ends.argmax(dim=-1)]


class ClipText(nn.Module):
    """The text side: a causal Transformer, whose vector is read at the end token."""

    def __init__(self, config: ClipTextConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.token_embedding = nn.Embedding(config.vocab_size, width)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.pooling = EndPooling(config.eos_token_id)
        features = config.projection_dim
        self.projection = None if features is None else nn.Linear(width, features, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the last layer's hidden states (B, T, E), normalized, of tokens (B, T)."""
        count = input_ids.shape[1]
        x = self.token_embedding(input_ids) + self.position_embedding.weight[:count]
        bias = torch.full((count, count), MASKED).triu(1)
        for layer in self.layers:
            x = layer(x, bias)
        return self.final_layer_norm(x)  # type: ignore[no-any-return]

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the vectors (B, F) of texts, not of unit length; without a projection F is E."""
        vectors = self.pooling(self(input_ids), input_ids)
        return vectors if self.projection is None else self.projection(vectors)  # type: ignore[no-any-return]


class ClipVision(nn.Module):
    """The picture side: a Transformer over patches, whose vector is read at the class token."""

    def __init__(self, config: ClipVisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        size = config.patch_size
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.patch_embedding = nn.Conv2d(config.num_channels, width, size, stride=size, bias=False)
        self.position_embedding = nn.Embedding(config.patches + 1, width)
        self.pre_layrnorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(width, config.layer_norm_eps)
        assert config.projection_dim is not None
        self.projection = nn.Linear(width, config.projection_dim, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the vectors (B, F) of pictures (B, 3, H, W), not of unit length; H and W are image_size."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)  # (B, P, E)
        first = self.class_embedding.expand(len(patches), 1, -1)
        x = torch.cat([first, patches], dim=1) + self.position_embedding.weight  # (B, S, E)
        x = self.pre_layrnorm(x)
        for layer in self.layers:
            x = layer(x, None)
        return self.projection(self.post_layernorm(x[:, 0]))  # type: ignore[no-any-return]


class Clip(nn.Module):
    """Both sides, and the scale of their likeness."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.config = config
        self.text = ClipText(config.text)
        self.vision = ClipVision(config.vision)
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: Tensor, pixels: Tensor) -> Tensor:
        """Return logits (pictures, texts): the cosines of their vectors, times exp(logit_scale)."""
        texts = F.normalize(self.text.embed(input_ids), dim=-1)
        pictures = F.normalize(self.vision(pixels), dim=-1)
        return self.logit_scale.exp() * pictures @ texts.T

    def tie_weights(self) -> None:
        """Do nothing: no weight is shared."""
