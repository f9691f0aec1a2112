"""A job: every row of an input gets an answer or an error, once, however often the job is interrupted."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileType

from ...backends.gpus import gpu_is_present
from ...backends.threads import choose_threads
from ...bundle.bundle import Bundle
from ...errors import BackendUnavailableError, BatchError, InputError
from ...option_checks import check_whole
from ...tasks import refuse_others
from ..signals import note_changes
from ..stage_progress import CountedLine, StageCounter, describe_count
from .engine import Engine, Lost
from .part_runner import COUNTS, Failure, JobSpec, hash_bundle
from .plan import Part, PlanSummary, Source, make_fingerprint, read_plan, write_plan
from .result import BatchResult, PartResult, WorkerTotal
from .storage import JOB, Storage
from .tasks import TASKS, check_task_options, find_task
from .worker import resolve_columns

DESCRIPTION = f"{JOB}/job.json"
FORMAT = 1
ATTEMPTS = 10  # of a part whose workers die
MAX_STARTUP_FAILURES = 3  # of workers before any part is done
MAX_GPUS = 1000
READERS = 16  # of footers, at a time; object stores take long for each
ROWS_PER_PART = "rows_per_part"
WORDS = {  # what is said of each thing that a job's answers depend on
    "bundle_hash": "bundle",
    "task": "task",
    "columns": "--column",
    "id_column": "--id",
    "options": "--option",
    "load_options": "--precision or --backend",
    "input": "input",
    ROWS_PER_PART: "--rows-per-part",
}
PART = re.compile(r"part-(\d{6,})\.parquet")
Progress = Callable[[str], None]


def run_batch(
    bundle: str | Path,
    task: str,
    input: str | Path,
    output: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    id_column: str | None = None,
    options: Mapping[str, Any] | None = None,
    load_options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus: float = 0,
    address: str | None = None,
    rows_per_part: int | None = None,
    progress: Progress | None = None,
) -> BatchResult:
    """Compute an answer for each row of a table, and write them as Parquet.

    Where the output has parts of the same job already, it goes on with those that are missing. A part is
    there whole or not at all, and its rows are the same whoever computes it.

    Args:
        bundle: the folder that `planforge export` wrote, at the same path on every machine.
        task: see `BatchWorker`.
        input: a file, or a folder of files, of Parquet, JSON lines, CSV or text (a row a line), or the URI of
            one, such as "s3://bucket/folder".
        output: a folder, which need not be there, or its URI. It gets `part-NNNNNN.parquet`, whose columns
            are "id", "file" and "row" (where the row was), the task's, "tokens" and "error", which is null
            where the row was answered.
        columns: the input's columns by the task's; see `BatchWorker`.
        id_column: the column of the rows' ids; unless given they are made of file and row.
        options: those of the method that answers.
        load_options: see `LoadOptions`.
        workers: processes, without Ray; as many as the cores allow unless given.
        threads: of each worker.
        gpus: of each worker, on a cluster.
        address: of a Ray cluster: "auto", "ray://host:10001", "host:6379", or "local", which starts one here.
        rows_per_part: of a file of the output; 1,000 unless given, and fewer where answers are long.
        progress: called with lines that say how far the job is.

    Returns:
        A `BatchResult`.

    Raises:
        InputError: what is asked for cannot be done, or the output has something else.
        BatchError: a worker cannot load the model, a part's workers die ten times, or another job writes
            there.
    """
    report = progress or (lambda line: None)
    resolved = resolve_columns(task, columns or {})
    check_task_options(find_task(task), options or {})
    check_whole("workers", workers, 1, optional=True)
    check_whole("threads", threads, 1)
    check_whole("rows_per_part", rows_per_part, 1, optional=True)
    check_place(workers, gpus, address)
    check_bundle(bundle, task)
    spec = JobSpec(
        bundle=str(Path(bundle).absolute()),
        bundle_hash=hash_bundle(str(bundle)),
        task=task,
        columns=resolved,
        source=Source.of(input),
        output=Storage.of(output),
        id_column=id_column,
        options=dict(options or {}),
        load_options={**(load_options or {}), "threads": threads},
    )
    check_output(spec)
    began = time.monotonic()
    with spec.output.lock():
        plan = open_job(spec, rows_per_part, report)
        spec.output.remove_temporary()
        done = list_done(spec.output)
        missing_rows = sum(part.rows for part in list_missing(spec, plan, done))
        counting = Counting(report, plan.rows - missing_rows, plan.rows)
        if missing_rows:
            engine = open_engine(spec, workers, threads, gpus, address, most=plan.parts - len(done))
            try:
                compute(engine, list_missing(spec, plan, done), counting)
            finally:
                engine.close()
                spec.output.remove_temporary()
            check_input(spec, plan)
        return summarize(spec.output, done, counting, plan, time.monotonic() - began)


def check_bundle(bundle: str | Path, task: str) -> None:
    """Refuse a bundle whose class of models does not do a task."""
    opened = Bundle.open(bundle)
    refuse_others(opened, "batch")
    if opened.manifest.task != find_task(task).model:
        able = [name for name, one in TASKS.items() if opened.manifest.task == one.model]
        if not able:
            raise InputError(f"batch does not run bundles for {opened.manifest.task}, as {bundle} is one")
        raise InputError(
            f"{bundle} is a bundle for {opened.manifest.task}, which does not support the task {task!r};"
            f" supported tasks: {', '.join(able)}",
            option="task",
        )


def check_place(workers: int | None, gpus: float, address: str | None) -> None:
    """Refuse options of a cluster without one, and the other way round."""
    if not 0 <= gpus < MAX_GPUS:
        raise InputError(f"gpus={gpus!r} must be a number of GPUs, such as 1 or 0.5", option="gpus")
    if gpus and address is None:
        raise InputError(f"gpus={gpus:g} is only for a Ray cluster; give its address too", option="gpus")
    if workers is not None and address is not None:
        raise InputError(
            f"workers={workers} is for processes on this machine; leave it out with address: a cluster runs"
            " as many as its CPUs allow",
            option="workers",
        )


def list_missing(spec: JobSpec, plan: PlanSummary, done: Set[int]) -> Iterator[Part]:
    """Yield the parts that are not done."""
    return (part for part in read_plan(spec.output, plan.hash) if part.number not in done)


def check_input(spec: JobSpec, plan: PlanSummary) -> None:
    """Refuse an input that is not the one that the plan was made of."""
    if make_fingerprint(spec.source, spec.source.list_files()) != plan.fingerprint:
        raise InputError(
            f"the input (names, sizes or times of its files) has changed since the job in {spec.output}"
            " began; give another output folder, or delete this one"
        )


class Counting:
    """Counts what gets done, and reports it.

    Attributes:
        totals: what each worker did, by its name.
        errors: rows of this run without an answer.
        example: one of their errors.
        tokens: of the rows of this run.
    """

    def __init__(self, report: Progress, done_rows: int, all_rows: int) -> None:
        self.totals: dict[str, WorkerTotal] = {}
        self.errors = 0
        self.example: str | None = None
        self.tokens = 0
        self._report = report
        self._began = time.monotonic()
        self._before = done_rows
        self._done = done_rows
        self._all = all_rows
        self._say()

    @property
    def computed(self) -> int:
        """The rows of this run."""
        return self._done - self._before

    def add(self, result: PartResult) -> None:
        """Count a part."""
        total = self.totals.setdefault(result.worker, WorkerTotal())
        total.rows += result.rows
        total.seconds += result.seconds
        self.errors += result.errors
        self.tokens += result.tokens
        self.example = self.example or result.example
        self._done += result.rows
        self._say()

    def _say(self) -> None:
        note_changes(
            f"{self._done:,} of {self._all:,} rows are kept, and the same command goes on with the rest"
        )
        rate = self.computed / max(time.monotonic() - self._began, 1e-9)
        count = describe_count(self._done, self._all, "rows")
        self._report(CountedLine(f"computing: {rate:,.1f} rows/s: {count}", self._done, self._all, "rows"))


def open_job(spec: JobSpec, rows_per_part: int | None, report: Progress) -> PlanSummary:
    """Return the plan that the output has, if it is of this job; make it if the output has none."""
    if not spec.output.exists(DESCRIPTION) or not list_done(spec.output):
        rows = rows_per_part or find_task(spec.task).rows_per_part
        counter = StageCounter(report, "looking at the input", "files")
        plan = write_plan(spec.source, spec.output, spec.all_columns, rows, counter)
        job = {**spec.describe(), ROWS_PER_PART: rows}
        description = {"format": FORMAT, "job": job, "plan": plan.to_json()}
        spec.output.write(DESCRIPTION, json.dumps(description, indent=2).encode())
        return plan
    there = read_description(spec.output)
    given = {**spec.describe(), ROWS_PER_PART: rows_per_part or there["job"].get(ROWS_PER_PART)}
    for name, value in given.items():
        if there["job"].get(name) != value:
            values = "" if name == "bundle_hash" else f": {there['job'].get(name)!r:.200}, not {value!r:.200}"
            raise InputError(
                f"{spec.output} has parts of a job with another {WORDS[name]}{values}; give another output"
                " folder, or delete this one"
            )
    plan = PlanSummary(**there["plan"])
    check_input(spec, plan)
    return plan


def read_description(output: Storage) -> dict[str, Any]:
    """Return what a job's folder says of it."""
    try:
        description = json.loads(output.read(DESCRIPTION))
        if description["format"] == FORMAT and description["job"] and description["plan"]:
            return dict(description)
    except (ValueError, KeyError, TypeError):
        pass
    raise BatchError(
        f"{output.join(DESCRIPTION)} is damaged or was written by another version; delete the output folder,"
        " and run the job again"
    )


def check_output(spec: JobSpec) -> None:
    """Refuse a folder that has something else in it, and one whose parts would be input, too."""
    output = spec.output
    source = spec.source.storage
    if output.files.equals(source.files):
        folders = [f"{source.path}/", f"{output.path}/"]
        if folders[0].startswith(folders[1]) or folders[1].startswith(folders[0]):
            raise InputError(
                f"--output {output} must not be inside the input folder, nor contain it", option="output"
            )
    if output.find_type() not in (FileType.NotFound, FileType.Directory):
        raise InputError(f"--output {output} is not a folder", option="output")
    if output.exists(DESCRIPTION):
        return
    for entry in output.list_entries():
        if entry.base_name != JOB:
            raise InputError(
                f"--output {output} is not empty, and is not a job's folder: it has {entry.base_name}; give"
                " another folder",
                option="output",
            )


def list_done(output: Storage) -> set[int]:
    """Return the numbers of the parts that are written."""
    names = (entry.base_name for entry in output.list_entries() if entry.type == FileType.File)
    return {int(match[1]) for match in map(PART.fullmatch, names) if match}


def compute(engine: Engine, parts: Iterator[Part], counting: Counting) -> None:
    """Have all parts computed; one that is lost is started again."""
    again: deque[Part] = deque()
    attempts: Counter[int] = Counter()
    barren = 0  # times that workers died before any part was done
    running = 0
    while True:
        slots = engine.count_slots()
        while running < slots and (part := again.popleft() if again else next(parts, None)) is not None:
            engine.start(part)
            running += 1
        if not running:
            return
        outcomes = engine.wait()
        running -= len(outcomes)
        lost = [(part, outcome) for part, outcome in outcomes if isinstance(outcome, Lost)]
        for _, outcome in outcomes:
            if isinstance(outcome, PartResult):
                counting.add(outcome)
            elif isinstance(outcome, Failure):
                raise BatchError(outcome.message)
        if lost and not counting.computed:
            barren += 1
            check_barren(barren, lost[0][1])
        for part, outcome in lost:
            attempts[part.number] += 1
            check_attempts(part, attempts[part.number], outcome)
            again.append(part)


def check_barren(times: int, lost: Lost) -> None:
    """Refuse to go on where workers die before any of them has done anything."""
    if times >= MAX_STARTUP_FAILURES:
        raise BatchError(
            f"the workers died {times} times before computing anything; the last reason: {lost.reason}. A"
            " program must call run_batch below `if __name__ == '__main__':`"
        )


def check_attempts(part: Part, attempts: int, lost: Lost) -> None:
    """Refuse to start a part again whose workers have died often."""
    if attempts >= ATTEMPTS:
        row_range = part.row_ranges[0]
        raise BatchError(
            f"{part.file}, which begins at row {row_range.first} of {row_range.file}, failed: its workers"
            f" died {attempts} times; the last reason: {lost.reason}"
        )


def open_engine(
    spec: JobSpec, workers: int | None, threads: int, gpus: float, address: str | None, most: int
) -> Engine:
    """Return what computes the parts, of which there are `most`."""
    if address is None:
        from .process_engine import ProcessEngine

        count = workers or count_processes(spec, threads)
        return ProcessEngine(spec, min(count, most))
    try:
        from .ray_engine import RayEngine
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"running on a Ray cluster needs {error.name}: pip install 'planforge[ray]'"
        ) from error
    return RayEngine(spec, address, threads, gpus)


def count_processes(spec: JobSpec, threads: int) -> int:
    """Return how many processes use this machine well: on a GPU a second one would only share it."""
    if spec.load_options.get("backend") != "ort-cpu" and gpu_is_present():
        return 1
    return max(1, choose_threads().count // threads)


def summarize(
    output: Storage, done: Set[int], counting: Counting, plan: PlanSummary, seconds: float
) -> BatchResult:
    """Return what a job came to: what this run counted, and what the parts say that were done before."""
    with ThreadPoolExecutor(READERS) as readers:
        earlier = list(readers.map(partial(read_counts, output), sorted(done)))
    return BatchResult(
        output=str(output),
        parts=plan.parts,
        rows=plan.rows,
        errors=counting.errors + sum(counts["errors"] for counts in earlier),
        example=counting.example,
        tokens=counting.tokens + sum(counts["tokens"] for counts in earlier),
        computed=counting.computed,
        seconds=seconds,
        workers=counting.totals,
    )


def read_counts(output: Storage, number: int) -> dict[str, int]:
    """Return how many rows, errors and tokens a part has."""
    name = Part(number, ()).file
    try:
        with output.files.open_input_file(output.join(name)) as stream:
            counts: dict[str, int] = json.loads(pq.read_metadata(stream).metadata[COUNTS])
            return counts
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise BatchError(f"{output.join(name)} cannot be read; delete it, and run the job again") from error
