"""The Llama family through an export: tokens and logits are those of transformers, in every dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planforge.exporter import export
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.exporter.imported.optimum import has_reference_model
from planforge.exporter.tensorrt import plans
from planforge.runtime import TextGenerator

from ..helpers.llamas import tiny_llama
from ..helpers.models import edit_json
from ..helpers.plans import only

LIMIT = 1e-4  # the issue's, on logits
TEXT = "In the beginning God created the heaven and the earth"
TEXTS = (TEXT, "And", "Let there be light: and there was")
# One of each kind of graph: windows, two rotations, a part of each head, norms behind, no positions, scales.
KINDS = ("mistral", "gemma 3", "phi-4-mini", "olmo 2", "smollm3", "granite")
NEW = 12


def continue_greedily(reference: Any, tokens: list[int]) -> list[int]:
    ids = torch.tensor([tokens])
    how: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return out[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", KINDS)
def test_tokens_and_logits_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt longer than a window, several tokens on top of a past, and a batch of unequal lengths."""
    monkeypatch.setattr(plans, "is_installed", lambda engine: False)
    layers = {} if name == "smollm3" else {"num_hidden_layers": 2}
    reference = tiny_llama(tmp_path / "checkpoint", name, **layers)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu", "portable"], "verify": False}
    bundle = export(tmp_path / "checkpoint", tmp_path / "bundle", **options).bundle
    for graph in ("decoder.ort.fp32", "decoder.portable.fp32"):
        with TextGenerator.load(only(bundle, tmp_path / graph, graph)) as model:
            tokens = model.tokenizer.encode(TEXT)
            run = model.decoder.start(1, len(tokens))
            first = run.prefill([tokens[:5]])
            rest = np.concatenate(list(run.extend(tokens[5:])))
            with torch.no_grad():
                want = reference(torch.tensor([tokens])).logits[0, 4:].numpy()
            assert len(tokens) > 10
            np.testing.assert_allclose(np.concatenate([first, rest]), want, rtol=0, atol=LIMIT)
            answers = model.generate(TEXTS, max_new_tokens=NEW, ignore_eos=True)
            for text, answer in zip(TEXTS, answers, strict=True):
                assert list(answer.token_ids) == continue_greedily(reference, model.tokenizer.encode(text))


def test_a_default_export_is_verified_and_has_a_plan(tmp_path: Path) -> None:
    """Windows and two rotations in every dialect, fp16 and TensorRT-RTX's plan among them."""
    pytest.importorskip("tensorrt_rtx")
    tiny_llama(tmp_path / "checkpoint", "gemma 3", num_hidden_layers=2)
    target = ["cpu", "portable", "rtx"]
    result = export(tmp_path / "checkpoint", tmp_path / "bundle", target=target, sms=["sm86"])
    assert result.report is not None and result.report.passed and result.report.with_pytorch
    graphs = {(artifact.dialect, artifact.precision) for artifact in result.manifest.artifacts}
    assert graphs >= {("ort", "fp32"), ("portable", "fp16"), ("inplace", "fp16")}
    assert [plan.built_from for plan in result.manifest.plans] == ["decoder.inplace.fp16"]


def test_a_long_context_is_cut_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_llama(tmp_path, "llama 2", max_position_embeddings=8192)
    checkpoint = Checkpoint(Source("folder", str(tmp_path), tmp_path))
    assert checkpoint.choices.max_length == 4096
    assert "takes 4,096 tokens of the model's 8,192; --max-length 8192 takes them all" in caplog.text
    assert Checkpoint(checkpoint.source, max_length=8192).choices.max_length == 8192


def test_language_models_are_ours_and_other_classes_optimums(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "llama 2")
    assert has_reference_model(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LlamaForSequenceClassification"])
    assert not has_reference_model(tmp_path)
    edit_json(tmp_path / "config.json", model_type="mixtral", architectures=["MixtralForCausalLM"])
    assert not has_reference_model(tmp_path)
