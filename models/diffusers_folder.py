"""Reads what a folder of diffusers says of its models: model_index.json, and the parts that it lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .autoencoder import AutoencoderConfig
from .clip import ClipTextConfig
from .folder import read_json
from .stable_diffusion import StableDiffusionConfig
from .unet import UNetConfig

INDEX = "model_index.json"
PIPELINES = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "LatentConsistencyModelPipeline",
    "LatentConsistencyModelImg2ImgPipeline",
)
# Beginnings of other pipelines' names, and what to do instead.
OTHER_PIPELINES = {
    "StableDiffusionXL": "which has two text encoders; export a model of Stable Diffusion 1, 2, Turbo or LCM",
    "StableDiffusionControlNet": "which is controlled by a picture; export the model that it extends",
    "StableDiffusionInpaint": "whose unet also reads a mask; export the model that it was made from",
    "StableDiffusion3": "whose denoiser is a transformer; supported are Stable Diffusion 1, 2, Turbo and LCM",
    "Flux": "whose denoiser is a transformer; supported are Stable Diffusion 1, 2, Turbo and LCM",
}
# The parts that become graphs, with the classes that they may have.
PARTS = {
    "text_encoder": ("CLIPTextModel",),
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
}
TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")
# Settings that say nothing of what a part computes in fp32, or that are read below.
SILENT = {"sample_size", "upcast_attention", "force_upcast"}
UNET_READ = {
    "attention_head_dim",
    "num_attention_heads",
    "transformer_layers_per_block",
    "down_block_types",
    "up_block_types",
}
# Settings that are supported with one value. Those without a row may be null, false, "" or empty.
UNET_ONLY = {
    "act_fn": ("silu",),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "downsample_padding": (1,),
    "mid_block_scale_factor": (1,),
    "resnet_time_scale_shift": ("default",),
    "resnet_out_scale_factor": (1,),
    "time_embedding_type": ("positional",),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "attention_type": ("default",),
    "addition_embed_type_num_heads": (64,),
}
VAE_READ = {"down_block_types", "up_block_types"}
VAE_ONLY = {"act_fn": ("silu",), "mid_block_add_attention": (True,)}
INFINITE = (math.inf, -math.inf)
OFF: tuple[object, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class Pipeline:
    """Describes what a diffusers folder has.

    Attributes:
        config: the settings of its three models.
        config_json: model_index.json.
        folders: the folder of each part's weights, by the part's name.
        tokenizer: the folder of its tokenizer.
        scheduler: scheduler_config.json.
        has_safety_checker: whether pictures are checked by a model, which is left out here.
    """

    config: StableDiffusionConfig
    config_json: Mapping[str, Any]
    folders: Mapping[str, Path]
    tokenizer: Path
    scheduler: Mapping[str, Any]
    has_safety_checker: bool


def is_pipeline(folder: Path) -> bool:
    """Tell whether a folder is one of diffusers."""
    return (folder / INDEX).is_file()


def read_pipeline(folder: Path) -> Pipeline:
    """Read the description of a diffusers folder, without weights.

    Raises:
        ValueError: a file is missing or damaged, or sets what is not supported; names both.
    """
    index = read_json(folder / INDEX)
    check_class(folder, index.get("_class_name"))
    for part, classes in {**PARTS, "tokenizer": TOKENIZERS}.items():
        check_part(folder, index, part, classes)
    try:
        config = StableDiffusionConfig(
            text=read_text_encoder(folder / "text_encoder" / "config.json"),
            unet=read_unet(folder / "unet" / "config.json"),
            vae=read_vae(folder / "vae" / "config.json"),
        )
    except TypeError as error:
        raise ValueError(f"{folder}: {error}") from error
    return Pipeline(
        config=config,
        config_json=index,
        folders={part: folder / part for part in PARTS},
        tokenizer=folder / "tokenizer",
        scheduler=read_scheduler(folder / "scheduler" / "scheduler_config.json", str(index["_class_name"])),
        has_safety_checker=read_class(index, "safety_checker") is not None,
    )


def check_class(folder: Path, name: object) -> None:
    """Refuse a pipeline that is not supported, by its class."""
    if name in PIPELINES:
        return
    why = next(
        (why for begin, why in OTHER_PIPELINES.items() if str(name).startswith(begin)),
        f"which is not supported; supported are {', '.join(PIPELINES)}",
    )
    raise ValueError(f"{folder / INDEX}: the pipeline is a {name}, {why}")


def read_class(index: Mapping[str, Any], part: str) -> str | None:
    """Return the name of a part's class; None where model_index.json has no such part."""
    entry = index.get(part)
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        return None
    return entry[1]


def check_part(folder: Path, index: Mapping[str, Any], part: str, classes: tuple[str, ...]) -> None:
    """Refuse a part that is missing, or of a class that is not supported."""
    found = read_class(index, part)
    if found not in classes:
        raise ValueError(
            f"{folder / INDEX}: {part} is {found or 'missing'}; supported is {' or '.join(classes)}"
        )


def read_scheduler(path: Path, pipeline: str) -> dict[str, Any]:
    """Return the settings of scheduler_config.json, as diffusers' class of the pipeline changes them."""
    settings = read_json(path)
    forced = {"steps_offset": 1, "clip_sample": False} if pipeline.startswith("StableDiffusion") else {}
    # An infinite number is a default, which JSON cannot have.
    return {name: value for name, value in settings.items() if value not in INFINITE} | forced


def read_text_encoder(path: Path) -> ClipTextConfig:
    """Return the settings of text_encoder/config.json."""
    known = {field.name for field in fields(ClipTextConfig)} - {"projection_dim"}
    settings = read_json(path)
    return ClipTextConfig(**{name: value for name, value in settings.items() if name in known})


def read_unet(path: Path) -> UNetConfig:
    """Return the settings of unet/config.json; refuse those that are not supported."""
    settings = read_json(path)
    own = select(path, settings, UNetConfig, UNET_READ, UNET_ONLY)
    levels = len(own.get("block_out_channels", UNetConfig.block_out_channels))
    downs = settings.get("down_block_types", ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"])
    check_blocks(path, "down_block_types", downs, ("CrossAttnDownBlock2D", "DownBlock2D"))
    ups = [str(name).replace("Down", "Up") for name in reversed(downs)]
    if settings.get("up_block_types", ups) != ups:
        raise ValueError(f"{path}: up_block_types is {settings['up_block_types']}; supported is {ups}")
    heads = settings.get("num_attention_heads") or settings.get("attention_head_dim", 8)
    depths = settings.get("transformer_layers_per_block", 1)
    return UNetConfig(
        **own,
        heads=repeat(heads, levels),
        has_attention=tuple(name == "CrossAttnDownBlock2D" for name in downs),
        depths=repeat(depths, levels),
    )


def read_vae(path: Path) -> AutoencoderConfig:
    """Return the settings of vae/config.json; refuse those that are not supported."""
    settings = read_json(path)
    own = select(path, settings, AutoencoderConfig, VAE_READ, VAE_ONLY)
    for name, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        check_blocks(path, name, settings.get(name, [kind]), (kind,))
    return AutoencoderConfig(**own)


def select(
    path: Path,
    settings: Mapping[str, Any],
    config: type[Any],
    read: set[str],
    only: Mapping[str, tuple[object, ...]],
) -> dict[str, Any]:
    """Return the settings that a config has; refuse others that are not off, and not known to be harmless."""
    known = {field.name for field in fields(config)}
    own: dict[str, Any] = {}
    for name, value in settings.items():
        if name in known:
            own[name] = tuple(value) if isinstance(value, list) else value
        elif name in read | SILENT or name.startswith("_") or value in OFF:
            continue
        elif value not in only.get(name, ()):
            allowed = only.get(name, (None,))[0]
            raise ValueError(f"{path} sets {name}={value!r:.60}; only {allowed!r} is supported")
    return own


def check_blocks(path: Path, name: str, blocks: object, allowed: tuple[str, ...]) -> None:
    """Refuse blocks of a kind that is not supported."""
    others = [block for block in blocks if block not in allowed] if isinstance(blocks, list) else [blocks]
    if others:
        raise ValueError(f"{path}: {name} has {others[0]!r:.60}; supported is {' or '.join(allowed)}")


def repeat(value: Any, levels: int) -> tuple[int, ...]:
    """Return a setting of each level, given one for all levels or a list."""
    return tuple(value) if isinstance(value, list) else (value,) * levels
