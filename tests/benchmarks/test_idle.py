"""What was measured while the machine had other things to do is no result."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.case import Case
from benchmarks.common import environment
from benchmarks.idle import ATTEMPTS, PATIENCE, BusyMachineError, measure_when_idle
from benchmarks.machine import BusyMeter, own_ticks
from benchmarks.report import name_files

SUITE = name_files(environment())  # what this machine's files are called
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


class FakeMachine:
    """A clock, and how busy the machine is while it is waited for and while a case is measured.

    Args:
        idle_at: seconds after which nothing else runs any more.
        meanwhile: the share at each measurement, one after the other.
    """

    def __init__(self, idle_at: float, meanwhile: list[float]) -> None:
        self.idle_at = idle_at
        self.meanwhile = iter(meanwhile)
        self.now = 0.0
        self.measured = 0
        self.said: list[str] = []

    def busy_now(self) -> float:
        self.now += 1.0
        return 0.0 if self.now > self.idle_at else 1.0

    def measure(self) -> dict[str, Any]:
        self.now += 100.0
        self.measured += 1
        return {"machine": {"busy": next(self.meanwhile)}, "number": self.measured}

    def result(self) -> dict[str, Any]:
        return measure_when_idle(
            self.measure, say=self.said.append, busy_now=self.busy_now, clock=lambda: self.now
        )


def test_a_case_measured_beside_other_work_is_measured_again() -> None:
    machine = FakeMachine(idle_at=0, meanwhile=[1.0, 0.4, 0.05])
    assert machine.result()["number"] == 3
    assert machine.said == [
        "attempt 1: 100% busy with other things meanwhile: not counted",
        "attempt 2: 40% busy with other things meanwhile: not counted",
    ]


def test_an_idle_machine_measures_once() -> None:
    machine = FakeMachine(idle_at=0, meanwhile=[0.1])
    assert machine.result()["number"] == 1
    assert machine.said == []


def test_measuring_waits_for_the_machine() -> None:
    machine = FakeMachine(idle_at=PATIENCE / 2, meanwhile=[0.0])
    machine.result()
    assert machine.measured == 1
    assert PATIENCE / 2 < machine.now <= PATIENCE / 2 + 102


def test_a_machine_that_stays_busy_gives_no_result() -> None:
    meanwhile = FakeMachine(idle_at=0, meanwhile=[0.11] * 9)
    with pytest.raises(BusyMachineError, match=r"at every attempt \(11%, 11%, 11%\)"):
        meanwhile.result()
    assert meanwhile.measured == ATTEMPTS
    before = FakeMachine(idle_at=1e9, meanwhile=[])
    with pytest.raises(BusyMachineError, match=r"at every attempt \(100%, 100%, 100%\)"):
        before.result()
    assert before.measured == 0
    assert before.now <= ATTEMPTS * (PATIENCE + 1)


def test_the_meter_leaves_out_what_this_process_and_its_children_use() -> None:
    processors: Iterator[tuple[int, int]] = iter([(1000, 5000), (1150, 5200)])
    own = iter([300, 400])
    meter = BusyMeter(processors=lambda: next(processors), own=lambda: next(own))
    assert meter.share() == 0.25  # 150 of 200 ticks were used, 100 of them by us


def test_the_meter_never_leaves_0_to_1() -> None:
    for used, ours in ((0, 50), (300, 0)):
        processors = iter([(0, 0), (used, 200)])
        own = iter([0, ours])
        meter = BusyMeter(processors=lambda p=processors: next(p), own=lambda o=own: next(o))  # type: ignore[misc]
        assert 0.0 <= meter.share() <= 1.0


def test_ticks_of_living_and_ended_children_count() -> None:
    work = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    before = own_ticks()
    if sys.platform != "linux":
        assert before == 0
        return
    subprocess.run([sys.executable, "-c", work], check=True)
    ended = own_ticks()
    assert ended - before >= 25
    living = subprocess.Popen([sys.executable, "-c", f"{work}print(flush=True); input()"], **PIPES)
    assert living.stdout is not None
    living.stdout.readline()
    assert own_ticks() - ended >= 25
    living.communicate("\n")
    assert own_ticks() - ended >= 25


def result(group: str = "decode", busy: float = 0.02, **more: Any) -> dict[str, Any]:
    """A result of a case in which nothing took part."""
    machine = {"busy": busy, "read_gb_per_s": 33.7, "gflop_per_s": 150.0}
    return {
        **{"title": "Model: tokens/s", "group": group, "metric": "per_s", "date": "2026-01-02"},
        **{"machine": machine, "rounds": 5, "varies": {}, "entries": {}, "skipped": {}, "targets": []},
        **more,
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], str]:
    """Measures one case, which does nothing, by the command on a machine that is so busy; how it ended."""
    monkeypatch.setattr(
        command, "resolve_cases", lambda names, work: [Case("decode-x", "decode", "Some case", {})]
    )
    monkeypatch.setattr(command, "Workshop", lambda *settings, **more: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def measured(busy: float) -> str:
        monkeypatch.setattr("benchmarks.idle.busy_share", lambda seconds: 0.0)
        monkeypatch.setattr(command, "measure", lambda case, workshop, rounds: result(busy=busy))
        with pytest.raises(SystemExit) as ended:
            command.main(["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")])
        return str(ended.value)

    return measured


def test_a_case_left_out_is_said_and_has_no_result(tmp_path: Path, run: Callable[[float], str]) -> None:
    suite = tmp_path / "out" / f"{SUITE}.json"
    report = tmp_path / "out" / f"{SUITE}.md"
    assert run(0.0) == "0"
    assert list(json.loads(suite.read_text(encoding="utf-8"))["cases"]) == ["decode-x"]
    assert run(1.0).startswith("decode-x is left out: the machine was busy with other things")
    written = json.loads(suite.read_text(encoding="utf-8"))
    assert written["cases"] == {} and list(written["left_out"]) == ["decode-x"]
    assert "- left out: Some case: the machine was busy" in report.read_text(encoding="utf-8")
    assert run(0.0) == "0"
    written = json.loads(suite.read_text(encoding="utf-8"))
    assert list(written["cases"]) == ["decode-x"] and written["left_out"] == {}
    assert "left out" not in report.read_text(encoding="utf-8")


def test_what_was_kept_of_a_busy_machine_goes(tmp_path: Path) -> None:
    suite = {"cases": {"old": result(busy=0.8), "good": result()}}
    (tmp_path / f"{SUITE}.json").write_text(json.dumps(suite), encoding="utf-8")
    command.keep("new", result(), tmp_path, root=None)
    written = json.loads((tmp_path / f"{SUITE}.json").read_text(encoding="utf-8"))
    assert sorted(written["cases"]) == ["good", "new"]
