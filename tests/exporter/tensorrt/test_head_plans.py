"""Plans of GPT-2's relatives and of models that rate choices: built by TensorRT-RTX, then run emulated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export
from planforge.exporter.tensorrt.plans import build
from planforge.runtime import TextEncoder, TextGenerator
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.heads import write_decoder

PROMPTS = ["In the beginning God created", "And"]
CHOICES = ["God created the heaven", "the lamp eats a stone", "and"]
FOR_A_PLAN: dict[str, Any] = {"precision": ["fp16"], "target": ["portable", "rtx"], "verify": False}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("OpenAIGPTLMHeadModel", {"eos_token_id": None, "bos_token_id": None}), ("GPTNeoForCausalLM", {})],
)
def test_a_plan_of_a_relative_continues_texts(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Longer than GPT-Neo's window of 4 tokens."""
    pytest.importorskip("tensorrt_rtx")
    write_decoder(tmp_path / "checkpoint", name, **settings)
    bundle = tmp_path / "bundle"
    export(tmp_path / "checkpoint", bundle, sms=["sm86"], **FOR_A_PLAN)
    (plan,) = Bundle.open(bundle).manifest.plans
    assert plan.built_from == "decoder.inplace.fp16"
    with TextGenerator.load(bundle, backend="ort-cpu", precision="fp16") as model:
        wanted = [one.token_ids for one in model.generate(PROMPTS, max_new_tokens=12)]
    with emulated_gpu(bundle), TextGenerator.load(bundle, backend="tensorrt-rtx", precision="fp16") as model:
        assert [one.token_ids for one in model.generate(PROMPTS, max_new_tokens=12)] == wanted


def rank_on_both(bundle: Path) -> None:
    """The plan rates choices as the graph does that it was built from."""
    (plan,) = Bundle.open(bundle).manifest.plans
    assert plan.built_from == "encoder.portable.fp16"
    with TextEncoder.load(bundle, backend="ort-cpu", precision="fp16") as model:
        wanted = {hit.index: hit.score for hit in model.rank(PROMPTS[0], CHOICES)}
    with emulated_gpu(bundle), TextEncoder.load(bundle, backend="tensorrt-rtx", precision="fp16") as model:
        got = {hit.index: hit.score for hit in model.rank(PROMPTS[0], CHOICES)}
    assert got == pytest.approx(wanted, abs=1e-2)
    assert len(set(got.values())) == len(CHOICES)


def test_a_plan_of_a_double_heads_model_rates_choices(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    write_decoder(tmp_path / "checkpoint", "GPT2DoubleHeadsModel", choice="[CLS]")
    export(tmp_path / "checkpoint", tmp_path / "bundle", sms=["sm86"], **FOR_A_PLAN)
    rank_on_both(tmp_path / "bundle")


def test_a_plan_of_a_bert_rates_choices(head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    folder = Path(shutil.copytree(head_bundle("chooser"), tmp_path / "bundle"))
    build(folder, target="rtx", sms=["sm86"])
    rank_on_both(folder)
