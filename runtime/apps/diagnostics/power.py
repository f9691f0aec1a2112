"""Measures power by what the machine has for it: tegrastats on a Jetson, nvidia-smi (NVML) with a GPU."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

EVERY_MS = 100


@dataclass(frozen=True)
class PowerSource:
    """A command that prints a line with the present power again and again.

    Attributes:
        name: in words, with what is measured.
        command: with its arguments; `{gpu}` stands for the GPU's UUID.
        pattern: finds the power in a line.
        watts: how many one of its units is.
    """

    name: str
    command: tuple[str, ...]
    pattern: re.Pattern[str]
    watts: float

    @property
    def is_of_gpu(self) -> bool:
        """Whether it tells the power of one GPU."""
        return any("{gpu}" in part for part in self.command)

    def parse(self, line: str) -> float | None:
        """Return the watts that a line tells; None where it tells none."""
        found = self.pattern.search(line)
        return float(found[1]) * self.watts if found else None


# VDD_IN is all that a module takes; AGX boards print parts of it alone, which is no sum to rely on.
# Source: https://docs.nvidia.com/jetson/archives/r36.3/DeveloperGuide/AT/JetsonLinuxDevelopmentTools/TegrastatsUtility.html
SOURCES = (
    PowerSource(
        "tegrastats, VDD_IN of the module",
        ("tegrastats", "--interval", str(EVERY_MS)),
        re.compile(r"\bVDD_IN ([0-9]+)(?:mW)?/"),
        0.001,
    ),
    PowerSource(
        "nvidia-smi, power of the GPU's board",
        (
            *("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits"),
            *("--id={gpu}", f"--loop-ms={EVERY_MS}"),
        ),
        re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*$"),
        1.0,
    ),
)


class PowerMeter:
    """Samples power while its block runs, from each source that there is.

    Where a board has both, tegrastats counts, as it sees the whole module.

    Args:
        gpu: the UUID of the GPU that works; "" where none does, whose power says nothing of the work.
    """

    def __init__(self, gpu: str = "", sources: Sequence[PowerSource] = SOURCES) -> None:
        self._sources = [source for source in sources if gpu or not source.is_of_gpu]
        self._gpu = gpu
        self._children: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self._samples: dict[str, list[float]] = {}
        self._started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> PowerMeter:
        for source in self._sources:
            command = [part.format(gpu=self._gpu) for part in source.command]
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    errors="replace",
                )
            except OSError:  # no such command
                continue
            assert child.stdout is not None
            thread = threading.Thread(target=self._read, args=(source, child.stdout), daemon=True)
            self._children.append(child)
            self._threads.append(thread)
            thread.start()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._started
        for child in self._children:
            child.kill()
        for child, thread in zip(self._children, self._threads, strict=True):
            thread.join()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()

    def _read(self, source: PowerSource, stream: IO[str]) -> None:
        for line in stream:
            watts = source.parse(line)
            if watts is not None:
                self._samples.setdefault(source.name, []).append(watts)

    def find_mean(self) -> tuple[str, float] | None:
        """Return the first source that told something, and the mean of its samples in watts."""
        for source in self._sources:
            samples = self._samples.get(source.name)
            if samples:
                return source.name, sum(samples) / len(samples)
        return None
