"""Kinds of checkpoints that an export refuses before long work, and heads that no kernel takes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planforge.exporter import export
from planforge.exporter.errors import CheckpointError, ExportError
from planforge.exporter.imported import optimum
from planforge.runtime import TextGenerator

from ..helpers.llamas import tiny_llama
from ..helpers.models import edit_json

LIMIT = 1e-4  # the issue's, on logits
TEXT = "In the beginning God created the heaven and the earth"


@pytest.fixture
def no_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where optimum is run: it would read the weights first."""

    def run_child(*_: Any, **__: Any) -> Any:
        raise AssertionError("optimum was asked")

    monkeypatch.setattr(optimum, "run_child", run_child)


def write_checkpoint(folder: Path, **config: Any) -> Path:
    """Write a checkpoint whose weights cannot be read."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"not read")
    return folder


@pytest.mark.parametrize("exporter", ["auto", "planforge", "optimum"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "granitemoe", "num_local_experts": 8}, "granitemoe is a mixture of experts"),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, "is a mixture of experts"),
        ({"model_type": "gemma3", "vision_config": {}}, "gemma3 is a model of images"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, r"python -c .* export checkpoint-text"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "quip"}}, "quantized by quip"),
        ({"model_type": "electra", "quantization_config": {"quant_method": "mxfp4"}}, "quantized by mxfp4"),
        (
            {
                "model_type": "granitemoe",
                "num_local_experts": 8,
                "quantization_config": {"quant_method": "fp8"},
            },
            "granitemoe is a mixture of experts",
        ),
    ],
)
def test_kinds_are_refused_whoever_exports(
    config: dict[str, Any], words: str, exporter: str, tmp_path: Path, no_optimum: None
) -> None:
    config["architectures"] = ["SomethingForCausalLM"]
    write_checkpoint(tmp_path / "checkpoint", **config)
    with pytest.raises(CheckpointError, match=words) as caught:
        export(tmp_path / "checkpoint", tmp_path / "bundle", exporter=exporter, optimum_python="python3")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_model_type_that_nobody_knows_ends_before_weights_are_read(
    tmp_path: Path, no_optimum: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "starcoder9", "architectures": ["Starcoder9ForCausalLM"]}
    write_checkpoint(tmp_path / "checkpoint", **config)
    with pytest.raises(
        CheckpointError, match=r"'starcoder9' is known neither to PlanForge nor to transformers"
    ):
        export(tmp_path / "checkpoint", tmp_path / "bundle")
    with pytest.raises(AssertionError, match="optimum was asked"):
        export(tmp_path / "checkpoint", tmp_path / "bundle", exporter="optimum", optimum_python="python3")
    edit_json(tmp_path / "checkpoint/config.json", model_type="stablelm")
    with pytest.raises(ExportError, match=r"stablelm is exported by optimum, which is not installed here"):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        export(tmp_path / "checkpoint", tmp_path / "bundle", exporter="optimum")


def test_a_tokenizer_of_more_tokens_is_named_with_the_way_out(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "checkpoint", "llama 2", vocab_size=2000)
    words = (
        "tokenizer.json has 2048 tokens, but config.json's vocabulary and the embedding 2000: take the"
        r" tokenizer .* or add the missing rows in transformers: model.resize_token_embeddings\(2048\)"
    )
    with pytest.raises(CheckpointError, match=words):
        export(tmp_path / "checkpoint", tmp_path / "bundle")


PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    ("name", "settings", "dialect"),
    [
        ("llama 2", {"head_dim": 20}, "portable"),
        ("llama 2", {"head_dim": 100}, "portable"),
        ("llama 2", {"head_dim": 24}, "ort"),  # no multiple of 16, which the node's own rotation takes
        ("llama 2", {"head_dim": 80}, "ort"),
        ("llama 2", {"head_dim": 96}, "ort"),
        ("llama 2", {"head_dim": 256}, "ort"),
        ("phi-3", {"head_dim": 80, **PARTIAL}, "ort"),
        ("phi-3", {"head_dim": 20, **PARTIAL}, "portable"),
    ],
)
def test_heads_of_any_size_are_exported(
    name: str, settings: dict[str, Any], dialect: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = tiny_llama(tmp_path / "checkpoint", name, num_hidden_layers=1, **settings)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": False}
    with caplog.at_level(logging.WARNING, "planforge"):
        result = export(tmp_path / "checkpoint", tmp_path / "bundle", **options)
    assert [artifact.id for artifact in result.manifest.artifacts] == [f"decoder.{dialect}.fp32"]
    size = settings["head_dim"]
    said = f"target cpu gets the portable graph, as the head size is {size}"
    assert (said in caplog.text) == (dialect == "portable")
    with TextGenerator.load(tmp_path / "bundle") as model:
        tokens = model.tokenizer.encode(TEXT)
        run = model.decoder.start(1, len(tokens))
        logits = np.concatenate([run.prefill([tokens[:5]]), *run.extend(tokens[5:])])
    with torch.no_grad():
        want = reference(torch.tensor([tokens])).logits[0, 4:].numpy()
    assert len(tokens) > 10
    np.testing.assert_allclose(logits, want, rtol=0, atol=LIMIT)
