"""The UNet of Stable Diffusion, which predicts the noise in latents under a text's control.

Rombach et al., 2022 (https://arxiv.org/abs/2112.10752), with the names of diffusers' checkpoints.

B batch, C channels, H height, W width, P = H * W points, T text tokens, E text features, D time features,
N heads
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import scaled_dot_product_attention
from .config_checks import check_epsilon, check_whole
from .convolutions import Downsample, ResnetBlock, Upsample

LONGEST_WAVE = 10_000  # of the time embedding, as in Vaswani et al., 2017


@dataclass(frozen=True)
class UNetConfig:
    """The settings of unet/config.json that change the graph; the defaults are Stable Diffusion 1's.

    Attributes:
        block_out_channels: C of each level, from the largest picture to the smallest.
        layers_per_block: blocks of each level on the way down; on the way up there is one more.
        cross_attention_dim: E.
        heads: N of each level. diffusers calls it attention_head_dim in Stable Diffusion's configs.
        has_attention: whether each level reads the text.
        depths: transformer blocks behind each block of a level.
        use_linear_projection: whether attention is reached by matrices (Stable Diffusion 2) or by
            convolutions of 1 x 1.
        freq_shift: shortens the time embedding's waves.
        time_cond_proj_dim: features of an embedded guidance scale (latent consistency models), or None.
        sample_size: H and W of the latents that it was trained with; it takes others too.
    """

    in_channels: int = 4
    out_channels: int = 4
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int = 2
    cross_attention_dim: int = 768
    heads: tuple[int, ...] = (8, 8, 8, 8)
    has_attention: tuple[bool, ...] = (True, True, True, False)
    depths: tuple[int, ...] = (1, 1, 1, 1)
    use_linear_projection: bool = False
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    time_cond_proj_dim: int | None = None
    sample_size: int = 64

    def __post_init__(self) -> None:
        sizes = ("layers_per_block", "cross_attention_dim", "sample_size")
        check_whole(self, "in_channels", "out_channels", *sizes)
        check_epsilon(self, "norm_eps")
        check_widths(self.block_out_channels, self.norm_num_groups)
        for name in ("heads", "has_attention", "depths"):
            if len(getattr(self, name)) != len(self.block_out_channels):
                raise ValueError(f"{name} must have one entry for each of block_out_channels")
        for width, heads in zip(self.block_out_channels, self.heads, strict=True):
            if heads < 1 or width % heads:
                raise ValueError(f"{width} channels are not divided by {heads} heads")


def check_widths(widths: tuple[int, ...], groups: int) -> None:
    """Raise a ValueError unless there are widths, each a multiple of the groups of a normalization."""
    if not widths:
        raise ValueError("block_out_channels is empty")
    for width in widths:
        if type(width) is not int or width < 1 or groups < 1 or width % groups:
            raise ValueError(f"block_out_channels has {width!r}, no multiple of norm_num_groups={groups!r}")


class CrossAttention(nn.Module):
    """Points attend to each other, or to a text's tokens.

    Args:
        width: C.
        source: features of what is attended to.
        heads: N.
    """

    def __init__(self, width: int, source: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(source, width, bias=False)
        self.to_v = nn.Linear(source, width, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """Return (B, P, C) of points (B, P, C) that attend to a source (B, S, E)."""
        q = self.split(self.to_q(x))
        k = self.split(self.to_k(source))
        v = self.split(self.to_v(source))
        y = scaled_dot_product_attention(q, k, v, None)  # (B, N, P, C / N)
        return self.to_out[0](y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> Tensor:
        """Return (B, N, S, C / N) of (B, S, C)."""
        B, S, C = x.shape
        return x.view(B, S, self.heads, C // self.heads).transpose(1, 2)


class GatedGelu(nn.Module):
    """A linear layer that is gated by the GELU of another (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A gated layer of four times the width, and one back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(GatedGelu(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Points attend to each other, then to the text, then pass a feed-forward layer."""

    def __init__(self, width: int, text: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = CrossAttention(width, width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.attn2 = CrossAttention(width, text, heads)
        self.norm3 = nn.LayerNorm(width)
        self.ff = FeedForward(width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Return (B, P, C) of points (B, P, C) and a text (B, T, E)."""
        y = self.norm1(x)
        x = x + self.attn1(y, y)
        x = x + self.attn2(self.norm2(x), text)
        return x + self.ff(self.norm3(x))  # type: ignore[no-any-return]


class SpatialTransformer(nn.Module):
    """Transformer blocks over the points of latents, around a shortcut."""

    def __init__(self, config: UNetConfig, channels: int, heads: int, depth: int) -> None:
        super().__init__()
        self.uses_matrices = config.use_linear_projection
        self.norm = nn.GroupNorm(config.norm_num_groups, channels, eps=1e-6)
        self.proj_in = self.make_projection(channels)
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(channels, config.cross_attention_dim, heads) for _ in range(depth)
        )
        self.proj_out = self.make_projection(channels)

    def make_projection(self, channels: int) -> nn.Module:
        """Return a layer from each point to the same point."""
        return nn.Linear(channels, channels) if self.uses_matrices else nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Return (B, C, H, W) of latents (B, C, H, W) and a text (B, T, E)."""
        B, C, H, W = x.shape
        y = self.norm(x)
        if not self.uses_matrices:
            y = self.proj_in(y)
        y = y.view(B, C, H * W).transpose(1, 2)  # (B, P, C)
        if self.uses_matrices:
            y = self.proj_in(y)
        for block in self.transformer_blocks:
            y = block(y, text)
        if self.uses_matrices:
            y = self.proj_out(y)
        y = y.transpose(1, 2).reshape(B, C, H, W)
        return x + (y if self.uses_matrices else self.proj_out(y))  # type: ignore[no-any-return]


class Level(nn.Module):
    """The blocks of one size of latents, each perhaps followed by attention.

    Args:
        config: the UNet's.
        number: of the level, 0 being the largest latents.
        channels: (in, out) of each block.
    """

    def __init__(self, config: UNetConfig, number: int, channels: list[tuple[int, int]]) -> None:
        super().__init__()
        time = 4 * config.block_out_channels[0]
        self.resnets = nn.ModuleList(
            ResnetBlock(before, after, config.norm_num_groups, config.norm_eps, time)
            for before, after in channels
        )
        self.has_attention = config.has_attention[number]
        if self.has_attention:
            self.attentions = nn.ModuleList(
                SpatialTransformer(config, after, config.heads[number], config.depths[number])
                for _, after in channels
            )

    def run_block(self, number: int, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Return what one block makes of latents (B, C, H, W), a time (B, D) and a text (B, T, E)."""
        y: Tensor = self.resnets[number](x, time)
        return self.attentions[number](y, text) if self.has_attention else y


class DownLevel(Level):
    """Halves the size behind its blocks, unless it is the last level."""

    def __init__(self, config: UNetConfig, number: int, channels: list[tuple[int, int]]) -> None:
        super().__init__(config, number, channels)
        self.downsamplers = nn.ModuleList()
        if number < len(config.block_out_channels) - 1:
            self.downsamplers.append(Downsample(config.block_out_channels[number], padding=1))

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> list[Tensor]:
        """Return what each block gives, and then the smaller latents: the way up reads all of them."""
        results = []
        for number in range(len(self.resnets)):
            x = self.run_block(number, x, time, text)
            results.append(x)
        return results + [shrink(x) for shrink in self.downsamplers]


class UpLevel(Level):
    """Reads a result of the way down with each of its blocks; doubles the size, unless it is the largest."""

    def __init__(self, config: UNetConfig, number: int, channels: list[tuple[int, int]]) -> None:
        super().__init__(config, number, channels)
        self.upsamplers = nn.ModuleList()
        if number > 0:
            self.upsamplers.append(Upsample(config.block_out_channels[number]))

    def forward(self, x: Tensor, time: Tensor, text: Tensor, earlier: list[Tensor]) -> Tensor:
        """Return larger latents, and take what it reads off the end of `earlier`."""
        for number in range(len(self.resnets)):
            x = self.run_block(number, torch.cat([x, earlier.pop()], dim=1), time, text)
        for grow in self.upsamplers:  # to the size of what the next level reads
            x = grow(x, earlier[-1])
        return x


class MiddleLevel(nn.Module):
    """A block, attention and a block, at the smallest size."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        width = config.block_out_channels[-1]
        time = 4 * config.block_out_channels[0]
        self.resnets = nn.ModuleList(
            ResnetBlock(width, width, config.norm_num_groups, config.norm_eps, time) for _ in range(2)
        )
        self.attentions = nn.ModuleList(
            [SpatialTransformer(config, width, config.heads[-1], config.depths[-1])]
        )

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, time), text)
        return self.resnets[1](x, time)  # type: ignore[no-any-return]


class TimeEmbedding(nn.Module):
    """Two layers over the waves of a time step; a latent consistency model adds its guidance before them."""

    def __init__(self, waves: int, features: int, condition: int | None) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(waves, features)
        self.cond_proj = None if condition is None else nn.Linear(condition, waves, bias=False)
        self.linear_2 = nn.Linear(features, features)

    def forward(self, waves: Tensor, condition: Tensor | None) -> Tensor:
        """Return (B, D) of waves (B, D / 4) and perhaps an embedded guidance scale (B, F)."""
        if self.cond_proj is not None and condition is not None:
            waves = waves + self.cond_proj(condition)
        return self.linear_2(F.silu(self.linear_1(waves)))  # type: ignore[no-any-return]


def compute_frequencies(count: int, shift: int) -> Tensor:
    """Return the frequencies (count,) of the waves of a time step, also where tensors have no values."""
    powers = torch.arange(count, dtype=torch.float32, device="cpu") / (count - shift)
    return torch.exp(-math.log(LONGEST_WAVE) * powers)


class UNet(nn.Module):
    """Predicts the noise in latents, or what else the scheduler is told, at a time step."""

    frequencies: Tensor

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.block_out_channels
        self.register_buffer("frequencies", compute_frequencies(widths[0] // 2, config.freq_shift), False)
        self.conv_in = nn.Conv2d(config.in_channels, widths[0], 3, padding=1)
        self.time_embedding = TimeEmbedding(widths[0], 4 * widths[0], config.time_cond_proj_dim)
        self.down_blocks = nn.ModuleList()
        kept = [widths[0]]  # channels of each result that the way up will read
        for number, width in enumerate(widths):
            before = widths[max(number - 1, 0)]
            ins = [before] + [width] * (config.layers_per_block - 1)
            self.down_blocks.append(DownLevel(config, number, [(size, width) for size in ins]))
            kept += [width] * (config.layers_per_block + (number < len(widths) - 1))
        self.mid_block = MiddleLevel(config)
        self.up_blocks = nn.ModuleList()
        before = widths[-1]
        for number, width in reversed(list(enumerate(widths))):
            ins = [before] + [width] * config.layers_per_block
            channels = [(size + kept.pop(), width) for size in ins]
            self.up_blocks.append(UpLevel(config, number, channels))
            before = width
        self.conv_norm_out = nn.GroupNorm(config.norm_num_groups, widths[0], config.norm_eps)
        self.conv_out = nn.Conv2d(widths[0], config.out_channels, 3, padding=1)

    def forward(
        self, sample: Tensor, timestep: Tensor, text: Tensor, guidance: Tensor | None = None
    ) -> Tensor:
        """Return the prediction (B, C, H, W).

        Args:
            sample: (B, C, H, W) latents, of any size.
            timestep: (B,) int64 or float32, from 0 to 999.
            text: (B, T, E) the text encoder's hidden states.
            guidance: (B, F) an embedded guidance scale; None for a model that reads none.
        """
        time = self.time_embedding(self.make_waves(timestep).to(sample.dtype), guidance)
        x = self.conv_in(sample)
        earlier = [x]
        for level in self.down_blocks:
            earlier += level(earlier[-1], time, text)
        x = self.mid_block(earlier[-1], time, text)
        for level in self.up_blocks:
            x = level(x, time, text, earlier)
        return self.conv_out(F.silu(self.conv_norm_out(x)))  # type: ignore[no-any-return]

    def make_waves(self, timestep: Tensor) -> Tensor:
        """Return sines and cosines (B, D / 4) of time steps (B,)."""
        angles = timestep[:, None].float() * self.frequencies
        waves = [angles.sin(), angles.cos()]
        return torch.cat(waves[::-1] if self.config.flip_sin_to_cos else waves, dim=-1)
