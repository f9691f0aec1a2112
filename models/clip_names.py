"""The names of CLIP's weights and settings in transformers, and those of diffusers' parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .clip import ClipTextConfig, ClipVisionConfig

SIDES = {"text_model.": "text.", "vision_model.": "vision."}
PROJECTIONS = {"text_projection.": "text.projection.", "visual_projection.": "vision.projection."}
INSIDE = ("embeddings.", "encoder.")  # what stands in a side's names in addition to ours
SCALE = "logit_scale"
POSITION_IDS = "position_ids"  # a counter that old files hold
# An old autoencoder's names of attention, and today's.
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
OLD_ATTENTION_WEIGHT = re.compile(rf"(.*attentions\.0\.)({'|'.join(OLD_ATTENTION)})(\..*)")
TEXT_ENCODER = "text_encoder."


def rename_clip(name: str) -> str | None:
    """Return our name of a published weight; None of one that is no weight."""
    for published, ours in SIDES.items():
        if name.startswith(published):
            own = rename_side(name.removeprefix(published))
            return None if own is None else ours + own
    for published, ours in PROJECTIONS.items():
        if name.startswith(published):
            return ours + name.removeprefix(published)
    return name


def rename_side(name: str) -> str | None:
    """Return our name of a weight of one side, without the side's own."""
    if name.endswith(POSITION_IDS):
        return None
    return name.removeprefix(INSIDE[0]).removeprefix(INSIDE[1])


def rename_stable_diffusion(name: str) -> str | None:
    """Return our name of a weight of one of diffusers' parts, whose name stands before it.

    transformers 5 saves a text encoder without "text_model.".
    """
    if name.startswith(TEXT_ENCODER):
        own = rename_side(name.removeprefix(TEXT_ENCODER).removeprefix("text_model."))
        return None if own is None else TEXT_ENCODER + own
    if found := OLD_ATTENTION_WEIGHT.fullmatch(name):
        return found[1] + OLD_ATTENTION[found[2]] + found[3]
    return name


def read_clip(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of both sides by a config.json, and the width of their vectors."""
    width = config_json.get("projection_dim", 512)
    sides = {}
    for side, config in (("text", ClipTextConfig), ("vision", ClipVisionConfig)):
        settings = config_json.get(f"{side}_config")
        if not isinstance(settings, dict):
            raise ValueError(f"config.json has no {side}_config")
        known = {field.name for field in fields(config)}
        own = {name: value for name, value in settings.items() if name in known}
        sides[side] = config(**{**own, "projection_dim": width})
    return sides
