"""Models that transformers has and PlanForge lacks, traced from transformers, against transformers itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from planforge.exporter import export
from planforge.exporter.errors import CheckpointError, ExportError
from planforge.exporter.imported import transformers_export
from planforge.exporter.imported.optimum import MODEL_TYPES
from planforge.exporter.processes import make_command
from planforge.runtime import TextEncoder
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.models import edit_json
from ...helpers.plans import only
from ...helpers.random_checkpoints import CONFIGS, TASKS, write_random_checkpoint
from ...helpers.same_answers import (
    compare_classes,
    compare_masked_words,
    compare_tokens,
    compare_translations,
    compare_vectors,
)

# One of each kind in every run; `make architectures` takes all that docs/import.md marks with a star.
ALL = os.environ.get("PLANFORGE_ARCHITECTURES") == "all"
EVERY_DECODER = ("opt", "gpt_neox", "phi", "bloom", "falcon", "gptj", "olmo", "nemotron", "mpt")
DECODERS = EVERY_DECODER if ALL else ("phi", "olmo")
ENCODERS = ("albert", "deberta", "electra", "mpnet") if ALL else ("deberta",)
TRANSLATORS = ("t5", "bart") if ALL else ("t5",)
OPTIONS: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu", "portable"], "verify": "quick"}


@pytest.fixture(scope="module")
def traced(once: Callable[[str], Any]) -> Callable[[str], tuple[Path, Path]]:
    """Random checkpoints, and verified bundles of them, by name. Don't change them."""

    def make(name: str) -> tuple[Path, Path]:
        with once(f"traced-{name}") as (folder, first):
            if first:
                write_random_checkpoint(name, folder / "checkpoint")
                export(folder / "checkpoint", folder / "bundle", **OPTIONS)
        return folder / "checkpoint", folder / "bundle"

    return make


def list_graphs(bundle: Path) -> list[list[str]]:
    """Return the passed graphs of each dialect."""
    artifacts = Bundle.open(bundle).manifest.artifacts
    assert all(artifact.passed for artifact in artifacts)
    dialects = dict.fromkeys(artifact.dialect for artifact in artifacts)
    return [[a.id for a in artifacts if a.dialect == dialect] for dialect in dialects]


@pytest.mark.parametrize("name", DECODERS)
def test_the_tokens_are_those_of_transformers(name: str, traced: Any, tmp_path: Path) -> None:
    checkpoint, bundle = traced(name)
    assert Bundle.open(bundle).manifest.source["exporter"] == "transformers"
    dialects = list_graphs(bundle)
    assert len(dialects) == (
        1 if name in ("bloom", "mpt") else 2
    )  # whose attention adds what grows with distance
    for number, graphs in enumerate(dialects):
        compare_tokens(only(bundle, tmp_path / str(number), *graphs), checkpoint)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_translations_are_those_of_transformers(name: str, traced: Any, tmp_path: Path) -> None:
    checkpoint, bundle = traced(name)
    dialects = list_graphs(bundle)
    assert [len(graphs) for graphs in dialects] == [2, 2]
    for number, graphs in enumerate(dialects):
        compare_translations(only(bundle, tmp_path / str(number), *graphs), checkpoint)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_answer_as_transformers_does(name: str, traced: Any, tmp_path: Path) -> None:
    checkpoint, bundle = traced(name)
    for number, graphs in enumerate(list_graphs(bundle)):
        alone = only(bundle, tmp_path / str(number), *graphs)
        with TextEncoder.load(alone) as model:
            if "sequence_classification" in model.heads:
                compare_classes(model, checkpoint)
            elif "masked_lm" in model.heads:
                compare_masked_words(model, checkpoint)
            else:
                compare_vectors(alone, checkpoint)


def test_every_architecture_of_the_list_is_tried() -> None:
    natively = {"llama", "qwen2", "mistral", "roberta"}  # which optimum's tests use too
    tried = {*EVERY_DECODER, *TASKS}
    assert set(CONFIGS) - natively == tried - natively


# What is refused


@pytest.fixture
def own(tmp_path: Path) -> Path:
    write_random_checkpoint("electra", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_an_unknown_type_is_refused_before_anything_is_loaded(own: Path, tmp_path: Path) -> None:
    edit_json(own / "config.json", model_type="electric")
    message = r"model_type 'electric' is known neither to PlanForge nor to transformers .*docs/add-a-model"
    with pytest.raises(CheckpointError, match=message):
        export(own, tmp_path / "bundle")


def test_it_is_said_that_transformers_is_missing_or_too_old(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.exporters", None)
    with pytest.raises(ExportError, match=r"pip install 'transformers>=5\.23'"):
        export(own, tmp_path / "bundle")


def test_what_transformers_cannot_load_is_said(own: Path, tmp_path: Path) -> None:
    data = (own / "model.safetensors").read_bytes()
    (own / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"transformers cannot load .*checkpoint: .*"):
        export(own, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_weights_that_are_missing_are_not_made_up(own: Path, tmp_path: Path) -> None:
    tensors = load_file(own / "model.safetensors")
    del tensors["electra.encoder.layer.1.output.dense.weight"]
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    message = r"1 weights of ElectraForSequenceClassification are missing, such as electra\.encoder\.layer\.1"
    with pytest.raises(CheckpointError, match=message):
        export(own, tmp_path / "bundle")


def test_a_forward_that_breaks_is_named_at_its_module(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer decides by a number that it computes, which no trace can follow."""
    broken = tmp_path / "broken_worker.py"
    broken.write_text(BROKEN, encoding="utf-8")
    monkeypatch.setattr(transformers_export, "WORKER", "broken_worker")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = (
        r"cannot be traced, in electra\.encoder\.layer\.1\.output \(ElectraOutput, broken_worker\.py:\d+\): "
        r".*optimum-onnx exports electra too: --exporter optimum"
    )
    with pytest.raises(ExportError, match=message):
        export(own, tmp_path / "bundle")
    monkeypatch.setattr(transformers_export, "MODEL_TYPES", tuple(set(MODEL_TYPES) - {"electra"}))
    with pytest.raises(ExportError, match=r"optimum-onnx 0\.1 does not export electra either; add the model"):
        export(own, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


BROKEN = """
from planforge.exporter.imported.transformers_worker import *
from planforge.exporter.imported import transformers_worker
from transformers.models.electra.modeling_electra import ElectraOutput

forward = ElectraOutput.forward
count = 0


def decide(self, hidden_states, input_tensor):
    global count
    count += 1
    if count > 1 and float(hidden_states.sum()) > 0:
        hidden_states = hidden_states + 1
    return forward(self, hidden_states, input_tensor)


ElectraOutput.forward = decide
"""


def test_a_killed_worker_is_said(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed_worker.py").write_text(
        "import os, signal\n\ndef main(arguments):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setattr(transformers_export, "WORKER", "killed_worker")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert make_command("killed_worker")[0] == sys.executable
    with pytest.raises(ExportError, match="cannot be traced: signal 9: is there enough memory"):
        export(own, tmp_path / "bundle")


def test_a_slow_tokenizer_is_written_beside_the_graphs(own: Path, tmp_path: Path) -> None:
    """BERT's vocab.txt alone: transformers makes a tokenizer.json of it."""
    (own / "tokenizer.json").unlink()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(2051))]
    (own / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (own / "tokenizer_config.json").write_text('{"tokenizer_class": "ElectraTokenizer"}', encoding="utf-8")
    export(own, tmp_path / "bundle", **OPTIONS | {"target": ["cpu"]})
    theirs = transformers.AutoTokenizer.from_pretrained(own)
    reference: Any = transformers.AutoModelForSequenceClassification.from_pretrained(own).eval()
    with TextEncoder.load(tmp_path / "bundle") as model, torch.no_grad():
        logits = reference(**theirs("w1 w7 w30", return_tensors="pt")).logits[0]
        assert model.classify("w1 w7 w30").label == f"LABEL_{int(logits.argmax())}"
