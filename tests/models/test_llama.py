"""The Llama family against transformers: every kind, a cache, padding, windows, and what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from planforge.models import Llama
from planforge.models.checkpoint import describe, load_model
from planforge.models.llama import LlamaConfig
from planforge.models.llama_families import read_settings

from ..helpers.llamas import LLAMA3, LLAMAS, LONG, PLAIN, SIZES, WINDOW, tiny_llama
from ..helpers.models import edit_json, edit_weights

LIMIT = 1e-4  # the issue's, on logits


def load_llama(folder: Path) -> Llama:
    ours = load_model(folder)
    assert isinstance(ours, Llama)
    return ours


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """A padded batch longer than two windows, at once, and in steps on top of a cache."""
    reference = tiny_llama(tmp_path, name)
    ours = load_llama(tmp_path)
    ids = torch.randint(3, 2048, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        want = reference(ids, attention_mask=mask, position_ids=positions).logits
        whole, _ = ours(ids, attention_mask=mask)
        first, past = ours(ids[:, :25], attention_mask=mask[:, :25])
        second, _ = ours(ids[:, 25:], past, mask)
    assert want[mask == 1].std() > 0.1  # the reference is no constant
    stepped = torch.cat([first, second], dim=1)
    torch.testing.assert_close(whole[mask == 1], want[mask == 1], rtol=0, atol=LIMIT)
    torch.testing.assert_close(stepped[mask == 1], want[mask == 1], rtol=0, atol=LIMIT)
    assert past[0][0].shape == (2, 2, 25, ours.config.head_dim)


SPIRAL = {"rope_type": "spiral", "rope_theta": 1e4}
NO_ORIGINAL = {**LLAMA3, "original_max_position_embeddings": 0}
NO_FACTORS = {"rope_type": "longrope", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama 2", {"rope_parameters": SPIRAL}, "rope_type='spiral' is not one of default, linear"),
        ("llama 2", {"rope_parameters": {"rope_theta": 1e4, "twist": 2}}, "rope_parameters sets twist"),
        ("llama 2", {"mixture": 8}, "config.json sets mixture=8, which is not known for llama"),
        ("llama 2", {"is_causal": False}, "config.json sets is_causal=False, which is not known for llama"),
        ("phi-4-mini", {"full_attn_mod": 2}, "config.json sets full_attn_mod=2, which is not known for phi3"),
        ("gemma 2", {"sliding_window_size": 7}, "config.json sets sliding_window_size=7, which is not known"),
        (
            "phi-4-mini",
            {"rope_parameters": {**LONG, "rope_type": "yarn"}},
            "short_factor and long_factor belong to longrope, not to 'yarn'",
        ),
        ("llama 2", {"use_mixture": True}, "config.json sets use_mixture=True, which is not known"),
        ("llama 2", {"num_key_value_heads": 3}, "=4 is not a multiple of num_key_value_heads=3"),
        ("llama 2", {"hidden_act": "snake"}, "hidden_act='snake' is not one of"),
        ("gemma 2", {"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
        ("gemma 2", {"layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention'"),
        ("llama 2", {"layer_types": ["linear_attention"] * 3}, "has 'linear_attention'; full_attention and"),
        (
            "gemma 2",
            {"layer_types": None, "sliding_window_pattern": "LG"},
            "sliding_window_pattern='LG' must",
        ),
        (
            "olmo 3",
            {"rope_parameters": {"full_attention": PLAIN}},
            "rope_parameters has no sliding_attention",
        ),
        ("llama 2", {"sliding_window": 8}, "config.json sets sliding_window=8, which is not known for llama"),
        (
            "mistral",
            {"layer_types": None, "num_hidden_layers": 2**31},
            "is more than the supported 2000 layers",
        ),
        ("smollm3", {"no_rope_layers": None, "num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 in"),
        ("mistral", {"sliding_window": -1}, "window=-1 must be an integer of at least 1"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] must have 0 or 1 for each of the 3"),
        ("gemma 2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be a number above 0"),
        ("gemma 2", {"attn_logit_softcapping": -5.0}, r"attention_softcap=-5.0 must be a number above 0"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling='8' must be a number above 0"),
        ("granite", {"residual_multiplier": [1]}, r"residual_scale=\[1\] must be a number"),
        ("llama 3.1", {"rope_parameters": {**LLAMA3, "high_freq_factor": "x"}}, "high_freq_factor='x' must"),
        (
            "llama 3.1",
            {"rope_parameters": NO_ORIGINAL},
            "original_max_position_embeddings=0 must be an integer",
        ),
        ("llama 2", {"num_attention_heads": None}, "config.json has no num_attention_heads"),
        ("llama 2", {"num_attention_heads": 0}, "num_attention_heads=0 must be an integer of at least 1"),
        ("llama 2", {"num_attention_heads": "4"}, "num_attention_heads='4' must be an integer"),
        ("phi-4-mini", {"rope_parameters": NO_FACTORS}, "short_factor has 0 numbers, not 8"),
    ],
)
def test_what_a_config_asks_for_and_is_not_known_is_named(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny_llama(tmp_path, name)
    edit_json(tmp_path / "config.json", **settings)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


# As published: SmolLM2 135M and 1.7B-Instruct, Phi-4-mini-instruct, gemma-2-9b, a mirror of Llama 3.2.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 2": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_parameters": None,
        "rope_scaling": None,
        "rope_theta": 1e5,
        "pretraining_tp": 1,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"fp16": "float16"}},
    },
    "llama 3.1": {"unsloth_fixed": True, "pretraining_tp": 1, "mlp_bias": False, "_name_or_path": "x"},
    "phi-4-mini": {
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    },
    "gemma 2": {"sliding_window_size": WINDOW, "cache_implementation": "hybrid", "hidden_act": "gelu"},
    "gemma 3": {
        "rope_parameters": None,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "cache_implementation": "hybrid",
        "layer_types": None,
        "sliding_window_pattern": 6,
    },
}


def test_older_names_of_rotary_settings_mean_the_same(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "llama 3.1")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    given = config.pop("rope_parameters")
    config["rope_theta"] = given.pop("rope_theta")
    config["rope_scaling"] = given
    newer = describe(tmp_path).config
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert describe(tmp_path).config == newer


def test_what_transformers_reads_of_rotary_settings_beside_each_other(tmp_path: Path) -> None:
    """A base beside rope_parameters is taken where they have none; rope_scaling goes before them."""
    tiny_llama(tmp_path, "llama 3.1")
    path = tmp_path / "config.json"
    newer = describe(tmp_path).config
    baseless = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    edit_json(path, rope_parameters=baseless, rope_theta=5e5)
    assert describe(tmp_path).config == newer
    edit_json(path, rope_parameters=PLAIN, rope_scaling=baseless)
    assert describe(tmp_path).config == newer


def test_the_first_phi_3_calls_longrope_su(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "phi-4-mini")
    path = tmp_path / "config.json"
    newer = describe(tmp_path).config
    older = {name: LONG[name] for name in ("short_factor", "long_factor", "factor")} | {"type": "su"}
    edit_json(path, rope_parameters=..., rope_scaling=older, rope_theta=1e4, partial_rotary_factor=0.5)
    assert describe(tmp_path).config == newer


STRETCHED = {"llama, linear", "llama, dynamic", "llama, yarn", "llama 3.1", "phi-4-mini", "olmo 3"}


@pytest.mark.parametrize("name", sorted(set(LLAMAS) - STRETCHED))
def test_a_part_of_each_head_turns_only_where_transformers_turns_it(name: str, tmp_path: Path) -> None:
    """Of positions that are not stretched most model types ignore partial_rotary_factor."""
    tiny_llama(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    given = config["rope_parameters"]
    kinds = [kind for kind in given.values() if isinstance(kind, dict)] or [given]
    assert all(kind["rope_type"] == "default" for kind in kinds)  # stretched ones read it in every model type
    for kind in kinds:
        kind["partial_rotary_factor"] = 0.5
    edit_json(tmp_path / "config.json", rope_parameters=given)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(3, 2048, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, _ = load_llama(tmp_path)(ids)
        torch.testing.assert_close(logits, reference(ids).logits, rtol=0, atol=LIMIT)


def test_settings_that_say_nothing_of_the_model_are_passed_over(tmp_path: Path) -> None:
    """As they stand in published files; the model stays that of transformers."""
    tiny_llama(tmp_path, "llama 2")
    edit_json(
        tmp_path / "config.json",
        max_sequence_length=2048,
        loss_type="ForCausalLM",
        torchscript=True,
        neftune_noise_alpha=5.0,
        model_max_length=4096,
        name_or_path="someone/llama",
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        logits, _ = load_llama(tmp_path)(ids)
        torch.testing.assert_close(logits, reference(ids, return_dict=True).logits, rtol=0, atol=LIMIT)


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_published_configs_set_is_known(family: str, tmp_path: Path) -> None:
    """Settings beside those that transformers 5 writes, as they stand in the config.json files on the hub."""
    tiny_llama(tmp_path, family)
    edit_json(tmp_path / "config.json", **PUBLISHED[family])
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = describe(tmp_path).config
    assert isinstance(ours, LlamaConfig)
    theta = reference.rope_parameters.get("full_attention", reference.rope_parameters)["rope_theta"]
    assert ours.rotary.rope_theta == theta
    assert list(ours.layer_types or ["full_attention"] * 3) == list(
        getattr(reference, "layer_types", None) or ["full_attention"] * 3
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "smollm3", "mistral", "ministral", "gemma 2", "exaone 4"])
def test_layer_types_that_a_config_leaves_out_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path, name)
    path = tmp_path / "config.json"
    edit_json(path, layer_types=..., max_window_layers=..., no_rope_layers=...)
    edit_json(path, use_sliding_window=True, sliding_window=5, num_hidden_layers=30)
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read_settings(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    theirs = getattr(reference, "layer_types", None) or ["sliding_attention"] * 30  # Mistral's all
    assert list(ours["layer_types"]) == list(theirs)


def test_gemma_reads_its_own_activation(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "gemma 2")
    edit_json(tmp_path / "config.json", hidden_act="silu", hidden_activation="gelu_pytorch_tanh")
    ours = describe(tmp_path).config
    assert isinstance(ours, LlamaConfig) and ours.hidden_act == "gelu_pytorch_tanh"


LEAVING_OUT = (
    "qwen3", "smollm3", "gemma", "gemma 2", "gemma 3", "phi-3", "olmo 2", "olmo 3", "exaone 4",
    "ministral", "seed-oss", "mixtral", "qwen3-moe", "olmoe",
)  # fmt: skip


@pytest.mark.parametrize("name", LEAVING_OUT)
def test_what_a_config_leaves_out_is_what_transformers_takes(name: str, tmp_path: Path) -> None:
    reference = tiny_llama(tmp_path, name)
    path = tmp_path / "config.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    whole = type(reference.config)().to_dict()
    sizes = ("layer_types", "no_rope_layers", "head_dim", "original_max_position_embeddings", *SIZES)
    left_out = {key for key in kept if key in whole and key not in (*sizes, "model_type", "architectures")}
    path.write_text(json.dumps({k: v for k, v in kept.items() if k not in left_out}), encoding="utf-8")
    short = describe(tmp_path).config
    settings = {k: whole[k] for k in left_out}
    path.write_text(json.dumps({**kept, **settings}), encoding="utf-8")
    assert describe(tmp_path).config == short


def test_a_longer_context_takes_the_long_factors(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "phi-4-mini", max_position_embeddings=128)
    ours = load_llama(tmp_path)
    tables = ours.rotary
    assert tables is not None
    long = tables.cos[:8].clone()
    ours.limit_context(64)
    short = tables.cos[:8]
    assert tables.cos.shape == (64, 4)
    assert not torch.allclose(long, short)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("phi-3", "gate_up_proj.weight has 192 rows, config.json means 160"),
        ("llama 2", r"gate_proj\.weight is \(96, 64\), config.json means \(80, 64\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(name: str, message: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path, name)
    edit_json(tmp_path / "config.json", intermediate_size=80)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def save_tables(folder: Path, base: float, prefix: str) -> None:
    """Add what transformers 4.30 saved of rotary positions; put a prefix before all names."""
    weights = load_file(folder / "model.safetensors")
    powers = torch.arange(0, 16, 2) / 16
    angles = torch.outer(torch.arange(256), 1 / base**powers).repeat(1, 2)[None, None]
    for layer in range(2):
        place = f"model.layers.{layer}.self_attn.rotary_emb"
        weights[f"{place}.inv_freq"] = (1 / base**powers).to(torch.bfloat16)
        weights[f"{place}.cos_cached"] = angles.cos()
        weights[f"{place}.sin_cached"] = angles.sin()
    weights["model.rotary_emb.inv_freq"] = 1 / base**powers
    save_file({prefix + name: tensor for name, tensor in weights.items()}, folder / "model.safetensors")


def test_saved_rotary_tables_are_compared_and_left_out(tmp_path: Path) -> None:
    reference = tiny_llama(tmp_path, "llama 2")
    assert reference.config.head_dim == 16
    save_tables(tmp_path, reference.config.rope_parameters["rope_theta"], "")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        logits, _ = load_llama(tmp_path)(ids)
        torch.testing.assert_close(logits, reference(ids).logits, rtol=0, atol=LIMIT)
    flat = {"model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(16)}
    edit_weights(tmp_path, **flat)
    with pytest.raises(ValueError, match=r"layers\.0\..*cos_cached differs from config\.json's rotary"):
        load_llama(tmp_path)
    save_tables(tmp_path, 500.0, "")
    with pytest.raises(ValueError, match=r"differs from config\.json's rotary"):
        load_llama(tmp_path)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_wrapper_of_the_model_is_named_and_its_prefix_taken_off(prefix: str, tmp_path: Path) -> None:
    reference = tiny_llama(tmp_path, "llama 2")
    save_tables(tmp_path, reference.config.rope_parameters["rope_theta"], prefix)
    with pytest.raises(ValueError, match=f"prefix '{prefix}' of") as refused:
        load_llama(tmp_path)
    command = shlex.split(str(refused.value).partition("take it off: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        logits, _ = load_llama(tmp_path)(ids)
        torch.testing.assert_close(logits, reference(ids).logits, rtol=0, atol=LIMIT)


def test_stretched_positions_of_a_part_of_a_head_are_refused_where_transformers_fails(tmp_path: Path) -> None:
    stretched = {**PLAIN, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    reference = tiny_llama(tmp_path, "llama 2", rope_parameters=stretched)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        reference(torch.arange(3, 9)[None])
    with pytest.raises(
        ValueError, match=r"partial_rotary_factor=0\.5 with rope_type='linear' is not supported"
    ):
        load_llama(tmp_path)
