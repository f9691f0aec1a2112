"""`bench` measures what it says; no test here looks at how long anything took."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime import TextEncoder, TextGenerator, Translator
from planforge.runtime.apps.diagnostics import bench as bench_module
from planforge.runtime.apps.diagnostics import bench_work
from planforge.runtime.apps.diagnostics import child as child_module
from planforge.runtime.apps.diagnostics.bench import BenchResult, Case, Process, bench, read_bandwidth
from planforge.runtime.apps.diagnostics.bench_work import (
    Embedding,
    Generating,
    TokenClock,
    Translating,
    Work,
    make_passage,
    summarize_times,
)
from planforge.runtime.apps.stage_progress import Notice
from planforge.runtime.backends.dialects import choose_artifact
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.decoding.chunk import Chunk, Usage
from planforge.runtime.errors import InputError, MemoryLimitError, PlanForgeError

KEYS = {
    *("backend", "artifact", "precision", "gate_passed", "batch", "prompt", "new_tokens", "ttft_ms"),
    *("inter_token_ms", "latency_ms", "tokens_per_s", "texts_per_s", "load_ms", "peak_rss_mb"),
    *("bandwidth_share", "tokens_per_s_range", "nodes", "steps"),
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
        middle_half = case["tokens_per_s_range"]
        assert 0 < middle_half["p25"] <= middle_half["p75"] and case["tokens_per_s"] > 0
        assert case["tokens_per_s"] == pytest.approx(3 * case["texts_per_s"], abs=0.02)
        assert case["bandwidth_share"] > 0
        if sys.platform == "linux":
            assert 30 < case["peak_rss_mb"] < 1000
    where = value["environment"]
    assert (where["threads"], where["threads_reason"]) == (1, "as asked for")
    assert where["read_gb_per_s"] > 0
    assert {"planforge", "onnxruntime", "numpy"} <= set(where["versions"])
    assert where["cpu"]
    assert stages == ["loading fp32", "loading fp16", "measuring: round 1", "measuring: round 2"]


@pytest.mark.usefixtures("short")
def test_an_encoder_embeds(minilm_bundle: Path) -> None:
    (case,) = bench(minilm_bundle, prompt_tokens=10, batch=3).cases
    assert case.artifact == chosen(minilm_bundle, "encoder", "fp32").id
    assert (case.prompt, case.new_tokens) == (10, 0)
    assert (case.ttft_ms, case.inter_token_ms, case.bandwidth_share) == (None, None, None)
    assert case.tokens_per_s == pytest.approx(10 * case.texts_per_s, rel=0.01)
    assert not case.gate_passed  # the fixture's export did not verify
    with pytest.raises(PlanForgeError, match="steps=3 is for models that make pictures"):
        bench(minilm_bundle, steps=3)
    with pytest.raises(PlanForgeError, match="an encoder, which generates no tokens"):
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


@pytest.mark.usefixtures("short")
def test_a_precision_that_does_not_fit_is_left_out_and_said(llama_demo_bundle: Path) -> None:
    """Weights in fp32 are larger than the limit, those in int8 and a cache are not."""
    manifest = Bundle.open(llama_demo_bundle).manifest
    limit = manifest.count_weight_bytes(chosen(llama_demo_bundle, "decoder", "fp32"))
    lines: list[str] = []
    settings: dict[str, Any] = {"threads": 1, "new_tokens": 2, "memory_limit": limit}
    precisions = ["fp32", "int8"]
    result = bench(llama_demo_bundle, precisions=precisions, progress=lines.append, **settings)
    assert [case.precision for case in result.cases] == ["int8"]
    (said,) = [line for line in lines if isinstance(line, Notice)]
    assert said.startswith("fp32 is not measured: more than ") and "memory_limit is " in said
    with pytest.raises(MemoryLimitError, match="of weights in fp32") as caught:
        bench(llama_demo_bundle, precisions=["fp32"], **settings)
    assert caught.value.needed > caught.value.limit == limit


def test_a_damaged_bundle_is_said_as_load_says_it(own_bundle: Path) -> None:
    weights = own_bundle / chosen(own_bundle, "decoder", "fp32").data[0]
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(PlanForgeError, match=rf"{weights.name} has changed since it was exported"):
        bench(own_bundle, precisions=["fp32"])


def test_a_process_that_dies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "CHILD", "import os; os._exit(7)  # {}")
    with pytest.raises(PlanForgeError, match="the process that measured int8 ended with exit code 7"):
        Process(Work("bundle", "auto", "int8"))


def chunk(*tokens: int, index: int = 0) -> Chunk:
    return Chunk("", tokens, (), (), None, Usage(3, len(tokens)), index)


def test_the_moments_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 2.0, 2.5, 2.75])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    clock = TokenClock(rows=2)
    for each in (chunk(5), chunk(6, index=1), chunk(7), chunk(8, index=1)):
        clock.note(each)
    assert clock.known == [1.0, 2.0]  # when the last row's token was known
    guessed = TokenClock(rows=1)
    guessed.note(chunk(1, 2))  # two tokens of one step
    assert guessed.known == [2.5, 2.75]
    found = summarize_times(started=0.5, known=[1.5, 2.0, 4.0], ended=7.0)
    assert found == {"seconds": 6.5, "ttft_ms": 1000.0, "inter_token_ms": [500.0, 2000.0]}


def test_a_single_new_token_has_nothing_between() -> None:
    assert summarize_times(1.0, [2.5], 3.0) == {"seconds": 2.0, "ttft_ms": 1500.0, "inter_token_ms": []}


def test_the_end_token_ends_nothing_and_every_round_has_another_text(demo_bundle: Path) -> None:
    with TextGenerator.load(demo_bundle, precision="fp32") as model:
        probe = model.generate("And it came to pass", max_new_tokens=1).token_ids[0]
        ends = replace(model.defaults, eos=(probe,))
        early = TextGenerator(model.decoder, model.tokenizer, ends, max_length=model.max_length)
        assert early.generate("And it came to pass", max_new_tokens=6).finish_reason == "eos"
        work = Work(str(demo_bundle), "auto", "fp32", prompt_tokens=150, new_tokens=6, batch=2)
        subject = Generating(early, work)
        for number in range(1, 4):
            found = subject.round(number)
            assert len(found["inter_token_ms"]) == 5
            assert 0 < found["ttft_ms"] + sum(found["inter_token_ms"]) <= found["seconds"] * 1e3
        texts = [subject.text(number) for number in range(4)]
        assert len({text[:12] for text in texts}) == 4
        assert [model.count_tokens(text) for text in texts] == [150] * 4


def test_translations_have_the_tokens_that_were_asked_for(dates_bundle: Path) -> None:
    with Translator.load(dates_bundle, precision="fp32") as model:
        subject = Translating(model, Work(str(dates_bundle), "auto", "fp32", new_tokens=30))
        decoder = model.decoder
        for number in range(2):
            found = subject.round(number)
            assert len(found["inter_token_ms"]) == 29  # dates are done after 11
            assert 0 < found["ttft_ms"] + sum(found["inter_token_ms"]) <= found["seconds"] * 1e3 + 1e-6
        assert model.decoder is decoder  # the model is as it was
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
        assert bench_work.count_step_bytes(manifest, subject, 3) == weights + sets * 3 * 12 * row
    with TextEncoder.load(minilm_bundle) as encoder:
        embedding = Embedding(encoder, Work(str(minilm_bundle), "auto", "fp32"))
        assert embedding.prompt == 128
        assert bench_work.count_step_bytes(Bundle.open(minilm_bundle).manifest, embedding, 1) is None


@given(tokens=st.integers(1, 400), start=st.integers(0, 1000), width=st.integers(1, 5))
def test_a_passage_has_the_tokens_that_were_asked_for(tokens: int, start: int, width: int) -> None:
    def count(text: str) -> int:  # a token for each begun `width` characters of a word, and two around it
        return 2 + sum(math.ceil(len(word) / width) for word in text.split())

    text = make_passage(count, tokens + 2, start)
    assert count(text) == tokens + 2
    assert text.split()[0] in " ".join(bench_work.WORDS)


def test_the_bandwidth_is_of_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    assert read_bandwidth(np.ones(1000, np.int64), 3) == 4000.0


def case(precision: str, tokens_per_s: float, passed: bool = True, spread: float = 0.0) -> Case:
    """A case whose middle half of rounds lies as far around its median as `spread`, a share, says."""
    numbers = {"p50": 1.0, "p99": 2.0}
    fields: dict[str, Any] = {
        **{"backend": "ort-cpu", "batch": 1, "prompt": 32, "new_tokens": 64, "ttft_ms": 5.0},
        **{"inter_token_ms": numbers, "latency_ms": numbers, "texts_per_s": 1.0, "load_ms": 100.0},
        **{"peak_rss_mb": 90.0, "bandwidth_share": 0.5},
    }
    return Case(
        precision=precision,
        artifact=f"decoder.portable.{precision}",
        tokens_per_s=tokens_per_s,
        tokens_per_s_range={"p25": tokens_per_s * (1 - spread), "p75": tokens_per_s * (1 + spread)},
        gate_passed=passed,
        **fields,
    )


def test_the_fastest_is_one_whose_gate_passed() -> None:
    cases = (case("fp32", 10.0), case("int8", 20.0), case("int4", 30.0, passed=False))
    assert BenchResult({}, cases).fastest().precision == "int8"
    assert BenchResult({}, cases).best_default().precision == "int8"
    with pytest.raises(InputError, match=r"of decoder\.portable\.int4 has passed verification"):
        BenchResult({}, cases[2:]).fastest()


@pytest.mark.parametrize(
    ("cases", "best"),
    [
        ([case("int8", 100.0, spread=0.02), case("int4", 103.0, spread=0.02)], "int8"),  # noise
        ([case("int8", 100.0, spread=0.001), case("int4", 101.9, spread=0.001)], "int8"),  # less than 2 %
        ([case("int8", 100.0, spread=0.01), case("int4", 103.0, spread=0.01)], "int4"),
        ([case("int8", 100.0, spread=0.3), case("int4", 140.0)], "int4"),
        ([case("int8", 100.0, spread=0.4), case("int4", 140.0)], "int8"),
        ([case("int4", 100.0), case("int8", 100.0), case("fp32", 60.0)], "int8"),  # whatever the order
        ([case("int8-kv8", 100.0), case("int8", 99.0), case("fp16", 98.5)], "fp16"),
        ([case("fp32", 99.5, passed=False), case("int4", 100.0)], "int4"),
        ([case("mystery", 100.0), case("int4-kv8", 99.0)], "int4-kv8"),
    ],
)
def test_within_the_spread_the_more_exact_precision_stays(cases: list[Case], best: str) -> None:
    assert BenchResult({}, tuple(cases)).best_default().precision == best


def test_the_spread_is_that_of_the_middle_half_of_the_rounds(demo_bundle: Path) -> None:
    seconds = [1.0, 2.0, 4.0, 5.0, 100.0]  # of 20 tokens: 20, 10, 5, 4 and 0.2 a second
    rounds = [
        {"seconds": value, "ttft_ms": 1.0, "inter_token_ms": [1.0], "peak_rss_mb": None} for value in seconds
    ]
    artifact = chosen(demo_bundle, "decoder", "fp32").id
    facts = {"backend": "ort-cpu", "artifacts": [artifact], "prompt": 3, "new_tokens": 10, "load_ms": 1.0}
    process: Any = SimpleNamespace(
        facts={**facts, "step_bytes": None, "nodes": None, "steps": 0}, rounds=rounds, precision="fp32"
    )
    found = bench_module.make_case(Bundle.open(demo_bundle), process, batch=2, read=1e9)
    assert found.tokens_per_s == 5.0
    assert found.tokens_per_s_range == {"p25": 4.0, "p75": 10.0}
    assert found.spread == pytest.approx(0.6)
