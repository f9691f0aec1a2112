"""CLIP against transformers: vectors and logits of both sides, and the ends of texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from planforge.models import Clip
from planforge.models.checkpoint import describe, load_model

from ..helpers.diffusion import TOKENS, list_special_ids, save_clip
from ..helpers.models import edit_json

LIMIT = 1e-5
FAR = 1e-2  # what must differ differs by more


def make_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return three texts, whose end tokens stand at different places, and two pictures."""
    torch.manual_seed(1)
    ids = list_special_ids()
    tokens = torch.randint(0, ids["bos_token_id"], (3, TOKENS))
    tokens[:, 0] = ids["bos_token_id"]
    for row, end in enumerate((4, 9, TOKENS - 1)):
        tokens[row, end:] = ids["eos_token_id"]
    return tokens, torch.randn(2, 3, 30, 30)


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("end", [None, 2], ids=["first end token", "largest id"])
def test_vectors_and_logits(tmp_path: Path, activation: str, end: int | None) -> None:
    ids = {} if end is None else {"eos_token_id": end}
    sides = {"hidden_act": activation}
    reference = save_clip(tmp_path, ids=ids, text=sides, vision=sides)
    assert describe(tmp_path).task == "image-text-encoding"
    model = load_model(tmp_path)
    assert isinstance(model, Clip)
    tokens, pixels = make_inputs()
    with torch.no_grad():
        texts = reference.get_text_features(tokens).pooler_output
        pictures = reference.get_image_features(pixels).pooler_output
        torch.testing.assert_close(model.text.embed(tokens), texts, rtol=0, atol=LIMIT)
        torch.testing.assert_close(model.vision(pixels), pictures, rtol=0, atol=LIMIT)
        logits = reference(input_ids=tokens, pixel_values=pixels).logits_per_image
        torch.testing.assert_close(model(tokens, pixels), logits, rtol=0, atol=1e-3)


def test_a_later_token_does_not_change_an_earlier_one(tmp_path: Path) -> None:
    save_clip(tmp_path)
    model = load_model(tmp_path)
    assert isinstance(model, Clip)
    tokens, _ = make_inputs()
    other = tokens.clone()
    other[:, 3] = 7
    with torch.no_grad():
        one = model.text(tokens)
        two = model.text(other)
    torch.testing.assert_close(one[:, :3], two[:, :3], rtol=0, atol=0)
    assert (one[:, 3:] - two[:, 3:]).abs().max() > FAR


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("hidden_act", "relu6", "hidden_act='relu6' is not one of"),
        ("num_attention_heads", 5, "is not a multiple of num_attention_heads=5"),
        ("hidden_size", 32, "shape: text.token_embedding.weight"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, setting: str, value: object, message: str) -> None:
    save_clip(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_json(tmp_path / "config.json", text_config={**text, setting: value})
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["CLIPTextModel", "CLIPVisionModel"])
def test_a_side_alone_is_refused(tmp_path: Path, name: str) -> None:
    save_clip(tmp_path)
    edit_json(tmp_path / "config.json", architectures=[name])
    with pytest.raises(ValueError, match=f"{name} is a part of a model"):
        describe(tmp_path)
