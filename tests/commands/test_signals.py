"""SIGTERM, as docker stop and a CI's timeout send it, is as clean as Ctrl-C; full and closed outputs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planforge.exporter.commands.app import app
from planforge.runtime.bundle.bundle import Bundle

from ..helpers.cli import COMMAND
from ..helpers.models import one_layer_gpt2
from ..helpers.patience import PATIENCE, wait_until

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


# What an export says while a graph is traced: the reference is loaded and computed meanwhile.
BESIDE_TRACING = "(reading weights|computing the reference in PyTorch|tracing decoder.portable)"


@pytest.mark.parametrize(
    ("module", "target", "stage"),
    [
        ("planforge.exporter.tracing.trace", "portable", BESIDE_TRACING),
        ("builder", "rtx", ".+"),
    ],
    ids=["tracing", "building a plan"],
)
def test_an_export_that_is_terminated_leaves_nothing(
    tmp_path: Path, module: str, target: str, stage: str
) -> None:
    """No folder, no child that goes on, nothing in the temporary folder."""
    output = tmp_path / "out" / "B"
    checkpoint = one_layer_gpt2(tmp_path / "checkpoint")
    command: list[str | Path] = ["export", checkpoint, "-o", output, "--target", target, "--no-verify"]
    with started(tmp_path, *command) as process:
        wait_until(lambda: any(module in command for command in descendants(process.pid).values()))
        children = descendants(process.pid)
        assert list(output.parent.iterdir())  # the staging folder is there
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, errors
    said = errors.splitlines()[-1]
    # A child that has just begun is seen before the first stage is.
    assert re.fullmatch(rf"terminated( while {stage}, after \d+ s)?; nothing was changed", said), said
    assert "Traceback" not in errors
    assert [pid for pid in children if is_running(pid)] == []
    assert list(output.parent.iterdir()) == []
    left = [path.name for path in (tmp_path / "temporary").rglob("*") if path.is_file()]
    assert [name for name in left if name != ".ses"] == []  # torch's, empty, of every export


@pytest.mark.parametrize("arguments", [["doctor"], ["lint", "--rules"], ["doctor", "--json"]])
def test_an_output_that_is_full_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, encoding="utf-8")
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_run_into_a_full_disk_and_into_a_closed_pipe(demo_bundle: Path) -> None:
    command = [*COMMAND, "run", str(demo_bundle), "And God", "--max-new-tokens", "2"]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, encoding="utf-8")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, encoding="utf-8")
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_tables_into_a_closed_pipe_say_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "doctor"], stdout=writer, stderr=subprocess.PIPE, encoding="utf-8")
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_messages_that_cannot_be_written_change_no_exit_code(tmp_path: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([*COMMAND, "inspect", str(tmp_path / "none")], stderr=full)
    assert done.returncode == 2


def test_a_full_disk_anywhere_else_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "/tmp/somewhere")

    monkeypatch.setattr("planforge.exporter.commands.inspection.inspect", full)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert done.exit_code == 1
    assert done.stderr == "error: /tmp/somewhere: No space left on device\n"


def test_a_wait_for_input_ends_at_once(demo_bundle: Path, tmp_path: Path) -> None:
    with started(tmp_path, "run", demo_bundle, "--max-new-tokens", "2", "--batch-size", "1") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("And God\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("And God")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (143, "terminated; nothing was changed\n")


# Sets the default of a bundle, as if it was measured; the signal comes before the commit, or meanwhile.
INTERRUPTED_COMMIT = """
import os, signal, sys
from types import SimpleNamespace
from planforge.exporter.bundle import writer
from planforge.exporter.commands import app
from planforge.runtime.apps.diagnostics import bench

def interrupted(real):
    def call(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)
    return call

found = SimpleNamespace(best_default=lambda: SimpleNamespace(precision="fp16", backend="ort-cpu"))
bench.bench = lambda *arguments, **options: found
setattr(writer, sys.argv[2], interrupted(getattr(writer, sys.argv[2])))
sys.argv = ["planforge", "bench", sys.argv[1], "--set-default"]
app.main()
"""


@pytest.mark.parametrize(
    ("step", "default", "words"),
    [
        ("replace_manifest", None, "nothing was changed"),
        ("write_manifest", "fp16", "the bundle was written already"),
    ],
)
def test_what_a_terminated_command_says_of_its_changes_is_true(
    own_bundle: Path, step: str, default: str | None, words: str
) -> None:
    command = [sys.executable, "-c", INTERRUPTED_COMMIT, str(own_bundle), step]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (143, f"terminated; {words}\n")
    assert Bundle.open(own_bundle).manifest.default_precision == default
    assert not (own_bundle / ".lock").exists()


@pytest.mark.parametrize("kind", ["encoder", "translator", "generator"])
def test_lines_are_answered_as_they_come_in_batches_of_one(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As a coprocess asks: it writes a line, and waits for the answer before it writes another."""
    fixture = {"encoder": "minilm_bundle", "translator": "dates_bundle", "generator": "demo_bundle"}[kind]
    bundle = request.getfixturevalue(fixture)
    with started(tmp_path, "run", bundle, "--batch-size", "1", "--json") as process:
        assert process.stdin is not None and process.stdout is not None
        for line in ("May 3, 1998", "", "", "May 4, 1998"):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            assert wait([process.stdout.fileno()], PATIENCE), f"no answer to {line!r}"
            assert (json.loads(process.stdout.readline()) is None) == (line == "")
        process.stdin.close()
        assert process.wait(timeout=PATIENCE) == 0
