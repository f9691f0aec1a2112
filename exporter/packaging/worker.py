"""Runs a package in its own runtime, in a process that gets questions and returns answers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime.apps.check.metrics import Logits
from ...runtime.errors import InputError
from ..errors import VerificationError

Question = dict[str, Any]
WORKERS = Path(__file__).with_name("workers")
SECONDS = 600.0  # that a runtime may take for all of its answers
PROBE_SECONDS = 60.0  # that a Python may take to tell a version
SAID = 600  # characters of what it said before it failed
NPM_PACKAGE = "@huggingface/transformers"


@dataclass(frozen=True)
class Worker:
    """A program that opens a package in a runtime which is installed."""

    command: tuple[str, ...]
    options: Mapping[str, Any]
    version: str  # of the runtime, without what else it is made of

    def ask(self, folder: Path, options: Mapping[str, Any], questions: Sequence[Question]) -> Answers:
        """Return the answers of the runtime; raise a VerificationError with the reason if it gave none."""
        out = Path(tempfile.mkdtemp(prefix="planforge-package-"))
        try:
            file = out / "questions.json"
            asked = {"options": {**self.options, **options}, "questions": list(questions)}
            file.write_text(json.dumps(asked), encoding="utf-8")
            run_program([*self.command, str(folder), str(file), str(out)])
            return Answers.read(out)
        finally:
            shutil.rmtree(out, ignore_errors=True)


@dataclass(frozen=True)
class Answers:
    """The answers of a runtime, in the order of the questions."""

    version: str  # of the runtime
    answers: tuple[dict[str, Any], ...]  # with arrays where the files named them

    @classmethod
    def read(cls, folder: Path) -> Answers:
        given = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
        answers = tuple(read_arrays(answer, folder) for answer in given["answers"])
        return cls(str(given["version"]), answers)


def read_arrays(value: Any, folder: Path) -> Any:
    """Return an answer with each array in place of its placeholder."""
    if isinstance(value, list):
        return (
            [read_arrays(part, folder) for part in value] if value and isinstance(value[0], dict) else value
        )
    if not isinstance(value, dict):
        return value
    if value.keys() == {"file", "shape"}:
        logits: Logits = np.fromfile(folder / Path(value["file"]).name, np.float32).reshape(value["shape"])
        return logits
    return {name: read_arrays(part, folder) for name, part in value.items()}


def run_program(command: Sequence[str]) -> None:
    """Run a worker; raise a VerificationError with its last line if it fails or takes too long."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=SECONDS, env=environment, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise VerificationError(f"{command[0]} did not answer within {SECONDS:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        said = find_reason(lines)
        raise VerificationError(f"the runtime failed on the package with exit code {done.returncode}: {said}")


def find_reason(lines: Sequence[str]) -> str:
    """Return the line of a traceback with the cause: Python's last one, or the first "Error:" of Node's."""
    errors = [line for line in lines if "Error" in line]
    told = errors[-1] if errors else (lines[-1] if lines else "it said nothing")
    return told.strip()[:SAID]


def find_python(script: str, module: str, distribution: str, runtime_at: Path | None) -> Worker | None:
    """Return the worker in a Python that has a module: this one, or `runtime_at`; None without one.

    `runtime_at` may also be the folder of a virtual environment. The module may be of a distribution whose
    name goes on behind `distribution`, as GPU builds' do.
    """
    python = sys.executable if runtime_at is None else find_program(runtime_at)
    probe = [python, str(WORKERS / "tell_version.py"), module, distribution]
    done = None
    if shutil.which(python) is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the program is not a Python
            done = subprocess.run(
                probe,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_SECONDS,
                encoding="utf-8",
                errors="replace",
            )
    if done is not None and done.returncode == 0 and done.stdout[:1].isdigit():
        return Worker((python, str(WORKERS / script)), {}, done.stdout.strip())
    if runtime_at is not None:
        raise InputError(f"--runtime-at {runtime_at}: {python} has no {distribution} installed")
    return None


def find_program(place: Path) -> str:
    """Return the python of a virtual environment's folder, or the program itself; refuse anything else."""
    for name in ("bin/python", "Scripts/python.exe"):
        if (place / name).is_file():
            return str(place / name)
    if shutil.which(str(place)) is None:
        raise InputError(
            f"--runtime-at {place} is not a program: give a python, such as {place.name or 'venv'}/bin/python"
        )
    return str(place)


def find_node(script: str, runtime_at: Path | None) -> Worker | None:
    """Return the worker in Node, where `runtime_at`, or the current folder, has transformers.js."""
    begin = (Path.cwd() if runtime_at is None else runtime_at).absolute()
    holder = next(
        (folder for folder in (begin, *begin.parents) if (folder / "node_modules" / NPM_PACKAGE).is_dir()),
        None,
    )
    node = shutil.which("node")
    if node is None or holder is None:
        if runtime_at is None:
            return None
        missing = "node is not installed" if node is None else f"no node_modules there has {NPM_PACKAGE}"
        raise InputError(f"--runtime-at {runtime_at}: {missing}")
    described = json.loads((holder / "node_modules" / NPM_PACKAGE / "package.json").read_text("utf-8"))
    return Worker((node, str(WORKERS / script)), {"modules": str(holder)}, str(described["version"]))
