"""GPT-1 and GPT-Neo beside transformers, whole and step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planforge.models import GPT2, GPT2Config, save_model
from planforge.models.checkpoint import load_model
from planforge.models.gpt2_names import expand_pattern

from ..helpers.models import TINY, edit_json
from .test_causal_encoder import NEO

LIMIT = 1e-5


def save_random(folder: Path, name: str, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    return model


def make_model(folder: Path, name: str) -> Any:
    if name == "OpenAIGPTLMHeadModel":
        return save_random(folder, name, transformers.OpenAIGPTConfig(**TINY))
    return save_random(folder, name, transformers.GPTNeoConfig(**NEO))


@pytest.mark.parametrize("name", ["OpenAIGPTLMHeadModel", "GPTNeoForCausalLM"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """20 tokens, five times what GPT-Neo's local layers see; also in steps on top of a cache."""
    reference = make_model(tmp_path, name)
    ours = load_model(tmp_path)
    assert isinstance(ours, GPT2)
    ids = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = reference(ids).logits
        torch.testing.assert_close(ours(ids)[0], want, rtol=0, atol=LIMIT)
        past = None
        steps = []
        for chunk in torch.split(ids, [7, 1, 1, 11], dim=1):
            logits, past = ours(chunk, past)
            steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), want, rtol=0, atol=LIMIT)
    assert want.std() > 0.3


def test_a_padded_row_is_as_alone(tmp_path: Path) -> None:
    """transformers' GPT-1 counts positions from the padding on, unless it is told them."""
    reference = make_model(tmp_path, "OpenAIGPTLMHeadModel")
    ours = load_model(tmp_path)
    ids = torch.tensor([[0, 0, 5, 17, 80]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        logits, _ = ours(ids, None, mask)
        want = reference(ids[:, 2:]).logits
    torch.testing.assert_close(logits[:, 2:], want, rtol=0, atol=LIMIT)


def test_gelu_of_a_gpt_1_is_the_approximation(tmp_path: Path) -> None:
    make_model(tmp_path, "OpenAIGPTLMHeadModel")
    assert load_model(tmp_path).config.activation_function == "gelu_new"  # type: ignore[union-attr]
    edit_json(tmp_path / "config.json", afn="silu")
    assert load_model(tmp_path).config.activation_function == "silu"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        ([[["global", "local"], 2]], "global local global local"),
        ([[["global"], 3], [["local"], 1]], "global global global local"),
    ],
)
def test_patterns_expand_as_in_transformers(pattern: Any, kinds: str) -> None:
    config = transformers.GPTNeoConfig(num_layers=4, attention_types=pattern)
    assert config.attention_layers == kinds.split()
    ours = [kind.replace("full", "global").replace("sliding", "local") for kind in expand_pattern(pattern, 4)]
    assert [kind.partition("_")[0] for kind in ours] == config.attention_layers


@pytest.mark.parametrize(
    "pattern", [[[["global", "local"], 1]], [[["moon"], 4]], [[["global"], 2**40]], 3, [3], [["global", 4]]]
)
def test_a_pattern_that_does_not_fit_is_refused(pattern: Any, tmp_path: Path) -> None:
    make_model(tmp_path, "GPTNeoForCausalLM")
    edit_json(tmp_path / "config.json", attention_types=pattern)
    with pytest.raises(ValueError, match=r"attention_types=.* must say for each of 4 layers"):
        load_model(tmp_path)


SIZES = {name: TINY[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}


@pytest.mark.parametrize("settings", [{"norm_first": False}, {"attention_scale": 1.0}])
def test_a_relative_is_not_saved_as_a_gpt_2(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"cannot be saved as gpt2: {next(iter(settings))} would be read"):
        save_model(GPT2(GPT2Config(**SIZES, **settings)), tmp_path / "model", "gpt2")
    assert not (tmp_path / "model").exists()


def test_transformers_reads_a_saved_gpt_1(tmp_path: Path) -> None:
    """That is what a `GPT2` with its norms behind the sums is saved as."""
    reference = make_model(tmp_path / "before", "OpenAIGPTLMHeadModel")
    save_model(load_model(tmp_path / "before"), tmp_path / "after")  # type: ignore[arg-type]
    kind: Any = transformers.OpenAIGPTLMHeadModel
    again, report = kind.from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not any(report.values()), report
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("settings", [{"n_inner": 48}, {"activation_function": "gelu"}])
def test_what_no_gpt_1_has_is_not_saved_as_one(settings: dict[str, Any], tmp_path: Path) -> None:
    """Its feed-forward part has four times the width, and its "gelu" is another."""
    model = GPT2(GPT2Config(**SIZES, norm_first=False, **settings))
    with pytest.raises(ValueError, match=f"cannot be saved as openai-gpt: {next(iter(settings))} would be"):
        save_model(model, tmp_path, "openai-gpt")
