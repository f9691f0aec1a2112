"""Rotary position embeddings (Su et al., 2021), and the ways to stretch them to longer contexts.

B batch, T tokens, H heads, D head size, F frequencies, L context
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from .config_checks import check_number

OLDER_NAMES = {"su": "longrope"}  # the first Phi-3's


@dataclass(frozen=True)
class Rotary:
    """A rotation of queries and keys by positions: `rope_parameters` of a config.json, with its names.

    Attributes:
        rope_theta: the base of the frequencies.
        rope_type: how they are stretched; one of `STRETCHES`.
        partial_rotary_factor: the part of each head that is turned.
        original_max_position_embeddings: the context that the model was first trained with.
        attention_factor: multiplies sines and cosines; None follows from the type.
        short_factor: divides each frequency while all tokens lie within the original context.
        long_factor: divides each frequency where they don't.
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in STRETCHES:
            raise ValueError(
                f"rope_type={self.rope_type!r} is not one of {', '.join(STRETCHES)}; docs/add-a-model.md says"
                " where another is added"
            )
        check_number(self, "rope_theta", "factor", "partial_rotary_factor", "attention_factor", above=0)
        check_number(self, "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", above=0)
        check_number(self, "mscale", "mscale_all_dim")
        if self.rope_theta <= 1 or self.factor < 1 or self.partial_rotary_factor > 1:
            raise ValueError(
                f"rope_theta={self.rope_theta} must be above 1, factor={self.factor} at least 1 and"
                f" partial_rotary_factor={self.partial_rotary_factor} above 0 and at most 1"
            )
        if (self.short_factor or self.long_factor) and self.rope_type != "longrope":
            raise ValueError(f"short_factor and long_factor belong to longrope, not to {self.rope_type!r}")

    @classmethod
    def from_json(cls, values: Mapping[str, Any], context: int) -> Rotary:
        """Return the rotation that a config.json describes.

        Args:
            values: `rope_parameters`, or `rope_scaling` with `rope_theta` next to it.
            context: max_position_embeddings, the original context where none is named.

        Raises:
            ValueError: a setting that is not known here, or a value that cannot be; names it.
        """
        rope_type = values.get("rope_type") or values.get("type") or "default"
        named = {**values, "rope_type": OLDER_NAMES.get(rope_type, rope_type)}
        named.pop("type", None)
        named = {name: value for name, value in named.items() if value is not None}
        if unknown := sorted(set(named) - {field.name for field in fields(cls)}):
            raise ValueError(f"rope_parameters sets {', '.join(unknown)}, which is not supported")
        for name in ("short_factor", "long_factor"):
            named[name] = tuple(named.get(name, ()))
        original = named.setdefault("original_max_position_embeddings", context)
        if type(original) is not int or original < 1:
            raise ValueError(
                f"original_max_position_embeddings={original!r} must be an integer of at least 1"
            )
        if named["rope_type"] == "longrope":
            named.setdefault("factor", max(1.0, context / original))
        try:
            return cls(**named)
        except TypeError as error:
            raise ValueError(f"rope_parameters={dict(values)}: {error}") from error

    @property
    def is_fixed(self) -> bool:
        """Return whether the frequencies are those of any context."""
        return self.rope_type not in ("dynamic", "longrope")

    def count_rotated(self, head_size: int) -> int:
        """Return 2 * F, the number of values of a head that are rotated."""
        return int(head_size * self.partial_rotary_factor)

    def compute_frequencies(self, head_size: int, context: int) -> Tensor:
        """Return the frequencies (F,) in fp32 for texts of up to `context` tokens."""
        size = self.count_rotated(head_size)
        powers = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
        return STRETCHES[self.rope_type](self, self.rope_theta**powers, context)

    def compute_magnitude(self) -> float:
        """Return the factor for sines and cosines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "yarn":
            if self.mscale and self.mscale_all_dim:
                return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(
                    self.factor, self.mscale_all_dim
                )
            return yarn_magnitude(self.factor, 1.0)
        if self.rope_type == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
        return 1.0


def yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def keep(rotary: Rotary, periods: Tensor, context: int) -> Tensor:
    return 1.0 / periods


def stretch_linearly(rotary: Rotary, periods: Tensor, context: int) -> Tensor:
    """Return frequencies by position interpolation (Chen et al., 2023)."""
    return 1.0 / periods / rotary.factor


def stretch_dynamically(rotary: Rotary, periods: Tensor, context: int) -> Tensor:
    """Return frequencies by NTK-aware scaling: a larger base for a context beyond the original one."""
    original = rotary.original_max_position_embeddings
    size = 2 * len(periods)
    growth = rotary.factor * max(context, original) / original - (rotary.factor - 1)
    powers = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    base: float = rotary.rope_theta * growth ** (size / (size - 2))
    return 1.0 / base**powers


def stretch_by_wavelength(rotary: Rotary, periods: Tensor, context: int) -> Tensor:
    """Return Llama 3.1's frequencies: long wavelengths are stretched, short ones kept, others blended."""
    frequencies = 1.0 / periods
    turns = rotary.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / rotary.factor + kept * frequencies


def stretch_by_yarn(rotary: Rotary, periods: Tensor, context: int) -> Tensor:
    """Return YaRN's frequencies (Peng et al., 2023): those of few turns are stretched, of many kept."""
    size = 2 * len(periods)

    def find_dimension(turns: float) -> float:
        length = rotary.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(rotary.rope_theta))

    low = find_dimension(rotary.beta_fast)
    high = find_dimension(rotary.beta_slow)
    if rotary.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return (1 - kept) / (rotary.factor * periods) + kept / periods


def stretch_by_longrope(rotary: Rotary, periods: Tensor, context: int) -> Tensor:
    """Return LongRoPE's frequencies (Ding et al., 2024): a factor for each, of short or long contexts."""
    is_long = context > rotary.original_max_position_embeddings
    factors = rotary.long_factor if is_long else rotary.short_factor
    if len(factors) != len(periods):
        raise ValueError(
            f"{'long' if is_long else 'short'}_factor has {len(factors)} numbers, not {len(periods)}"
        )
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * periods)


STRETCHES: dict[str, Callable[[Rotary, Tensor, int], Tensor]] = {
    "default": keep,
    "linear": stretch_linearly,
    "dynamic": stretch_dynamically,
    "llama3": stretch_by_wavelength,
    "yarn": stretch_by_yarn,
    "longrope": stretch_by_longrope,
}


# What old versions of transformers saved with the weights; newer ones compute it and read none of it.
SAVED_ROTARY = re.compile(
    r"(?:layers\.(\d+)\.self_attn\.)?rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)"
)


class RotaryTables(nn.Module):
    """Cosines and sines (L, F) of all positions below a context of L tokens."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: Rotary, head_size: int, context: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.head_size = head_size
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.fill(context)

    def fill(self, context: int) -> None:
        """Compute the tables, on any device, as nothing of them is read from a checkpoint."""
        frequencies = self.rotary.compute_frequencies(self.head_size, context)
        positions = torch.arange(context, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies)  # (L, F)
        magnitude = self.rotary.compute_magnitude()
        self.cos = angles.cos() * magnitude
        self.sin = angles.sin() * magnitude

    def agrees_with(self, kind: str, saved: Tensor) -> bool:
        """Tell whether a saved tensor is the source of these tables, but for rounding to bfloat16.

        Args:
            kind: "inv_freq" or "original_inv_freq" (F,), "cos_cached" or "sin_cached" (..., L, 2 * F).
            saved: the tensor. Its frequencies may be those before they are stretched.
        """
        saved = saved.to(torch.float32)
        if kind.endswith("inv_freq"):
            plain = replace(self.rotary, rope_type="default", short_factor=(), long_factor=())
            return any(
                saved.shape == own.shape and torch.allclose(saved, own, rtol=2.0**-8, atol=1e-7)
                for rotary in (self.rotary, plain)
                for own in [rotary.compute_frequencies(self.head_size, len(self.cos))]
            )
        if saved.dim() < 2:
            return False
        own = self.cos if kind == "cos_cached" else self.sin
        rows = min(len(own), saved.shape[-2])
        own = own[:rows].repeat(1, 2)
        saved = saved.reshape(-1, saved.shape[-1])[:rows]
        return saved.shape == own.shape and torch.allclose(saved, own, rtol=0, atol=2.0**-8)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first 2 * F numbers of each head of x (B, H, T, D), in pairs (i, i + F).

        Positions are (B, T), or (1, T) where all rows share them.
        """
        cos = self.cos[positions][:, None]  # (B, 1, T, F)
        sin = self.sin[positions][:, None]
        F = cos.shape[-1]
        first = x[..., :F]
        second = x[..., F : 2 * F]
        turned = [first * cos - second * sin, second * cos + first * sin]
        if x.shape[-1] > 2 * F:
            turned.append(x[..., 2 * F :])
        return torch.cat(turned, dim=-1)
