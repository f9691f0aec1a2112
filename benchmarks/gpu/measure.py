"""Measures one case on the GPU: every entry in a process of its own, all loaded and warm, in turns."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np

from planforge.exporter.limits import CAPS
from planforge.exporter.precisions import PRECISIONS
from planforge.runtime.apps.diagnostics.bench import compute_percentiles

from ..alike import UnlikeWorkError
from ..case import Case
from ..measure import PAUSE, Run, compare_work, prepare_runs, same_share, skip_on_failure, start_process
from ..process import ROOT, Process
from ..workshop import Workshop
from .cases import NEEDED_GB
from .judge import FIRST
from .nvidia import used_mb
from .yardstick import encoder_flops, step_bytes

WARM = 2  # pieces of work before any counts: the second still records CUDA graphs
Bounds = Mapping[str, Any]


@dataclass
class Turns:
    """The outcome of a case's processes.

    Attributes:
        runs: the entries that took part to the end, with their answers.
        skipped: the others, and why.
        device_mb: what the device's memory in use grew by with each entry; None where it can't be told.
    """

    runs: dict[str, Run]
    skipped: dict[str, str]
    device_mb: dict[str, float | None] = field(default_factory=dict)


def measure(
    case: Case, workshop: Workshop, rounds: int, bounds: Bounds, device_gb: float, device: str = "cuda"
) -> dict[str, Any]:
    """Measure a case.

    Args:
        bounds: of `bounds.bounds`.
        device_gb: memory of the GPU.
        device: of torch, for the judge.

    Returns:
        Plain JSON: "entries" with their figures, "skipped" with reasons, "refused", None or why nothing of
        this case was measured.
    """
    result: dict[str, Any] = {
        "title": case.title,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rounds": rounds,
        "bounds": dict(bounds),
        "refused": None,
        "entries": {},
        "skipped": {},
    }
    checkpoint = next(iter(case.entries.values())).checkpoint
    if (needed := NEEDED_GB.get(checkpoint, 0)) > device_gb:
        return {**result, "refused": f"all together needs {needed} GB on the device, it has {device_gb:.1f}"}
    try:
        turns = take_turns(case, workshop, rounds)
    except UnlikeWorkError as error:
        return {**result, "refused": str(error)}
    result["skipped"] = turns.skipped
    result["entries"] = {name: figures(run, bounds) for name, run in turns.runs.items()}
    for name, found in result["entries"].items():
        found["device_mb"] = turns.device_mb[name]
    compare(turns.runs, result["entries"], device)
    return result


def take_turns(case: Case, workshop: Workshop, rounds: int) -> Turns:
    """Open every process and warm it up, refuse unlike work, and let them take turns.

    Raises:
        UnlikeWorkError: two of them did not do the same.
    """
    runs, skipped = prepare_runs(case, workshop)
    turns = Turns(runs, skipped)
    processes: dict[str, Process] = {}
    try:
        for name, run in list(runs.items()):
            before = used_mb()
            with skip_on_failure(name, runs, skipped):
                processes[name] = start_process(run, case, workshop)
                for _ in range(WARM):
                    run.warm = processes[name].ask(run.message(save=True))
                after = used_mb()
                known = before is not None and after is not None
                turns.device_mb[name] = round(after - before) if known else None  # type: ignore[operator]
        compare_work(case, runs)
        for number in range(rounds):
            names = list(runs)
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                time.sleep(PAUSE)
                with skip_on_failure(name, runs, skipped):
                    run = runs[name]
                    run.answers.append(processes[name].ask(run.message()))
    finally:
        for process in processes.values():
            process.close()
    return turns


def figures(run: Run, bounds: Bounds) -> dict[str, Any]:
    """Return medians, percentiles and shares of the machine's bounds of one entry."""
    work = run.entry.work
    checkpoint = run.prepared.checkpoint
    seconds = [answer["seconds"] for answer in run.answers]
    stamps = [answer["stamps"] for answer in run.answers]
    found: dict[str, Any] = {"ms": compute_percentiles([1e3 * value for value in seconds])}
    found |= run.answers[-1]["figures"]
    if not work.new_tokens:
        found["texts_per_s"] = round(len(work.prompts) / float(np.median(seconds)), 1)
        flops = encoder_flops(checkpoint, work)
        if flops is not None:
            rate = flops / float(np.median(seconds)) / 1e12
            found["matrix_share"] = round(rate / bounds["fp16_tflops"], 3)
        return found
    found["tokens_per_s"] = round(work.units / float(np.median(seconds)), 1)
    found["tokens"] = run.warm["result"][0][:FIRST]
    if all(len(stamp) == work.new_tokens for stamp in stamps) and work.new_tokens > 1:
        gaps = [1e3 * gap for stamp in stamps for gap in np.diff(stamp)]
        found["ttft_ms"] = compute_percentiles([1e3 * stamp[0] for stamp in stamps])
        found["inter_token_ms"] = compute_percentiles(gaps)
        read = step_bytes(checkpoint, work, run.entry.precision)
        if read is not None:
            rate = read / (float(np.median(gaps)) / 1e3) / 1e9
            found["bandwidth_share"] = round(rate / bounds["copy_gb_per_s"], 3)
    return found


def compare(runs: Mapping[str, Run], entries: dict[str, dict[str, Any]], device: str) -> None:
    """Mark each entry by whether its results are the model's ("alike"), with the evidence."""
    if not runs:
        return
    first = next(iter(runs.values()))
    if first.vectors is not None:
        wanted = np.load(first.vectors).astype(np.float32)
        for name, run in runs.items():
            assert run.vectors is not None
            cosine = min_cosine(np.load(run.vectors).astype(np.float32), wanted)
            least = 1 - CAPS[run.entry.precision]["cosine_gap"]  # what an export may lose
            entries[name] |= {"cosine_min": round(cosine, 5), "alike": cosine >= least}
        return
    judged = judgement(runs, device)
    for name, run in runs.items():
        entries[name]["same_tokens"] = same_share(first.warm["result"], run.warm["result"])
        entries[name] |= {"judge": judged[name], "alike": judged[name]["alike"]}


def min_cosine(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """Return the least cosine of the rows (B, N) of two arrays; NaN where one is not finite."""
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((got * wanted).sum(1) / lengths).min())


def judgement(runs: Mapping[str, Run], device: str) -> dict[str, dict[str, Any]]:
    """Return the findings of `judge` for all entries' tokens, from a process of its own."""
    first = next(iter(runs.values()))
    order = {
        "checkpoint": str(first.prepared.checkpoint),
        "kind": first.entry.work.kind,
        "prompts": first.entry.work.prompts,
        "answers": {name: run.warm["result"] for name, run in runs.items()},
        "device": device,
        "bundles": {name: bundle for name, run in runs.items() if (bundle := find_bundle(run))},
    }
    command = [sys.executable, "-m", f"{__package__}.judge"]
    done = subprocess.run(
        command, input=json.dumps(order) + "\n", stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    )
    answer: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def find_bundle(run: Run) -> tuple[str, str] | None:
    """Return the bundle that an entry with rounded weights or cache was made of, and its precision."""
    precision = run.entry.precision
    if not PRECISIONS[precision].is_quantized:
        return None
    beside = run.prepared.folder / "bundle"  # of a package
    return str(beside if beside.exists() else run.prepared.folder), precision
