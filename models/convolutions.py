"""The convolutional blocks that the UNet and the autoencoder of latent diffusion share.

B batch, C channels, H height, W width, D features of the time embedding
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResnetBlock(nn.Module):
    """Two convolutions around a shortcut, with the time added between them.

    He et al., 2015 (https://arxiv.org/abs/1512.03385); Ho et al., 2020 (https://arxiv.org/abs/2006.11239).

    Args:
        in_channels: C of its input.
        out_channels: C of its output; if it differs, the shortcut is a convolution of 1 x 1.
        groups: of each normalization.
        eps: of each normalization.
        time_features: D; None in a block that reads no time.
    """

    def __init__(
        self, in_channels: int, out_channels: int, groups: int, eps: float, time_features: int | None = None
    ) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels, eps)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_emb_proj = None if time_features is None else nn.Linear(time_features, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = None if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        """Return (B, C', H, W) of (B, C, H, W) and, if it reads one, a time embedding (B, D)."""
        y = self.conv1(F.silu(self.norm1(x)))
        if self.time_emb_proj is not None:
            assert time is not None
            y = y + self.time_emb_proj(F.silu(time))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x)
        return shortcut + y  # type: ignore[no-any-return]


class Downsample(nn.Module):
    """Halves height and width by a convolution.

    Args:
        channels: C, before and after.
        padding: 1 on every side (UNet), or 0: then a row below and a column on the right (autoencoder).
    """

    def __init__(self, channels: int, padding: int) -> None:
        super().__init__()
        self.padding = padding
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x if self.padding else F.pad(x, (0, 1, 0, 1)))  # type: ignore[no-any-return]


class Upsample(nn.Module):
    """Doubles height and width by repeating each point, then a convolution.

    `like` is what the result has the size of, if an odd size was halved and rounded up before.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """Return (B, C, 2 H, 2 W), or with the height and width of `like`."""
        if like is None:
            return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))  # type: ignore[no-any-return]
        return self.conv(F.interpolate(x, like.shape[2:], mode="nearest"))  # type: ignore[no-any-return]
