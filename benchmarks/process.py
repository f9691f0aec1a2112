"""A system's own process."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .systems.system import Skip

ROOT = Path(__file__).resolve().parent.parent
LLAMA_AVX2 = ROOT / "build" / "llama-avx2"
HIDDEN = "AVX2_CPUINFO"  # is set by `python -m tests.avx2`, which hides newer instructions


class ProcessError(Exception):
    """A system's process failed or ended; the message says where its output is."""


class Process:
    """A process that runs `child`; see there for its requests.

    Args:
        python: of its environment.
        order: the first line that it is sent.
        log: a file for what it prints.

    Raises:
        Skip: the system can't do this here.
        ProcessError: it failed.

    Attributes:
        start_seconds: from starting the process to its first answer.
    """

    def __init__(self, python: Path, order: Mapping[str, Any], log: Path) -> None:
        self.log = log
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # every system's modules are compiled, as installed
        if HIDDEN in environment:  # compiled for this processor, llama.cpp asks for no features
            paths = [str(LLAMA_AVX2), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if "threads" in order:
            environment["OMP_NUM_THREADS"] = str(order["threads"])
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [python, "-m", "benchmarks.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=environment,
            )
        try:
            self.ask(order)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - started

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line, and wait for the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why, or its log does
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": "the process ended"}
        if "skip" in answer:
            raise Skip(answer["skip"])
        if "failed" in answer:
            raise ProcessError(f"{answer['failed']} (see {self.log})")
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
