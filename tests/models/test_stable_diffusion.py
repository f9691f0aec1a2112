"""Stable Diffusion's parts against diffusers, and the settings and files of its folders."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file

from planforge.models import StableDiffusion
from planforge.models.checkpoint import describe, load_model
from planforge.models.diffusers_folder import read_unet
from planforge.models.unet import UNet

from ..helpers.diffusion import TOKENS, UNET, list_special_ids, save_pipeline
from ..helpers.models import edit_json

LIMIT = 1e-5
FAR = 1e-2  # what must differ differs by more


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("sd")
    return folder, save_pipeline(folder)


@pytest.fixture
def copied(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the folder, to damage."""
    return Path(shutil.copytree(saved[0], tmp_path / "sd"))


def load(folder: Path) -> StableDiffusion:
    model = load_model(folder)
    assert isinstance(model, StableDiffusion)
    return model


@pytest.mark.parametrize("size", [(8, 8), (12, 4), (5, 19)])
def test_each_part(saved: tuple[Path, Any], size: tuple[int, int]) -> None:
    folder, reference = saved
    model = load(folder)
    torch.manual_seed(1)
    tokens = torch.randint(0, list_special_ids()["vocab_size"], (2, TOKENS))
    latents = torch.randn(2, 4, *size)
    pictures = torch.rand(2, 3, 4 * size[0], 4 * size[1]) * 2 - 1
    steps = torch.tensor([999, 3])
    with torch.no_grad():
        states = reference.text_encoder(tokens).last_hidden_state
        torch.testing.assert_close(model.text_encoder(tokens), states, rtol=0, atol=LIMIT)
        noise = reference.unet(latents, steps, encoder_hidden_states=states).sample
        torch.testing.assert_close(model.unet(latents, steps, states), noise, rtol=0, atol=LIMIT)
        wanted = reference.vae.decode(latents).sample
        torch.testing.assert_close(model.vae.decode(latents), wanted, rtol=0, atol=LIMIT)
        posterior = reference.vae.encode(pictures).latent_dist
        mean, deviation = model.vae.encode(pictures)
        torch.testing.assert_close(mean, posterior.mean, rtol=0, atol=LIMIT)
        torch.testing.assert_close(deviation, posterior.std, rtol=0, atol=LIMIT)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_linear_projection": True},
        {"time_cond_proj_dim": 32},
        {"attention_head_dim": 8},
        {"transformer_layers_per_block": 2, "layers_per_block": 1},
        {"flip_sin_to_cos": False, "freq_shift": 1},
        {"norm_eps": 1e-3},
        {"down_block_types": ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 2,
         "up_block_types": ("CrossAttnUpBlock2D",) * 2 + ("UpBlock2D",)},
    ],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_settings_of_a_unet(tmp_path: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    reference = UNet2DConditionModel(**{**UNET, **settings}).eval()
    reference.save_pretrained(tmp_path)
    model = UNet(read_unet(tmp_path / "config.json")).eval()
    model.load_state_dict(reference.state_dict())
    latents = torch.randn(2, 4, 8, 12)
    text = torch.randn(2, 7, 64)
    steps = torch.tensor([500, 1])
    guidance = torch.randn(2, 32) if "time_cond_proj_dim" in settings else None
    with torch.no_grad():
        wanted = reference(latents, steps, encoder_hidden_states=text, timestep_cond=guidance).sample
        torch.testing.assert_close(model(latents, steps, text, guidance), wanted, rtol=0, atol=LIMIT)


def test_old_names_of_an_autoencoders_attention(saved: tuple[Path, Any], copied: Path) -> None:
    path = copied / "vae" / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    weights = load_file(path)
    for new, name in old.items():
        for key in [key for key in weights if f"attentions.0.{new}." in key]:
            weights[key.replace(f".{new}.", f".{name}.")] = weights.pop(key)
    save_file(weights, path)
    latents = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            load(copied).vae.decode(latents), saved[1].vae.decode(latents).sample, rtol=0, atol=LIMIT
        )


def test_weights_in_fp16_alone(saved: tuple[Path, Any], copied: Path) -> None:
    path = copied / "unet" / "diffusion_pytorch_model.safetensors"
    half = {name: tensor.half() for name, tensor in load_file(path).items()}
    save_file(half, path.with_name("diffusion_pytorch_model.fp16.safetensors"))
    whole = load(copied).unet.conv_in.weight
    assert not torch.equal(whole, whole.half().float())  # those in fp32 come first
    path.unlink()
    torch.testing.assert_close(load(copied).unet.conv_in.weight, whole.half().float(), rtol=0, atol=0)


def test_shards(saved: tuple[Path, Any], copied: Path) -> None:
    single = copied / "unet" / "diffusion_pytorch_model.safetensors"
    single.unlink()
    saved[1].unet.save_pretrained(copied / "unet", max_shard_size="100KB")
    assert len(list(single.parent.glob("*.safetensors"))) > 2
    own = load(copied).state_dict()
    assert all(
        torch.equal(tensor, own[f"unet.{name}"]) for name, tensor in saved[1].unet.state_dict().items()
    )


def test_description(saved: tuple[Path, Any]) -> None:
    found = describe(saved[0])
    assert found.task == "image-generation"
    assert found.pipeline is not None
    assert found.pipeline.scheduler["_class_name"] == "PNDMScheduler"
    assert not found.pipeline.has_safety_checker


def test_a_safety_checker_is_told_of(copied: Path) -> None:
    edit_json(
        copied / "model_index.json", safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"]
    )
    pipeline = describe(copied).pipeline
    assert pipeline is not None
    assert pipeline.has_safety_checker


def edit(file: str, **settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit_json(folder / file, **settings)

    return change


def keep_pickle_alone(folder: Path) -> None:
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    path.rename(path.with_suffix(".bin"))


def keep_file(name: str, **settings: Any) -> Callable[[Path], None]:
    """Return what leaves one file in a folder: weights with the names of single files, or settings."""

    def change(folder: Path) -> None:
        (folder / "model_index.json").unlink()
        if settings:
            (folder / name).write_text(json.dumps(settings), encoding="utf-8")
        else:
            save_file({"model.diffusion_model.out.2.bias": torch.zeros(4)}, folder / name)

    return change


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "SDXL": (edit("model_index.json", _class_name="StableDiffusionXLPipeline"), "has two text encoders"),
    "inpainting": (edit("model_index.json", _class_name="StableDiffusionInpaintPipeline"), "reads a mask"),
    "ControlNet": (edit("model_index.json", _class_name="StableDiffusionControlNetPipeline"), "controlled"),
    "another pipeline": (edit("model_index.json", _class_name="DDPMPipeline"), "supported are"),
    "no unet": (edit("model_index.json", unet=[None, None]), "unet is missing"),
    "another vae": (edit("model_index.json", vae=["diffusers", "VQModel"]), "vae is VQModel"),
    "an unknown setting": (edit("unet/config.json", class_embed_type="timestep"), "class_embed_type='time"),
    "an unknown block": (edit("unet/config.json", down_block_types=["KDownBlock2D"] * 3), "KDownBlock2D"),
    "another middle": (edit("unet/config.json", mid_block_type="UNetMidBlock2D"), "mid_block_type='UNetMid"),
    "heads that do not divide": (edit("unet/config.json", attention_head_dim=7), "not divided by 7 heads"),
    "groups that do not divide": (edit("vae/config.json", norm_num_groups=7), "norm_num_groups=7"),
    "text of another width": (edit("text_encoder/config.json", hidden_size=32), "hidden_size is 32, but"),
    "no scaling": (edit("vae/config.json", scaling_factor=0), "scaling_factor=0 must be a number above 0"),
    "a pickle": (keep_pickle_alone, "is a pickle, which is never opened"),
    "a LoRA": (keep_file("pytorch_lora_weights.safetensors"), "is a LoRA.* fuse_lora"),
    "a UNet alone": (keep_file("config.json", _class_name="UNet2DConditionModel"), "Model is a part of"),
    "a ControlNet alone": (keep_file("config.json", _class_name="ControlNetModel"), "NetModel is a part"),
    "one file": (keep_file("v1-5.safetensors"), "is a whole model.*from_single_file"),
    "no scheduler": (lambda folder: shutil.rmtree(folder / "scheduler"), "scheduler_config.json does"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_supported_is_named(copied: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(copied)
    with pytest.raises(ValueError, match=message):
        load_model(copied)


FAULTS: dict[str, Callable[[Any], object]] = {
    "a group norm's epsilon": lambda model: setattr(model.unet.down_blocks[0].resnets[0].norm1, "eps", 1e-2),
    "sines and cosines": lambda model: setattr(
        model.unet, "make_waves", lambda step: UNet.make_waves(model.unet, step).roll(16, dims=1)
    ),
    "a time step": lambda model: setattr(
        model.unet, "make_waves", lambda step: UNet.make_waves(model.unet, step + 1)
    ),
    "heads": lambda model: setattr(
        model.unet.mid_block.attentions[0].transformer_blocks[0].attn2, "heads", 2
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_far_outside_the_limit(saved: tuple[Path, Any], fault: str) -> None:
    model = load(saved[0])
    torch.manual_seed(1)
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([40]), torch.randn(1, TOKENS, 64)
    with torch.no_grad():
        wanted = model.unet(*inputs)
        FAULTS[fault](model)
        assert (model.unet(*inputs) - wanted).abs().max() > 30 * LIMIT


def test_index_is_json(copied: Path) -> None:
    (copied / "model_index.json").write_text(json.dumps(["StableDiffusionPipeline"]))
    with pytest.raises(ValueError, match="must hold a JSON object"):
        describe(copied)


def test_settings_of_a_scheduler_as_the_pipeline_changes_them(saved: tuple[Path, Any], copied: Path) -> None:
    """The class of diffusers forces two, and an infinite number is in no manifest."""
    path = copied / "scheduler" / "scheduler_config.json"
    settings = json.loads(path.read_text()) | {"steps_offset": 0, "lambda_min_clipped": -math.inf}
    path.write_text(json.dumps(settings))
    found = describe(copied).pipeline
    assert found is not None
    scheduler = saved[1].scheduler
    assert found.scheduler["steps_offset"] == scheduler.config.steps_offset == 1
    assert "lambda_min_clipped" not in found.scheduler
