"""Measures how fast a bundle is on this machine: each precision in its own process, all taking turns."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ...backends.backend import LoadRequest
from ...backends.dialects import choose_artifact
from ...backends.gpus import gpu_is_present
from ...backends.select import OPTIONAL, OPTIONAL_FOR, make_backend
from ...backends.threads import Threads, choose_threads
from ...bundle.artifact import rank_exactness
from ...bundle.bundle import Bundle
from ...errors import InputError, MemoryLimitError, PlanForgeError
from ...option_checks import check_whole
from ...tasks import PICTURES, refuse_others
from ..stage_progress import Notice
from .bench_work import SUBJECTS, Work
from .child import Child
from .machine import find_processor_name
from .packages import find_package

ROUNDS = 5  # as many rounds as fill the seconds, at least and at most
MAX_ROUNDS = 50
SECONDS = 3.0
READ_BYTES = 256 * 2**20  # more than the processor's caches hold
MIN_GAIN = 1.02  # of speed; less is not worth a less exact precision
# What figures of pictures are called in JSON; None for those of texts alone.
PICTURE_NAMES = {
    "prompt": None,
    "new_tokens": None,
    "ttft_ms": "first_step_ms",
    "inter_token_ms": "step_ms",
    "tokens_per_s": "steps_per_s",
    "tokens_per_s_range": "steps_per_s_range",
    "texts_per_s": "pictures_per_s",
}


@dataclass(frozen=True)
class Case:
    """The measurements of one precision."""

    backend: str
    artifact: str  # the graph that takes the time
    precision: str
    gate_passed: bool  # whether every graph that ran was found equal to PyTorch's model
    batch: int  # texts in a call
    prompt: int  # tokens of each
    new_tokens: int  # generated for each; 0 of an encoder, and of pictures
    # From the text to the first new token, or behind the first step of pictures, median; None of an encoder.
    ttft_ms: float | None
    # "p50" and "p99" between two tokens of a row, or two steps, if there are two.
    inter_token_ms: dict[str, float] | None
    latency_ms: dict[str, float]  # "p50" and "p99" of whole calls
    # New tokens of all rows over the whole call, median; of an encoder tokens read, of pictures their steps.
    tokens_per_s: float
    tokens_per_s_range: dict[str, float]  # "p25" and "p75" of the same over the rounds
    texts_per_s: float  # of all rows
    load_ms: float  # load() alone, whether or not its files were cached in memory
    peak_rss_mb: float | None  # of the process; None where the system doesn't say
    # Of the memory bandwidth measured in the same run: the bytes that one step reads at least (each weight
    # once, the cache) over the time between two tokens; None where not known.
    bandwidth_share: float | None
    # Of that graph in ONNX Runtime on a GPU: its nodes by where they run, and its CUDA graphs after the
    # warm-up, as `Placement.to_json` counts them.
    nodes: dict[str, int] | None = None
    steps: int = 0  # of each picture; 0 of models of text

    @property
    def amount(self) -> str:
        """What a call has of each text or picture, in words."""
        if self.steps:
            return f"{self.steps} steps"
        return f"{self.prompt} tokens" + (f" and {self.new_tokens} new ones" if self.new_tokens else "")

    @property
    def spread(self) -> float:
        """Half of the range from p25 to p75 as a share of the median: 0.01 where rounds vary by 1 %."""
        low = self.tokens_per_s_range["p25"]
        high = self.tokens_per_s_range["p75"]
        return (high - low) / 2 / self.tokens_per_s

    def to_json(self) -> dict[str, Any]:
        """Return the figures by their names; those of pictures by the names of pictures."""
        names = PICTURE_NAMES if self.steps else {}
        named = ((names.get(name, name), value) for name, value in asdict(self).items())
        return {name: value for name, value in named if name is not None}


@dataclass(frozen=True)
class BenchResult:
    """What was measured, and where."""

    environment: dict[str, Any]  # see `describe_machine`
    cases: tuple[Case, ...]  # one for each precision, in the order of the bundle

    def fastest(self) -> Case:
        """Return the case of most tokens per second among those whose gate has passed."""
        passed = [case for case in self.cases if case.gate_passed]
        if not passed:
            measured = ", ".join(case.artifact for case in self.cases)
            raise InputError(
                f"none of {measured} has passed verification (its gate): export again without --no-verify"
            )
        return max(passed, key=lambda case: case.tokens_per_s)

    def best_default(self) -> Case:
        """Return the case that load() should take: the most exact of those that are as fast as the fastest.

        What has not passed its gate takes no part.
        """
        fastest = self.fastest()
        as_fast = [case for case in self.cases if case.gate_passed and is_as_fast(case, fastest)]
        return min(as_fast, key=lambda case: rank_exactness(case.precision))

    def to_json(self) -> dict[str, Any]:
        """Return {"environment", "cases"}."""
        return {"environment": self.environment, "cases": [case.to_json() for case in self.cases]}


def is_as_fast(case: Case, fastest: Case) -> bool:
    """Tell whether a case's p25 to p75 reaches the fastest's, or the fastest gains too little to matter."""
    overlaps = case.tokens_per_s_range["p75"] >= fastest.tokens_per_s_range["p25"]
    return overlaps or fastest.tokens_per_s < MIN_GAIN * case.tokens_per_s


class Process(Child):
    """`bench_work` in a process of its own, loaded and warm."""

    def __init__(self, work: Work) -> None:
        self.precision = work.precision
        self.rounds: list[dict[str, Any]] = []
        super().__init__(f"{__package__}.bench_work", work.precision, asdict(work))


def bench(
    bundle: str | Path,
    *,
    backend: str = "auto",
    precisions: Sequence[str] = (),  # all when empty
    threads: int | None = None,
    prompt_tokens: int | None = None,  # of each text; 32, or of an encoder 128, when None
    new_tokens: int | None = None,  # to generate for each; 64 when None
    batch: int = 1,
    steps: int | None = None,  # of each picture; 4 when None
    height: int | None = None,  # of pictures; the model's own size when None
    width: int | None = None,
    memory_limit: int | None = None,
    index: str | Path | None = None,  # that a model reads neighbours from
    progress: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """Measure a bundle's precisions: generation, translation, embedding or pictures, by its task.

    Each has a process of its own, which stays loaded and warm; they take turns, so that what else the machine
    does meets all of them. Generation and translation are greedy, and no end token ends them. A call has
    `batch` texts, or makes so many pictures of one. A precision that needs more bytes than `memory_limit` is
    left out, with a `Notice` to `progress`, which is called with a line when a stage begins too. Raises a
    MemoryLimitError where all do.
    """
    opened = Bundle.open(bundle)
    sizes = {"steps": steps, "height": height, "width": width}
    if opened.manifest.task not in SUBJECTS:
        refuse_others(opened, "bench")
    if opened.manifest.task != PICTURES:
        refuse_sizes(sizes)
    check_whole("threads", threads, 1, os.cpu_count() or 1, optional=True, what="this machine's cores")
    graphs = {artifact.graph for artifact in opened.manifest.artifacts}
    graph = next(name for name in ("decoder", "unet", "encoder") if name in graphs)
    known = [a.precision for a in opened.manifest.artifacts if a.graph == graph]
    chosen = list(dict.fromkeys(precisions or known))
    for precision in chosen:
        choose_artifact(opened, graph, precision)  # a wrong name is refused before anything is loaded
    options = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch": batch, **sizes}
    place = None if index is None else str(index)
    works = [
        Work(str(bundle), engine, precision, threads, memory_limit=memory_limit, index=place, **options)  # type: ignore[arg-type]
        for precision in chosen
        for engine in list_engines(opened, graph, backend, precision)
    ]
    used = choose_threads(threads)
    with contextlib.ExitStack() as stack:
        processes = start_processes(stack, works, progress)
        read = run_rounds(processes, used.count, progress)
    cases = tuple(make_case(opened, process, batch, read) for process in processes)
    return BenchResult(describe_machine(used, read), cases)


def list_engines(bundle: Bundle, graph: str, backend: str, precision: str) -> list[str]:
    """Return the engines to measure a precision on: with "auto" on a CPU all that run it."""
    if backend != "auto" or gpu_is_present():
        return [backend]
    try:
        make_backend(OPTIONAL, bundle, LoadRequest()).artifact(bundle, graph, precision)
    except PlanForgeError:
        return ["ort-cpu"]
    return ["ort-cpu", OPTIONAL] if precision not in OPTIONAL_FOR else [OPTIONAL]


def start_processes(
    stack: contextlib.ExitStack, works: Sequence[Work], progress: Callable[[str], None]
) -> list[Process]:
    """Return a process for each precision that fits the memory; raise a MemoryLimitError where none does."""
    processes = []
    refused = {}
    for work in works:
        progress(f"loading {work.precision}")
        try:
            processes.append(stack.enter_context(contextlib.closing(Process(work))))
        except MemoryLimitError as error:
            refused[work.precision] = error
    if not processes:
        raise refused[works[0].precision]
    for precision, reason in refused.items():
        progress(Notice(f"{precision} is not measured: {reason}"))
    return processes


def run_rounds(processes: Sequence[Process], threads: int, progress: Callable[[str], None]) -> float:
    """Let processes take turns until each has run long enough; return the memory's speed in bytes/s."""
    block = np.ones(READ_BYTES // 8, np.int64)
    read = 0.0
    for number in range(MAX_ROUNDS):
        seconds = [sum(one["seconds"] for one in process.rounds) for process in processes]
        if number >= ROUNDS and min(seconds) > SECONDS:
            break
        progress(f"measuring: round {number + 1}")
        read = max(read, read_bandwidth(block, threads))
        for process in processes:
            process.rounds.append(process.ask("go"))
    return read


def refuse_sizes(options: Mapping[str, int | None]) -> None:
    """Refuse what is given of the options that are for pictures alone."""
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name}={value} is for models that make pictures; leave it out", option=name)


def make_case(bundle: Bundle, process: Process, batch: int, read: float) -> Case:
    """Return the figures of one process's rounds; `read` is the memory's bandwidth in bytes/s."""
    facts = process.facts
    rounds = process.rounds
    seconds = [one["seconds"] for one in rounds]
    gaps = [gap for one in rounds for gap in one["inter_token_ms"]]
    first = [one["ttft_ms"] for one in rounds if one["ttft_ms"] is not None]
    between = compute_percentiles(gaps) if gaps else None
    share = None
    if between is not None and facts["step_bytes"] is not None:
        share = round(facts["step_bytes"] / (between["p50"] / 1e3) / read, 3)
    tokens = batch * (facts["steps"] or facts["new_tokens"] or facts["prompt"])
    low, high = np.percentile([tokens / value for value in seconds], (25, 75))
    peak = rounds[-1]["peak_rss_mb"]
    return Case(
        backend=facts["backend"],
        artifact=facts["artifacts"][0],
        precision=process.precision,
        gate_passed=all(bundle.manifest.artifact(name).passed for name in facts["artifacts"]),
        batch=batch,
        prompt=facts["prompt"],
        new_tokens=facts["new_tokens"],
        ttft_ms=round(statistics.median(first), 3) if first else None,
        inter_token_ms=between,
        latency_ms=compute_percentiles([value * 1e3 for value in seconds]),
        tokens_per_s=round(tokens / statistics.median(seconds), 2),
        tokens_per_s_range={"p25": round(float(low), 2), "p75": round(float(high), 2)},
        texts_per_s=round(batch / statistics.median(seconds), 2),
        load_ms=round(facts["load_ms"], 1),
        peak_rss_mb=None if peak is None else round(peak, 1),
        bandwidth_share=share,
        nodes=facts["nodes"],
        steps=facts["steps"],
    )


def compute_percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, to three decimals."""
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def read_bandwidth(block: np.ndarray[Any, np.dtype[np.int64]], threads: int) -> float:
    """Measure the bytes per second that so many threads read from memory, each its part of a block."""
    parts = np.array_split(block, threads)
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(np.sum, parts))
        return block.nbytes / (time.perf_counter() - started)


def describe_machine(threads: Threads, read: float) -> dict[str, Any]:
    """Return facts about the machine, and the versions of what was measured."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "cpu": find_processor_name(),
        "system": platform.platform(),
        "threads": threads.count,
        "threads_reason": threads.reason,
        "read_gb_per_s": round(read / 1e9, 1),
        "python": platform.python_version(),
        "versions": {
            "planforge": importlib.metadata.version("planforge"),
            **find_package("onnxruntime").versions,
            **find_package("numpy").versions,
            **find_package("tokenizers").versions,
        },
    }
