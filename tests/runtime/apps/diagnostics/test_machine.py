"""What the doctor finds on made-up machines: their files are a folder, their commands scripts."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planforge.runtime.apps.diagnostics.doctor import diagnose, examine
from planforge.runtime.apps.diagnostics.jetson import (
    Power,
    find_fastest_mode,
    find_jetpack,
    parse_mode,
    parse_release,
)
from planforge.runtime.apps.diagnostics.machine import (
    COLUMNS,
    Gpu,
    Graphics,
    ask_command,
    parse_cuda,
    parse_driver,
    parse_gpus,
    read_free_memory,
    read_gpu_memory,
)

from ....helpers.machines import (
    FULL_SPEED,
    HEADER_580,
    MEMINFO,
    ORIN_HEADER,
    ORIN_NANO,
    ORIN_SMI,
    RTX_4090,
    X86_CPU,
    Machine,
)

MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def on(monkeypatch: pytest.MonkeyPatch, architecture: str, system: str = "Linux") -> None:
    monkeypatch.setattr(platform, "machine", lambda: architecture)
    monkeypatch.setattr(platform, "system", lambda: system)


AVAILABLE = 12_000_000 * 1024  # of MEMINFO
GROUP = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/app"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, AVAILABLE),
        (GROUP, AVAILABLE),
        (
            {**GROUP, "sys/fs/cgroup/app/memory.max": "max", "sys/fs/cgroup/app/memory.current": "5"},
            AVAILABLE,
        ),
        (
            {
                **GROUP,
                "sys/fs/cgroup/app/memory.max": "4000000000",
                "sys/fs/cgroup/app/memory.current": "3000000000",
                "sys/fs/cgroup/app/memory.stat": "anon 5\ninactive_file 500000000\nactive_file 7\n",
            },
            1_500_000_000,
        ),
        ({**GROUP, "sys/fs/cgroup/memory.max": "100", "sys/fs/cgroup/memory.current": "200"}, 0),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "12:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab",
                "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": "2000000000",
                "sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes": "1800000000",
                "sys/fs/cgroup/memory/docker/ab/memory.stat": "total_inactive_file 300000000\n",
            },
            500_000_000,
        ),
    ],
    ids=["nothing said", "machine", "no limit", "max", "version 2", "beyond", "version 1"],
)
def test_free_memory_is_the_machines_or_what_a_container_leaves(
    machine: Machine, files: dict[str, str], free: int | None
) -> None:
    assert read_free_memory(machine.files(files).root) == free


def test_a_desktop_with_an_rtx_4090(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "x86_64")
    machine.files({"proc/cpuinfo": X86_CPU, "proc/meminfo": MEMINFO}).nvidia_smi(RTX_4090, HEADER_580)
    found = examine(machine.root)
    gpu = Gpu(0, "NVIDIA GeForce RTX 4090", "sm89", 24564 * MIB, "580.95.05")
    assert found.graphics == Graphics((gpu,), "580.95.05", "13.0")
    assert (found.processor.name, found.processor.architecture) == ("Intel(R) Core(TM) i9", "x86_64")
    assert found.processor.features == {"avx2": True, "avx512_vnni": False, "avx_vnni": True}
    assert (found.memory.total, found.memory.available) == (16_000_000 * 1024, 12_000_000 * 1024)
    assert found.jetson is None
    assert found.python == ".".join(map(str, sys.version_info[:3]))


def test_a_jetson_orin_nano_with_jetpack_6_2(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "aarch64")
    machine.files(ORIN_NANO).nvidia_smi(ORIN_SMI, ORIN_HEADER).prints("nvpmodel", "NV Power Mode: 15W\n0\n")
    found = diagnose(machine.root)
    board = found.facts.jetson
    assert board is not None and board.jetpack is not None
    assert board.board == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert (board.release, board.sm) == ("36.4.3", "sm87")
    assert (board.jetpack.version, board.jetpack.cuda, board.jetpack.python) == ("6.2", "12.6", "3.10")
    assert board.power == Power("15W", 0, 2, False)
    assert found.facts.graphics == Graphics((Gpu(0, "Orin (nvgpu)", "sm87"),), None, "12.6")
    assert found.facts.processor.features == {"asimd": True, "fphp": True, "asimddp": True, "i8mm": False}
    assert "before benchmarking: sudo nvpmodel -m 2 && sudo jetson_clocks" in found.advice[-1]


def test_a_jetson_without_nvidia_smi_and_nvpmodel(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "aarch64")
    files = {name: text for name, text in ORIN_NANO.items() if not name.startswith(("sys", "etc/nvpmodel"))}
    found = examine(machine.files(files).root)
    assert found.jetson is not None
    assert found.graphics == Graphics((Gpu(0, found.jetson.board, "sm87"),), None, "12.6")
    assert found.jetson.power == Power(None, None, 0, None)
    assert found.jetson.power.commands() == []


def test_a_container_on_a_jetson_has_the_release_alone(machine: Machine) -> None:
    machine.files(
        {"etc/nv_tegra_release": "# R38 (release), REVISION: 2.2, GCID: 42205042, BOARD: generic\n"}
    )
    found = examine(machine.nvidia_smi("0, NVIDIA Thor, 11.0, [N/A], 580.00\n", HEADER_580).root)
    assert found.jetson is not None and found.jetson.jetpack is not None
    assert found.jetson.jetpack.version == "7.0"
    assert [gpu.sm for gpu in found.graphics.gpus] == ["sm110"]


@pytest.mark.parametrize(
    ("files", "table"),
    [
        (("etc/nv_tegra_release",), ORIN_SMI),  # as a container sees it: the GPU's name tells
        (("proc/device-tree/compatible",), "0, nvgpu, [N/A], [N/A], [N/A]\n"),  # the chip's name tells
    ],
)
def test_the_architecture_of_a_jetson_that_tells_little(
    machine: Machine, files: tuple[str, ...], table: str
) -> None:
    machine.files({name: ORIN_NANO[name] for name in files}).nvidia_smi(table, ORIN_HEADER)
    found = examine(machine.root)
    assert found.jetson is not None and found.jetson.board == "Jetson"
    assert [gpu.sm for gpu in found.graphics.gpus] == ["sm87"]


def test_no_proc_and_no_commands(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "arm64", "Darwin")
    found = diagnose(machine.root)
    assert found.facts.graphics == Graphics()
    assert found.facts.jetson is None
    assert found.facts.memory.total is found.facts.memory.available is None
    assert found.facts.processor.features == {}
    assert found.facts.processor.name
    assert {(backend.reason, backend.remedy) for backend in found.backends[:3]} == {
        ("no NVIDIA GPU or driver was found", "")
    }
    assert found.summary == "bundles run on: ort-cpu, openvino; nothing that can be installed is better"


@pytest.mark.parametrize(
    ("files", "script", "reason"),
    [
        (
            {},
            'echo "Failed to initialize NVML: Driver/library version mismatch"; echo more; exit 18',
            "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch",
        ),
        ({}, "exit 9", "nvidia-smi: exit code 9"),
        (
            {
                "proc/driver/nvidia/version": (
                    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  555.42.06  Release Build"
                    "  (a@host)\nGCC version:  gcc version 7.5.0 (SUSE Linux)\n"
                )
            },
            None,
            "NVIDIA's driver 555.42.06 is loaded, but nvidia-smi lists no GPU",
        ),
        (
            {
                "sys/bus/pci/devices/0000:00:00.0/vendor": "0x8086\n",
                "sys/bus/pci/devices/0000:00:00.0/class": "0x030000\n",
                "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
                "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
            },
            None,
            "there is an NVIDIA GPU, but no driver of it",
        ),
    ],
)
def test_a_gpu_that_cannot_be_used_is_told_from_none(
    machine: Machine, files: dict[str, str], script: str | None, reason: str
) -> None:
    if script is not None:
        machine.command("nvidia-smi", script)
    found = diagnose(machine.files(files).root)
    assert found.facts.graphics == Graphics(driver=found.facts.graphics.driver, problem=reason)
    for backend in found.backends[:3]:
        assert (backend.available, backend.reason) == (False, reason)
        assert "driver 580 or newer" in backend.remedy and "--gpus all" in backend.remedy


def test_another_vendors_card_and_an_nvidia_network_card_are_no_gpu(machine: Machine) -> None:
    for number, (vendor, kind) in enumerate([("0x1002", "0x030000"), ("0x10de", "0x020000")]):
        folder = f"sys/bus/pci/devices/0000:0{number}:00.0"
        machine.files({f"{folder}/vendor": vendor, f"{folder}/class": kind})
    assert examine(machine.root).graphics == Graphics()


@pytest.mark.parametrize(
    ("table", "size"),
    [
        ("12, 100 MiB\n312, 412 MiB\n", 412 * MIB),
        ("312, [N/A]\n", None),  # as Windows says
        ("1312, 412 MiB\n3120, 412 MiB\n", None),
        ("312, 7 MiB\n312, 412 MiB\n", 419 * MIB),  # of two instances of the GPU
        ("", None),
        ("No devices were found\n", None),
    ],
)
def test_the_memory_that_a_process_has_of_a_gpu(table: str, size: int | None, machine: Machine) -> None:
    machine.prints("nvidia-smi", table)
    assert read_gpu_memory("GPU-1a2b", 312) == size


def test_a_command_that_gives_no_answer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planforge.runtime.apps.diagnostics.machine.COMMAND_SECONDS", 0.1)
    machine.command("nvidia-smi", "exec /bin/sleep 30")
    assert examine(machine.root).graphics.problem == "nvidia-smi gave no answer in 0.1 seconds"


def test_a_command_that_may_not_be_run(machine: Machine) -> None:
    (machine.commands / "nvidia-smi").mkdir()
    assert "Permission denied" in ask_command("nvidia-smi")[1]
    assert ask_command("no-such-command") == ("", "")


@given(text=st.text(max_size=200))
@example(f"{COLUMNS}\n0, , , , \n99999999999, a, 8.9, 1 MiB, 1\n0, a, 8.99, 1 MiB, 1.2")
@example("# R (release), REVISION: \n# R36 (release), REVISION: .\nNV Power Mode: \n")
def test_no_text_is_an_error(text: str) -> None:
    assert all(isinstance(gpu, Gpu) for gpu in parse_gpus(text))
    assert parse_gpus(f"{text}\n{RTX_4090}")[-1].sm == "sm89"
    release = parse_release(text)
    assert release is None or release in text.replace(" (release), REVISION: ", ".")
    find_jetpack(text)
    assert find_fastest_mode(text) >= 0
    mode, number = parse_mode(text)
    assert mode is None or mode in text
    assert number is None or mode is not None
    for version in (parse_cuda(text), parse_driver(text)):
        assert version is None or version in text


names = st.lists(
    st.text(st.characters(categories=("L", "N")), min_size=1, max_size=12), min_size=1, max_size=3
)


@given(
    index=st.integers(0, 15),
    words=names,
    capability=st.tuples(st.integers(3, 20), st.integers(0, 9)) | st.none(),
    mib=st.integers(1, 10**6) | st.none(),
    driver=st.sampled_from(["470.57", "550.54.14", None]),
)
def test_a_row_of_nvidia_smi_is_read_as_it_was_written(
    index: int, words: list[str], capability: tuple[int, int] | None, mib: int | None, driver: str | None
) -> None:
    cells = [
        str(index),
        ", ".join(words),
        "[N/A]" if capability is None else f"{capability[0]}.{capability[1]}",
        "[N/A]" if mib is None else f"{mib} MiB",
        driver or "[N/A]",
    ]
    sm = None if capability is None else f"sm{capability[0]}{capability[1]}"
    gpu = Gpu(index, ", ".join(words), sm, None if mib is None else mib * MIB, driver)
    assert parse_gpus(f"No devices\n{', '.join(cells)}\n") == (gpu,)


# Drivers from 610 on print the second form: https://docs.nvidia.com/deploy/nvidia-smi/index.html
@pytest.mark.parametrize(
    ("header", "cuda"),
    [
        ("| NVIDIA-SMI 550.54.14    Driver Version: 550.54.14    CUDA Version: 12.4     |", "12.4"),
        ("| NVIDIA-SMI 610.47    KMD Version: 610.47        CUDA UMD Version: 13.3     |", "13.3"),
        ("| NVIDIA-SMI 390.48    Driver Version: 390.48                    |", None),
        ("| NVIDIA-SMI 540.3.0   Driver Version: N/A   CUDA Version: N/A   |", None),
    ],
)
def test_the_drivers_cuda(header: str, cuda: str | None) -> None:
    assert parse_cuda(header) == cuda


# Source: https://developer.nvidia.com/embedded/jetpack-archive
@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("35.3.1", "5.1"),
        ("35.4.1", "5.1"),
        ("36.2.0", "6.0"),
        ("36.3.0", "6.0"),
        ("36.4.0", "6.1"),
        ("36.4.3", "6.2"),
        ("36.4.7", "6.2"),
        ("38.2.0", "7.0"),
        ("38.4.0", "7.1"),
        ("39.2.0", "7.2"),
        ("39.2.1", "7.2"),
        ("40.1.0", None),
        (None, None),
    ],
)
def test_the_jetpack_of_a_release(release: str | None, version: str | None) -> None:
    jetpack = find_jetpack(release)
    assert (None if jetpack is None else jetpack.version) == version


@pytest.mark.parametrize(
    ("configuration", "number"),
    [
        ("< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=MODE_15W >\n", 0),  # AGX Orin
        (
            "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n"
            "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
            2,
        ),
        ("< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=4 NAME=MAXN_SUPER >\n", 4),
        ("< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=7W >\n", 0),  # Orin Nano before JetPack 6.2
        ("", 0),
    ],
)
def test_the_fastest_power_mode_is_found_by_its_name(configuration: str, number: int) -> None:
    assert find_fastest_mode(configuration) == number


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ("NV Power Mode: MAXN\n0\n", ("MAXN", 0)),
        ("NVPM WARN: fan mode is not set!\nNV Power Mode: MODE_15W_6CORE\n4\n", ("MODE_15W_6CORE", 4)),
        ("NVPM VERB: Current mode: NV Power Mode: 25W\n1\nNVPM VERB: PARAM CPU_ONLINE: ARG", ("25W", 1)),
        ("NV Power Mode: MAXN\n", ("MAXN", None)),
        ("NVPM ERROR: failed to read\n", (None, None)),
    ],
)
def test_the_power_mode(said: str, mode: tuple[str | None, int | None]) -> None:
    assert parse_mode(said) == mode


@pytest.mark.parametrize(
    ("power", "commands"),
    [
        (FULL_SPEED, []),
        (Power("MAXN", 0, 0, False), ["sudo jetson_clocks"]),
        (Power("MAXN", 0, 0, None), []),
        (Power("15W", 0, 2, True), ["sudo nvpmodel -m 2", "sudo jetson_clocks"]),  # held at what 15W allows
        (Power("MAXN", None, 0, True), []),
        (Power("MODE_30W", None, 0, True), ["sudo nvpmodel -m 0", "sudo jetson_clocks"]),
        (Power(None, None, 0, False), ["sudo jetson_clocks"]),
    ],
)
def test_what_brings_a_board_to_full_speed(power: Power, commands: list[str]) -> None:
    assert power.commands() == commands
