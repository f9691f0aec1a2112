"""CLIP against transformers: vectors and logits of both sides, and the ends of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planforge.models import Clip, ClipConfig
from planforge.models.clip_names import read_clip, rename_clip
from planforge.models.folder import read_json, read_published_weights

from ..helpers.diffusion import TOKENS, list_special_ids, save_clip
from ..helpers.models import edit_json

LIMIT = 1e-5
FAR = 1e-2  # what must differ differs by more


def load(folder: Path) -> Clip:
    """Return our model with the weights of a folder of transformers."""
    model = Clip(ClipConfig(**read_clip(read_json(folder / "config.json"))))
    named = {rename_clip(name): tensor for _, name, tensor in read_published_weights(folder)}
    model.load_state_dict({name: tensor for name, tensor in named.items() if name is not None})
    return model.eval()


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
    reference: Any = save_clip(tmp_path, ids=ids, text=sides, vision=sides)
    model = load(tmp_path)
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
    model = load(tmp_path)
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
        ("layer_norm_eps", -1, "layer_norm_eps=-1 must be"),
        ("vocab_size", 0, "vocab_size=0 must be"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, setting: str, value: object, message: str) -> None:
    save_clip(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_json(tmp_path / "config.json", text_config={**text, setting: value})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
