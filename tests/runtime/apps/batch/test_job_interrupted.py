"""Signals, killed workers and killed drivers: a job ends in order, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from planforge.runtime.apps.batch import run_batch
from planforge.runtime.errors import BatchError

from ....helpers.cli import INTERRUPTIBLE
from ....helpers.patience import PATIENCE, wait_until
from .cluster_kills import wait_for_none
from .texts import TEXTS


def start_in_group(command: list[str]) -> subprocess.Popen[str]:
    """Start a command whose processes get a terminal's signals together."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_while_running(process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, which it must before the process ends."""
    wait_until(lambda: process.poll() is not None or holds())
    assert process.poll() is None


@pytest.fixture
def running(bundle: Path, tmp_path: Path) -> Any:
    """A command that is amid a job of many parts."""
    (tmp_path / "in.txt").write_text("\n".join(TEXTS * 400))
    command = [*INTERRUPTIBLE, "batch", str(bundle), "--task", "embed", "--input", str(tmp_path / "in.txt")]
    command += ["--output", str(tmp_path / "out"), "--rows-per-part", "60", "--workers", "2"]
    process = start_in_group(command)
    wait_while_running(process, lambda: len(list((tmp_path / "out").glob("part-*"))) >= 3)
    yield process
    process.kill()
    process.communicate()


def list_children(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in listed.splitlines()}
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [one for child in children for one in list_children(child)]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_job_and_its_workers(
    running: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    children = list_children(running.pid)
    assert len(children) >= 2
    os.killpg(running.pid, number) if number == signal.SIGINT else running.send_signal(number)
    output, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == 128 + number
    assert output == ""
    assert "rows are kept, and the same command goes on with the rest" in errors
    assert "Traceback" not in errors
    wait_for_none(lambda: list(filter(exists, children)), "workers that are left")
    assert sorted(path.name for path in (tmp_path / "out" / "_job").iterdir()) == [
        "job.json",
        "lock",
        "plan.jsonl",
    ]


@pytest.mark.parametrize("started", [0, 1, 2, 3])
def test_ctrl_c_while_workers_start(bundle: Path, tmp_path: Path, started: int) -> None:
    """As soon as the job is planned, and as soon as each of its processes is there."""
    (tmp_path / "in.txt").write_text("\n".join(TEXTS * 400))
    command = [*INTERRUPTIBLE, "batch", str(bundle), "--task", "embed", "--input", str(tmp_path / "in.txt")]
    job = start_in_group([*command, "--output", str(tmp_path / "out"), "--workers", "2"])
    wait_while_running(job, (tmp_path / "out" / "_job" / "job.json").exists)
    wait_while_running(job, lambda: len(list_children(job.pid)) >= started)
    os.killpg(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 130
    assert "Traceback" not in errors


def test_no_thread_outlives_a_job(bundle: Path, tmp_path: Path) -> None:
    """One of the pool would close, while this process exits, what the exit still uses."""
    before = threading.enumerate()
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    for number in range(3):
        run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / f"out-{number}", workers=1)
        assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_a_signal_waits_while_a_worker_is_started(bundle: Path, tmp_path: Path) -> None:
    """Another thread may take it, whatever the main one blocks, and its handler runs in the main one."""
    texts = str(tmp_path / "in.txt")
    output = str(tmp_path / "out")
    Path(texts).write_text("\n".join(TEXTS))
    code = f"""
import signal, threading
from concurrent.futures import ProcessPoolExecutor
from planforge.runtime.apps.batch import run_batch

submit = ProcessPoolExecutor.submit
is_time = threading.Event()


def interrupt():
    is_time.wait()
    signal.raise_signal(signal.SIGINT)


def interrupt_and_submit(*arguments):
    is_time.set()
    interrupting.join()
    future = submit(*arguments)
    print("submitted")
    return future


interrupting = threading.Thread(target=interrupt, daemon=True)
ProcessPoolExecutor.submit = interrupt_and_submit
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where who runs the tests ignores it
    interrupting.start()
    try:
        run_batch({str(bundle)!r}, "embed", {texts!r}, {output!r}, workers=1)
    except KeyboardInterrupt:
        print("interrupted")
"""
    (tmp_path / "job.py").write_text(code)
    completed = subprocess.run(
        [sys.executable, tmp_path / "job.py"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (completed.stdout, completed.stderr) == ("submitted\ninterrupted\n", "")


def test_a_driver_that_is_killed_leaves_no_worker(
    running: subprocess.Popen[str], bundle: Path, tmp_path: Path
) -> None:
    """And what it wrote is whole; until then no other job writes to its folder."""
    with pytest.raises(BatchError, match="another job is writing there"):
        run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / "out", workers=1)
    children = list_children(running.pid)
    running.kill()
    wait_for_none(lambda: list(filter(exists, children)), "workers that are left")
    for path in (tmp_path / "out").glob("part-*"):
        assert len(pq.read_table(path)) == 60
