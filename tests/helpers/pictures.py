"""Pictures beside those of diffusers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from planforge.runtime.images.pictures import Picture

# Both sides round to whole 255ths; sums in another order may round a few of them to the next.
MOST = 1
FEW = 0.01


def ask_pipeline(pipeline: Any, prompt: Any, seed: int, steps: int, **options: Any) -> Any:
    """Return the pictures (N, H, W, 3) of a pipeline of diffusers, of whole 255ths."""
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers tells of its own deprecations
        found = pipeline(
            prompt, num_inference_steps=steps, generator=generator, output_type="np", **options
        ).images
    return (found * 255).round()


def compare_pictures(pictures: Sequence[Picture], wanted: Any) -> None:
    """Fail unless pictures are those of diffusers, but for rounding."""
    got = np.stack([picture.pixels for picture in pictures]).astype(float)
    assert got.shape == wanted.shape
    gaps = np.abs(got - wanted)
    assert gaps.max() <= MOST
    assert (gaps > 0).mean() <= FEW
    assert got.std() > 10  # not all grey
