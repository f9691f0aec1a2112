"""Kinds of checkpoints that are refused: told by config.json alone, with what to do instead."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto import configuration_auto, modeling_auto

from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.errors import CheckpointError
from planforge.models import Llama
from planforge.models.checkpoint import load_model
from planforge.models.refusals import EXPERTS, OWN_MIXTURES, list_parts, refuse_kind

LIMIT = 1e-4  # the issue's, on logits
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 60},
    "granitemoe": {"num_local_experts": 8},
    "phimoe": {"num_local_experts": 16},
    "deepseek_v2": {"n_routed_experts": 64},
    "deepseek_v3": {"n_routed_experts": 256},
    "dbrx": {"ffn_config": {"moe_num_experts": 4}},
    "llama4": {"text_config": {"num_local_experts": 16}, "vision_config": {}},
    "of the year 2030": {"num_experts": 1024},
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "awq": {"quantization_config": {"quant_method": "awq"}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "compressed-tensors": {"compression_config": {"quant_method": "compressed-tensors"}},
    "mxfp4": {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}},
    "quantization_config in config.json": {"quantization_config": {"bits": 4}},
}
TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
AXES = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}  # of time, height and width
QWEN_IMAGE = {"hidden_size": 32, "depth": 1, "num_heads": 2, "patch_size": 8}
# Wholes with a language model of each kind of name, head and positions.
WHOLES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT, "vision_config": IMAGE, "mm_tokens_per_image": 4},
    "idefics3": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": IMAGE},
    "llava": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": IMAGE},
    "qwen2_vl": {"text_config": {**TEXT, "rope_parameters": AXES}, "vision_config": QWEN_IMAGE},
}


def write_config(folder: Path, **settings: Any) -> Path:
    """Write a config.json alone: what is refused is refused before any weight is looked for."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_is_named(kind: str, tmp_path: Path) -> None:
    write_config(tmp_path, model_type=kind, **MIXTURES[kind])
    hint = r"which is exported neither here nor through optimum; export a dense model"
    with pytest.raises(ValueError, match=rf"{kind} is a mixture of experts \(\w+=\d+\), {hint}"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="is a mixture of experts"):
        refuse_kind(tmp_path, {"model_type": kind, **MIXTURES[kind]}, with_optimum=True)


@pytest.mark.parametrize("kind", ["qwen2_moe", "granitemoe"])
def test_a_mixture_is_told_by_its_type_where_no_setting_does(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{kind} is a mixture of experts \(model_type={kind}\)"):
        refuse_kind(tmp_path, {"model_type": kind})


def test_a_mixture_that_optimum_exports_is_left_to_it(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", "num_local_experts": 32}
    with pytest.raises(ValueError, match=r"optimum may export it: planforge export --exporter optimum"):
        load_model(write_config(tmp_path, **config))
    refuse_kind(tmp_path, config, with_optimum=True)


def test_a_dense_model_of_a_mixed_family_is_no_mixture(tmp_path: Path) -> None:
    refuse_kind(tmp_path, {"model_type": "granitemoehybrid", "num_local_experts": 0})


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_named(method: str, tmp_path: Path) -> None:
    write_config(tmp_path, **{"model_type": "qwen2", **QUANTIZED[method]})
    words = rf"weights are quantized \({method}\).*export the original model.* --precision int8 or int4"
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize(("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_the_files_of_older_tools_tell_quantized_weights_too(file: str, method: str, tmp_path: Path) -> None:
    write_config(tmp_path, model_type="llama")
    (tmp_path / file).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"weights are quantized \({method}\)"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "mllama", "vision_config": {}, "text_config": {}}, r"images \(vision_config"),
        ({"model_type": "phi4_multimodal", "audio_config": {}}, r"sound \(audio_config"),
        ({"model_type": "paligemma", "vision_config": {}}, r"images \(vision_config"),
        ({"model_type": "gemma4", "text_config": {}}, r"text and something else \(text_config"),
        ({"model_type": "llava", "vision_config": {}, "text_config": {"model_type": "mpt"}}, "images"),
        ({"model_type": "whisper", "num_mel_bins": 80}, r"sound \(num_mel_bins"),
    ],
)
def test_a_model_of_more_than_text_is_named(config: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"is a model of {what}.*; export a model of text alone instead$"):
        load_model(write_config(tmp_path, **config))


def test_every_such_model_of_transformers_is_told(tmp_path: Path) -> None:
    """Whatever has experts or reads images or sound, by the settings that transformers itself writes."""
    of_more = {
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    refused = set()
    mixed = set()
    for kind in sorted({*of_more, *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}):
        try:
            config = json.loads(configuration_auto.CONFIG_MAPPING[kind]().to_json_string())
        except Exception:  # a class whose own defaults it refuses
            continue
        counts = [v for part in list_parts(config) for k, v in part.items() if "expert" in k]
        if any(type(count) is int and count > 1 for count in counts):
            mixed.add(kind)
        try:
            refuse_kind(tmp_path, config)
        except ValueError:
            refused.add(kind)
        of_more -= {kind} if kind in refused else set()
    assert not mixed - refused - set(OWN_MIXTURES)
    assert not refused & set(OWN_MIXTURES)
    assert not of_more
    assert len(mixed) > 40 and len(refused) > 120
    assert not {"llama", "qwen2", "gemma3_text", "bert", "t5", "opt", "bloom", "falcon"} & refused


@pytest.fixture
def no_device() -> Any:
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("kind", WHOLES)
def test_the_command_in_the_message_saves_a_language_model_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_device: None
) -> None:
    config = transformers.AutoConfig.for_model(kind, **WHOLES[kind])
    transformers.set_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    whole.save_pretrained(tmp_path / kind)
    with pytest.raises(ValueError, match=rf"and export {kind}-text$") as caught:
        load_model(tmp_path / kind)
    command = re.search(r'python -c "[^"]*"', str(caught.value))
    assert command is not None
    _, option, code = shlex.split(command[0])
    monkeypatch.chdir(tmp_path)
    if kind == "gemma3":  # as a user runs it
        subprocess.run([sys.executable, option, code], check=True, capture_output=True)
    else:
        exec(code, {})
        torch.set_default_device(None)
    ours = load_model(tmp_path / f"{kind}-text")
    assert isinstance(ours, Llama)
    ids = torch.randint(3, 256, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = whole(input_ids=ids).logits
        logits, _ = ours(ids)
    assert want.std() > 0.1
    torch.testing.assert_close(logits, want, rtol=0, atol=LIMIT)


def test_all_settings_of_experts_are_of_use() -> None:
    used = {name for config in MIXTURES.values() for part in list_parts(config) for name in part}
    assert used >= set(EXPERTS)


@pytest.mark.parametrize("with_model", [True, False])
def test_an_adapter_is_named_with_the_way_to_merge_it(with_model: bool, tmp_path: Path) -> None:
    """Beside a whole model too: transformers would load it there."""
    if with_model:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "someone/llama"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"adapter.*someone/llama.*AutoPeftModelForCausalLM.*merge"):
        resolve_source(tmp_path)
    with pytest.raises(ValueError, match="merge_and_unload"):
        load_model(tmp_path)


def save_pickle(path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, path)


OTHER_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "model.safetensors": (lambda path: save_file({"weight": torch.zeros(1)}, path), "give the folder that"),
    "config.json": (lambda path: path.write_text("{}"), "give the folder that holds it"),
    "sd.safetensors": (
        lambda path: save_file({"model.diffusion_model.a": torch.zeros(1)}, path), "from_single_file"
    ),
    "model.onnx": (lambda path: path.write_bytes(b"\x08\x08"), "planforge import FOLDER"),
    "model.pt": (save_pickle, "it may run code"),
    "pytorch_model.bin": (save_pickle, "it may run code"),
    "old_model.bin": (lambda path: path.write_bytes(pickle.dumps({})), "it may run code"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_that_is_no_word_vectors_is_named(name: str, tmp_path: Path) -> None:
    write, words = OTHER_FILES[name]
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match="no word vectors") as caught:
        resolve_source(tmp_path / name)
    assert name in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)
