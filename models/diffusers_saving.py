"""Saves a Stable Diffusion as a folder that diffusers reads, and that `load_model` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .clip_names import TEXT_ENCODER
from .diffusers_folder import INDEX
from .folder import SINGLE
from .stable_diffusion import StableDiffusion
from .unet import UNetConfig

LAYERS = "layers."
WEIGHTS = "diffusion_pytorch_model.safetensors"


def save_pipeline(
    model: StableDiffusion,
    folder: Path,
    scheduler: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write everything but the tokenizer, whose files belong into `folder`/tokenizer.

    Args:
        model: its weights are written.
        folder: created if it does not exist.
        scheduler: scheduler_config.json, with the name of diffusers' class.
        dtype: of the weights in the files.
    """
    config = model.config
    text = asdict(config.text)
    text["projection_dim"] = config.text.hidden_size  # of a projection that this class does not have
    parts: dict[str, tuple[str, dict[str, Any]]] = {
        "text_encoder": ("CLIPTextModel", {"model_type": "clip_text_model", **text}),
        "unet": ("UNet2DConditionModel", describe_unet(config.unet)),
        "vae": ("AutoencoderKL", {**asdict(config.vae), **describe_levels(config.vae.block_out_channels)}),
    }
    weights = {name: tensor.detach().to(dtype).contiguous() for name, tensor in model.named_parameters()}
    for part, (kind, settings) in parts.items():
        path = folder / part
        path.mkdir(parents=True, exist_ok=True)
        named = {"architectures": [kind]} if part == "text_encoder" else {"_class_name": kind}
        write_json(path / "config.json", {**named, **settings})
        tensors = {publish(name): tensor for name, tensor in weights.items() if name.startswith(f"{part}.")}
        save_file(tensors, path / (SINGLE if part == "text_encoder" else WEIGHTS), {"format": "pt"})
    (folder / "scheduler").mkdir(exist_ok=True)
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    libraries = {"text_encoder": "transformers", "tokenizer": "transformers"}
    kinds = {part: kind for part, (kind, _) in parts.items()}
    kinds |= {"tokenizer": "CLIPTokenizer", "scheduler": str(scheduler["_class_name"])}
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "requires_safety_checker": False}
    index |= {part: [libraries.get(part, "diffusers"), kind] for part, kind in kinds.items()}
    write_json(folder / INDEX, {**index, "safety_checker": [None, None], "feature_extractor": [None, None]})


def publish(name: str) -> str:
    """Return the published name of a weight, without its part."""
    part, _, own = name.partition(".")
    if f"{part}." != TEXT_ENCODER:
        return own
    inside = "encoder." if own.startswith(LAYERS) else "" if own.startswith("final") else "embeddings."
    return f"text_model.{inside}{own}"


def describe_unet(config: UNetConfig) -> dict[str, Any]:
    """Return unet/config.json."""
    settings = asdict(config)
    heads = settings.pop("heads")
    attended = settings.pop("has_attention")
    depths = settings.pop("depths")
    downs = ["CrossAttnDownBlock2D" if has else "DownBlock2D" for has in attended]
    return {
        **settings,
        "attention_head_dim": list(heads),
        "transformer_layers_per_block": list(depths),
        "down_block_types": downs,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(downs)],
        "mid_block_type": "UNetMidBlock2DCrossAttn",
    }


def describe_levels(widths: tuple[int, ...]) -> dict[str, Any]:
    """Return the names of an autoencoder's blocks."""
    return {
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
