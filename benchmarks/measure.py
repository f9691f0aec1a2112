"""Measures one case: every system in a process of its own, all of them warm, in turns."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from planforge.runtime.apps.diagnostics.bench import compute_percentiles

from .alike import UnlikeWorkError, check_alike, differences
from .case import Case, Entry, Limit, Target
from .checkpoints import head_size
from .machine import BusyMeter, measure_machine
from .process import Process, ProcessError
from .systems import system_named
from .systems.system import Skip
from .workshop import Prepared, Workshop

PAUSE = 0.3  # seconds between systems: some keep their threads spinning for 0.2 s after their work
CACHED = 50e6  # bytes; of smaller weights much may stay in the processor's caches
TIMES = ("ttft_ms", "inter_token_ms", "ms", "row_ms", "start_s", "outside_ms")  # of which less is better


@dataclass
class Run:
    """An entry that takes part, and its answers, one for each round; `row` has those without a pause."""

    entry: Entry
    prepared: Prepared
    warm: dict[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    row: list[dict[str, Any]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    vectors: Path | None = None
    expected: list[list[int]] | None = None  # what the case's reference answers

    def message(self, save: bool = False) -> dict[str, Any]:
        return {**self.entry.work.to_json(), "save": str(self.vectors) if save and self.vectors else ""}


def measure(case: Case, workshop: Workshop, rounds: int) -> dict[str, Any]:
    """Measure a case.

    Returns:
        Plain JSON: "machine", "entries" with their figures, "skipped" with reasons, "targets". Of the machine
        "busy" is the share of the processors' time that others used, before or meanwhile.

    Raises:
        UnlikeWorkError: two systems did not do the same, or one found other tokens than the reference.
    """
    rounds = min(rounds, case.rounds)
    runs, skipped = prepare_runs(case, workshop)
    if case.reference:
        expect_tokens(case, runs, workshop)
    machine = measure_machine(max(entry.threads for entry in case.entries.values()))
    take = fresh_rounds if case.fresh else warm_rounds
    meter = BusyMeter()
    for _ in range(case.processes):
        skipped |= take(case, runs, workshop, rounds)
    machine = {**machine, "busy": round(max(machine["busy"], meter.share()), 2)}
    for name, run in runs.items():
        check_alike(run.entry.work.kind, {name: run.warm["did"], **later(name, run)}, {})
    entries = {name: figures(run, machine) for name, run in runs.items()}
    shared = Counter(run.entry.process for run in runs.values())
    for name, run in runs.items():
        if shared[run.entry.process] > 1:  # the peak would be that of the largest work
            del entries[name]["peak_rss_mb"]
    compare_results(runs, entries)
    return {
        "title": case.title,
        "group": case.group,
        "metric": case.metric,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine,
        "rounds": rounds * case.processes,
        "varies": dict(case.varies),
        "entries": entries,
        "skipped": skipped,
        "targets": [judge_target(target, entries) for target in case.targets],
    }


def display(entry: Entry) -> str:
    """Return an entry's name in tables."""
    name = f"{system_named(entry.system).name} {entry.precision}"
    return f"{name}, {entry.label}" if entry.label else name


def prepare_runs(case: Case, workshop: Workshop) -> tuple[dict[str, Run], dict[str, str]]:
    """Convert missing files; return the entries that can take part, and why the others can't."""
    runs: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    for name, entry in case.entries.items():
        with skip_on_failure(name, runs, skipped):
            runs[name] = Run(entry, workshop.prepare(entry))
            if entry.work.kind == "embed":
                runs[name].vectors = (workshop.work / f"{case.name}.{name}.npy").resolve()
    return runs, skipped


def start_process(run: Run, case: Case, workshop: Workshop) -> Process:
    """Start the process of an entry, which does the beginning of its work."""
    entry = run.entry
    prepared = run.prepared
    works = [other.work for other in case.entries.values() if other.process == entry.process]
    most = {
        "batch": max(len(work.texts) for work in works),
        "tokens": max(work.new_tokens + max(map(len, work.prompts), default=0) for work in works),
    }
    order = {
        "mode": "open",
        "system": entry.system,
        "model": str(prepared.folder),
        "kind": entry.work.kind,
        "precision": entry.precision,
        "threads": entry.threads,
        "settings": {**most, **entry.settings},
        "weights_sha256": prepared.weights_sha256,
        "first": {**run.message(), "new_tokens": min(1, entry.work.new_tokens)},
    }
    return Process(prepared.python, order, workshop.log(f"{case.name}-{entry.system}-{entry.precision}"))


def expect_tokens(case: Case, runs: Mapping[str, Run], workshop: Workshop) -> None:
    """Let the case's reference do each piece of work once, before any other system's process is there."""
    known: dict[tuple[str, Any], list[list[int]]] = {}
    for run in runs.values():
        entry = run.entry
        key = (entry.checkpoint, entry.work.prompts)
        if key not in known:
            asked = Entry(case.reference, "fp32", entry.checkpoint, entry.work)
            reference = Run(asked, workshop.prepare(asked))
            with start_process(reference, replace(case, entries={"reference": asked}), workshop) as process:
                known[key] = process.ask(reference.message())["result"]
        run.expected = known[key]


def warm_rounds(case: Case, runs: dict[str, Run], workshop: Workshop, rounds: int) -> dict[str, str]:
    """Open every process, warm it up, compare their work, and let them take turns, then work in a row.

    The order moves on by one from round to round. Entries that fail leave `runs`; returns why.
    """
    processes: dict[str, Process] = {}
    failed: dict[str, str] = {}
    try:
        for name, run in list(runs.items()):
            with skip_on_failure(name, runs, failed):
                if run.entry.process not in processes:
                    processes[run.entry.process] = start_process(run, case, workshop)
                run.warm = warm_up(processes[run.entry.process], run, case.warm_up)
        compare_work(case, runs)
        for number in range(rounds):
            names = list(runs)
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                time.sleep(PAUSE)
                with skip_on_failure(name, runs, failed):
                    run = runs[name]
                    run.answers.append(processes[run.entry.process].ask(run.message()))
        for name in list(runs) if case.in_a_row else []:
            time.sleep(PAUSE)
            with skip_on_failure(name, runs, failed):
                work_in_a_row(processes[runs[name].entry.process], runs[name], case.in_a_row)
    finally:
        for process in processes.values():
            process.close()
    return failed


def warm_up(process: Process, run: Run, seconds: float) -> dict[str, Any]:
    """Let a process do its work once, and on until the time is over; return its first answer."""
    end = time.monotonic() + seconds
    answer = process.ask(run.message(save=True))
    while time.monotonic() < end:
        process.ask(run.message())
    return answer


def work_in_a_row(process: Process, run: Run, works: int) -> None:
    """Let a process do its work so often without a pause, while the other processes wait."""
    for _ in range(works):
        run.row.append(process.ask(run.message()))


@contextlib.contextmanager
def skip_on_failure(name: str, runs: dict[str, Run], reasons: dict[str, str]) -> Iterator[None]:
    """Remove an entry that fails in this block from `runs`, with its reason."""
    try:
        yield
    except Skip as reason:
        reasons[name] = str(reason)
    except ProcessError as error:
        reasons[name] = f"failed: {error}"
    if name in reasons:
        runs.pop(name, None)


def fresh_rounds(case: Case, runs: dict[str, Run], workshop: Workshop, rounds: int) -> dict[str, str]:
    """Start every process anew in each round, one at a time; the first time is not counted."""
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        for name, run in list(runs.items()):
            with skip_on_failure(name, runs, failed), start_process(run, case, workshop) as process:
                run.warm = process.ask(run.message())
                if number > 0:
                    run.answers.append(run.warm)
                    run.starts.append(process.start_seconds)
        if number == 0:
            compare_work(case, runs)
    return failed


def compare_work(case: Case, runs: Mapping[str, Run]) -> None:
    """Refuse unlike work."""
    if not runs:
        return
    allowed = {
        name: {**case.varies, **system_named(run.entry.system).differences, **run.entry.varies}
        for name, run in runs.items()
    }
    for name, run in runs.items():
        wanted = run.entry.work.new_tokens
        counts = run.warm["did"].get("new_tokens", [])
        if short := [count for count in counts if count != wanted]:
            raise UnlikeWorkError(
                f"refused to compare unlike work: {name} made {short[0]} new tokens in a row instead of"
                f" {wanted}. Give the case other texts, at which no end token comes"
            )
        if run.expected is not None and run.warm["result"] != run.expected:
            share = same_share(run.expected, run.warm["result"])
            raise UnlikeWorkError(
                f"refused to compare unlike work: {name} found other tokens than {case.reference} in fp32;"
                f" {share:.0%} of them come before the first difference. Its conversion is wrong, or the"
                " checkpoint's weights are not sure enough for its precision"
            )
    kind = next(iter(runs.values())).entry.work.kind
    check_alike(kind, {name: run.warm["did"] for name, run in runs.items()}, allowed)


def later(name: str, run: Run) -> dict[str, Any]:
    """Return what an entry did in each round and in a row, by names that tell which."""
    rounds = {f"{name} in round {i}": answer["did"] for i, answer in enumerate(run.answers, 1)}
    return rounds | {f"{name} at work {i} in a row": answer["did"] for i, answer in enumerate(run.row, 1)}


def figures(run: Run, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return medians, percentiles and bytes of one entry."""
    work = run.entry.work
    prepared = run.prepared
    system = system_named(run.entry.system)
    seconds = [answer["seconds"] for answer in run.answers]
    stamps = [answer["stamps"] for answer in run.answers]
    found: dict[str, Any] = {
        "name": display(run.entry),
        "system": system.name,
        "differences": dict(system.differences),
        "versions": dict(prepared.versions),
        "per_s": round(work.units / float(np.median(seconds)), 1),
        "ms": compute_percentiles([1e3 * value for value in seconds]),
        "file_mb": round(prepared.file_bytes / 1e6, 1),
        "peak_rss_mb": round(max(answer["peak_rss_mb"] for answer in run.answers)),
        "did": {key: value for key, value in run.warm["did"].items() if key != "prompts"},
        "seconds": [round(value, 4) for value in seconds],
    }
    if all(len(stamp) == work.new_tokens for stamp in stamps) and work.new_tokens > 1:
        gaps = [1e3 * gap for stamp in stamps for gap in np.diff(stamp)]
        found["ttft_ms"] = compute_percentiles([1e3 * stamp[0] for stamp in stamps])
        found["inter_token_ms"] = compute_percentiles(gaps)
        if prepared.read_bytes > CACHED and not work.options:
            reading = (prepared.read_bytes + cache_bytes(run)) / machine["read_gb_per_s"] / 1e6
            found["bandwidth_share"] = round(reading / float(np.median(gaps)), 3)
    for name in run.answers[0].get("figures", {}):
        found[name] = round(float(np.median([answer["figures"][name] for answer in run.answers])), 3)
    if run.row:
        in_a_row = float(np.median([answer["seconds"] for answer in run.row]))
        found["row_ms"] = round(1e3 * in_a_row, 3)
        found["row_per_s"] = round(work.units / in_a_row, 1)
    if run.starts:
        found["start_s"] = compute_percentiles(run.starts)
    return found


def cache_bytes(run: Run) -> int:
    """Return the bytes that a decoding step reads of its cache, on average over the steps.

    A layer of a window reads no more than that.
    """
    work = run.entry.work
    config = json.loads((run.prepared.checkpoint / "config.json").read_text(encoding="utf-8"))
    size = {"fp32": 4, "fp16": 2, "int8": 1}[run.warm["did"].get("cache", "fp32")]
    lengths = [len(prompt) + work.new_tokens // 2 for prompt in work.prompts]
    if config["model_type"] == "gpt2":
        layers = config["n_layer"]
        width = config["n_embd"]
    else:
        layers = config["num_hidden_layers"]
        width = config["num_key_value_heads"] * head_size(config)
        if config["model_type"] == "mistral":
            lengths = [min(length, config["sliding_window"]) for length in lengths]
    return 2 * int(layers) * int(width) * size * sum(lengths)


def compare_results(runs: Mapping[str, Run], entries: dict[str, dict[str, Any]]) -> None:
    """Record how each entry's work and result differ from the first one's: cosines, or equal tokens."""
    if not runs:
        return
    first = next(iter(runs.values()))
    for name, run in runs.items():
        found = entries[name]
        found["differs"] = differences(first.warm["did"], run.warm["did"])
        if run.vectors is not None:
            assert first.vectors is not None
            cosines = (np.load(first.vectors) * np.load(run.vectors)).sum(1)
            found["cosine_mean"], found["cosine_min"] = (
                round(float(value), 5) for value in (cosines.mean(), cosines.min())
            )
        elif (reference := same_arithmetic(run, runs)) is not None:
            found["same_tokens"] = same_share(reference.warm["result"], run.warm["result"])


def same_arithmetic(run: Run, runs: Mapping[str, Run]) -> Run | None:
    """Return the first entry at these texts, if another, with equal tokens expected: both fp32, or alike."""
    for other in runs.values():
        same_work = other.entry.work.texts == run.entry.work.texts
        if same_work and other.entry.checkpoint == run.entry.checkpoint:
            names = [(each.entry.system, each.entry.precision) for each in (run, other)]
            classes = {each.warm["did"]["precision"] for each in (run, other)}
            if classes == {"fp32"} or names[0] == names[1]:
                return None if other is run else other
    return None


def same_share(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of all tokens that come before the first difference in their row."""
    same = 0
    for a, b in zip(one, other, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return round(same / max(1, sum(map(len, one))), 3)


def value_of(figures: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric's median, where it was measured."""
    value = figures.get(metric)
    return value["p50"] if isinstance(value, Mapping) else value


def judge_target(target: Target | Limit, entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a target with its result; "met" is None where an entry did not take part."""
    ours = value_of(entries.get(target.of, {}), target.metric)
    if isinstance(target, Limit):
        met = None
        if ours is not None:
            too_much = target.at_most is not None and ours > target.at_most
            too_little = target.at_least is not None and ours < target.at_least
            met = not (too_much or too_little)
        return {**{k: v for k, v in vars(target).items() if v is not None}, "found": ours, "met": met}
    theirs = value_of(entries.get(target.to, {}), target.metric)
    ratio = None
    if ours is not None and theirs is not None:
        ratio = theirs / ours if target.metric in TIMES else ours / theirs
    return {
        "of": target.of,
        "to": target.to,
        "metric": target.metric,
        "at_least": target.at_least,
        "found": None if ratio is None else round(ratio, 3),
        "met": None if ratio is None else ratio >= target.at_least,
    }
