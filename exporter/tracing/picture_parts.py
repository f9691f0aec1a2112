"""The parts of models of pictures as modules, each with the inputs and outputs of its graph.

B batch, T text tokens, E text features, L channels of latents, H and W height and width of latents,
F features of a vector
"""

from __future__ import annotations

from torch import Tensor, nn

from ...models import Clip, StableDiffusion


class TextPart(nn.Module):
    """A prompt's hidden states."""

    def __init__(self, model: StableDiffusion) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return (B, T, E) of tokens (B, T)."""
        return self.model.text_encoder(input_ids)  # type: ignore[no-any-return]


class DenoisingPart(nn.Module):
    """The UNet's prediction for latents at a time step."""

    def __init__(self, model: StableDiffusion) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, sample: Tensor, timestep: Tensor, text: Tensor, guidance: Tensor | None = None
    ) -> Tensor:
        """Return (B, L, H, W) of latents (B, L, H, W), steps (B,), text (B, T, E), guidance (B, F)."""
        return self.model.unet(sample, timestep, text, guidance)  # type: ignore[no-any-return]


class DecodingPart(nn.Module):
    """The autoencoder's way from latents to pictures."""

    def __init__(self, model: StableDiffusion) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: Tensor) -> Tensor:
        """Return pictures (B, 3, 8 H, 8 W) from -1 to 1 of latents (B, L, H, W), which it scales back."""
        vae = self.model.vae
        return vae.decode(latents / vae.config.scaling_factor)


class EncodingPart(nn.Module):
    """The autoencoder's way from pictures to latents."""

    def __init__(self, model: StableDiffusion) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation, each (B, L, H, W), of pictures (B, 3, 8 H, 8 W), not scaled."""
        return self.model.vae.encode(pictures)


class TextVectorPart(nn.Module):
    """A text's vector."""

    def __init__(self, model: Clip) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return (B, F), not of unit length, of tokens (B, T)."""
        return self.model.text.embed(input_ids)


class PictureVectorPart(nn.Module):
    """A picture's vector."""

    def __init__(self, model: Clip) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Return (B, F), not of unit length, of normalized pixels (B, 3, H, W)."""
        return self.model.vision(pixels)  # type: ignore[no-any-return]
