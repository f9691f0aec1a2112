"""The GPU benchmarks' judge, yardsticks and processes, with systems that are made up here."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.case import Case, Entry, Work
from benchmarks.checkpoints import demo
from benchmarks.gpu import measure as gpu_measuring
from benchmarks.gpu.bounds import bounds
from benchmarks.gpu.judge import judge_answers, verdict
from benchmarks.gpu.measure import measure
from benchmarks.gpu.yardstick import encoder_flops, step_bytes
from benchmarks.workshop import Workshop

from ..helpers.models import SOURCES, tiny_marian

# The judge


def test_the_judge_allows_flips_and_no_wrong_token() -> None:
    folder = demo("gpt2-demo")
    prompt = [5, 17, 80, 3]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy: list[int] = []
    with torch.inference_mode():
        for _ in range(6):
            scores = model(torch.tensor([prompt + greedy])).logits[0, -1]
            greedy.append(int(scores.argmax()))
        ids = torch.tensor([prompt + greedy[:-1]])
        exact = model(ids).logits[0, -6:]
        error = float((model.half()(ids).logits[0, -6:].float() - exact).abs().max())
    second = int(exact[3].topk(2).indices[1])
    gap = float(exact[3].max() - exact[3][second])
    wrong = [*greedy[:3], second]
    judged = judge_answers(str(folder), "generate", [prompt], {"right": [greedy], "wrong": [wrong]}, "cpu")
    assert error > 0 and judged["right"]["limit"] == pytest.approx(4 * error, abs=1e-5)
    assert (judged["right"]["worst"], judged["right"]["flips"], judged["right"]["alike"]) == (0.0, 0, True)
    assert gap > 4 * error  # else it could be taken for rounding, and this would show nothing
    assert judged["wrong"]["worst"] == pytest.approx(gap, abs=1e-4)
    assert (judged["wrong"]["flips"], judged["wrong"]["alike"]) == (1, False)


def test_the_judge_knows_what_a_translator_may_not_choose(tmp_path: Path) -> None:
    model: Any = tiny_marian(tmp_path / "marian", forced_eos_token_id=None)
    source = SOURCES[0]
    end = model.config.eos_token_id
    found = model.generate(torch.tensor([source]), num_beams=1, min_new_tokens=8, max_new_tokens=8)
    tokens = found[0, 1:].tolist()
    answers = {"right": [tokens], "ended": [[*tokens[:3], end, *tokens[4:]]]}
    judged = judge_answers(str(tmp_path / "marian"), "translate", [source], answers, "cpu")
    assert judged["right"]["alike"] and judged["right"]["worst"] == 0.0
    assert not judged["ended"]["alike"] and judged["ended"]["worst"] is None


@pytest.mark.parametrize(
    ("gaps", "worst", "flips", "alike"),
    [
        ([0.0, 0.0], 0.0, 0, True),
        ([0.0, 0.02], 0.02, 1, True),
        ([0.021, 0.0], 0.021, 1, False),
        ([0.0, math.nan, 0.01], None, 1, False),
        ([math.inf, 0.0], None, 1, False),  # a token that may not be chosen
    ],
)
def test_verdicts(gaps: list[float], worst: float | None, flips: int, alike: bool) -> None:
    assert verdict(gaps, 0.02) == {"worst": worst, "limit": 0.02, "flips": flips, "alike": alike}
    assert verdict([0.0], math.nan)["alike"] is False


# What a step needs at least


def on_meta(folder: Path, model: Any) -> Path:
    """A checkpoint of which there is only what yardsticks read: its config, and its tensors' shapes."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    shapes = {name: {"shape": list(tensor.shape)} for name, tensor in model.named_parameters()}
    header = json.dumps({"__metadata__": {}, **shapes}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_what_a_step_of_gpt2_reads(tmp_path: Path) -> None:
    with torch.device("meta"):
        folder = on_meta(tmp_path / "gpt2", transformers.GPT2LMHeadModel(transformers.GPT2Config()))
    weights = 124_439_808 - 1024 * 768  # as published, without the table of positions
    cache = 2 * 12 * 768 * (128 + 32)
    work = Work("generate", ("",), ((0,) * 128,), 64)
    assert step_bytes(folder, work) == 2 * (weights + cache)
    assert step_bytes(folder, replace(work, prompts=((0,) * 128,) * 64)) == 2 * (weights + 64 * cache)
    assert encoder_flops(folder, work) is None
    matrices = 50257 * 768 + 12 * 12 * 768 * 768
    rest = weights - matrices  # norms and biases
    assert step_bytes(folder, work, "int8") == matrices + 2 * (rest + cache)
    assert step_bytes(folder, work, "int4") == matrices // 2 + 2 * (rest + cache)
    assert step_bytes(folder, work, "fp16-kv8") == 2 * weights + cache


def test_what_a_step_of_marian_reads(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"d_model": 8, "vocab_size": 30, "max_position_embeddings": 16}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 20}
    with torch.device("meta"):
        model = transformers.MarianMTModel(transformers.MarianConfig(**sizes, pad_token_id=29))
    square = 8 * 8 + 8
    norm = 2 * 8
    layer = (
        4 * square + 2 * square + 3 * norm + (8 * 20 + 20) + (20 * 8 + 8)
    )  # of the source query and output
    weights = 2 * layer + 30 * 8
    cache = 2 * 2 * 8 * (5 + 3)
    work = Work("translate", ("",), ((0,) * 5,), 6)
    assert step_bytes(on_meta(tmp_path / "marian", model), work) == 2 * (weights + cache)


def test_operations_are_those_that_pytorch_counts(tmp_path: Path) -> None:
    eager: Any = {"attn_implementation": "eager"}
    with torch.device("meta"):
        model: Any = transformers.BertModel(transformers.BertConfig(**eager))
        ids = torch.zeros((3, 128), dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(ids)
    pooler = 2 * 3 * 768 * 768
    work = Work("embed", ("",) * 3, ((0,) * 128,) * 3)
    folder = on_meta(tmp_path / "bert", model)
    assert encoder_flops(folder, work) == counter.get_total_flops() - pooler
    assert step_bytes(folder, work) is None


def test_the_bounds_are_rates() -> None:
    found = bounds("cpu", 2**22, 128)
    assert found["copy_gb_per_s"] > 0 and found["fp16_tflops"] >= 0
    assert set(found) == {"copy_gb_per_s", "fp16_tflops", "clocks", "torch", "torch_cuda"}


# Processes

FAKE = """
import time
import numpy as np
from benchmarks.systems.system import Skip, System

class Session:
    def __init__(self, how):
        self.how = how
    def run(self, work, tick):
        if work["kind"] == "embed":
            return np.eye(len(work["prompts"]), 4, dtype=np.float16)[:: -1 if self.how == "turned" else 1]
        for _ in range(work["new_tokens"]):
            time.sleep(0.002)
            tick()
        return [[7] * work["new_tokens"] for _ in work["prompts"]]
    def did(self, work):
        if work["kind"] == "embed":
            return {"texts_sha256": "", "tokens": 9, "pooling": "none", "normalized": False}
        cache = "fp32" if self.how == "other cache" else "fp16"
        return {"prompts": work["prompts"], "beams": 1, "eos": "off", "cache": cache, "prefill_logit_rows": 1}

class Fake(System):
    name, packages, classes = "fake", ("numpy",), {"fp16": "fp16"}
    def generate(self, model, precision, threads, settings):
        if settings["how"] == "absent":
            raise Skip("this machine has no such thing")
        if settings["how"] == "broken":
            raise RuntimeError("it broke")
        return Session(settings["how"])
    embed = generate

SYSTEM = Fake()
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Any]]]:
    """Measures a case of systems that are made up here, each by what it does wrong."""
    (tmp_path / "fake_gpu").mkdir()
    (tmp_path / "fake_gpu" / "system.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_measuring, "PAUSE", 0)

    class OneCheckpoint(Workshop):
        def checkpoint(self, name: str) -> Path:
            folder = tmp_path / "checkpoint"
            if not folder.exists():
                config: Any = {"vocab_size": 50, "n_positions": 8, "n_embd": 4, "n_layer": 2, "n_head": 2}
                on_meta(folder, transformers.GPT2LMHeadModel(transformers.GPT2Config(**config)))
            return folder

    def run(
        work: Work, checkpoint: str = "any", device_gb: float = 80.0, varies: Any = None, **hows: str
    ) -> dict[str, Any]:
        own = varies or {}
        entries = {
            name: Entry(
                *("fake_gpu.system", "fp16", checkpoint, work),
                settings={"how": how},
                varies=own.get(name, {}),
            )
            for name, how in hows.items()
        }
        case = Case("fakes", "gpu", "Fakes", entries)
        bounds = {"copy_gb_per_s": 1.0, "fp16_tflops": 1.0, "clocks": {}}
        return measure(case, OneCheckpoint(tmp_path), 3, bounds, device_gb, "cpu")

    yield run
    for name in [name for name in sys.modules if name.startswith("fake_gpu")]:
        del sys.modules[name]


GENERATION = Work("generate", ("a",), ((1, 2),), 4)


def test_entries_are_measured_side_by_side(
    fakes: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([500.0, 1500.0, 1500.0, 1750.0])
    monkeypatch.setattr(gpu_measuring, "used_mb", lambda: next(used))
    verdict = {"alike": True, "worst": 0.0, "limit": 0.1, "flips": 0}
    asked: list[Any] = []

    def judgement(runs: Any, device: str) -> Any:
        asked.append({name: run.warm["result"] for name, run in runs.items()})
        return {"one": verdict, "two": {**verdict, "alike": False}}

    monkeypatch.setattr(gpu_measuring, "judgement", judgement)
    result = fakes(GENERATION, one="well", two="well")
    assert asked == [{"one": [[7] * 4], "two": [[7] * 4]}]
    assert result["refused"] is None and result["skipped"] == {} and json.loads(json.dumps(result)) == result
    one, two = result["entries"].values()
    assert (one["device_mb"], two["device_mb"]) == (1000, 250)
    assert (one["alike"], two["alike"], two["same_tokens"]) == (True, False, 1.0)
    assert one["tokens"] == [7] * 4 and one["ttft_ms"]["p50"] >= 2 and 2 <= one["inter_token_ms"]["p50"] < 10


def test_what_is_absent_or_breaks_leaves_the_others(
    fakes: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_measuring, "used_mb", lambda: None)
    monkeypatch.setattr(gpu_measuring, "judgement", lambda runs, device: {"one": {"alike": True}})
    result = fakes(GENERATION, none="absent", worse="broken", one="well")
    assert list(result["entries"]) == ["one"] and result["entries"]["one"]["device_mb"] is None
    assert result["skipped"]["none"] == "this machine has no such thing"
    assert result["skipped"]["worse"].startswith("failed: RuntimeError: it broke")
    assert fakes(GENERATION, none="absent")["entries"] == {}


def test_unlike_work_is_refused(fakes: Callable[..., dict[str, Any]]) -> None:
    result = fakes(GENERATION, one="well", two="other cache")
    assert result["entries"] == {} and "cache of one is 'fp16', of two 'fp32'" in str(result["refused"])


def test_an_entrys_own_difference_excuses_no_other(
    fakes: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = {"alike": True, "worst": 0.0, "limit": 0.1, "flips": 0}
    monkeypatch.setattr(gpu_measuring, "judgement", lambda runs, device: dict.fromkeys(runs, fine))
    result = fakes(
        GENERATION, varies={"two": {"cache": "is measured"}}, one="well", two="other cache", three="well"
    )
    assert result["refused"] is None and list(result["entries"]) == ["one", "two", "three"]
    result = fakes(
        GENERATION, varies={"three": {"cache": "is measured"}}, one="well", two="other cache", three="well"
    )
    assert "cache of one is 'fp16', of two 'fp32'" in str(result["refused"])


def test_other_vectors_are_marked(fakes: Callable[..., dict[str, Any]]) -> None:
    result = fakes(Work("embed", ("", ""), ((1, 2), (3, 4))), one="well", two="turned")
    one, two = result["entries"].values()
    assert (one["cosine_min"], one["alike"]) == (1.0, True) and (two["cosine_min"], two["alike"]) == (
        0.0,
        False,
    )
    assert one["texts_per_s"] == pytest.approx(2e3 / one["ms"]["p50"], rel=0.1)


def test_a_model_that_does_not_fit_the_gpu_is_not_tried(fakes: Callable[..., dict[str, Any]]) -> None:
    result = fakes(GENERATION, "gpt2-xl", 24.0, one="well")
    assert (
        result["refused"] == "all together needs 48 GB on the device, it has 24.0" and not result["entries"]
    )
