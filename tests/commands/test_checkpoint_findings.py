"""`planforge inspect CHECKPOINT`: how it would be exported, what is missing, and the nearest family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.commands.inspection import inspect
from planforge.models.families import FAMILIES

from ..helpers.cli import planforge
from ..helpers.gguf_files import write_gguf
from ..helpers.llamas import tiny_llama
from ..helpers.models import edit_json
from ..helpers.quantized_checkpoints import write_quantized
from ..helpers.random_checkpoints import write_random_checkpoint


def look(folder: Path) -> dict[str, Any]:
    return inspect(folder).to_json()


def test_what_is_exported_natively(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "llama 2")
    done = planforge("inspect", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model_type"], found["export"], found["missing"]) == ("llama", "natively", [])
    assert found["weights"]["parameters"] > 1000 and "nearest" not in found


def test_what_is_traced_and_the_nearest_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path, "seed-oss")
    monkeypatch.delitem(FAMILIES, "seed_oss")
    found = look(tmp_path)
    assert found["export"] == "traced from transformers"
    assert found["nearest"]["model_type"] in ("llama", "qwen2", "mistral")
    assert "attention_out_bias" in found["nearest"]["unknown"]


def test_what_stops_an_export_is_said(tmp_path: Path) -> None:
    write_random_checkpoint("opt", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    found = look(tmp_path)
    assert found["missing"] == ["model.safetensors", "a tokenizer, such as tokenizer.json"]
    assert found["export"] == "refused" and "a pickle, which is never read" in found["reason"]
    edit_json(tmp_path / "config.json", model_type="granitemoe", num_local_experts=4)
    assert "granitemoe is a mixture of experts" in look(tmp_path)["reason"]


def test_quantized_weights_are_told(tmp_path: Path) -> None:
    write_quantized("awq", tmp_path)
    found = look(tmp_path)
    assert (found["export"], found["reason"]) == ("natively", "weights quantized by AWQ are read first")


def test_an_unknown_type_is_told_with_the_nearest_family(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "llama 2")
    edit_json(tmp_path / "config.json", model_type="llama9", a_new_setting=3)
    found = look(tmp_path)
    assert found["export"] == "refused" and "has no 'llama9' either" in found["reason"]
    assert found["nearest"]["unknown"] == ["a_new_setting"]


def test_a_file_of_llama_cpp_tells_its_types(tmp_path: Path) -> None:
    write_gguf("qwen2", tmp_path / "model.gguf", "Q4_0")
    found = look(tmp_path / "model.gguf")
    assert (found["architecture"], found["export"]) == ("qwen2", "natively")
    assert found["types"]["Q4_0"] > 10 and found["bytes"] == (tmp_path / "model.gguf").stat().st_size
    data = (tmp_path / "model.gguf").read_bytes().replace(b"qwen2", b"qwen9")
    (tmp_path / "other.gguf").write_bytes(data)
    found = look(tmp_path / "other.gguf")
    assert found["export"] == "refused" and "qwen9" in found["reason"]
