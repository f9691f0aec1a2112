"""Random arrays with the layout of g2p-en's checkpoint, and its `predict` in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

GRAPHEMES = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
SIZE = 24  # 256 in the package's


def write_checkpoint(path: Path, seed: int = 6) -> dict[str, Array]:
    """Save random arrays, and return them; pronunciations differ from word to word, and some end."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc_w": (74, SIZE), "fc_b": (74,)}
    for side, rows in (("enc", 29), ("dec", 74)):
        shapes |= {
            f"{side}_emb": (rows, SIZE),
            f"{side}_w_ih": (3 * SIZE, SIZE),
            f"{side}_w_hh": (3 * SIZE, SIZE),
        }
        shapes |= {f"{side}_b_ih": (3 * SIZE,), f"{side}_b_hh": (3 * SIZE,)}
    arrays = {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["fc_b"][3] = 2  # of the end
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return arrays


def pronounce(arrays: dict[str, Array], word: str) -> list[int]:
    """Return the ids of a word's phonemes, by the formulas of g2p_en/g2p.py (Apache 2.0)."""
    letters = [GRAPHEMES.index(c) if c in GRAPHEMES[3:] else 1 for c in word] + [2]
    state = np.zeros((1, arrays["enc_w_hh"].shape[1]), np.float32)
    for letter in letters:
        state = step_cell(arrays, "enc", arrays["enc_emb"][[letter]], state)
    token, found = 2, list[int]()
    for _ in range(20):
        state = step_cell(arrays, "dec", arrays["dec_emb"][[token]], state)
        token = int((state @ arrays["fc_w"].T + arrays["fc_b"]).argmax())
        if token == 3:
            break
        found.append(token)
    return found


def step_cell(arrays: dict[str, Array], side: str, x: Array, h: Array) -> Array:
    w_ih, w_hh, b_ih, b_hh = (arrays[f"{side}_{name}"] for name in ("w_ih", "w_hh", "b_ih", "b_hh"))
    r_x, z_x, n_x = np.split(x @ w_ih.T + b_ih, 3, -1)
    r_h, z_h, n_h = np.split(h @ w_hh.T + b_hh, 3, -1)
    r = 1 / (1 + np.exp(-(r_x + r_h)))
    z = 1 / (1 + np.exp(-(z_x + z_h)))
    n = np.tanh(n_x + r * n_h)
    found: Array = (1 - z) * n + z * h
    return found
