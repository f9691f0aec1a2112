"""Pictures of attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planforge.runtime import Alignment
from planforge.runtime.apps.diagnostics.plots import draw_attention
from planforge.runtime.errors import InputError

PNG = b"\x89PNG\r\n\x1a\n"


def alignment() -> Alignment:
    weights = np.zeros((2, 3, 2, 4), np.float32)
    weights[0, :, :, 0] = 1.0  # layer 0 looks at the first source token
    weights[1, :, :, 3] = 1.0
    weights[1, 2] = 0.25  # but its last head at all of them
    return Alignment(("a", " ", "$b$", "</s>"), ("x", "</s>"), weights)


def test_averages_are_over_what_is_not_chosen() -> None:
    found = alignment()
    np.testing.assert_allclose(found.averaged(0), [[1, 0, 0, 0]] * 2)
    np.testing.assert_allclose(found.averaged(1, 2), [[0.25] * 4] * 2)
    np.testing.assert_allclose(found.averaged(head=2), [[0.625, 0.125, 0.125, 0.125]] * 2)
    np.testing.assert_allclose(found.averaged().sum(-1), 1.0)


@pytest.mark.parametrize(("name", "begins"), [("map.png", PNG), ("map.svg", b"<?xml")])
def test_pictures_of_several_kinds(tmp_path: Path, name: str, begins: bytes) -> None:
    draw_attention(alignment(), tmp_path / name, layer=1)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layer=2 must be an integer from 0 to 1"):
        draw_attention(alignment(), tmp_path / "map.png", layer=2)
    with pytest.raises(InputError, match="head=-1 must be an integer from 0 to 2"):
        draw_attention(alignment(), tmp_path / "map.png", head=-1)
    with pytest.raises(InputError, match="needs a file extension"):
        draw_attention(alignment(), tmp_path / "map")
    with pytest.raises(InputError, match=r"map\.nonsense cannot be written"):
        draw_attention(alignment(), tmp_path / "map.nonsense")
    with pytest.raises(InputError, match="cannot be written"):
        draw_attention(alignment(), tmp_path / "missing" / "map.png")
