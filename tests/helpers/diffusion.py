"""Tiny random checkpoints of Stable Diffusion and CLIP, written by diffusers and transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import logging

from .models import TINY  # sets transformers up

assert TINY
logging.set_verbosity_error()
logging.disable_progress_bar()

LETTERS = "abcdefghijklmnopqrstuvwxyz"
START = "<|startoftext|>"
END = "<|endoftext|>"
MERGES = [("r", "e"), ("re", "d</w>"), ("t", "h"), ("th", "e</w>"), ("o", "n"), ("on", "e</w>")]
TOKENS = 16  # of a prompt
UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 64,
    "attention_head_dim": (2, 4, 8),
    "norm_num_groups": 16,
}
SMALL: dict[str, Any] = {  # of two levels, one with attention: tracing takes most of an export
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": (2, 4),
}
AUTOENCODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (16, 32, 64),
    "layers_per_block": 2,
    "norm_num_groups": 8,
    "latent_channels": 4,
}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TOKENS,
    "initializer_range": 0.3,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 8,
    "initializer_range": 0.3,
}
SCHEDULER: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "steps_offset": 1,
    "skip_prk_steps": True,
    "set_alpha_to_one": False,
}


def make_tokenizer() -> transformers.CLIPTokenizer:
    """Return a CLIP tokenizer of a few words."""
    symbols = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *("".join(pair) for pair in MERGES)]
    vocab = {token: number for number, token in enumerate([*symbols, START, END])}
    merges: Any = MERGES  # its annotation is of strings
    tokenizer = transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=TOKENS)
    assert isinstance(tokenizer, transformers.CLIPTokenizer)
    return tokenizer


def list_special_ids() -> dict[str, int]:
    """Return the ids of the special tokens and the size of the vocabulary, as a config has them."""
    vocab = make_tokenizer().get_vocab()
    end = vocab[END]
    return {
        "vocab_size": len(vocab),
        "bos_token_id": vocab[START],
        "eos_token_id": end,
        "pad_token_id": end,
    }


def make_pipeline(unet: dict[str, Any] | None = None, **text: Any) -> StableDiffusionPipeline:
    """Return a random Stable Diffusion of diffusers, in fp32 and eval mode."""
    torch.manual_seed(0)
    encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(**TEXT, **list_special_ids() | text)
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers tells of its own deprecations
        return StableDiffusionPipeline(
            text_encoder=encoder,
            unet=UNet2DConditionModel(**UNET | (unet or {})).eval(),
            vae=AutoencoderKL(**AUTOENCODER).eval(),
            tokenizer=make_tokenizer(),
            scheduler=PNDMScheduler(**SCHEDULER),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


def save_pipeline(folder: Path, **settings: Any) -> StableDiffusionPipeline:
    """Write a random Stable Diffusion's folder, and return it."""
    pipeline = make_pipeline(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline.save_pretrained(folder)
    return pipeline


def save_small_pipeline(folder: Path) -> StableDiffusionPipeline:
    """Write a random Stable Diffusion's folder that is quickly exported, and return it."""
    return save_pipeline(folder, unet=SMALL)


def save_clip(folder: Path, **settings: Any) -> transformers.CLIPModel:
    """Write a random CLIP's folder, and return it."""
    torch.manual_seed(0)
    ids = list_special_ids() | settings.pop("ids", {})
    config = transformers.CLIPConfig(
        text_config={**TEXT, **ids, **settings.pop("text", {})},
        vision_config={**VISION, **settings.pop("vision", {})},
        projection_dim=24,
        **settings,
    )
    model: transformers.CLIPModel = transformers.CLIPModel(config).eval()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    make_image_processor().save_pretrained(folder)
    return model


def make_image_processor() -> transformers.CLIPImageProcessorPil:
    """Return what reads pictures for a small CLIP: resized to 34, of which the middle 30 count."""
    return transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 34}, crop_size={"height": VISION["image_size"], "width": VISION["image_size"]}
    )
