"""Runs the cases of a model that compares pictures with texts, graph by graph.

F features of a vector
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...backends.backend import Array
from ...bundle.image_defaults import CHANNELS, LikenessDefaults
from ...images.noise import Generator
from .case import Case, CaseSet, Noise
from .images import PartsEngine, see_all
from .judge import Seen


@dataclass(frozen=True)
class LikenessEngine(PartsEngine):
    """Runs the graphs of both sides."""

    defaults: LikenessDefaults

    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        part = self.parts[case.graph]
        texts = [case_set.texts[row.text] for row in case.rows]
        if case.graph == "text_encoder":
            given = {"ids": np.array([text.tokens for text in texts], np.int64)}
        else:
            fields = [make_pixels(text.noise, self.defaults.size) for text in texts if text.noise is not None]
            given = {"pixels": np.concatenate(fields)}
        return see_all(case_set, case, part.run(given))


def make_pixels(noise: Noise, size: int) -> Array:
    """Return normalized pixels (1, 3, size, size): patches of noise, height x width of them."""
    patches = Generator(noise.seed).normal((1, CHANNELS, noise.height, noise.width))
    rows, columns = (np.arange(size) * count // size for count in (noise.height, noise.width))
    return np.ascontiguousarray(patches[:, :, rows][:, :, :, columns])
