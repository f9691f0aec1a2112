"""How pictures are read, from a checkpoint of CLIP; what is not supported is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.exporter.errors import CheckpointError

from ...helpers.diffusion import save_clip
from ...helpers.models import edit_json

SETTINGS = "preprocessor_config.json"


def read(folder: Path) -> Checkpoint:
    return Checkpoint(Source("folder", str(folder), folder))


def test_the_settings_of_texts_and_pictures(tmp_path: Path) -> None:
    model = save_clip(tmp_path)
    found = read(tmp_path).likeness
    assert found is not None
    assert (found.shortest, found.size, found.resample, found.max_length) == (34, 30, 3, 16)
    assert found.mean[0] == pytest.approx(0.48145466)
    assert found.std[2] == pytest.approx(0.27577711)
    assert found.scale == pytest.approx(math.exp(model.logit_scale.item()))


@pytest.mark.parametrize(
    "sizes",
    [
        {"size": 34, "crop_size": 30},  # as OpenAI's checkpoints had them
        {"size": {"shortest_edge": 34}, "crop_size": {"height": 30, "width": 30}},
    ],
)
def test_both_forms_of_sizes(tmp_path: Path, sizes: dict[str, Any]) -> None:
    save_clip(tmp_path)
    edit_json(tmp_path / SETTINGS, **sizes)
    found = read(tmp_path).likeness
    assert found is not None and (found.shortest, found.size) == (34, 30)


def test_settings_inside_a_processors_file(tmp_path: Path) -> None:
    save_clip(tmp_path)
    expected = read(tmp_path).likeness
    settings = json.loads((tmp_path / SETTINGS).read_text(encoding="utf-8"))
    (tmp_path / SETTINGS).unlink()
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json, which says how pictures"):
        read(tmp_path)
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": settings}), encoding="utf-8"
    )
    assert read(tmp_path).likeness == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_center_crop": False}, "sets do_center_crop=False; only true is supported"),
        ({"rescale_factor": 1 / 127.5}, "sets rescale_factor="),
        ({"size": {"height": 34, "width": 34}}, "sets size="),
        ({"size": 0}, "sets size=0"),
        ({"crop_size": {"height": 30, "width": 28}}, "sets crop_size="),
        ({"crop_size": 28}, "crops to 28; the model reads 30 x 30"),
        ({"size": 20}, "resizes to 20 and crops to 30"),
        ({"resample": 9}, "sets resample=9"),
        ({"image_mean": [0.5]}, "sets image_mean="),
        ({"image_mean": [0.5, "x", 0.5]}, "sets image_mean="),
        ({"image_std": [0.5, 0, 0.5]}, "each must be above 0"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    save_clip(tmp_path)
    edit_json(tmp_path / SETTINGS, **settings)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)
