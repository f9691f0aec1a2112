"""The GPU benchmarks below fp16, on an emulated GPU: who computes what, who is skipped, and what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.alike import check_alike
from benchmarks.case import Entry, Work
from benchmarks.checkpoints import TINY, demo
from benchmarks.child import answer
from benchmarks.gpu.cases import ORT_CUDA, cases
from benchmarks.gpu.judge import judge_answers, read_rounding
from benchmarks.gpu.measure import find_bundle, judgement, min_cosine
from benchmarks.gpu.systems import genai as genai_system
from benchmarks.gpu.systems import planforge as planforge_system
from benchmarks.measure import Run
from benchmarks.systems import system_named
from benchmarks.systems.system import Skip
from benchmarks.texts import gpt2_prompts
from planforge.exporter.limits import CAPS
from planforge.exporter.reference_model import replace_conv1d
from planforge.runtime.text.tokenizer import Tokenizer

from ..helpers.emulated_ort_cuda import emulated_ort_cuda

PRECISIONS = ("int8", "int4", "fp16-kv8")
TEXT = "And it came to pass"
NEW = 12
SYSTEMS = "benchmarks.gpu.systems"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Bundles as the suite exports them, one for each precision."""
    folder = tmp_path_factory.mktemp("below")
    for precision in PRECISIONS:
        planforge_system.export_bundle(demo("gpt2-demo"), folder / precision, precision, "cuda", 2)
    return {precision: folder / precision for precision in PRECISIONS}


@pytest.fixture(scope="module")
def work(prepared: Mapping[str, Path]) -> Work:
    ids = Tokenizer.from_file(next(prepared["int8"].glob("tokenizer/*.json"))).encode(TEXT)
    return Work("generate", (TEXT,) * 2, (tuple(ids),) * 2, NEW)


def as_json(work: Work) -> dict[str, Any]:
    """A message as a process gets it."""
    message: dict[str, Any] = json.loads(json.dumps({**work.to_json(), "save": ""}))
    return message


@pytest.fixture(scope="module")
def found(prepared: Mapping[str, Path], work: Work) -> Mapping[str, dict[str, Any]]:
    """What each precision's process would say."""
    system: Any = system_named(f"{SYSTEMS}.planforge")
    found = {}
    with emulated_ort_cuda():
        for precision, bundle in prepared.items():
            session = system.generate(bundle, precision, 1, {"backend": "ort-cuda"})
            known = {"weights_sha256": "same", "precision": system.classes[precision], "threads": 1}
            asked = as_json(work)
            answer(session, asked, known)
            found[precision] = answer(session, asked, known)
            session.model.close()
    return found


def judge(prepared: Mapping[str, Path], work: Work, answers: Mapping[str, Any], **of: str) -> Any:
    bundles = {name: (str(prepared[of.get(name, name)]), of.get(name, name)) for name in answers}
    return judge_answers(str(demo("gpt2-demo")), "generate", work.prompts, answers, "cpu", bundles)


def test_each_precision_runs_captured_and_says_what_it_did(found: Mapping[str, dict[str, Any]]) -> None:
    for each in found.values():
        assert each["figures"]["captured"] > 0 and len(each["stamps"]) == NEW
    did = {precision: each["did"] for precision, each in found.items()}
    assert [d["precision"] for d in did.values()] == ["8-bit", "4-bit", "fp16"]
    assert [d["cache"] for d in did.values()] == ["fp16", "fp16", "int8"]
    check_alike("generate", did, {name: {"precision": "", "cache": ""} for name in did})


def test_a_step_that_cannot_be_captured_counts_none(prepared: Mapping[str, Path], work: Work) -> None:
    with pytest.MonkeyPatch.context() as patch, emulated_ort_cuda():
        patch.setattr("planforge.runtime.backends.captured_step.MIN_FREE", 2**60)  # no memory is enough
        system: Any = system_named(f"{SYSTEMS}.planforge")
        session = system.generate(prepared["int8"], "int8", 1, {"backend": "ort-cuda"})
        session.run(as_json(work), lambda: None)
        assert session.figures() == {"captured": 0}
        session.model.close()


def test_sound_answers_pass_and_others_do_not(
    prepared: Mapping[str, Path], work: Work, found: Mapping[str, dict[str, Any]]
) -> None:
    answers = {precision: each["result"] for precision, each in found.items()}
    runs: dict[str, Any] = {
        precision: Run(
            Entry("any", precision, "gpt2-demo", work),
            SimpleNamespace(folder=prepared[precision], checkpoint=demo("gpt2-demo")),  # type: ignore[arg-type]
            warm=found[precision],
        )
        for precision in PRECISIONS
    }
    judged = judgement(runs, "cpu")  # in a process of its own
    assert all(each["alike"] for each in judged.values())
    assert judged["fp16-kv8"]["limit"] > 1.2 * judged["int8"]["limit"]  # of its cache
    assert judged["int4"]["limit"] < 0.2  # rounding to int4 itself moves logits by 1.2
    for precision, rows in answers.items():
        wrong = [[*rows[0][:4], rows[0][3], *rows[0][5:]], rows[1]]  # a token twice
        assert not judge(prepared, work, {precision: wrong})[precision]["alike"]


def round_rows(weight: Any, bits: int) -> Any:
    """Round each row (N, K) to symmetric integers, with a scale in fp16."""
    top = 2 ** (bits - 1) - 1
    scale = (weight.abs().amax(1, keepdim=True) / top).half().float()
    return (weight / scale).round().clamp(-top - 1, top) * scale


def test_the_judges_weights_are_the_checkpoints_rounded(prepared: Mapping[str, Path]) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(demo("gpt2-demo"), dtype=torch.float32)
    replace_conv1d(model)
    own = dict(model.base_model.named_parameters())
    rounding = read_rounding(model.base_model, str(prepared["int8"]), "int8")
    matrices = {name for name in own if own[name].ndim == 2 and name != "wpe.weight"}
    assert set(rounding.weights) == matrices and rounding.dtype is None
    for name in matrices:
        exact = own[name].detach()
        step = exact.abs().amax(1, keepdim=True) / 127
        off = (torch.from_numpy(rounding.weights[name]) - round_rows(exact, 8)).abs() / step
        assert off.max() < 0.2, name  # the scale's own rounding; a code is 1
    four = read_rounding(model.base_model, str(prepared["int4"]), "int4").weights["h.0.attn.c_attn.weight"]
    exact = own["h.0.attn.c_attn.weight"].detach().numpy()
    assert 0.02 < np.linalg.norm(four - exact) / np.linalg.norm(exact) < 0.2


def test_the_judge_finds_the_bundle_of_an_entry(prepared: Mapping[str, Path], tmp_path: Path) -> None:
    def run(folder: Path, precision: str) -> Run:
        entry = Entry("any", precision, "any", Work("generate", (TEXT,)))
        return Run(entry, SimpleNamespace(folder=folder))  # type: ignore[arg-type]

    assert find_bundle(run(tmp_path, "fp16")) is None
    assert find_bundle(run(prepared["int4"], "int4")) == (str(prepared["int4"]), "int4")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "package").mkdir()
    assert find_bundle(run(tmp_path, "int8")) == (str(tmp_path / "bundle"), "int8")


# The peer


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_genai_runs_the_same_graph(
    precision: str,
    prepared: Mapping[str, Path],
    work: Work,
    found: Mapping[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnxruntime_genai")
    genai_system.package_bundle(prepared[precision], tmp_path / "package", precision)
    config = (tmp_path / "package" / "genai_config.json").read_text(encoding="utf-8")
    assert '"cuda": {}' in config
    session = genai_system.SYSTEM.generate(tmp_path, precision, 1, {"provider": "cpu"})
    did = {"weights_sha256": "same", "precision": genai_system.SYSTEM.classes[precision], "threads": 1}
    peer = answer(session, as_json(work), did)
    check_alike("generate", {"planforge": found[precision]["did"], "genai": peer["did"]}, {})
    judged = judge(prepared, work, {"genai": peer["result"]}, genai=precision)
    assert judged["genai"]["alike"] and len(peer["stamps"]) == NEW


def skips(prepare: Any, *arguments: Any) -> str:
    with pytest.raises(Skip) as skipped:
        prepare(*arguments)
    return str(skipped.value)


def test_a_peer_or_precision_that_is_not_here_is_skipped_with_its_reason(
    prepared: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: Sequence[Any] = (demo("gpt2-demo"), "generate", "fp16", tmp_path / "out", {"max_batch": 1})
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert "NVIDIA" in skips(genai_system.SYSTEM.prepare, *arguments)
    monkeypatch.setattr(genai_system, "require", lambda backend: None)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    assert "pip install onnxruntime-genai-cuda" in skips(genai_system.SYSTEM.prepare, *arguments)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", SimpleNamespace(is_cuda_available=lambda: False))
    assert "without CUDA: pip uninstall" in skips(genai_system.SYSTEM.prepare, *arguments)
    assert not (tmp_path / "out").exists()
    refused = skips(genai_system.package_bundle, prepared["fp16-kv8"], tmp_path / "package", "fp16-kv8")
    assert refused.startswith("no package in fp16-kv8: ") and "onnxruntime-genai takes fp32" in refused
    bert = (demo("bert-demo"), tmp_path / "bert", "fp16-kv8", "cuda", 1)
    assert skips(planforge_system.export_bundle, *bert).startswith("fp16-kv8 can't be exported: ")


def test_a_gpu_too_old_for_a_precision_is_skipped(prepared: Mapping[str, Path]) -> None:
    with emulated_ort_cuda(sm="sm75"), pytest.raises(Skip, match="sm80"):
        planforge_system.SYSTEM.generate(prepared["fp16-kv8"], "fp16-kv8", 1, {"backend": "ort-cuda"})


# Encoders, and long prompts


def test_an_encoder_runs_captured_in_int8_too(tmp_path: Path) -> None:
    planforge_system.export_bundle(demo("bert-demo"), tmp_path / "bert", "int8", "cuda", 2)
    rows = tuple(tuple(int(i) for i in row) for row in np.random.default_rng(0).integers(200, 2000, (2, 16)))
    asked = as_json(Work("embed", ("",) * 2, rows))
    with emulated_ort_cuda():
        session: Any = planforge_system.SYSTEM.embed(tmp_path / "bert", "int8", 1, {"backend": "ort-cuda"})
        states = [session.run(asked, lambda: None).astype(np.float32) for _ in range(2)]
        assert session.figures()["captured"] > 0
        session.encoder.close()
    model = transformers.AutoModel.from_pretrained(demo("bert-demo"), dtype=torch.float32)
    with torch.inference_mode():
        exact = model(input_ids=torch.tensor(asked["prompts"])).last_hidden_state.flatten(1).numpy()
    for each in states:
        assert min_cosine(each, exact) > 1 - CAPS["int8"]["cosine_gap"]
        assert min_cosine(each[::-1], exact) < 1 - CAPS["int4"]["cosine_gap"]


def test_prompts_of_2048_tokens_fit_their_checkpoint(tmp_path: Path) -> None:
    TINY["gpt2-124m-4k"](tmp_path / "checkpoint")
    planforge_system.export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", "fp16", "cuda", 1)
    long = cases(new=4)["gpt2-124m-long"].entries[ORT_CUDA].work
    with emulated_ort_cuda():
        session: Any = planforge_system.SYSTEM.generate(
            tmp_path / "bundle", "fp16", 1, {"backend": "ort-cuda"}
        )
        result = session.run(as_json(long), lambda: None)
        did = session.did(as_json(long))
        session.model.close()
    assert did["prompts"] == [list(prompt) for prompt in long.prompts] and len(did["prompts"][0]) == 2048
    judged = judge_answers(str(tmp_path / "checkpoint"), "generate", long.prompts, {"it": result}, "cpu")
    assert judged["it"]["alike"] and len(result[0]) == 4


def test_what_int4_loses_of_a_random_model_is_no_fault(tmp_path: Path) -> None:
    checkpoint = TINY["gpt2-124m"](tmp_path / "checkpoint")
    planforge_system.export_bundle(checkpoint, tmp_path / "bundle", "int4", "cuda", 1)
    texts, prompts = gpt2_prompts(1, 32)
    with emulated_ort_cuda():
        settings = {"backend": "ort-cuda"}
        session: Any = planforge_system.SYSTEM.generate(tmp_path / "bundle", "int4", 1, settings)
        rows = session.run(as_json(Work("generate", texts, prompts, NEW)), lambda: None)
        session.model.close()

    def told(bundles: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        given = (str(checkpoint), "generate", prompts, {"it": rows}, "cpu", bundles)
        return judge_answers(*given)["it"]

    assert told({"it": (str(tmp_path / "bundle"), "int4")})["alike"]
    assert not told({})["alike"]  # by fp16's error from the checkpoint's own scores
