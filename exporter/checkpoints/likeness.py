"""Reads how the checkpoint of a model that compares pictures with texts says that pictures are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.bundle.image_defaults import CHANNELS, FILTERS, LikenessDefaults, PromptDefaults
from ..errors import CheckpointError, raise_checkpoint_errors

SETTINGS = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # of transformers 5, which has the settings of pictures inside
INSIDE = "image_processor"
# The settings of transformers' CLIPImageProcessor where a file has none.
USUAL_SIZE = 224
BICUBIC = 3
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")


def read_likeness(folder: Path, prompts: PromptDefaults, config: Any) -> LikenessDefaults:
    """Return how texts and pictures are read, and the scale of their likeness.

    Args:
        folder: the checkpoint's.
        prompts: how texts are read.
        config: a `ClipConfig`.

    Raises:
        CheckpointError: a file is missing or damaged, or sets what is not supported; names both.
    """
    image_size = config.vision.image_size
    path, settings = read_settings(folder)
    for name in STEPS:
        if settings.get(name, True) is not True:
            raise CheckpointError(f"{path} sets {name}={settings[name]!r:.60}; only true is supported")
    factor = settings.get("rescale_factor", 1 / 255)
    if not is_number(factor) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise CheckpointError(f"{path} sets rescale_factor={factor!r:.60}; only 1/255 is supported")
    shortest = read_size(path, settings, "size", ("shortest_edge",))
    size = read_size(path, settings, "crop_size", ("height", "width"))
    if size != image_size or shortest < size:
        raise CheckpointError(
            f"{path} resizes to {shortest} and crops to {size}; the model reads {image_size} x {image_size}"
        )
    resample = settings.get("resample", BICUBIC)
    if type(resample) is not int or resample not in FILTERS:
        raise CheckpointError(
            f"{path} sets resample={resample!r:.60}; Pillow's filters are 0 to {max(FILTERS)}"
        )
    return LikenessDefaults(
        **vars(prompts),
        shortest=shortest,
        size=size,
        resample=resample,
        mean=read_colours(path, settings, "image_mean", MEAN),
        std=read_colours(path, settings, "image_std", STD),
        scale=read_scale(folder),
    )


def read_settings(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the file that says how pictures are read, and its settings."""
    from ...models.folder import read_json

    with raise_checkpoint_errors():
        if (folder / SETTINGS).is_file():
            return folder / SETTINGS, read_json(folder / SETTINGS)
        inside = read_json(folder / PROCESSOR, missing={}).get(INSIDE)
    if isinstance(inside, dict):
        return folder / PROCESSOR, inside
    raise CheckpointError(f"{folder} has no {SETTINGS}, which says how pictures are read; copy the model's")


def read_size(path: Path, settings: Mapping[str, Any], name: str, sides: tuple[str, ...]) -> int:
    """Return a size in pixels, which is a number, or one by the names of its sides."""
    value = settings.get(name, USUAL_SIZE)
    named = isinstance(value, dict) and set(value) == set(sides)
    found = set(value.values()) if named else {value} if type(value) is int else set()
    if len(found) != 1 or type(one := found.pop()) is not int or one < 1:
        raise CheckpointError(f"{path} sets {name}={value!r:.60}; supported is one number of pixels")
    return int(one)


def read_colours(
    path: Path, settings: Mapping[str, Any], name: str, usual: tuple[float, ...]
) -> tuple[float, ...]:
    """Return a number for each of red, green and blue."""
    values = settings.get(name, usual)
    if not isinstance(values, list | tuple) or len(values) != CHANNELS or not all(map(is_number, values)):
        raise CheckpointError(f"{path} sets {name}={values!r:.60}; it must have {CHANNELS} numbers")
    if name == "image_std" and min(values) <= 0:
        raise CheckpointError(f"{path} sets {name}={values!r:.60}; each must be above 0")
    return tuple(map(float, values))


def is_number(value: object) -> bool:
    """Tell whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_scale(folder: Path) -> float:
    """Return what cosines are multiplied by; the other weights stay in their files."""
    from ...models.clip_names import SCALE
    from ...models.folder import read_published_weights

    with raise_checkpoint_errors():
        found = [tensor for _, name, tensor in read_published_weights(folder) if name == SCALE]
    if len(found) != 1 or found[0].numel() != 1 or not math.isfinite(scale := math.exp(float(found[0]))):
        raise CheckpointError(f"{folder}: the weights have no usable {SCALE}")
    return scale
