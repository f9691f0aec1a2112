"""SIGTERM, as `docker stop` and a CI's timeout send it: as clean as Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .helpers_cli import COMMAND

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")


@contextmanager
def started(tmp_path: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """The command at work, with a temporary folder of its own; killed at the end, whatever happens."""
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Returns as soon as the condition holds; an error where it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def descendants(pid: int) -> dict[int, str]:
    """The running processes below one, with their command lines."""
    parents = {}
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            commands[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue  # it has just ended
        if fields[0] != "Z":
            parents[int(folder.name)] = int(fields[1])
    found = {pid}
    for _ in parents:
        found |= {child for child, parent in parents.items() if parent in found}
    return {child: commands[child] for child in found - {pid}}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("module", "target"),
    [("planforge.exporter.onnx_export", "portable"), ("builder", "rtx")],
    ids=["tracing", "building a plan"],
)
def test_an_export_that_is_terminated_leaves_nothing(tmp_path: Path, module: str, target: str) -> None:
    """No folder, no child that goes on, nothing in the temporary folder."""
    output = tmp_path / "out" / "B"
    with started(tmp_path, "export", "gpt2-demo", "-o", output, "--target", target) as process:
        wait_until(lambda: any(module in command for command in descendants(process.pid).values()))
        children = descendants(process.pid)
        assert list(output.parent.iterdir())  # the staging folder is there
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 143, errors
    assert errors.splitlines()[-1].startswith("terminated")
    assert "Traceback" not in errors
    assert [pid for pid in children if is_running(pid)] == []
    assert list(output.parent.iterdir()) == []
    left = [path.name for path in (tmp_path / "temporary").rglob("*") if path.is_file()]
    assert [name for name in left if name != ".ses"] == []  # torch's, empty, of every export
