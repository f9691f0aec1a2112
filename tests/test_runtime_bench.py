"""`bench` measures what it says; no test here looks at how long anything took."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime import TextEncoder, TextGenerator, Translator, bench_work
from planforge.runtime import bench as bench_module
from planforge.runtime.backends.dialects import choose_artifact
from planforge.runtime.bench import BenchResult, Case, Process, bench, read_bandwidth
from planforge.runtime.bench_work import Embedding, Generating, TimedDecoder, Translating, Work, passage
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.decoding.decoder import Decoder
from planforge.runtime.errors import InputError, PlanForgeError

KEYS = {
    *("backend", "artifact", "precision", "gate_passed", "batch", "prompt", "new_tokens", "ttft_ms"),
    *("inter_token_ms", "latency_ms", "tokens_per_s", "texts_per_s", "load_ms", "peak_rss_mb"),
    "bandwidth_share",
}


def chosen(folder: Path, graph: str, precision: str) -> Artifact:
    return choose_artifact(Bundle.open(folder), graph, precision)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds and a small block to read, whatever time they take."""
    monkeypatch.setattr(bench_module, "ROUNDS", 2)
    monkeypatch.setattr(bench_module, "SECONDS", 0.0)
    monkeypatch.setattr(bench_module, "READ_BYTES", 2**20)


@pytest.mark.usefixtures("short")
def test_every_precision_of_a_generator(demo_bundle: Path) -> None:
    stages: list[str] = []
    result = bench(demo_bundle, threads=1, prompt_tokens=9, new_tokens=3, batch=2, progress=stages.append)
    value = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert [case["precision"] for case in value["cases"]] == ["fp32", "fp16"]
    for case in value["cases"]:
        assert set(case) == KEYS
        assert (case["backend"], case["batch"], case["prompt"], case["new_tokens"]) == ("ort-cpu", 2, 9, 3)
        assert case["artifact"] == chosen(demo_bundle, "decoder", case["precision"]).id
        assert case["gate_passed"] is True
        assert set(case["inter_token_ms"]) == set(case["latency_ms"]) == {"p50", "p99"}
        assert 0 < case["ttft_ms"] < case["latency_ms"]["p99"]
        assert case["tokens_per_s"] == pytest.approx(3 * case["texts_per_s"], abs=0.02)
        assert case["bandwidth_share"] > 0
        if sys.platform == "linux":
            assert 30 < case["peak_rss_mb"] < 1000
    where = value["environment"]
    assert (where["threads"], where["threads_reason"]) == (1, "as asked for")
    assert where["read_gb_per_s"] > 0
    assert {"planforge", "onnxruntime", "numpy"} <= set(where["versions"])
    assert where["cpu"]
    assert stages == ["loading fp32", "loading fp16", "round 1", "round 2"]


@pytest.mark.usefixtures("short")
def test_an_encoder_embeds(minilm_bundle: Path) -> None:
    (case,) = bench(minilm_bundle, prompt_tokens=10, batch=3).cases
    assert case.artifact == chosen(minilm_bundle, "encoder", "fp32").id
    assert (case.prompt, case.new_tokens) == (10, 0)
    assert (case.ttft_ms, case.inter_token_ms, case.bandwidth_share) == (None, None, None)
    assert case.tokens_per_s == pytest.approx(10 * case.texts_per_s, rel=0.01)
    assert not case.gate_passed  # the fixture's export did not verify
    with pytest.raises(PlanForgeError, match="an encoder generates nothing"):
        bench(minilm_bundle, new_tokens=3)


@pytest.mark.usefixtures("short")
def test_a_translator_translates(dates_bundle: Path) -> None:
    (case,) = bench(dates_bundle, precisions=["fp32"], new_tokens=5, batch=2).cases
    assert case.artifact == chosen(dates_bundle, "decoder", "fp32").id
    assert (case.prompt, case.new_tokens, case.batch) == (32, 5, 2)
    assert case.ttft_ms is not None and case.inter_token_ms is not None
    assert case.bandwidth_share is None  # the weights file holds the encoder's too


@pytest.mark.usefixtures("short")
def test_settings_that_do_not_fit(demo_bundle: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"precisions": ["int3"]}, r"precision='int3' is not in this bundle, which has \['fp32', 'fp16'\]"),
        ({"threads": 0}, "threads=0"),
        ({"backend": "cuda"}, "backend='cuda' is not one of"),
        ({"batch": 0}, "batch=0 must be from 1 to 8"),
        ({"batch": 9}, "batch=9 must be from 1 to 8"),
        ({"prompt_tokens": 257}, "prompt_tokens=257 must be from 1 to 256"),
        ({"prompt_tokens": 200, "new_tokens": 57}, "new_tokens=57 must be from 1 to 56"),
        ({"new_tokens": 0}, "new_tokens=0"),
    ]
    for settings, message in wrong:
        with pytest.raises(PlanForgeError, match=message):
            bench(demo_bundle, **settings)
    with pytest.raises(PlanForgeError, match="is not a folder"):
        bench(demo_bundle / "nowhere")


def test_a_damaged_bundle_is_said_as_load_says_it(own_bundle: Path) -> None:
    weights = own_bundle / chosen(own_bundle, "decoder", "fp32").data[0]
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(PlanForgeError, match=rf"{weights.name} has changed since it was exported"):
        bench(own_bundle, precisions=["fp32"])


def test_a_process_that_dies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "CHILD", "import os; os._exit(7)  # {}")
    with pytest.raises(PlanForgeError, match="the process that measured int8 ended with exit code 7"):
        Process(Work("bundle", "auto", "int8"))


def test_the_moments_of_tokens(monkeypatch: pytest.MonkeyPatch, demo_bundle: Path) -> None:
    with TextGenerator.load(demo_bundle) as model:
        timed = TimedDecoder(model.decoder)
        timed.moments = [1.0, 1.5, 2.0, 4.0]  # a prompt in two parts, then a step for each further token
        monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
        found = timed.timings(0.5, 3)
    assert found == {"seconds": 6.5, "ttft_ms": 1500.0, "inter_token_ms": [2000.0, 3000.0]}
    assert timed.moments == []


def test_a_single_new_token_has_nothing_between(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = TimedDecoder(Decoder(None, None))  # type: ignore[arg-type]
    timed.moments = [1.0]
    monkeypatch.setattr(time, "perf_counter", lambda: 3.0)
    assert timed.timings(1.0, 1) == {"seconds": 2.0, "ttft_ms": 2000.0, "inter_token_ms": []}


def test_the_end_token_ends_nothing_and_every_round_has_another_text(demo_bundle: Path) -> None:
    with TextGenerator.load(demo_bundle, precision="fp32") as model:
        probe = model.generate("And it came to pass", max_new_tokens=1).token_ids[0]
        model.defaults = type(model.defaults)(eos=(probe,), max_length=model.max_length)
        subject = Generating(
            model, Work(str(demo_bundle), "auto", "fp32", prompt_tokens=300 // 2, new_tokens=6)
        )
        assert len(subject.round(1)["inter_token_ms"]) == 5
        texts = [subject.text(number) for number in range(4)]
        assert len({text[:12] for text in texts}) == 4
        assert [model.count_tokens(text) for text in texts] == [150] * 4
        assert subject.decoder.moments == []


def test_translations_have_the_tokens_that_were_asked_for(dates_bundle: Path) -> None:
    with Translator.load(dates_bundle, precision="fp32") as model:
        subject = Translating(model, Work(str(dates_bundle), "auto", "fp32", new_tokens=30))
        assert len(subject.round(1)["inter_token_ms"]) == 29  # dates are done after 11
        assert [artifact.graph for artifact in subject.artifacts] == ["decoder", "encoder"]


def test_what_one_step_moves(demo_bundle: Path, minilm_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    artifact = chosen(demo_bundle, "decoder", "fp32")
    weights = sum((demo_bundle / name).stat().st_size for name in artifact.data)
    config = manifest.config
    with TextGenerator.load(demo_bundle, precision="fp32") as model:
        work = Work(str(demo_bundle), "auto", "fp32", prompt_tokens=10, new_tokens=4)
        subject = Generating(model, work)
        row = config["n_layer"] * 2 * config["n_embd"] * 4  # keys and values of a token
        # A portable graph reads the past of one set of buffers and writes the present into another.
        sets = 2 if artifact.dialect == "portable" else 1
        assert bench_work.step_bytes(manifest, subject, 3) == weights + sets * 3 * 12 * row
    with TextEncoder.load(minilm_bundle) as encoder:
        embedding = Embedding(encoder, Work(str(minilm_bundle), "auto", "fp32"))
        assert embedding.prompt == 128
        assert bench_work.step_bytes(Bundle.open(minilm_bundle).manifest, embedding, 1) is None


@given(tokens=st.integers(1, 400), start=st.integers(0, 1000), width=st.integers(1, 5))
def test_a_passage_has_the_tokens_that_were_asked_for(tokens: int, start: int, width: int) -> None:
    def count(text: str) -> int:  # a token for each begun `width` characters of a word, and two around it
        return 2 + sum(math.ceil(len(word) / width) for word in text.split())

    text = passage(count, tokens + 2, start)
    assert count(text) == tokens + 2
    assert text.split()[0] in " ".join(bench_work.WORDS)


def test_the_bandwidth_is_of_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    assert read_bandwidth(np.ones(1000, np.int64), 3) == 4000.0


def case(precision: str, tokens_per_s: float, passed: bool = True) -> Case:
    numbers = {"p50": 1.0, "p99": 2.0}
    fields: dict[str, Any] = {
        **{"backend": "ort-cpu", "batch": 1, "prompt": 32, "new_tokens": 64, "ttft_ms": 5.0},
        **{"inter_token_ms": numbers, "latency_ms": numbers, "texts_per_s": 1.0, "load_ms": 100.0},
        **{"peak_rss_mb": 90.0, "bandwidth_share": 0.5},
    }
    artifact = f"decoder.portable.{precision}"
    return Case(
        precision=precision, artifact=artifact, tokens_per_s=tokens_per_s, gate_passed=passed, **fields
    )


def test_the_fastest_is_one_whose_gate_passed() -> None:
    cases = (case("fp32", 10.0), case("int8", 20.0), case("int4", 30.0, passed=False))
    assert BenchResult({}, cases).fastest().precision == "int8"
    with pytest.raises(InputError, match=r"of decoder\.portable\.int4 none has passed its gate"):
        BenchResult({}, cases[2:]).fastest()
