"""Power by commands that are made up: what tegrastats and nvidia-smi print. No real board was asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from planforge.runtime.apps.diagnostics.power import SOURCES, PowerMeter

from ....helpers.machines import Machine

TEGRASTATS, NVIDIA = SOURCES
# As an Orin NX with JetPack 6 prints it; an AGX Orin; a Xavier NX with JetPack 5.
ORIN_NX = (
    "11-29-2026 10:00:00 RAM 2458/15502MB (lfb 9x4MB) CPU [0%@729,off] GR3D_FREQ 0%"
    " cpu@47.5C VDD_IN 4940mW/4902mW VDD_CPU_GPU_CV 572mW/570mW VDD_SOC 1480mW/1477mW"
)
AGX_ORIN = "RAM 2/30536MB VDD_GPU_SOC 2362mW/2362mW VDD_CPU_CV 787mW/787mW VIN_SYS_5V0 3630mW/3630mW"
XAVIER_NX = "RAM 1/7765MB AO@39C VDD_IN 3400/3400 VDD_CPU_GPU_CV 400/400 VDD_SOC 900/900"


@pytest.mark.parametrize(
    ("line", "watts"),
    [(ORIN_NX, 4.94), (XAVIER_NX, 3.4), (AGX_ORIN, None), ("", None), ("VDD_IN NC/NC", None)],
)
def test_a_line_of_tegrastats(line: str, watts: float | None) -> None:
    assert TEGRASTATS.parse(line) == (None if watts is None else pytest.approx(watts))


@pytest.mark.parametrize(
    ("line", "watts"),
    [("71.93\n", 71.93), (" 300\n", 300.0), ("[N/A]\n", None), ("[Not Supported]\n", None), ("71 W\n", None)],
)
def test_a_line_of_nvidia_smi(line: str, watts: float | None) -> None:
    assert NVIDIA.parse(line) == watts


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def repeat(*lines: str) -> str:
    """A script that prints lines, and the last one until it is killed."""
    first = "\n".join(f"echo '{line}'" for line in lines)
    return f"{first}\nwhile :; do :; done"


def test_the_mean_is_of_the_samples_and_the_command_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [ORIN_NX, ORIN_NX.replace("VDD_IN 4940", "VDD_IN 6940"), "no power here"]
    Machine(tmp_path, monkeypatch).command("tegrastats", f"echo $* > {tmp_path}/asked\n{repeat(*lines)}")
    meter = PowerMeter()
    with meter:
        wait_for(lambda: len(meter._samples.get(TEGRASTATS.name, ())) == 2)
    found = meter.find_mean()
    assert found is not None and found[0] == TEGRASTATS.name
    assert found[1] == pytest.approx(5.94)
    assert meter.seconds > 0
    assert [child.returncode for child in meter._children] == [-9]
    assert (tmp_path / "asked").read_text() == "--interval 100\n"


def test_the_whole_module_counts_before_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.command("nvidia-smi", f"echo $* > {tmp_path}/asked\n{repeat('20.5')}")
    with PowerMeter() as meter:
        pass
    assert not meter._children  # no GPU takes part in the work
    meter = PowerMeter("GPU-1a2b")
    with meter:
        wait_for(lambda: NVIDIA.name in meter._samples)
    assert meter.find_mean() == (NVIDIA.name, 20.5)
    assert "--id=GPU-1a2b " in (tmp_path / "asked").read_text()
    machine.command("tegrastats", repeat(ORIN_NX))
    both = PowerMeter("GPU-1a2b")
    with both:
        wait_for(lambda: {NVIDIA.name, TEGRASTATS.name} <= set(both._samples))
    found = both.find_mean()
    assert found is not None and found[0] == TEGRASTATS.name


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch)
    with PowerMeter("GPU-1a2b") as meter:
        pass
    assert meter.find_mean() is None
    machine.command("tegrastats", "exit 1").prints("nvidia-smi", "No devices were found\n")
    with PowerMeter("GPU-1a2b") as meter:
        pass
    assert meter.find_mean() is None
