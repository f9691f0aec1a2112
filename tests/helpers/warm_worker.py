"""Runs a package's worker in a process that has loaded its libraries, each time in a fork of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from planforge.exporter.packaging import worker

# Imports the script, which begins nothing then; and answers each line of arguments with an exit code.
SERVER = """
import importlib, json, os, sys, traceback

sys.path.insert(0, sys.argv[1])
script = importlib.import_module(sys.argv[2])
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sys.argv[1:] = json.loads(line)
        sys.stdout = sys.stderr
        try:
            script.answer_questions(script.open_package)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class WarmWorker:
    """The process of one script."""

    def __init__(self, python: str, script: Path, said: IO[str]) -> None:
        self.said = said
        command = [python, "-c", SERVER, str(script.parent), script.stem]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said, "text": True}
        self.process = subprocess.Popen(command, env=worker.make_environment(), **pipes)

    def run(self, arguments: Sequence[str]) -> None:
        """Run the script with arguments, as `run_program` runs it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        begin = self.said.seek(0, 2)
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        self.said.seek(begin)
        worker.check_exit(code, self.said.read())


@contextmanager
def keep_warm(script: Path, folder: Path) -> Iterator[None]:
    """Let packages be asked by a script in forks of one process; other scripts run as ever."""
    run_program = worker.run_program
    warm: list[WarmWorker] = []

    def run(command: Sequence[str]) -> None:
        if Path(command[1]) != script:
            run_program(command)
            return
        if not warm:
            warm.append(WarmWorker(command[0], script, said))
        warm[0].run(command[2:])

    with (folder / "said").open("w+", encoding="utf-8", errors="replace") as said:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "run_program", run)
            yield
        for one in warm:
            one.process.communicate()
