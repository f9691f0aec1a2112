"""Kills commands at random points: afterwards a folder holds the old bundle or the new one, whole."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .child import fork, judge
from .disks import DISK, mount_disk, remount
from .doors import DECODER, ENCODER, PLAIN

LATE = 0.3  # of a command's time, in which half of the points are: files are written at its end
BEYOND = 1.3  # points are drawn up to so many times the time that it took alone


@dataclass(frozen=True)
class Command:
    """A command that changes a bundle, or a cache, and how it is run here."""

    name: str
    subject: str
    run: Callable[[Path, Path], object]  # gets the material of its subject and the bundle
    largest: int = 100_000  # bytes that its files may have when the disk is to be full


@dataclass
class Outcome:
    """What became of a command's points."""

    killed: int = 0
    finished: int = 0
    old: int = 0
    new: int = 0
    findings: list[str] = field(default_factory=list)


def export(material: Path, bundle: Path) -> None:
    """Export again, with the graphs that were traced before."""
    from planforge.exporter import export
    from planforge.exporter.tracing import trace

    def copy_traced(checkpoint: Path, recipe: str, choices: Any, out: Path) -> Any:
        shutil.copy(material / "traced" / recipe, out)
        return SimpleNamespace(returncode=0, communicate=lambda: ("", ""))

    trace.start_tracer = copy_traced
    export(material / "checkpoint", bundle, target=["cpu", "portable"], precision=["fp32"], force=True)


def import_again(material: Path, bundle: Path) -> None:
    from planforge.exporter.exporting import import_folder

    options: dict[str, Any] = {"precision": ["fp32"], "target": ["portable"], "verify": False}
    import_folder(material / "import", bundle, force=True, **options)


def build(material: Path, bundle: Path) -> None:
    from planforge.exporter import build

    build(bundle, target="rtx", sms=["sm86"])


def fit_head(material: Path, bundle: Path) -> None:
    from planforge.exporter.fitting.fitting import fit_head

    fit_head(material / "bundle", material / "labelled.tsv", bundle, force=True)


def prune(material: Path, bundle: Path) -> None:
    from planforge.exporter import prune

    prune(bundle, keep=["fp32"])


def set_default(material: Path, bundle: Path) -> None:
    """Set a default as `bench --set-default` does after it has measured."""
    from planforge.exporter.commands.bench import record_default

    measured: Any = SimpleNamespace(best_default=lambda: SimpleNamespace(precision="fp16", backend="ort-cpu"))
    record_default(bundle, measured)


def prepare(material: Path, bundle: Path) -> None:
    from planforge.runtime.apps.commands.prepare import prepare_graphs
    from planforge.runtime.bundle.bundle import Bundle

    os.environ["PLANFORGE_CACHE"] = str(bundle.with_name("cache"))
    prepare_graphs(Bundle.open(bundle), None, lambda line: None)


COMMANDS = {
    command.name: command
    for command in (
        Command("export", DECODER, export),
        Command("import", ENCODER, import_again),
        Command("build", DECODER, build),
        Command("fit-head", PLAIN, fit_head),
        Command("prune", DECODER, prune),
        Command("bench --set-default", DECODER, set_default, largest=4_000),
        Command("prepare", DECODER, prepare),
    )
}


def start(command: Command, material: Path, bundle: Path, limit: int = 0) -> int:
    """Run a command in a child; return its number. `limit` bounds every file, as a full disk does."""
    pid = fork()
    if pid == 0:
        try:
            os._exit(run_here(command, material, bundle, limit))
        finally:
            os._exit(70)
    return pid


def run_here(command: Command, material: Path, bundle: Path, limit: int) -> int:
    """Run a command in this process; return 0, 1 where it ended with one line, or 70, and say which."""
    os.dup2(os.open(bundle.with_name("said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(2, 1)
    tempfile.tempdir = str(bundle.with_name("temporary"))
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        command.run(material / command.subject, bundle)
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        problem = judge(error)
        print(problem or error, file=sys.stderr, flush=True)
        return 70 if problem else 1
    return 0


def make_folder(command: Command, material: Path, home: Path) -> Path:
    """Make a fresh copy of the command's bundle; return its folder."""
    shutil.rmtree(home, ignore_errors=True)
    (home / "temporary").mkdir(parents=True)
    shutil.copytree(material / command.subject / "bundle", home / "bundle")
    return home / "bundle"


def answer(bundle: Path) -> Any:
    """Return what a bundle answers, opened with whatever was prepared; every file is hashed."""
    from planforge.runtime import TextEncoder, TextGenerator, load

    os.environ["PLANFORGE_CACHE"] = str(bundle.with_name("cache"))
    with load(bundle, backend="ort-cpu", threads=1, verify=True, prepared="auto") as model:
        if isinstance(model, TextGenerator):
            return model.generate("And it", max_new_tokens=4).text
        assert isinstance(model, TextEncoder)
        return model.embed("hello").round(3).tolist()


def is_whole(bundle: Path, expected: Any) -> bool:
    """Check a bundle in a child: an engine begins threads, and what forks must have one."""
    from planforge.runtime.bundle.bundle import Bundle

    pid = fork()
    if pid == 0:
        code = 1
        try:
            Bundle.open(bundle).verify_files()
            code = 0 if answer(bundle) == expected else 2
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def compute_answer(bundle: Path) -> Any:
    """Return what a sound bundle answers, computed in a child."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as file:
                json.dump(answer(bundle), file)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        value = json.load(file)
    os.waitpid(pid, 0)
    return value


def measure(command: Command, material: Path, home: Path) -> float:
    """Run a command to its end; return how long that takes when its modules' files have been read."""
    seconds = []
    for _ in range(3):
        bundle = make_folder(command, material, home)
        began = time.monotonic()
        _, status = os.waitpid(start(command, material, bundle), 0)
        seconds.append(time.monotonic() - began)
        if os.waitstatus_to_exitcode(status) != 0:
            raise RuntimeError(f"{command.name} fails undisturbed: {(home / 'said').read_text()[-2000:]}")
    return min(seconds)


def kill_command(command: Command, material: Path, points: int, seed: int) -> Outcome:
    """Kill a command at so many points, each time on a fresh bundle, and look what there is then."""
    chance = random.Random(f"{seed} {command.name}")
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="planforge-kills-") as folder:
        home = Path(folder, "home")
        seconds = measure(command, material, home)
        expected = compute_answer(make_folder(command, material, home))
        for point in range(points):
            bundle = make_folder(command, material, home)
            before = (bundle / "manifest.json").read_bytes()
            late = point % 2 * (1 - LATE)
            delay = BEYOND * seconds * (late + chance.random() * (1 - late))
            pid = start(command, material, bundle)
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            outcome.killed += os.WIFSIGNALED(status)
            outcome.finished += not os.WIFSIGNALED(status)
            is_new = (bundle / "manifest.json").read_bytes() != before
            outcome.new += is_new
            outcome.old += not is_new
            if not is_whole(bundle, expected):
                outcome.findings.append(f"{command.name}, killed after {delay:.3f} s: not whole")
        check_mended(command, material, bundle, expected, outcome)
    return outcome


def check_mended(command: Command, material: Path, bundle: Path, expected: Any, outcome: Outcome) -> None:
    """Run the command once more over what the last kill left: all is as if nothing had been."""
    _, status = os.waitpid(start(command, material, bundle), 0)
    said = bundle.with_name("said").read_text()
    if os.waitstatus_to_exitcode(status) != 0:
        outcome.findings.append(f"{command.name} fails after a kill: {said[-300:]}")
    elif not is_whole(bundle, expected):
        outcome.findings.append(f"{command.name}, done again: not whole")
    left = [path.name for path in bundle.parent.iterdir() if ".partial-" in path.name]
    if left:
        outcome.findings.append(f"{command.name}, done again, leaves {left}")


def fill_disk(command: Command, material: Path, points: int, seed: int) -> Outcome:
    """Let a command's disk be full at so many sizes; look what there is then.

    Where a disk of memory can be mounted, every other point has one; else no file may be longer than a limit.
    """
    chance = random.Random(f"full {seed} {command.name}")
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="planforge-full-") as folder, mount_disk(folder) as disk:
        home = Path(folder, "home")
        expected = compute_answer(make_folder(command, material, home))
        for point in range(points):
            place = disk / "home" if disk is not None and point % 2 else home
            bundle = make_folder(command, material, place)
            before = (bundle / "manifest.json").read_bytes()
            limit = 0
            if place != home:
                used = shutil.disk_usage(place).used
                remount(disk, f"size={used + chance.randrange(used)}")
            else:
                limit = chance.randrange(1, command.largest)
            _, status = os.waitpid(start(command, material, bundle, limit), 0)
            if place != home:
                remount(disk, f"size={DISK}")
            code = os.waitstatus_to_exitcode(status)
            outcome.finished += code == 0
            outcome.killed += code == 1
            where = f"{command.name}, " + (
                f"files of {limit} bytes" if limit else f"a full disk, point {point}"
            )
            if code not in (0, 1):
                outcome.findings.append(f"{where}: {code}: {bundle.with_name('said').read_text()[-300:]}")
            is_new = (bundle / "manifest.json").read_bytes() != before
            outcome.new += is_new
            outcome.old += not is_new
            if not is_whole(bundle, expected):
                outcome.findings.append(f"{where}: not whole")
    return outcome
