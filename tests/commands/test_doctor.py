"""`planforge doctor`: on this machine, and its tables for others."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from planforge.runtime.apps.commands.doctor import doctor
from planforge.runtime.apps.commands.doctor_tables import tabulate_diagnosis
from planforge.runtime.apps.diagnostics.doctor import (
    Diagnosis,
    Facts,
    find_advice,
    find_backends,
    summarize_backends,
)
from planforge.runtime.apps.diagnostics.jetson import Jetson, Power, find_jetpack
from planforge.runtime.apps.diagnostics.machine import Gpu, Graphics, Memory, Processor

from ..helpers.cli import planforge
from ..helpers.machines import facts

BOARD = Jetson("Jetson Orin Nano", "36.4.3", find_jetpack("36.4.3"), "sm87", Power("15W", 0, 2, False))


def lines_of(known: Facts) -> list[str]:
    """What is printed of a machine into a file."""
    found = find_backends(known)
    console = Console(width=160, file=io.StringIO())
    console.print(*tabulate_diagnosis(Diagnosis(known, found, find_advice(known), summarize_backends(found))))
    written = console.file
    assert isinstance(written, io.StringIO)
    return [" ".join(line.split()) for line in written.getvalue().splitlines()]


def test_this_machine_runs_ort_cpu_and_is_told_why_not_the_rest() -> None:
    done = planforge("doctor")
    as_json = planforge("doctor", "--json")
    assert (done.returncode, as_json.returncode) == (0, 0), done.stderr + as_json.stderr
    found: dict[str, Any] = json.loads(as_json.stdout)
    assert list(found) == ["facts", "backends", "advice", "summary"]
    said = {state["backend"]: state for state in found["backends"]}
    assert list(said) == ["tensorrt-rtx", "tensorrt", "ort-cuda", "ort-cpu", "openvino"]
    assert said["ort-cpu"]["available"] is True
    assert "CPUExecutionProvider" in found["facts"]["onnxruntime"]["providers"]
    lines = done.stdout.splitlines()
    backends = lines[lines.index(next(line for line in lines if line.startswith("Backends"))) :]
    for backend, state in said.items():
        (row,) = (line.split() for line in backends if line.startswith(f"{backend} "))
        assert row[1] == ("yes" if state["available"] else "no")
        assert state["reason"].split()[0] == row[2]
    assert lines[-1 - len(found["advice"]) :] == [*found["advice"], found["summary"]]


def test_the_tables_of_a_machine_without_a_gpu() -> None:
    lines = lines_of(facts())
    assert "none no NVIDIA GPU or driver was found" in lines
    assert "ort-cuda no no NVIDIA GPU or driver was found" in lines
    assert "ort-cpu yes onnxruntime 1.31.1" in lines
    assert "torch not installed not needed to run bundles" in lines


def test_the_tables_of_a_desktop() -> None:
    known = facts(
        "sm89",
        processor=Processor("Core i9", "x86_64", 8, 16, 1.5, {"avx2": True, "avx_vnni": False}),
        memory=Memory(64_000_000_000, None),
        graphics=Graphics((Gpu(0, "RTX 4090", "sm89", 24564 * 2**20), Gpu(1, "Other")), "580.95", "13.0"),
    )
    lines = lines_of(known)
    assert "planforge 0.1.0, Python 3.10.12" in lines
    assert "system Linux 6, glibc 2.35" in lines
    assert "processor Core i9, x86_64, 8 physical of 16 logical cores, cgroup limit 1.5" in lines
    assert "instructions avx2 yes, avx_vnni no" in lines
    assert "memory 64.00 GB, available not known" in lines
    assert "0 RTX 4090, sm89, 25.76 GB" in lines
    assert "1 Other, sm not known, memory not known" in lines
    assert "driver 580.95" in lines and "CUDA 13.0" in lines


def test_the_tables_of_a_jetson() -> None:
    lines = lines_of(facts("sm87", architecture="aarch64", cuda="12.6", jetson=BOARD))
    assert "board Jetson Orin Nano, Jetson Linux 36.4.3, JetPack 6.2" in lines
    assert "power mode 15W, clocks changing with the load" in lines
    assert "0 GPU 0, sm87, memory shared with the processor" in lines
    unknown = Jetson("Jetson", None, None, None, Power(None, None, 0, None))
    lines = lines_of(facts(jetson=unknown))
    assert "board Jetson, Jetson Linux not known, JetPack not known" in lines
    assert "power mode not known, clocks not known" in lines


@pytest.mark.parametrize("arguments", [("bundle",), ("--jsonl",)])
def test_wrong_usage(arguments: Sequence[str]) -> None:
    assert planforge("doctor", *arguments).returncode == 2


def test_advice_and_summary_stand_in_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = facts("sm86", packages={"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}, jetson=BOARD)
    found = find_backends(known)
    made_up = Diagnosis(known, found, find_advice(known), summarize_backends(found))
    monkeypatch.setattr("planforge.runtime.apps.diagnostics.doctor.diagnose", lambda: made_up)
    doctor()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("onnxruntime-gpu and onnxruntime overwrite each other's files")
    assert lines[-2].endswith("before benchmarking: sudo nvpmodel -m 2 && sudo jetson_clocks")
    assert lines[-1] == made_up.summary and len(lines[-1]) > 160
