"""Runs damaged cases in child processes that may crash, hang or eat memory, and says what became of each."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 5.0  # of a processor that a case may take, whatever else runs here
HANGING = 120.0  # seconds after which a case is ended
BYTES = 10**9  # of memory that it may take
BATCH = 400  # cases of one child
ROOM = 6 * 10**9  # of addresses; what asks for more is refused by the system, and seen as MemoryError
OPENED = 0x20  # inotify's IN_OPEN
CHANGED = 0x2 | 0x100 | 0x200 | 0x40 | 0x80  # modified, made, deleted, moved


@dataclass
class Tally:
    """What became of the cases of one kind."""

    cases: int = 0
    ends: Counter[str] = field(default_factory=Counter)  # "accepted", or the name of an error
    findings: list[str] = field(default_factory=list)
    slowest: float = 0.0
    max_bytes: int = 0


class Watched:
    """A folder outside of a bundle, in which nobody has anything to open: the kernel tells who does."""

    def __init__(self, folder: Path) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self.descriptor = library.inotify_init1(os.O_NONBLOCK)
        library.inotify_add_watch(self.descriptor, os.fsencode(folder), OPENED | CHANGED)

    def read(self) -> list[str]:
        """Return the names of files that were opened or changed since the last reading."""
        try:
            data = os.read(self.descriptor, 2**16)
        except BlockingIOError:
            return []
        names = []
        while data:
            _, _, _, length = struct.unpack_from("iIII", data)
            names.append(data[16 : 16 + length].rstrip(b"\0").decode())
            data = data[16 + length :]
        return [name for name in names if name]


def make_outside(folder: Path) -> Path:
    """Make the folder of files that a bundle's names may lead to, and must not."""
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (outside / "tokenizer.json").write_text("{}")
    (outside / "weights.data").write_bytes(bytes(2**16))
    return outside


def judge(error: BaseException) -> str:
    """Return what is wrong with how a case ended; "" for one line of ours, or of the system."""
    from planforge.runtime.errors import PlanForgeError

    if isinstance(error, PlanForgeError | OSError):
        text = str(error)
        joined = text.replace("\n  ", "  ")  # lists of what differs, each on a line of its own
        unprintable = [sign for sign in joined if sign != "\t" and not sign.isprintable()]
        return f"unprintable {unprintable[0]!r} in: {text[:300]!r}" if unprintable else ""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "planforge" in frame.filename), frames[-1])
    where = f"{Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:200]}"


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def read_memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def run_case(
    kind: Any, number: int, seed: int, material: Path, home: Path, watched: Watched
) -> dict[str, Any]:
    """Run one case here; return what became of it."""
    from .doors import damage

    case = home / "case"
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    folder, door, what = damage(kind, number, seed, material, case)
    report({"begin": number, "what": what})
    gc.collect()
    reset_peak()
    before = read_memory("VmRSS")
    watched.read()
    began = time.process_time()
    faulthandler.dump_traceback_later(HANGING, exit=True)
    problem = ""
    try:
        door(folder)
        end = "accepted"
    except BaseException as error:
        end = type(error).__name__
        problem = judge(error)
    faulthandler.cancel_dump_traceback_later()
    seconds = time.process_time() - began
    most = read_memory("VmHWM") - before
    opened = watched.read()
    if seconds > SECONDS:
        problem = problem or f"took {seconds:.1f} s"
    if most > BYTES:
        problem = problem or f"took {most / 1e6:.0f} MB"
    if opened:
        problem = f"opened {opened} outside"
    left = [path.name for path in case.iterdir() if path.name not in ("subject", "out")]
    if left:
        problem = problem or f"left {left}"
    return {"end": end, "problem": problem, "seconds": seconds, "bytes": most, "what": what}


def report(value: dict[str, Any]) -> None:
    os.write(REPORT[0], (json.dumps(value) + "\n").encode())


REPORT = [1]  # the descriptor that a child writes to


def run_batch(kind: Any, numbers: range, seed: int, material: Path, home: Path, pipe: int) -> None:
    """Run cases in this process, which ends after them."""
    REPORT[0] = pipe
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    errors = os.open(home / "errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    faulthandler.enable(2)
    import onnxruntime  # begins a thread, so the parent has not imported it

    onnxruntime.set_default_logger_severity(4)
    used = read_memory("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watched = Watched(home / "outside")
    tempfile.tempdir = str(home / "temporary")
    for number in numbers:
        report(run_case(kind, number, seed, material, home, watched))
    os._exit(0)


def run_kind(kind: Any, count: int, seed: int, material: Path, start: int = 0) -> Tally:
    """Run so many cases of a kind, in one child after the other."""
    tally = Tally()
    number = start
    with tempfile.TemporaryDirectory(prefix="planforge-faults-") as folder:
        home = Path(folder)
        make_outside(home)
        (home / "temporary").mkdir()
        while number < start + count:
            numbers = range(number, min(number + BATCH, start + count))
            number = numbers.start + follow(tally, kind, numbers, seed, material, home)
    return tally


def fork() -> int:
    """Fork a process of one thread: a lock that another one held then would be held in the child forever."""
    sys.stdout.flush()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"a process of {len(threads)} threads is not forked; what began the others?")
    return os.fork()


def follow(tally: Tally, kind: Any, numbers: range, seed: int, material: Path, home: Path) -> int:
    """Run cases in a child until it ends; return how many it began."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(reader)
        try:
            run_batch(kind, numbers, seed, material, home, writer)
        except BaseException:
            traceback.print_exc()
        os._exit(70)
    os.close(writer)
    begun = 0
    what = ""
    finished = True
    for line in read_lines(reader):
        if "begin" in line:
            begun += 1
            what = line["what"]
            finished = False
            continue
        finished = True
        tally.cases += 1
        tally.ends[line["end"]] += 1
        tally.slowest = max(tally.slowest, line["seconds"])
        tally.max_bytes = max(tally.max_bytes, line["bytes"])
        if line["problem"]:
            tally.findings.append(f"{what}: {line['problem']}")
    _, status = os.waitpid(pid, 0)
    if not finished:
        tally.cases += 1
        tally.ends["crashed"] += 1
        tally.findings.append(f"{what}: {explain_end(status, home)}")
    elif os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"the harness failed: {(home / 'errors').read_text()[-2000:]}")
    return begun


def explain_end(status: int, home: Path) -> str:
    """Return how a child ended, and where it was then."""
    code = os.waitstatus_to_exitcode(status)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}, or hung"
    lines = [line.strip() for line in (home / "errors").read_text(errors="replace").splitlines()]
    return f"{how}; {' | '.join(line for line in lines[-60:] if line)[:700]}"


def read_lines(descriptor: int) -> Iterator[dict[str, Any]]:
    with contextlib.closing(os.fdopen(descriptor, encoding="utf-8")) as file:
        for line in file:
            yield json.loads(line)
