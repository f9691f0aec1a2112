"""Random word vectors, some of which lie where a known analogy puts them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

DIMENSIONS = 32
WORDS = ["the", "king", "queen", "man", "woman", "new york", "Zoë", "<unk>", *(f"w{i}" for i in range(392))]


def make_vectors() -> npt.NDArray[np.float32]:
    """Vectors (V, D) of `WORDS`, of lengths from 1 to 30: "queen" is "king" - "man" + "woman"."""
    random = np.random.default_rng(0)
    vectors = random.normal(size=(len(WORDS), DIMENSIONS)) * random.uniform(0.2, 5, (len(WORDS), 1))
    royal, male, female = random.normal(size=(3, DIMENSIONS)) * 3
    vectors[1:5] = [royal + male, royal + female, male, female]
    return vectors.astype(np.float32)


def write_glove(path: Path) -> None:
    """Write `WORDS` as GloVe's text."""
    pairs = zip(WORDS, make_vectors(), strict=True)
    lines = [f"{word} {' '.join(map(str, vector))}\n" for word, vector in pairs]
    path.write_text("".join(lines), encoding="utf-8")
