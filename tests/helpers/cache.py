"""The reference for keys and values in int8: transformers with a cache that rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import transformers

Array: TypeAlias = npt.NDArray[np.float32]
torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


class RoundingCache(transformers.DynamicCache):
    """A cache that keeps int8 with a scale for each head and channel, rounded to even and clipped.

    Args:
        scales: None keeps floats.
    """

    def __init__(self, scales: Mapping[str, Array] | None) -> None:
        super().__init__()
        self.scales = scales
        self.stored: dict[str, Array] = {}  # (H, T, D) of row 0, in steps

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = []
        for kind, x in (("key", key_states), ("value", value_states)):
            name = f"cache.{layer_idx}.{kind}"
            _, heads, _, size = x.shape
            step = torch.ones(1)
            if self.scales is not None:
                step = torch.tensor(self.scales[name]).reshape(heads, 1, size)
            self.stored[name] = (x / step)[0].numpy()
            kept.append(x if self.scales is None else (x / step).round().clamp(-128, 127) * step)
        return super().update(kept[0], kept[1], layer_idx, *args, **kwargs)


def in_steps(
    model: transformers.GPT2LMHeadModel, tokens: list[int], scales: Mapping[str, Array] | None
) -> dict[str, Array]:
    """Keys and values (H, T, D) of one sequence by the cache's name, in steps, before they are rounded.

    Args:
        scales: (H * D,) of each; None gives them as they are, of a model that keeps floats.
    """
    cache = RoundingCache(scales)
    with torch.inference_mode():
        model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return cache.stored
