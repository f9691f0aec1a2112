"""Compares 64 prompts through `planforge run` with one call of `generate` with a list of them.

python -m benchmarks.run_command [--models gpt2-demo,gpt2-124m] [--rounds 5]

Each side is a process of its own, from its start to its end. A second run of each with one prompt and one new
token tells what starting and loading take, so that both ratios can be given: with the start and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planforge.runtime.apps.diagnostics.bench_work import WORDS

from .common import write_result
from .idle import BusyMachineError, measure_when_idle
from .machine import BusyMeter
from .process import ROOT
from .workshop import Workshop

PROMPTS = 64
NEW_TOKENS = 64
AT_MOST = 1.1  # of the time that generate takes
PRECISION = "fp32"
# What a user would write, who reads prompts from stdin. Prints the answers' tokens as a line of JSON.
LIBRARY = """
import json, sys
from planforge.runtime import load
prompts = [line.rstrip("\\n") for line in sys.stdin]
with load(sys.argv[1]) as model:
    answers = model.generate(prompts, max_new_tokens=int(sys.argv[2]))
print(json.dumps([answer.token_ids for answer in answers]))
"""


@dataclass
class Side:
    """One of the two ways to generate.

    Attributes:
        command: what runs; the number of new tokens is put behind it.
        whole: seconds of each round with all prompts.
        start: seconds of each round with one prompt and one new token.
    """

    command: tuple[str, ...]
    whole: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)

    def run(self, prompts: Sequence[str], new_tokens: int) -> tuple[float, str]:
        """Return the seconds of a process that answers the prompts, and what it printed."""
        started = time.perf_counter()
        done = subprocess.run(
            [*self.command, str(new_tokens)],
            input="".join(f"{prompt}\n" for prompt in prompts),
            capture_output=True,
            encoding="utf-8",
        )
        seconds = time.perf_counter() - started
        if done.returncode != 0:
            sys.exit(f"{self.command[0]} failed with exit code {done.returncode}: {done.stderr[-500:]}")
        return seconds, done.stdout


def prompts_of(count: int) -> list[str]:
    """Return prompts of 3 to 12 words, all different."""
    return [" ".join(WORDS[place : place + 3 + place % 10]) for place in range(count)]


def measure_command(bundle: Path, rounds: int, count: int, new_tokens: int) -> dict[str, Any]:
    """Return the times of both sides, in turns, and their ratios.

    Args:
        bundle: a text generator's.
        rounds: how often each side does the work.
        count: of prompts.
        new_tokens: for each prompt.

    Raises:
        AssertionError: the two sides gave different answers.
    """
    prompts = prompts_of(count)
    planforge = str(Path(sys.executable).with_name("planforge"))
    command = Side((planforge, "run", str(bundle), "--json", "--max-new-tokens"))
    library = Side((sys.executable, "-c", LIBRARY, str(bundle)))
    for _ in range(rounds):
        for side in (command, library):
            seconds, _ = side.run(prompts[:1], 1)
            side.start.append(seconds)
        seconds, lines = command.run(prompts, new_tokens)
        command.whole.append(seconds)
        seconds, answers = library.run(prompts, new_tokens)
        library.whole.append(seconds)
        assert [json.loads(line)["token_ids"] for line in lines.splitlines()] == json.loads(answers)
    return compare(command, library)


def compare(command: Side, library: Side) -> dict[str, Any]:
    """Return both sides' medians and their ratios."""
    medians = {
        "command_s": statistics.median(command.whole),
        "command_start_s": statistics.median(command.start),
        "generate_s": statistics.median(library.whole),
        "generate_start_s": statistics.median(library.start),
    }
    without_start = (medians["command_s"] - medians["command_start_s"]) / (
        medians["generate_s"] - medians["generate_start_s"]
    )
    return {
        **{name: round(seconds, 3) for name, seconds in medians.items()},
        "command_rounds_s": [round(seconds, 3) for seconds in command.whole],
        "generate_rounds_s": [round(seconds, 3) for seconds in library.whole],
        "ratio": round(medians["command_s"] / medians["generate_s"], 3),
        "ratio_without_start": round(without_start, 3),
        "at_most": AT_MOST,
        "met": max(medians["command_s"] / medians["generate_s"], without_start) <= AT_MOST,
    }


def beside_others(bundle: Path, rounds: int) -> dict[str, Any]:
    """Return `measure_command`'s result with the share of the processors that others used meanwhile."""
    meter = BusyMeter()
    found = measure_command(bundle, rounds, PROMPTS, NEW_TOKENS)
    return {**found, "machine": {"busy": round(meter.share(), 2)}}


def export_bundle(model: str, work: Path) -> Path:
    """Return the bundle of a checkpoint of the benchmarks, which is made at the first call."""
    from planforge.exporter import export

    bundle = work / model / f"run-command-{PRECISION}"
    if not (bundle / "manifest.json").exists():
        checkpoint = Workshop(work, pythons=()).checkpoint(model)
        options: dict[str, Any] = {"precision": [PRECISION], "target": ["cpu"], "max_batch": 32}
        export(checkpoint, bundle, verify=False, force=True, **options)
    return bundle


def main(given: Sequence[str] | None = None) -> None:
    """Write results/run_command.json; exit with 1 where a model missed the target or was not measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_command", description=__doc__)
    parser.add_argument("--models", default="gpt2-demo,gpt2-124m", help="checkpoints of the benchmarks")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side does the work")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "benchmarks", help="for converted models"
    )
    arguments = parser.parse_args(given)
    models: dict[str, Any] = {}
    missed = []
    for model in arguments.models.split(","):
        bundle = export_bundle(model, arguments.work)
        try:
            models[model] = measure_when_idle(
                lambda bundle=bundle: beside_others(bundle, arguments.rounds),  # type: ignore[misc]
                say=lambda line: print(f"  {line}", file=sys.stderr),
            )
        except BusyMachineError as error:
            missed.append(f"{model} is left out: {error}")
            continue
        if not models[model]["met"]:
            missed.append(f"{model}: `planforge run` takes more than {AT_MOST} times as long as generate")
    settings = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "precision": PRECISION}
    if models:
        write_result("run_command", {"rounds": arguments.rounds, **settings, "models": models})
    sys.exit("\n".join(missed) or 0)


if __name__ == "__main__":
    main()
