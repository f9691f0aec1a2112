"""Optimum's Python with its libraries loaded: what tests run in it runs in a fork, and so begins at once."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.imported import optimum
from planforge.exporter.processes import run_child

from .optimums import OPTIMUM_PYTHON

LIBRARIES = ("torch", "transformers", "optimum.onnxruntime", "optimum.exporters.onnx")
UNDERSTOOD = ("cwd", "env", "capture_output", "text", "check", "encoding", "errors", "stdout", "stderr")
# Standard input is always empty here, and the limit of the whole test run stands for a limit of one command.
REPLACED = ("stdin", "timeout")
# Loads libraries, and answers each line, which has a command's arguments, with an exit code.
SERVER = """
import importlib, json, os, runpy, sys, traceback

for name in sys.argv[1:]:
    importlib.import_module(name)


def run(kind, *rest):
    sys.argv[:] = rest if kind == "-m" else [kind, *rest] if kind != "-c" else ["-c", *rest[1:]]
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")


for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, path in enumerate(asked["said"], 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            os.chdir(asked["cwd"])
            os.environ.clear()
            os.environ.update(asked["env"])
            run(*asked["arguments"])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class WarmPython:
    """The process, from its first command on."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run a script, a module or a command with options of `subprocess.run`."""
        refused = {key: value for key, value in options.items() if key not in (*UNDERSTOOD, *REPLACED)}
        assert options.get("stdin") in (None, subprocess.DEVNULL), "a fork reads no standard input"
        assert not refused, f"{refused} would be passed over"
        if self.process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([str(OPTIMUM_PYTHON), "-c", SERVER, *LIBRARIES], **pipes)
        assert self.process.stdin is not None and self.process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            said = [Path(folder, name) for name in ("stdout", "stderr")]
            where = {
                "cwd": str(options.get("cwd") or Path.cwd()),
                "env": options.get("env") or {**os.environ},
            }
            asked = {"arguments": [*map(str, arguments)], "said": [*map(str, said)], **where}
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            code = int(self.process.stdout.readline())
            out, error = (path.read_text("utf-8", errors="replace") for path in said)
            done = subprocess.CompletedProcess(arguments, code, out, error)
            if options.get("check"):
                done.check_returncode()
            return done

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


@contextmanager
def keep_optimum_warm() -> Iterator[None]:
    """Run what is asked of optimum's Python in forks of one process."""
    warm = WarmPython()

    def warmed(usual: Any) -> Any:
        def run(command: Any, **options: Any) -> Any:
            is_optimums = str(command[0]) == str(OPTIMUM_PYTHON)
            return warm.run(command[1:], options) if is_optimums else usual(command, **options)

        return run

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "run", warmed(subprocess.run))
            patch.setattr(optimum, "run_child", warmed(run_child))
            yield
    finally:
        warm.close()
