"""How many threads, from made-up machines: their sys and proc are folders of the test."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime import load
from planforge.runtime.backends.threads import choose_threads, count_physical_cores, read_cgroup_limit

Machine = Callable[[dict[str, str]], Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A root folder with these files."""

    def build(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n", encoding="utf-8")
        return tmp_path

    return build


def siblings(*groups: str) -> dict[str, str]:
    """The topology of processors of which those in one group, such as "0,4" or "0-1", are one core."""
    files = {}
    for group in groups:
        numbers = [int(n) for n in group.replace("-", ",").split(",")]
        for cpu in numbers:
            files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = group
    return files


V2 = {"proc/self/cgroup": "0::/app"}
V1 = {"proc/self/cgroup": "12:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n0::/docker/ab"}
FOUR = siblings("0,2", "1,3")  # two cores with two threads each


def chosen(root: Path, cpus: range = range(4), **environment: str) -> str:
    return str(choose_threads(None, environment, cpus, root))


def test_a_thread_for_each_physical_core_of_the_affinity(machine: Machine) -> None:
    root = machine(siblings("0-1", "2-3", "4-5", "6-7"))
    assert chosen(root, range(8)) == "4 threads: 4 physical cores of 8 logical"
    assert count_physical_cores([0, 1], root) == 1
    assert count_physical_cores([1, 2, 7], root) == 3
    assert chosen(root, range(1)) == "1 thread: 1 physical core of 1 logical"


def test_core_ids_count_per_package(machine: Machine) -> None:
    files = {}
    for cpu, (package, core) in enumerate([(0, 0), (0, 0), (1, 0), (1, 1)]):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = str(package)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = str(core)
    assert count_physical_cores(range(4), machine(files)) == 3


@pytest.mark.parametrize(("name", "cores"), [("x86_64", 3), ("AMD64", 3), ("arm64", 6), ("aarch64", 6)])
def test_where_the_system_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, cores: int
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    assert count_physical_cores(range(6), tmp_path) == cores
    assert count_physical_cores(range(1), tmp_path) == 1


@pytest.mark.parametrize(
    ("limit", "threads", "said"),
    [
        ("200000 100000", "2 threads", "2"),
        ("150000 100000", "2 threads", "1.5"),
        ("100000 100000", "1 thread", "1"),
        ("20000 100000", "1 thread", "0.2"),
        ("800000 100000", "2 threads", "8"),
    ],
)
def test_a_cgroup_limit_of_version_2(machine: Machine, limit: str, threads: str, said: str) -> None:
    root = machine({**FOUR, **V2, "sys/fs/cgroup/app/cpu.max": limit})
    assert chosen(root) == f"{threads}: 2 physical cores of 4 logical, cgroup limit {said}"


def test_no_limit(machine: Machine) -> None:
    root = machine({**FOUR, **V2, "sys/fs/cgroup/app/cpu.max": "max 100000"})
    assert chosen(root) == "2 threads: 2 physical cores of 4 logical"
    assert read_cgroup_limit(root / "elsewhere") is None


def test_the_least_limit_of_a_group_and_those_above_it(machine: Machine) -> None:
    above = {"sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}
    assert read_cgroup_limit(machine({"proc/self/cgroup": "0::/a/b", **above})) == 3.0


def test_a_container_sees_its_own_group_as_the_mount(machine: Machine) -> None:
    root = machine({"proc/self/cgroup": "0::/../../host/path", "sys/fs/cgroup/cpu.max": "250000 100000"})
    assert read_cgroup_limit(root) == 2.5


@pytest.mark.parametrize("folder", ["cpu,cpuacct/docker/ab", "cpu,cpuacct", "cpu/docker/ab", "cpu"])
def test_a_cgroup_limit_of_version_1(machine: Machine, folder: str) -> None:
    files = {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "25000"}
    assert (
        read_cgroup_limit(machine(V1 | {f"sys/fs/cgroup/{folder}/{k}": v for k, v in files.items()})) == 2.0
    )


def test_no_limit_of_version_1_and_other_controllers(machine: Machine) -> None:
    memory = {"sys/fs/cgroup/memory/docker/ab/cpu.max": "1 1"}
    quota = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert read_cgroup_limit(machine({**V1, **memory, **quota})) is None


def test_omp_num_threads_goes_before_the_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    root = machine({**FOUR, **V2, "sys/fs/cgroup/app/cpu.max": "100000 100000"})
    assert chosen(root, OMP_NUM_THREADS="3") == "3 threads: OMP_NUM_THREADS=3"
    assert chosen(root, OMP_NUM_THREADS="99") == "4 threads: OMP_NUM_THREADS=99, of which this machine has 4"


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5", "2,4"])
def test_an_omp_num_threads_that_is_no_number_is_passed_over(machine: Machine, value: str) -> None:
    reason = f"2 physical cores of 4 logical, OMP_NUM_THREADS={value!r} is no number of threads"
    assert chosen(machine(FOUR), OMP_NUM_THREADS=value) == f"2 threads: {reason}"


def test_what_the_caller_asks_for_goes_before_all(machine: Machine) -> None:
    found = choose_threads(3, {"OMP_NUM_THREADS": "1"}, range(1), machine({}))
    assert str(found) == "3 threads: as asked for"


@given(text=st.text(max_size=60), limit=st.text(max_size=20))
def test_whatever_the_system_says_there_is_a_thread(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: str
) -> None:
    root = tmp_path_factory.mktemp("machine")
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/self/cgroup").write_bytes(f"0::/{text}\n{text}".encode("utf-8", "replace"))
    (root / "sys/fs/cgroup/cpu.max").write_bytes(limit.encode("utf-8", "replace"))
    assert 1 <= choose_threads(None, {"OMP_NUM_THREADS": text}, range(2), root).count <= 2


def test_this_machine() -> None:
    found = choose_threads()
    assert 1 <= found.count <= (os.cpu_count() or 1)
    assert found.reason


def test_load_says_what_it_chose(demo_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "planforge"):
        load(demo_bundle, threads=1).close()
        load(demo_bundle, backend="ort-cpu").close()
    lines = [record.getMessage() for record in caplog.records if "runs on ort-cpu" in record.getMessage()]
    assert len(lines) == 2
    assert "runs on ort-cpu, 1 thread: as asked for" in lines[0]
    assert f"runs on ort-cpu, {choose_threads()}" in lines[1]
