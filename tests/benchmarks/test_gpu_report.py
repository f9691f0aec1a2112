"""The GPU benchmarks' targets, tables and facts, from made-up figures; what is said where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import nvidia
from benchmarks.gpu.cases import COPIES, EAGER, GENAI, ORT_CUDA, RTX, TENSORRT, cases
from benchmarks.gpu.environment import environment, same_machine
from benchmarks.gpu.report import report
from benchmarks.gpu.systems.planforge import TARGETS as TARGETS_OF_EXPORT
from benchmarks.gpu.targets import TARGETS, Target, judge_target, verdicts
from benchmarks.systems import system_named
from planforge.exporter.precisions import PRECISIONS
from planforge.exporter.targets import find_target
from planforge.runtime.backends.gpus import Gpu

from ..helpers.machines import Machine
from ..helpers.paths import ROOT

BOUNDS: dict[str, Any] = {
    "copy_gb_per_s": 4200.0,
    "fp16_tflops": 700.0,
    "clocks": {"clocks.sm": 1980.0, "pstate": "P0", "power.draw": None},
}
ABSENT = "TensorRT-RTX is for sm75 and x86-64, this machine has sm90 and x86_64"


def decoding(ms: float, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {
        "ttft_ms": {"p50": 3.2, "p99": 4.0},
        "inter_token_ms": {"p50": ms, "p99": 2 * ms},
        "tokens_per_s": tokens_per_s,
        "bandwidth_share": 0.4,
        "judge": {"worst": 0.01, "limit": 0.02, "flips": 1, "alike": True},
        "alike": True,
        **more,
    }


def case(entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **{"title": "GPT-2", "date": "2026-01-02", "rounds": 7, "bounds": BOUNDS, "refused": None},
        **{"entries": entries, "skipped": {}},
        **more,
    }


def made_up() -> dict[str, Any]:
    """One run's cases: ort-cuda is 4.5 times as fast as PyTorch and 1.4 times as fast as copies."""
    one = {
        EAGER: decoding(2.25, 400.0),
        COPIES: decoding(0.7, 1300.0),
        ORT_CUDA: decoding(0.5, 1900.0),
        TENSORRT: decoding(0.4, 2300.0),
    }
    return {
        "gpt2-124m-b1": case(one, skipped={RTX: ABSENT}),
        "gpt2-124m-b64": case({ORT_CUDA: decoding(3.0, 20000.0)}),
        "gpt2-xl-b1": case({}, refused="all together needs 32 GB on the device, it has 8.0"),
    }


def found(case: str, entry: str, against: tuple[str, str] | None, cases: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one of the issue's targets."""
    target = next(t for t in TARGETS if (t.case, t.entry, t.against) == (case, entry, against))
    return judge_target(target, cases)


def test_targets_are_met_or_missed_by_ratios_and_limits() -> None:
    one = "gpt2-124m-b1"
    run = made_up()
    eager, copies = (found(one, ORT_CUDA, (one, entry), run) for entry in (EAGER, COPIES))
    assert (eager["found"], eager["met"]) == (4.5, True)
    assert (copies["found"], copies["met"]) == (1.4, False)
    assert found(one, ORT_CUDA, None, run)["met"] is True  # 0.5 ms, and 0.8 are allowed
    batches = found("gpt2-124m-b64", ORT_CUDA, (one, ORT_CUDA), run)  # of a rate, more is better
    assert batches["found"] == pytest.approx(20000 / 1900, abs=1e-3) and batches["met"] is True
    plan = found(one, TENSORRT, (one, ORT_CUDA), run)
    assert (plan["found"], plan["met"], plan["why"]) == (1.25, True, None)
    run[one]["entries"][ORT_CUDA] = decoding(0.81, 1900.0)
    assert found(one, ORT_CUDA, None, run)["met"] is False


def test_xl_in_int4_is_judged_by_fp16() -> None:
    xl = "gpt2-xl-b1"
    int4 = f"{ORT_CUDA} int4"
    run = {xl: case({ORT_CUDA: decoding(2.6, 380.0), int4: decoding(2.0, 490.0)})}
    assert found(xl, int4, (xl, ORT_CUDA), run)["met"] is True  # 1.3 times
    run[xl]["entries"][int4] = decoding(2.1, 470.0)
    assert found(xl, int4, (xl, ORT_CUDA), run)["met"] is False
    run[xl] = case({ORT_CUDA: decoding(2.6, 380.0)}, skipped={int4: "this GPU is too old"})
    assert found(xl, int4, (xl, ORT_CUDA), run)["why"] == f"{int4}: this GPU is too old"


def test_the_report_says_whether_steps_ran_captured() -> None:
    one = {EAGER: decoding(2.0, 400.0), ORT_CUDA: decoding(0.5, 1900.0, captured=3)}
    run = {"gpt2-124m-b1": case({**one, f"{ORT_CUDA} int4": decoding(0.9, 900.0, captured=0)})}
    about = {
        **{"gpu": {"name": "G", "sm": "sm90", "memory_gb": 1, "nvidia_smi": {}}, "driver": "580.1"},
        **{"cuda": "13.0", "cpu": "C", "system": "S", "python": "3.12", "versions": {}},
    }
    text = report({"environment": about, "cases": run, "targets": []})
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line[:1] == "|"]
    column = lines[0].index("captured graphs")
    captured = {cells[1]: cells[column] for cells in lines if cells[1].startswith("P")}
    assert captured == {EAGER: "", ORT_CUDA: "3", f"{ORT_CUDA} int4": "0"}
    assert f"- {ORT_CUDA} int4 replayed no CUDA graph: each kernel was launched" in text
    assert f"{ORT_CUDA} replayed" not in text and f"{EAGER} replayed" not in text


def test_what_cannot_be_judged_says_why() -> None:
    one = "gpt2-124m-b1"
    run = made_up()
    assert found(one, RTX, (one, ORT_CUDA), run)["why"] == f"{RTX}: {ABSENT}"
    assert found("gpt2-xl-b1", ORT_CUDA, None, run)["why"] == (
        "gpt2-xl-b1: all together needs 32 GB on the device, it has 8.0"
    )
    assert found("bert-base-b32", ORT_CUDA, None, run)["why"] == "bert-base-b32 was not run"
    slower = {one: {**run[one], "bounds": {**BOUNDS, "copy_gb_per_s": 900.0}}}
    assert "H200's class" in str(found(one, ORT_CUDA, None, slower)["why"])
    assert found(one, ORT_CUDA, (one, EAGER), slower)["met"] is True  # ratios are for any GPU
    for entry in (ORT_CUDA, EAGER):  # the speed of another computation says nothing, on either side
        run = made_up()
        run[one]["entries"][entry]["alike"] = False
        verdict = found(one, ORT_CUDA, (one, EAGER), run)
        assert (verdict["met"], verdict["found"]) == (None, None)
        assert verdict["why"] == f"{entry}: its results are not the model's"
    run = made_up()
    del run[one]["entries"][ORT_CUDA]["inter_token_ms"]
    assert "inter_token_ms could not be told" in str(found(one, ORT_CUDA, None, run)["why"])


def test_every_target_names_what_a_case_measures() -> None:
    known = cases()
    assert len(TARGETS) == 18 + 2 * len(known)
    for target in TARGETS:
        for name, entry in ((target.case, target.entry), *([target.against] if target.against else ())):
            assert entry in known[name].entries
        encodes = known[target.case].entries[target.entry].work.kind == "embed"
        assert (target.metric in ("ms", "matrix_share")) == encodes
    lead = next(t for t in TARGETS if t.against == ("gpt2-124m-b1", EAGER))
    least = replace(lead, value=2.0)
    assert (
        judge_target(least, made_up())["met"] is True
        and judge_target(replace(least, value=4.6), made_up())["met"] is False
    )


def test_cases_name_systems_that_there_are_and_the_same_work() -> None:
    for each in cases().values():
        works = {json.dumps(entry.work.to_json()) for entry in each.entries.values()}
        assert len(works) == 1
        for entry in each.entries.values():
            kind = PRECISIONS[entry.precision]
            own = {8: "8-bit", 4: "4-bit"}.get(kind.weight_bits or 16, "fp16")
            assert system_named(entry.system).classes[entry.precision] == own
            rounded = {"precision": kind.weight_bits, "cache": kind.cache_bits}
            assert set(entry.varies) == {part for part, bits in rounded.items() if bits}


def test_the_cases_have_precisions_below_fp16_a_peer_and_long_prompts() -> None:
    known = cases()
    for name in ("gpt2-124m-b1", "gpt2-124m-long", "gpt2-xl-b1"):
        of = {entry: made.precision for entry, made in known[name].entries.items()}
        caches = () if name == "gpt2-xl-b1" else ("fp16-kv8", "int8-kv8")
        for precision in ("int8", "int4", *caches):
            assert of[f"{ORT_CUDA} {precision}"] == precision
        assert [of.get(f"{GENAI}{end}") for end in ("", " int8", " int4")] == ["fp16", "int8", "int4"]
    long = known["gpt2-124m-long"].entries[ORT_CUDA].work
    assert [len(prompt) for prompt in long.prompts] == [2048]
    assert {f"{ORT_CUDA} int8", f"{ORT_CUDA} int4"} < set(known["bert-base-b1"].entries)


def test_plans_and_graphs_are_exported_for_the_engine_that_runs_them() -> None:
    for backend, name in TARGETS_OF_EXPORT.items():
        target = find_target(name)
        assert target.engine == ("onnxruntime" if backend == "ort-cuda" else backend)
        assert target.plans == (backend != "ort-cuda") and "fp16" not in target.without


def test_the_report_shows_figures_absences_faults_and_verdicts() -> None:
    run = made_up()
    run["gpt2-124m-b1"]["entries"][COPIES] |= {
        "alike": False,
        "judge": {"worst": 1.25, "limit": 0.02, "flips": 9, "alike": False},
    }
    run["bert-base-b1"] = case({EAGER: {"ms": {"p50": 1.5, "p99": 2.5}, "cosine_min": 0.5, "alike": False}})
    gpu = {"name": "NVIDIA H200", "sm": "sm90", "memory_gb": 150.1}
    about = {
        **{"gpu": {**gpu, "nvidia_smi": {"power.limit": 700.0, "vbios_version": None}}},
        **{"driver": "580.1", "cuda": "13.0", "cpu": "A processor", "system": "Linux", "python": "3.12.3"},
        **{"versions": {"torch": "2.13.0", "onnxruntime-gpu": "1.31.1"}, "backends": {}},
    }
    text = report({"environment": about, "cases": run, "targets": verdicts(run)})
    assert "- NVIDIA H200, sm90, 150.1 GB; driver 580.1, CUDA 13.0\n- nvidia-smi: power.limit 700\n" in text
    assert "torch 2.13.0, onnxruntime-gpu 1.31.1" in text
    assert f"| {ORT_CUDA} | 3.20 | 0.500 | 1.000 | 1,900 | 40% |" in text
    assert "copies 4200.0 GB/s, read and written, and multiplies at 700.0 TFLOP/s" in text
    assert "then at clocks.sm 1980, pstate P0." in text
    assert f"- without {RTX}: {ABSENT}" in text
    assert f"**{COPIES} does not compute this model**: a token of its answers is 1.25 below the best" in text
    assert f"**{EAGER} does not compute this model**: its least cosine to PyTorch's fp16 is 0.5000" in text
    assert "not measured: all together needs 32 GB" in text
    rows = [line for line in text.splitlines() if line.startswith("| gpt2-124m-b1")]
    assert f"| gpt2-124m-b1 | {ORT_CUDA} | ms per token | at least 4x {EAGER} | 4.5x | met |" in rows
    assert f"| gpt2-124m-b1 | {ORT_CUDA} | ms per token | at most 0.8 | 0.5 | met |" in rows
    assert any("not measured: ORT-CUDA with copies: its results are not the model's" in row for row in rows)
    assert "at least 10x gpt2-124m-b1" in text
    run["gpt2-124m-b1"]["entries"][ORT_CUDA]["inter_token_ms"]["p50"] = 0.85
    text = report({"environment": about, "cases": run, "targets": verdicts(run)})
    assert "| at most 0.8 | 0.85 | **missed** |" in text


# What nvidia-smi says

TABLE = "NVIDIA H200, 3 g, GPU-1a2b, 9.0, 143771, 580.95.05, [N/A], Enabled, 700.00, 1980, 3201\n"


def test_a_table_of_nvidia_smi() -> None:
    facts = nvidia.parse_fields(TABLE, nvidia.FACTS)
    assert facts["name"] == "NVIDIA H200, 3 g" and facts["uuid"] == "GPU-1a2b"
    assert (facts["memory.total"], facts["power.limit"], facts["clocks.max.mem"]) == (143771.0, 700.0, 3201.0)
    assert facts["vbios_version"] is None and facts["driver_version"] == "580.95.05"
    assert nvidia.parse_fields("", nvidia.FACTS) == nvidia.parse_fields("an error\n", nvidia.FACTS) == {}


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, "0"), ("", "0"), ("2,1", "2"), ("GPU-1a2b", "GPU-1a2b")]
)
def test_the_gpu_that_cuda_calls_0_is_asked(
    visible: str | None, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = "--query-gpu=memory.used --format=csv,noheader,nounits"
    machine = Machine(tmp_path, monkeypatch)
    machine.command("nvidia-smi", f'[ "$*" = "{options} -i {asked}" ] && echo 1000')
    assert nvidia.used_mb() == 1000 * 2**20 / 1e6
    machine.prints("nvidia-smi", "[N/A]\n")
    assert nvidia.used_mb() is None


def test_the_environment_holds_gpu_driver_clocks_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    doctors = "0, NVIDIA H200, 9.0, 143771 MiB, 580.95.05"
    header = "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |"
    machine.command(
        "nvidia-smi",
        f'case "$*" in "") echo "{header}";; *nounits*) echo "{TABLE.strip()}";; *) echo "{doctors}";; esac',
    )
    about = environment(Gpu(0, "NVIDIA H200", "sm90", 150_754_820_096))
    assert json.loads(json.dumps(about)) == about
    assert (about["gpu"]["name"], about["gpu"]["sm"], about["gpu"]["memory_gb"]) == (
        "NVIDIA H200",
        "sm90",
        150.8,
    )
    assert about["gpu"]["nvidia_smi"]["clocks.max.sm"] == 1980.0
    assert (about["driver"], about["cuda"]) == ("580.95.05", "13.0")
    assert {"planforge", "torch", "transformers", "cuda-bindings"} <= set(about["versions"])
    assert about["backends"]["tensorrt-rtx"].startswith("not here: TensorRT-RTX is for sm75")
    assert same_machine(about, dict(about)) and not same_machine(about, {**about, "driver": "570.1"})


# The command


def test_without_a_gpu_one_line_says_what_is_missing() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # where there is one
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, cwd=ROOT, env=hidden
    )
    assert ran.returncode == 1 and ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("nothing can be measured here: no NVIDIA ") and "`make gpu` installs" in line


def test_a_pytorch_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as ended:
        command.bounds_here()
    assert "nothing can be measured here: PyTorch cannot use the GPU: " in str(ended.value.code)
    assert "\n" not in str(ended.value.code) and "`make gpu`" in str(ended.value.code)


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command on a made-up machine, whose measurements are handed to it; what it ends with."""

    def run(results: dict[str, Any], *arguments: str, driver: str = "580.1") -> Any:
        about = {
            **{"gpu": {"name": "G", "sm": "sm90", "memory_gb": 1, "nvidia_smi": {}}, "driver": driver},
            **{"cuda": "13.0", "cpu": "C", "system": "S", "python": "3.12", "versions": {}},
        }
        monkeypatch.setattr(command, "find_gpu", lambda index: Gpu(index, "G", "sm90", 10**9))
        monkeypatch.setattr(command, "bounds_here", lambda: BOUNDS)
        monkeypatch.setattr(command, "environment", lambda gpu: about)
        monkeypatch.setattr(command, "measure", lambda case, *_: results[case.name])
        with pytest.raises(SystemExit) as ended:
            command.main(["--out", str(tmp_path), "--work", str(tmp_path / "work"), *arguments])
        return ended.value.code

    return run


def test_results_are_kept_case_by_case_on_one_machine(
    run_command: Callable[..., Any], tmp_path: Path
) -> None:
    def written() -> dict[str, Any]:
        value: dict[str, Any] = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
        return value

    run = made_up()
    assert run_command(run, "--cases", "gpt2-124m-b64") == 0
    assert run_command(run, "--cases", "gpt2-124m-b1") == 0
    assert list(written()["cases"]) == ["gpt2-124m-b1", "gpt2-124m-b64"]
    assert {t["met"] for t in written()["targets"] if t["metric"] == "tokens_per_s"} == {True}
    assert "| 4.5x | met |" in (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert run_command(run, "--cases", "gpt2-124m-b64", driver="590.1") == 0
    assert list(written()["cases"]) == ["gpt2-124m-b64"]  # the others were another driver's
    assert "there is no case 'x'; there are gpt2-124m-b1" in run_command(run, "--cases", "x")


def test_the_command_fails_where_planforge_does(run_command: Callable[..., Any]) -> None:
    run = made_up()
    name = "gpt2-124m-b1"
    run[name]["skipped"][ORT_CUDA] = "failed: BackendError: it broke"
    assert run_command(run, "--cases", name) == f"{name}: {ORT_CUDA} failed: BackendError: it broke"
    run[name] = case({TENSORRT: decoding(1.0, 1.0, alike=False)}, skipped={EAGER: "failed: out of memory"})
    assert run_command(run, "--cases", name) == f"{name}: {TENSORRT} does not compute this model"
    run[name] = case({}, refused="refused to compare unlike work: prompts differ")
    assert "unlike work" in run_command(run, "--cases", name)
    assert (
        run_command({"gpt2-xl-b1": made_up()["gpt2-xl-b1"]}, "--cases", "gpt2-xl-b1") == 0
    )  # too small a GPU


def test_a_target_is_a_plain_row() -> None:
    row = judge_target(Target("gpt2-124m-b1", ORT_CUDA, "tokens_per_s", 1.0), made_up())
    assert json.loads(json.dumps(row)) == row
    assert (row["found"], row["met"]) == (1900.0, True)
