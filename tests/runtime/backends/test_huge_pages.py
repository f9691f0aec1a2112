"""Memory that is moved into huge pages: which, when, and that nothing happens where there are none."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from planforge.runtime.backends import huge_pages, ort_program
from planforge.runtime.backends.huge_pages import HugePages, collapse, find_blocks, read_huge_page_size
from planforge.runtime.backends.ort_program import OrtProgram

MIB = 2**20
HUGE = 2 * MIB
MAPS = """\
00200000-00400000 r-xp 00000000 fe:00 1234                               /usr/bin/python3.12
00600000-00800000 rw-p 00200000 fe:00 1234                               /usr/bin/python3.12
01000000-01500000 rw-p 00000000 00:00 0                                  [heap]
02000000-02200000 ---p 00000000 00:00 0
03000000-03200000 r--p 00000000 00:00 0
04000000-041ff000 rw-p 00000000 00:00 0
05100000-05900000 rw-p 00000000 00:00 0
06000000-06200000 rw-p 00000000 00:00 0                                  [anon: glibc: malloc]
07000000-07200000 rw-s 00000000 00:01 88                                 /dev/zero (deleted)
08000000-08200000 rw-p 00000000 00:0f 99                                 /anon_hugepage (deleted)
09000000-09200000 rw-p 00000000 fe:00 77                                 /a file with [heap]
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
ffffffffff600000-ffffffffff800000 --xp 00000000 00:00 0                  [vsyscall]
"""


def test_blocks_are_whole_and_in_memory_that_is_this_process_s_own() -> None:
    heap = [0x1000000, 0x1200000]
    assert list(find_blocks(MAPS, HUGE)) == [*heap, 0x5200000, 0x5400000, 0x5600000, 0x6000000]
    assert list(find_blocks("", HUGE)) == []


@pytest.fixture
def memory() -> NDArray[np.uint8]:
    """Four blocks: two that are full, one of which a page is touched, and one that is not."""
    if read_huge_page_size() != HUGE:
        pytest.skip("huge pages here are of another size, or there are none")
    pages = mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)  # small ones, also where "always" is set
    array = np.frombuffer(pages, np.uint8)
    begin = -array.ctypes.data % HUGE
    blocks = array[begin : begin + 4 * HUGE]
    blocks[: 2 * HUGE] = 7
    blocks[2 * HUGE] = 7
    return blocks


def read_kib(name: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def list_addresses(memory: NDArray[np.uint8]) -> list[int]:
    return [memory.ctypes.data + i * HUGE for i in range(4)]


def test_full_blocks_become_huge_and_others_stay_untouched(
    monkeypatch: pytest.MonkeyPatch, memory: NDArray[np.uint8]
) -> None:
    addresses = list_addresses(memory)
    madvise = huge_pages.find_madvise()
    asked: list[int] = []

    def noted(address: int, size: int, advice: int) -> int:
        asked.append(address)
        return int(madvise(address, size, advice))

    huge = read_kib("AnonHugePages")
    resident = read_kib("Rss")
    # Of the full blocks alone: the kernel may begin with what it is allowed to by itself.
    assert madvise(addresses[0], 2 * HUGE, mmap.MADV_HUGEPAGE) == 0
    if madvise(addresses[0], HUGE, huge_pages.MADV_COLLAPSE) != 0:
        pytest.skip("this kernel does not move memory into huge pages when asked to")
    monkeypatch.setattr(huge_pages, "find_madvise", lambda: noted)
    collapse(addresses, HUGE)
    assert asked == addresses[:2]
    assert read_kib("AnonHugePages") - huge == 2 * HUGE // 1024
    assert read_kib("Rss") - resident < 1024
    assert (memory[: 2 * HUGE] == 7).all()
    assert memory[2 * HUGE :].sum() == 7


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let the kernel refuse with an error; return the addresses that it is asked for."""
    asked: list[int] = []

    def madvise(address: int, size: int, advice: int) -> int:
        asked.append(address)
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(huge_pages, "find_madvise", lambda: madvise)
    return asked


@pytest.mark.parametrize(
    ("number", "count"), [(errno.ENOMEM, 1), (errno.EBUSY, 1), (errno.EINVAL, 1), (errno.EAGAIN, 2)]
)
def test_a_kernel_that_refuses_is_left_alone_where_memory_is_short_or_it_is_old(
    monkeypatch: pytest.MonkeyPatch, memory: NDArray[np.uint8], number: int, count: int
) -> None:
    asked = refuse(monkeypatch, number)
    collapse(list_addresses(memory), HUGE)
    assert asked == list_addresses(memory)[:count]


def test_a_block_that_is_freed_meanwhile_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, memory: NDArray[np.uint8]
) -> None:
    asked = refuse(monkeypatch, errno.ENOMEM)
    addresses = list_addresses(memory)[:2]
    resident = iter([True, False, True, True])  # the first when it is looked at, and again; then the second
    monkeypatch.setattr(huge_pages, "is_resident", lambda *_: next(resident))
    collapse(addresses, HUGE)
    assert asked == addresses and list(resident) == []


def test_memory_that_is_gone_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refuse(monkeypatch, errno.EINVAL)
    if Path("/proc/self/pagemap").exists():
        collapse([0, 2**47 - HUGE], HUGE)
    assert asked == []


def make_system(folder: Path, enabled: str, size: int = HUGE) -> Path:
    (folder / "enabled").write_text(enabled + "\n", encoding="ascii")
    (folder / "hpage_pmd_size").write_text(f"{size}\n", encoding="ascii")
    return folder


def test_nothing_happens_without_huge_pages_or_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "SYSTEM", tmp_path / "missing")
    assert read_huge_page_size() == 0
    monkeypatch.setattr(huge_pages, "SYSTEM", make_system(tmp_path, "always madvise [never]"))
    assert read_huge_page_size() == 0
    monkeypatch.setattr(huge_pages, "SYSTEM", make_system(tmp_path, "always [madvise] never"))
    assert read_huge_page_size() == HUGE
    assert HugePages(wanted=False).size == 0
    monkeypatch.setattr(huge_pages, "SYSTEM", make_system(tmp_path, "[always] madvise never", 512 * MIB))
    assert read_huge_page_size() == 0  # where pages have 64 KiB
    monkeypatch.setattr(huge_pages, "SYSTEM", make_system(tmp_path, "always [madvise] never"))
    monkeypatch.setattr(huge_pages, "PROCESS", tmp_path / "missing")
    with HugePages() as pages:
        pass
    assert pages.blocks == []
    collapse([HUGE], HUGE)


@pytest.fixture
def collapsed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Note what is moved instead of moving it, at once instead of in a thread."""
    calls: list[list[int]] = []

    class Inline:
        def __init__(
            self, target: Callable[..., None], args: tuple[list[int], int], **options: object
        ) -> None:
            self.start = lambda: calls.append(args[0])

    monkeypatch.setattr(threading, "Thread", Inline)
    return calls


def test_only_new_memory_is_moved_once_and_after_twice_its_cost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, collapsed: list[list[int]]
) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "process_time", lambda: clock)
    monkeypatch.setattr(huge_pages, "SYSTEM", make_system(tmp_path, "[always] madvise never"))
    monkeypatch.setattr(huge_pages, "PROCESS", tmp_path)
    maps = tmp_path / "maps"
    maps.write_text("00200000-00600000 rw-p 00000000 00:00 0 \n", encoding="ascii")
    with HugePages() as pages:
        maps.write_text("00200000-00a00000 rw-p 00000000 00:00 0 \n", encoding="ascii")
    clock = 100.0 + 2 * 2 * 0.005 - 0.001
    pages.collapse_when_due()
    assert collapsed == []
    clock += 0.002
    pages.collapse_when_due()
    pages.collapse_when_due()
    assert collapsed == [[0x600000, 0x800000]]


def test_graphs_that_are_opened_at_once_do_not_note_the_same_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huge_pages, "SYSTEM", make_system(tmp_path, "[always] madvise never"))
    monkeypatch.setattr(huge_pages, "PROCESS", tmp_path)
    maps = tmp_path / "maps"
    maps.write_text("", encoding="ascii")
    with HugePages() as one:
        with HugePages() as other:
            maps.write_text("00200000-00600000 rw-p 00000000 00:00 0 \n", encoding="ascii")
        maps.write_text("00200000-00800000 rw-p 00000000 00:00 0 \n", encoding="ascii")
    assert (other.blocks, one.blocks) == ([0x200000, 0x400000], [0x600000])
    other.forget()  # its graph is closed: the memory may be another one's
    maps.write_text("", encoding="ascii")
    with HugePages() as later:
        maps.write_text("00200000-00800000 rw-p 00000000 00:00 0 \n", encoding="ascii")
    assert later.blocks == [0x200000, 0x400000]


def test_where_no_thread_can_start_the_graph_runs_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refused:
        def __init__(self, **options: object) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    program = open_abs(tmp_path)
    program.huge_pages.blocks = [0]
    program.huge_pages.due = 0.0
    monkeypatch.setattr(threading, "Thread", Refused)
    found = program.run({"x": np.array([-1, 2], np.float32)}, {})
    np.testing.assert_array_equal(found["y"], [1, 2])
    assert program.huge_pages.blocks == []
    program.close()


@pytest.mark.parametrize(("provider", "size"), [("CPUExecutionProvider", HUGE), ("CUDAExecutionProvider", 0)])
def test_only_graphs_of_the_cpu_have_memory_to_move(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, provider: str, size: int
) -> None:
    def make_session(path: Path, options: object, providers: list[str], disabled: object) -> Any:
        assert providers == [provider]
        return original(path, options)

    original = ort_program.make_session
    monkeypatch.setattr(ort_program, "make_session", make_session)
    monkeypatch.setattr(huge_pages, "SYSTEM", make_system(tmp_path, "[always] madvise never"))
    program = open_abs(tmp_path, providers=[provider])
    assert program.huge_pages.size == size
    program.close()


def open_abs(folder: Path, **options: Any) -> OrtProgram:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    return OrtProgram(folder / "model.onnx", threads=1, **options)


def test_a_graph_looks_when_its_shapes_change_and_not_at_each_step(
    tmp_path: Path, collapsed: list[list[int]]
) -> None:
    program = open_abs(tmp_path)
    program.huge_pages.due = 0.0
    step = program.bind({})
    for number, width in enumerate([3, 3, 4]):
        program.huge_pages.blocks = [number]
        step({"x": np.ones(width, np.float32)})
    assert collapsed == [[0], [2]]
    program.close()
