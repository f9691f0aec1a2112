"""Compares PlanForge on a GPU with its peers: python -m benchmarks.gpu [--quick] [--cases NAME,...].

Writes gpu.json and gpu.md. Cases that are not chosen keep the results that they have, if those are of the
same GPU, driver and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planforge.runtime.backends.gpus import Gpu, find_gpu
from planforge.runtime.errors import PlanForgeError

from ..common import RESULTS
from ..process import ROOT
from ..workshop import Workshop
from .cases import NEW, cases
from .environment import environment, same_machine
from .measure import measure
from .report import report
from .targets import verdicts

HOW = "on a machine with an NVIDIA GPU and its driver, `make gpu` installs what this needs and runs it"
QUICK_CASES = ("gpt2-124m-b1", "bert-base-b1")
QUICK_ROUNDS = 2
QUICK_NEW = 16


def main(given: Sequence[str] | None = None) -> None:
    """Run the command; exit with 1 without a GPU, for unlike work, or if PlanForge failed or differed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cases", help="by their names, with commas between; all by default")
    parser.add_argument("--rounds", type=int, default=7, help="how often each entry does the work")
    parser.add_argument("--quick", action="store_true", help="two small cases, to see that all works")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu", help="for converted models")
    parser.add_argument("--out", type=Path, help="for results, instead of benchmarks/results")
    parser.add_argument("--list", action="store_true", help="the cases, and nothing else")
    arguments = parser.parse_args(given)
    known = cases(QUICK_NEW if arguments.quick else NEW)
    if arguments.list:
        print("".join(f"{case.name:16}{case.title}\n" for case in known.values()), end="")
        return
    usual = QUICK_CASES if arguments.quick else known
    names = arguments.cases.split(",") if arguments.cases else list(usual)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"there is no case {unknown[0]!r}; there are {', '.join(known)}")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts them
    gpu = gpu_here()
    bounds = bounds_here()
    out = arguments.out or (arguments.work / "quick" if arguments.quick else RESULTS)
    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    arguments.work.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(arguments.work)
    about = environment(gpu)
    failures = []
    for name in names:
        print(f"{name}: {known[name].title}", file=sys.stderr, flush=True)
        result = measure(known[name], workshop, rounds, bounds, gpu.memory / 1e9)
        for entry, reason in result["skipped"].items():
            print(f"  without {entry}: {reason}", file=sys.stderr)
        failures += faults(name, result)
        keep(name, result, about, out)
    print(f"written: {out / 'gpu.json'} and gpu.md", file=sys.stderr)
    sys.exit("\n".join(failures) or 0)


def gpu_here() -> Gpu:
    """Return the GPU, or exit with a message about what is missing."""
    try:
        return find_gpu(0)
    except PlanForgeError as error:
        sys.exit(f"nothing can be measured here: {error}; {HOW}")


def bounds_here() -> dict[str, Any]:
    """Return the GPU's own speed, or exit with a message about what is missing."""
    command = [sys.executable, "-m", f"{__package__}.bounds"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        sys.exit(f"nothing can be measured here: {last}; {HOW}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def faults(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return PlanForge's faults in a case; a missing installation is not a fault."""
    found = [
        f"{name}: {entry} {reason}"
        for entry, reason in result["skipped"].items()
        if entry.startswith("PlanForge ") and reason.startswith("failed")
    ]
    found += [
        f"{name}: {entry} does not compute this model"
        for entry, figures in result["entries"].items()
        if entry.startswith("PlanForge ") and not figures["alike"]
    ]
    unlike = result["refused"] if (result["refused"] or "").startswith("refused") else None
    return [*found, f"{name}: {unlike}"] if unlike else found


def keep(name: str, result: dict[str, Any], about: dict[str, Any], out: Path) -> None:
    """Replace a case's last result, judge all targets, and write both files."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "gpu.json"
    kept: dict[str, Any] = {}
    if path.exists():
        last = json.loads(path.read_text(encoding="utf-8"))
        kept = last["cases"] if same_machine(last["environment"], about) else {}
    kept[name] = result
    ordered = {known: kept[known] for known in cases() if known in kept}
    results = {"environment": about, "cases": ordered, "targets": verdicts(ordered)}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(report(results), encoding="utf-8")


if __name__ == "__main__":
    main()
