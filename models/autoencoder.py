"""The autoencoder of latent diffusion: pictures to latents of an eighth of their size, and back.

Rombach et al., 2022 (https://arxiv.org/abs/2112.10752), with the names of diffusers' checkpoints.

B batch, C channels, H height, W width, P = H * W points, L channels of latents
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import scaled_dot_product_attention
from .config_checks import check_number, check_whole
from .convolutions import Downsample, ResnetBlock, Upsample
from .unet import check_widths

EPS = 1e-6  # of every normalization


@dataclass(frozen=True)
class AutoencoderConfig:
    """The settings of vae/config.json that change the graphs; the defaults are Stable Diffusion 1's.

    Attributes:
        latent_channels: L.
        block_out_channels: C of each level, from the picture to the latents.
        layers_per_block: blocks of each level of the encoder; the decoder has one more.
        scaling_factor: the UNet's latents are the autoencoder's times this, which has about unit variance.
        use_quant_conv: whether a convolution of 1 x 1 follows the encoder.
        use_post_quant_conv: whether one precedes the decoder.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 4
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = 2
    norm_num_groups: int = 32
    scaling_factor: float = 0.18215
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True

    def __post_init__(self) -> None:
        check_whole(self, "in_channels", "out_channels", "latent_channels", "layers_per_block")
        check_number(self, "scaling_factor", above=0.0)
        check_widths(self.block_out_channels, self.norm_num_groups)

    @property
    def shrinks_by(self) -> int:
        """Return how many times wider a picture is than its latents."""
        return int(2 ** (len(self.block_out_channels) - 1))


class PointAttention(nn.Module):
    """Attention of all points to each other, with one head, around a shortcut."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, EPS)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        y = self.group_norm(x).view(B, C, H * W).transpose(1, 2)  # (B, P, C)
        q, k, v = (part(y)[:, None] for part in (self.to_q, self.to_k, self.to_v))  # (B, 1, P, C)
        y = self.to_out[0](scaled_dot_product_attention(q, k, v, None)[:, 0])
        return x + y.transpose(1, 2).reshape(B, C, H, W)  # type: ignore[no-any-return]


class Middle(nn.Module):
    """A block, attention and a block, at the smallest size."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock(channels, channels, groups, EPS) for _ in range(2))
        self.attentions = nn.ModuleList([PointAttention(channels, groups)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Blocks of one size.

    Args:
        before: channels of its input.
        width: channels of its output.
        count: of its blocks.
        groups: of each normalization.
    """

    def __init__(self, before: int, width: int, count: int, groups: int) -> None:
        super().__init__()
        ins = [before] + [width] * (count - 1)
        self.resnets = nn.ModuleList(ResnetBlock(size, width, groups, EPS) for size in ins)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.resnets:
            x = block(x)
        return x


class DownStage(Stage):
    """A stage that halves the size in the end."""

    def __init__(self, before: int, width: int, count: int, groups: int) -> None:
        super().__init__(before, width, count, groups)
        self.downsamplers = nn.ModuleList([Downsample(width, padding=0)])

    def forward(self, x: Tensor) -> Tensor:
        return self.downsamplers[0](super().forward(x))  # type: ignore[no-any-return]


class UpStage(Stage):
    """A stage that doubles the size in the end."""

    def __init__(self, before: int, width: int, count: int, groups: int) -> None:
        super().__init__(before, width, count, groups)
        self.upsamplers = nn.ModuleList([Upsample(width)])

    def forward(self, x: Tensor) -> Tensor:
        return self.upsamplers[0](super().forward(x))  # type: ignore[no-any-return]


class PictureEncoder(nn.Module):
    """Turns pictures into the mean and the log-variance of their latents."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = config.block_out_channels
        groups = config.norm_num_groups
        self.conv_in = nn.Conv2d(config.in_channels, widths[0], 3, padding=1)
        self.down_blocks = nn.ModuleList()
        for number, width in enumerate(widths):
            kind = DownStage if number < len(widths) - 1 else Stage
            before = widths[max(number - 1, 0)]
            self.down_blocks.append(kind(before, width, config.layers_per_block, groups))
        self.mid_block = Middle(widths[-1], groups)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for stage in self.down_blocks:
            x = stage(x)
        return self.conv_out(F.silu(self.conv_norm_out(self.mid_block(x))))  # type: ignore[no-any-return]


class PictureDecoder(nn.Module):
    """Turns latents into pictures."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = config.block_out_channels[::-1]
        groups = config.norm_num_groups
        self.conv_in = nn.Conv2d(config.latent_channels, widths[0], 3, padding=1)
        self.mid_block = Middle(widths[0], groups)
        self.up_blocks = nn.ModuleList()
        for number, width in enumerate(widths):
            kind = UpStage if number < len(widths) - 1 else Stage
            before = widths[max(number - 1, 0)]
            self.up_blocks.append(kind(before, width, config.layers_per_block + 1, groups))
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = nn.Conv2d(widths[-1], config.out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for stage in self.up_blocks:
            x = stage(x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """Turns pictures (B, 3, 8 H, 8 W) from -1 to 1 into latents (B, L, H, W), and back."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.latent_channels
        self.encoder = PictureEncoder(config)
        self.decoder = PictureDecoder(config)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1) if config.use_quant_conv else None
        self.post_quant_conv = nn.Conv2d(channels, channels, 1) if config.use_post_quant_conv else None

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of pictures' latents, each (B, L, H, W), not scaled."""
        x = self.encoder(pictures)
        mean, log_variance = (x if self.quant_conv is None else self.quant_conv(x)).chunk(2, dim=1)
        return mean, torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pictures (B, 3, 8 H, 8 W) of latents (B, L, H, W), not scaled."""
        x = latents if self.post_quant_conv is None else self.post_quant_conv(latents)
        return self.decoder(x)  # type: ignore[no-any-return]
