"""Stable Diffusion (Rombach et al., 2022): a text encoder, a UNet and an autoencoder that work together.

B batch, T text tokens, E text features, H and W height and width of latents
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .autoencoder import Autoencoder, AutoencoderConfig
from .clip import ClipText, ClipTextConfig
from .unet import UNet, UNetConfig


@dataclass(frozen=True)
class StableDiffusionConfig:
    """The settings of the three models; raises a ValueError where they do not fit each other."""

    text: ClipTextConfig
    unet: UNetConfig
    vae: AutoencoderConfig

    def __post_init__(self) -> None:
        self.check_same("text_encoder's hidden_size", self.text.hidden_size, self.unet.cross_attention_dim)
        self.check_same("vae's latent_channels", self.vae.latent_channels, self.unet.in_channels)
        self.check_same("unet's out_channels", self.unet.out_channels, self.unet.in_channels)

    @staticmethod
    def check_same(name: str, value: int, wanted: int) -> None:
        """Raise a ValueError unless a size is the one that the UNet reads."""
        if value != wanted:
            raise ValueError(f"{name} is {value}, but the unet reads {wanted}")

    @property
    def vocab_size(self) -> int:
        """Return the number of the text encoder's tokens."""
        return self.text.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Return the most tokens of a prompt."""
        return self.text.max_position_embeddings


class StableDiffusion(nn.Module):
    """The three models; each runs by itself.

    `text_encoder(input_ids)` gives hidden states (B, T, E), `unet(sample, timestep, text)` predicts the noise
    in latents (B, 4, H, W), and `vae` turns pictures into latents and back.
    """

    def __init__(self, config: StableDiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.text_encoder = ClipText(config.text)
        self.unet = UNet(config.unet)
        self.vae = Autoencoder(config.vae)

    def tie_weights(self) -> None:
        """Do nothing: no weights are shared."""
