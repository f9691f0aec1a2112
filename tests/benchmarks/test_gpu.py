"""The GPU benchmarks on a CPU: the same sessions, loops, clocks and processes, without the GPU's speed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import measure as measuring
from benchmarks.alike import REPORTED, check_alike
from benchmarks.case import Case, Entry, Work
from benchmarks.checkpoints import demo
from benchmarks.child import answer
from benchmarks.gpu import measure as gpu_measuring
from benchmarks.gpu.judge import judge_answers
from benchmarks.gpu.measure import measure
from benchmarks.gpu.yardstick import step_bytes
from benchmarks.systems import system_named
from benchmarks.systems.system import Skip
from benchmarks.workshop import Prepared, Workshop
from planforge.runtime import TextGenerator, Translator
from planforge.runtime.backends.ort_program import OrtStep
from planforge.runtime.text.tokenizer import Tokenizer

from ..helpers.emulated_gpu import emulated_gpu
from ..helpers.models import edit_json
from ..helpers.translation import SENTENCES

SYSTEMS = "benchmarks.gpu.systems"
CPU = {"device": "cpu"}
CPU_PROVIDER = {"provider": "CPUExecutionProvider"}
COMPILED = {**CPU, "compiled": True, "backend": "eager"}  # traced as for a GPU, and not turned into kernels
NEW = 12
KNOWN: Mapping[str, Any] = {"weights_sha256": "same", "precision": "fp16", "threads": 1}


def sessions(kind: str, bundle: Path, checkpoint: Path, backend: str = "ort-cpu") -> dict[str, Any]:
    """Everybody's session for one kind of work."""
    names = ("pytorch", "copies", "planforge")
    pytorch, copies, planforge = (getattr(system_named(f"{SYSTEMS}.{name}"), kind) for name in names)
    return {
        "eager": pytorch(checkpoint, "fp16", 1, CPU),
        "compiled": pytorch(checkpoint, "fp16", 1, COMPILED),
        "copies": copies(bundle, "fp16", 1, CPU_PROVIDER),
        "planforge": planforge(bundle, "fp16", 1, {"backend": backend}),
    }


def answers(opened: dict[str, Any], work: Work, save: str = "") -> dict[str, dict[str, Any]]:
    """What each session's process would say, at its second piece of work."""
    asked = json.loads(json.dumps({**work.to_json(), "save": save}))
    for session in opened.values():
        answer(session, asked, KNOWN)
    return {name: answer(session, asked, KNOWN) for name, session in opened.items()}


def check(kind: str, found: dict[str, dict[str, Any]]) -> None:
    """Like work, and a time for every token."""
    check_alike(kind, {name: each["did"] for name, each in found.items()}, {})
    for each in found.values():
        assert set(each["did"]) == set(REPORTED[kind])
        if kind != "embed":
            assert len(each["stamps"]) == NEW and each["stamps"] == sorted(each["stamps"])
            assert each["stamps"][-1] <= each["seconds"]


def test_generators_do_the_same_work_and_find_the_models_tokens(demo_bundle: Path) -> None:
    text = "And it came to pass"
    ids = Tokenizer.from_file(next(demo_bundle.glob("tokenizer/*.json"))).encode(text)
    work = Work("generate", (text, text), (tuple(ids), tuple(ids)), NEW)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    opened = sessions("generate", demo_bundle, demo("gpt2-demo"))
    found = answers(opened, work)
    check("generate", found)
    assert found["eager"]["did"]["cache"] == "fp16" and found["eager"]["did"]["prefill_logit_rows"] == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # one step, for all of them
    tokens = {name: each["result"] for name, each in found.items()}
    judged = judge_answers(str(demo("gpt2-demo")), "generate", work.prompts, tokens, "cpu")
    assert all(each["alike"] for each in judged.values()) and len(set(tokens["eager"][0])) > 5
    opened["planforge"].model.close()


def test_encoders_do_the_same_work(head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = head_bundle("classifier")
    rows = tuple(tuple(int(i) for i in row) for row in np.random.default_rng(0).integers(5, 90, (3, 16)))
    work = Work("embed", ("",) * 3, rows)
    opened = sessions("embed", bundle, bundle.with_name("classifier"))
    found = answers(opened, work)
    check("embed", found)
    assert found["eager"]["did"]["tokens"] == 48 and found["eager"]["did"]["vectors"] == [3, 16 * 32]
    asked = {**work.to_json(), "prompts": [list(row) for row in rows]}
    states = {name: session.run(asked, lambda: None).astype(np.float32) for name, session in opened.items()}
    for name, each in states.items():
        assert gpu_measuring.min_cosine(each, states["eager"]) > 0.9999, name
        assert gpu_measuring.min_cosine(each[::-1], states["eager"]) < 0.99, name
    asked["prompts"] = asked["prompts"][:2]  # other work is not answered with the last one's rows
    assert len(opened["planforge"].run(asked, lambda: None)) == 2
    opened["planforge"].encoder.close()


def test_translators_do_the_same_work_and_find_the_models_tokens(marian_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(marian_bundle, tmp_path / "bundle"))
    checkpoint = Path(shutil.copytree(marian_bundle.parent / "marian", tmp_path / "marian"))
    edit_json(checkpoint / "generation_config.json", forced_eos_token_id=...)  # as the benchmarks' has none
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    edit_json(bundle / "manifest.json", generation=manifest["generation"] | {"forced_eos": None})
    text = SENTENCES[4]
    with Translator.load(bundle, backend="ort-cpu") as model:
        ids = [*model.source_tokenizer.encode(text), model.source_eos]
    work = Work("translate", (text,) * 2, (tuple(ids),) * 2, NEW)
    opened = sessions("translate", bundle, checkpoint)
    found = answers(opened, work)
    check("translate", found)
    tokens = {name: each["result"] for name, each in found.items()}
    judged = judge_answers(str(checkpoint), "translate", work.prompts, tokens, "cpu")
    assert all(each["alike"] for each in judged.values()) and len(set(tokens["eager"][0])) > 3
    opened["planforge"].model.close()


def test_planforge_is_measured_alike_on_a_gpus_backend(demo_bundle: Path) -> None:
    text = "Now therefore"
    work = Work("generate", (text,), ((),), NEW)
    with emulated_gpu(demo_bundle) as cuda:
        session: Any = system_named(f"{SYSTEMS}.planforge").generate(
            demo_bundle, "fp16", 1, {"backend": "tensorrt-rtx"}
        )
        found = answers({"rtx": session}, work)["rtx"]
        session.model.close()
        assert cuda.used == 0
    assert len(found["stamps"]) == NEW == len(found["result"][0]) and found["did"]["cache"] == "fp16"


def test_a_backend_that_is_not_here_is_skipped_in_the_runtimes_words(
    demo_bundle: Path, tmp_path: Path
) -> None:
    planforge: Any = system_named(f"{SYSTEMS}.planforge")
    with emulated_gpu(demo_bundle, sm="sm90"), pytest.raises(Skip, match="this GPU is sm90"):
        planforge.generate(demo_bundle, "fp16", 1, {"backend": "tensorrt-rtx"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))  # no nvidia-smi, wherever this runs
        for system in (planforge, system_named(f"{SYSTEMS}.copies")):
            with pytest.raises(Skip, match="NVIDIA"):
                settings = {"backend": "ort-cuda", "max_batch": 1}
                system.prepare(demo("gpt2-demo"), "generate", "fp16", tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_a_provider_that_could_not_start_is_skipped(demo_bundle: Path) -> None:
    copies: Any = system_named(f"{SYSTEMS}.copies")
    with pytest.warns(UserWarning), pytest.raises(Skip, match="could not make its NoSuchProvider"):
        copies.generate(demo_bundle, "fp16", 1, {"provider": "NoSuchProvider"})


# The clock


@pytest.mark.parametrize(("prefill", "step"), [(0.08, 0.02), (0.01, 0.03)])
def test_the_first_token_and_the_later_ones_have_their_own_times(
    prefill: float, step: float, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import child
    from benchmarks.gpu.systems import planforge

    now = [100.0]  # seconds; only the engine's calls take time
    monkeypatch.setattr(child, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slowed(*arguments: Any, **options: Any) -> Any:
        model = TextGenerator.load(demo_bundle, backend="ort-cpu", precision="fp32")
        call = OrtStep.__call__

        def slow(self: OrtStep, inputs: Mapping[str, Any]) -> Any:
            results = call(self, inputs)
            now[0] += prefill if inputs["input_ids"].shape[1] > 1 else step
            return results

        monkeypatch.setattr(OrtStep, "__call__", slow)
        return model

    monkeypatch.setattr(planforge, "load", slowed)
    session: Any = planforge.SYSTEM.generate(demo_bundle, "fp16", 1, {"backend": "any"})
    work = Work("generate", ("Now therefore",), ((0,) * 4,), 8)
    rounds = [answers({"slow": session}, work)["slow"] for _ in range(3)]
    found = rounds[0]
    prepared: Any = type("Prepared", (), {"checkpoint": demo("gpt2-demo")})
    run = measuring.Run(Entry("any", "fp16", "any", work), prepared, found, rounds)
    figures = gpu_measuring.figures(run, {"copy_gb_per_s": 1.0})
    assert figures["ttft_ms"]["p50"] == pytest.approx(prefill * 1e3)
    assert figures["inter_token_ms"]["p50"] == pytest.approx(step * 1e3)
    assert figures["tokens_per_s"] == pytest.approx(8 / (prefill + 7 * step), rel=0.01)
    read = step_bytes(demo("gpt2-demo"), work)
    assert read is not None
    share = read / (figures["inter_token_ms"]["p50"] / 1e3) / 1e9
    assert figures["bandwidth_share"] == pytest.approx(share, abs=1e-3)
    assert figures["tokens"] == found["result"][0] and len(figures["tokens"]) == 8
    session.model.close()


# All of it


def test_the_whole_way_in_processes_of_their_own(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo("gpt2-demo")
    text = "And it came to pass"
    ids = Tokenizer.from_file(next(demo_bundle.glob("tokenizer/*.json"))).encode(text)
    work = Work("generate", (text,), (tuple(ids),), NEW)
    settings = {"pytorch": CPU, "copies": CPU_PROVIDER, "planforge": {"backend": "ort-cpu"}}
    entries = {
        name: Entry(f"{SYSTEMS}.{name}", "fp16", "gpt2-demo", work, settings=chosen)
        for name, chosen in settings.items()
    }

    def prepare(workshop: Workshop, entry: Entry) -> Prepared:
        where = folder if entry.system.endswith("pytorch") else demo_bundle
        return Prepared(Path(sys.executable), {}, folder, where, "same", 0, 0)

    monkeypatch.setattr(Workshop, "prepare", prepare)
    bounds = {"copy_gb_per_s": 1000.0, "fp16_tflops": 1.0, "clocks": {}}
    result = measure(Case("demo", "gpu", "Demo", entries), Workshop(tmp_path), 2, bounds, 80.0, "cpu")
    assert result["refused"] is None and result["skipped"] == {}
    first = result["entries"]["pytorch"]["tokens"]
    assert len(first) == NEW and len(set(first)) > 5
    for found in result["entries"].values():
        assert found["alike"] and found["judge"]["limit"] > 0 and len(found["tokens"]) == NEW
        assert (
            found["ttft_ms"]["p50"] > 0 and found["inter_token_ms"]["p50"] > 0 and "bandwidth_share" in found
        )
