"""Seconds of a UNet step of Stable Diffusion 1.5's shape, and from a fresh process to its first step.

python -m benchmarks.pictures WORK [--peers PYTHON] [--size 256] [--rounds 7]

WORK gets a checkpoint of random weights, PlanForge's bundle of it, and the peers' conversions. Each system
has a process of its own, with two threads, warm; they take turns. PYTHON is of an environment with
diffusers, optimum-onnx and openvino. Writes results/pictures.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from planforge.runtime.images.denoise import denoise, predict
from planforge.runtime.images.noise import Float32, Generator
from planforge.runtime.images.scheduler_config import SchedulerConfig
from planforge.runtime.images.schedulers import SCHEDULERS, make_scheduler

from .common import write_result
from .picture_systems import SYSTEMS
from .process import ROOT

WORST_DIFFERENCE = 1e-3  # of predictions in parts of their root mean square: all compute the same model


class Child:
    """A system's process: `picture_systems`, asked and answering in lines of JSON."""

    def __init__(self, python: Path, system: str, order: dict[str, Any]) -> None:
        command: list[str | Path] = [python, "-m", "benchmarks.picture_systems", system, json.dumps(order)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        self.facts = self.read()

    def read(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        sys.exit(f"a process ended: {self.process.args!r:.300}")

    def step(self) -> float:
        """Return the seconds of another step."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return float(self.read()["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def prepare(work: Path, pythons: dict[str, Path], size: int) -> dict[str, dict[str, Any]]:
    """Make the checkpoint and each system's conversion, where they are not there; return the orders."""
    work.mkdir(parents=True, exist_ok=True)
    orders = {}
    for name, python in {"checkpoint": Path(sys.executable), **pythons}.items():
        order = {"checkpoint": str(work / "checkpoint"), "model": str(work / name), "size": size}
        if not (work / name).exists():
            command: list[str | Path] = [
                python,
                "-m",
                "benchmarks.picture_systems",
                name,
                json.dumps(order),
                "--prepare",
            ]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        orders[name] = order
    del orders["checkpoint"]
    return orders


def read_files(folder: Path) -> None:
    """Read all files of a folder, so that the system has them in memory: no start is slower for its disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(2**24):
                    pass


def measure(work: Path, pythons: dict[str, Path], size: int, rounds: int) -> dict[str, Any]:
    """Return the median seconds of a step, warm, of systems that take turns, and those to the first step."""
    orders = prepare(work, pythons, size)
    starts: dict[str, list[float]] = {name: [] for name in orders}
    for _ in range(3):
        for name, order in orders.items():
            read_files(Path(order["model"] if name != "diffusers" else order["checkpoint"]))
            child = Child(pythons[name], name, order)
            starts[name].append(child.facts["start_s"])
            child.close()
    children = {name: Child(pythons[name], name, order) for name, order in orders.items()}
    times: dict[str, list[float]] = {name: [] for name in orders}
    for number in range(rounds + 1):
        for name, child in children.items():
            seconds = child.step()
            if number:  # the first is warm-up
                times[name].append(seconds)
    facts = {name: child.facts for name, child in children.items()}
    for child in children.values():
        child.close()
    first = facts["planforge"]["digest"]
    for name, known in facts.items():
        gap = max(abs(a - b) for a, b in zip(known["digest"], first, strict=True)) / known["rms"]
        if gap > WORST_DIFFERENCE:
            sys.exit(f"{name} predicts something else than planforge: {gap:.1e}")
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        name: {
            "step_s": round(medians[name], 3),
            "times_planforge": round(medians[name] / medians["planforge"], 3),
            "all_s": [round(value, 3) for value in times[name]],
            "start_s": round(statistics.median(starts[name]), 2),
            "peak_mb": facts[name]["peak_mb"],
            "versions": facts[name]["versions"],
        }
        for name in orders
    }


def measure_loops(size: int, steps: int = 20, rounds: int = 50) -> dict[str, float]:
    """Return for each scheduler the median microseconds of a step without the UNet, with guidance."""
    unet: Any = SimpleNamespace(run=lambda given: {"noise": given["sample"]})
    defaults: Any = SimpleNamespace(guidance_features=None)
    text = np.zeros((2, 1, 1), np.float32)
    found = {}
    for name in SCHEDULERS:
        times = []
        for number in range(rounds):
            scheduler = make_scheduler(
                SchedulerConfig("PNDMScheduler", {"skip_prk_steps": True}), steps, name
            )
            generator = Generator(number)
            latents = scheduler.begin(generator.normal((1, 4, size // 8, size // 8)))

            def ask(sample: Float32, timestep: float) -> Float32:
                return predict(unet, defaults, sample, timestep, text, 7.5)

            started = time.perf_counter()
            count = len(list(denoise(scheduler, latents, ask, generator.normal)))
            times.append((time.perf_counter() - started) / count)
        found[name] = round(statistics.median(times) * 1e6, 1)
    return found


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--peers", type=Path, default=Path(sys.executable))
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    names = arguments.systems.split(",")
    pythons = {name: Path(sys.executable) if name == "planforge" else arguments.peers for name in names}
    loops = measure_loops(arguments.size)
    found = measure(arguments.work.resolve(), pythons, arguments.size, arguments.rounds)
    result = {"size": arguments.size, "rows": 2, "threads": 2, "systems": found}
    write_result("pictures", result | {"step_without_unet_us": loops})


if __name__ == "__main__":
    main()
