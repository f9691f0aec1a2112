"""Adapters that are merged into their base model: answers against peft, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from planforge.exporter import export, verify
from planforge.exporter.checkpoints.source import merge_into, resolve_source
from planforge.exporter.errors import CheckpointError, SourceError, VerificationError
from planforge.exporter.imported import adapter_check
from planforge.models import adapters
from planforge.models.adapter_merge import merge_adapter
from planforge.models.adapters import read_adapter
from planforge.runtime import TextEncoder, TextGenerator

from ..helpers.adapters import ATTENTION, GPT2, LLAMA, Lora, load_peft, write_adapter, write_base
from ..helpers.cli import planforge
from ..helpers.models import edit_json
from ..helpers.random_checkpoints import GROUPED, write_random_checkpoint

# peft warns of much that is meant here, such as a part of tied weights that is trained alone.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TEXT = "In the beginning God created the heaven and the earth"
OPTIONS: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
BIASED = transformers.LlamaConfig(**GROUPED, attention_bias=True)
TIED = transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)
# Base models and adapters by name: every kind, where it differs.
KINDS: dict[str, tuple[Any, Any]] = {
    "lora": (LLAMA, Lora(r=4, lora_alpha=16, target_modules=ATTENTION)),
    "rslora": (LLAMA, Lora(r=4, lora_alpha=16, target_modules=ATTENTION, use_rslora=True)),
    "dora": (LLAMA, Lora(r=4, target_modules=[*ATTENTION, "down_proj"], use_dora=True)),
    "all linear": (LLAMA, Lora(r=4, target_modules="all-linear")),
    "patterns": (
        LLAMA,
        Lora(
            r=4,
            target_modules=ATTENTION,
            rank_pattern={"layers.1.self_attn.q_proj": 2},
            alpha_pattern={"v_proj": 3, r".*layers\.0\..*q_proj": 5},
        ),
    ),
    "one layer": (LLAMA, Lora(r=4, target_modules=ATTENTION, layers_to_transform=[1])),
    "embedding and a saved head": (
        LLAMA,
        Lora(r=4, target_modules=[*ATTENTION, "embed_tokens"], modules_to_save=["lm_head"]),
    ),
    "tied embedding": (TIED, Lora(r=4, target_modules=[*ATTENTION, "embed_tokens"])),
    "tied, a saved head": (TIED, Lora(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"])),
    "biases of its own": (BIASED, Lora(r=4, target_modules=ATTENTION, lora_bias=True)),
    "all biases": (BIASED, Lora(r=4, target_modules=ATTENTION, bias="all")),
    "gpt2": (transformers.GPT2Config(**GPT2), Lora(r=4, target_modules=["c_attn", "c_proj"])),
    "gpt2 dora": (
        transformers.GPT2Config(**GPT2),
        Lora(r=4, target_modules=["c_attn", "c_proj"], use_dora=True),
    ),
    "ia3": (
        BIASED,
        peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "gpt2 ia3": (
        transformers.GPT2Config(**GPT2),
        peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    config, adapter = KINDS[kind]
    base = write_base(config, tmp_path / "base")
    folder = write_adapter(base, adapter, tmp_path / "adapter")
    export(base, tmp_path / "bundle", adapter=folder, **OPTIONS)
    reference = load_peft(base, folder)
    with TextGenerator.load(tmp_path / "bundle") as model:
        ids = model.tokenizer.encode(TEXT)
        found = np.concatenate(list(model.decoder.start(1, len(ids)).extend(ids)))
        with torch.no_grad():
            wanted = reference(torch.tensor([ids])).logits[0].numpy()
            without = reference.base_model.model if kind == "lora" else None
        np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())
    if without is not None:  # the adapter matters
        with reference.disable_adapter(), torch.no_grad():
            plain = reference(torch.tensor([ids])).logits[0].numpy()
        assert np.abs(plain - wanted).max() > 0.1 * np.abs(wanted).max()


def test_a_classifier_of_an_adapter_is_exported(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_random_checkpoint("roberta", base)
    config = Lora(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    auto = transformers.AutoModelForSequenceClassification
    folder = write_adapter(base, config, tmp_path / "adapter", auto)
    export(base, tmp_path / "bundle", adapter=folder, **OPTIONS)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(base)
    with TextEncoder.load(tmp_path / "bundle") as model, torch.no_grad():
        logits = load_peft(base, folder, auto)(**tokenizer(TEXT, return_tensors="pt")).logits[0]
        found = model.classify(TEXT)
        assert found.label == f"LABEL_{int(logits.argmax())}"
        np.testing.assert_allclose(found.score, logits.softmax(-1).max(), atol=1e-5)


def test_what_is_traced_from_transformers_takes_adapters_too(tmp_path: Path) -> None:
    write_random_checkpoint("t5", tmp_path / "base")
    config = Lora(r=4, target_modules=["q", "v"])
    auto = transformers.AutoModelForSeq2SeqLM
    folder = write_adapter(tmp_path / "base", config, tmp_path / "adapter", auto)
    result = export(tmp_path / "base", tmp_path / "bundle", adapter=folder, **OPTIONS)
    assert result.manifest.source["exporter"] == "transformers"
    assert result.report is not None and result.report.passed


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base model, and an adapter of it."""
    base = write_base(LLAMA, tmp_path / "base")
    return base, write_adapter(base, KINDS["lora"][1], tmp_path / "adapter")


def test_the_command_merges_and_verify_finds_both(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    more = ["--precision", "fp32", "--target", "cpu", "--verify", "quick"]
    done = planforge("export", base, "-o", tmp_path / "bundle", "--adapter", adapter, *more)
    assert done.returncode == 0 and "merging the adapter" in done.stderr, done.stderr
    source = json.loads((tmp_path / "bundle/manifest.json").read_text("utf-8"))["source"]
    assert (source["argument"], source["adapter"]) == ("../base", "../adapter")
    assert verify(tmp_path / "bundle", level="quick").passed
    assert verify(tmp_path / "bundle", level="quick", source=base).passed
    edit_json(adapter / "adapter_config.json", lora_alpha=8)
    with pytest.raises(VerificationError, match="is not the checkpoint that the bundle was exported from"):
        verify(tmp_path / "bundle", level="quick", source=base)
    shutil.rmtree(adapter)
    with pytest.raises(SourceError, match=r"the adapter .*adapter does not exist"):
        verify(tmp_path / "bundle", level="quick", source=base)


def test_an_adapters_tokenizer_takes_the_bases_place(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    shutil.copyfile(base / "tokenizer.json", adapter / "tokenizer.json")
    settings = {"chat_template": "{{ messages[0].content }}"}
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    merged = merge_into(resolve_source(base), adapter)
    assert json.loads((merged.folder / "tokenizer_config.json").read_text("utf-8")) == settings


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "VERA"}, r"peft_type 'VERA' is not one of LORA, IA3.*merge_and_unload"),
        ({"use_qalora": True}, r"use_qalora = True is not computed; merge it with peft"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens = \[1\] is not computed"),
        ({"a_setting_of_next_year": 3}, "a_setting_of_next_year = 3 is not computed"),
        ({"r": 8}, r"q_proj has A \[4, 64\] and B \[64, 4\], but adapter_config.json says rank 8"),
        ({"lora_alpha": "16"}, "lora_alpha = '16' of .* are not numbers"),
        ({"use_dora": True}, "disagree whether .* is of DoRA"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    settings: dict[str, Any], message: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = pair
    edit_json(adapter / "adapter_config.json", **settings)
    with pytest.raises(CheckpointError, match=message):
        export(base, tmp_path / "bundle", adapter=adapter, **OPTIONS)
    assert not (tmp_path / "bundle").exists()


def test_an_adapter_of_another_base_is_refused_with_the_shapes(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    adapter = pair[1]
    wider = transformers.LlamaConfig(**GROUPED | {"hidden_size": 96})
    base = write_base(wider, tmp_path / "wider")
    message = r"B \[64, 4\] times A \[4, 64\] for a weight \[96, 96\]; the adapter is of another base model"
    with pytest.raises(CheckpointError, match=message):
        export(base, tmp_path / "bundle", adapter=adapter, **OPTIONS)
    base = write_base(transformers.GPT2Config(**GPT2), tmp_path / "gpt2")
    with pytest.raises(
        CheckpointError, match=r"changes model\.layers\.0\.self_attn\.\w_proj, which .* has not"
    ):
        export(base, tmp_path / "bundle", adapter=adapter, **OPTIONS)


def test_pickles_and_missing_files_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch run'\ntR.")
    data = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        export(base, tmp_path / "bundle", adapter=adapter, **OPTIONS)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"only adapter_model\.bin, a pickle, which is never read"):
        export(base, tmp_path / "bundle", adapter=adapter, **OPTIONS)
    with pytest.raises(SourceError, match="is no folder; give the one that peft wrote"):
        export(base, tmp_path / "bundle", adapter=tmp_path / "nowhere", **OPTIONS)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        export(base, tmp_path / "bundle", adapter=base, **OPTIONS)


# Planted faults in the merge, which the comparison with peft must find


def exchange(change: Any) -> dict[str, Any]:
    """A and B exchanged: of a square weight the shapes fit."""
    return {"a": change.b.T.contiguous(), "b": change.a.T.contiguous()}


FAULTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "alpha over r is twice what it should be": lambda change: {"scale": 2 * change.scale},
    "A and B are exchanged": exchange,
    "a module is left out": lambda change: {"scale": 0.0},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_merge_is_refused(
    fault: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pair
    sound = adapters.read_change

    def read_change(folder: Path, module: str, parts: Any, settings: Any) -> Any:
        change = sound(folder, module, parts, settings)
        if not module.endswith("layers.1.self_attn.q_proj"):
            return change
        return adapters.ModuleChange(**{**vars(change), **FAULTS[fault](change)})

    monkeypatch.setattr(adapters, "read_change", read_change)
    with pytest.raises(
        VerificationError, match=r"layers\.1\.self_attn\.q_proj\.weight: merged weights differ"
    ):
        export(base, tmp_path / "bundle", adapter=adapter, **OPTIONS)
    assert not (tmp_path / "bundle").exists()


def test_without_peft_a_warning_says_so(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    adapter_check.compare_with_peft(merge_into(resolve_source(pair[0]), pair[1]))
    assert "not compared with those of peft: pip install peft" in caplog.text


def test_large_models_are_written_in_shards(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from planforge.models import derived_folder

    monkeypatch.setattr(derived_folder, "SHARD_BYTES", 2**16)
    (tmp_path / "out").mkdir()
    merge_adapter(pair[0], read_adapter(pair[1]), tmp_path / "out")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    names = [name for shard in shards for name in load_file(shard)]
    assert sorted(names) == sorted(load_file(pair[0] / "model.safetensors"))


def test_a_vocabulary_that_grew_is_taken(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"base_model.model.{name}.weight"] = torch.randn(2052, 64)
    save_file(tensors, adapter / "adapter_model.safetensors")
    edit_json(adapter / "adapter_config.json", modules_to_save=["embed_tokens", "lm_head"])
    merged = merge_into(resolve_source(base), adapter)
    assert json.loads((merged.folder / "config.json").read_text("utf-8"))["vocab_size"] == 2052
