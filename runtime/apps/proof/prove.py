"""Measures a bundle on a file of texts, on this machine and without PyTorch.

What PyTorch would answer is taken from the first of these that there is: the file's column "pytorch"; the
bundle's evidence of a graph in fp32 that was found equal to PyTorch; that graph, run here on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...backends.dialects import CPU_DIALECTS
from ...backends.ort_backend import OrtCpuBackend
from ...backends.threads import ROOT
from ...bundle.bundle import Bundle, compute_sha256
from ...bundle.manifest import Artifact
from ...errors import DataError, InputError, PlanForgeError
from ...suggest import did_you_mean
from ...tasks import refuse_others
from ..batch.text_table import TextTable, read_text_table
from ..diagnostics.bench import compute_percentiles
from ..diagnostics.child import Child
from ..diagnostics.jetson import find_jetson
from ..diagnostics.machine import find_processor_name, read_gpu_memory
from ..diagnostics.packages import DISTRIBUTIONS, find_package
from ..diagnostics.power import PowerMeter
from .evidence import CLASSIFY, MAX_TEXTS, SCORE, Joules, Proof, read_whole_evidence
from .worker import Work

AT_ONCE = 64  # texts that a process is asked for at a time
LONGEST = 3  # texts that run first, untimed: what is too long is refused before all others run
GENERATED = 8  # texts that a generator continues
ITSELF = "nothing: this graph is what others are compared with"
ONE_LABEL = "single_label_classification"


@dataclass(frozen=True)
class Texts:
    """The rows of a file.

    Attributes:
        rows: a text each, or a pair of texts.
        truth: the number of each row's label; empty for a generator.
        pytorch: the number of PyTorch's label; empty where the file does not tell.
    """

    table: TextTable
    rows: tuple[tuple[str, ...], ...]
    truth: tuple[int, ...] = ()
    pytorch: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """What one graph or plan gave for every row."""

    facts: dict[str, Any]
    results: list[list[Any]]
    times: list[float]
    token_times: list[float]
    peak_rss_mb: float | None
    gpu_memory_mb: float | None
    joules: Joules | None = None


class MemoryWatch:
    """The most memory, in MB, that a process had of the machine and of its GPU; None where nobody says.

    Args:
        process: its number.
        gpu: the UUID of its GPU; "" without one.
    """

    def __init__(self, process: int, gpu: str) -> None:
        self.process = process
        self.gpu = gpu
        self.rss_mb: float | None = None
        self.gpu_mb: float | None = None

    def note(self, answer: dict[str, Any]) -> None:
        """Take what the process answered; it waits meanwhile."""
        if answer["peak_rss_mb"] is not None:
            self.rss_mb = round(answer["peak_rss_mb"], 1)  # which only grows
        size = read_gpu_memory(self.gpu, self.process) if self.gpu else None
        if size is not None:
            self.gpu_mb = max(self.gpu_mb or 0.0, round(size / 1e6, 1))


def prove(
    bundle: str | Path,
    data: str | Path,
    *,
    backend: str = "auto",
    precision: str | None = None,
    device: int = 0,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Proof:
    """Measure accuracy, F1 and changed labels of a classifier, or the perplexity of a text generator.

    Each text runs alone, in a process that does nothing else, whose times, memory and energy are measured.

    Args:
        bundle: the folder that `planforge export` wrote; it is not changed.
        data: a file with the columns "text", of a classifier "label", and maybe "pair" and "pytorch", which
            has the labels that PyTorch gave. A generator's file has texts alone.
        backend: as in `load`.
        precision: as in `load`.
        device: the GPU's number.
        threads: as in `load`.
        progress: called with a line when a stage begins.

    Raises:
        InputError: a bundle of another task, or a file without these columns.
        DataError: a row that cannot be used; it is named.
    """
    opened = Bundle.open(bundle)
    task = find_task(opened)
    path = Path(data)
    progress("reading the texts")
    texts = read_texts(opened, task, path)
    work = Work(str(bundle), task, backend, precision, device, threads)
    run = measure(work, texts, progress)
    labels = () if opened.manifest.encoder is None else opened.manifest.encoder.labels
    proof = Proof(
        artifact=run.facts["artifact"],
        file=run.facts["file"],
        backend=run.facts["backend"],
        machine=describe_machine(run.facts["gpu"]),
        tools=list_tools(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        data={"name": path.name, "sha256": compute_sha256(path)},
        task=task,
        latency_ms=compute_percentiles(run.times),
        token_ms=compute_percentiles(run.token_times) if run.token_times else None,
        peak_rss_mb=run.peak_rss_mb,
        threads=run.facts["threads"],
        gpu_memory_mb=run.gpu_memory_mb,
        joules=run.joules,
        labels=labels if task == CLASSIFY else (),
        truth=texts.truth,
        **read_results(task, run),
    )
    return add_reference(proof, opened, texts, replace(work, backend=OrtCpuBackend.name, device=0), progress)


def find_task(bundle: Bundle) -> str:
    """Return whether a bundle classifies or scores texts; refuse others."""
    refuse_others(bundle, "prove")
    manifest = bundle.manifest
    if manifest.task == "text-generation":
        return SCORE
    encoder = manifest.encoder
    if encoder is not None and "sequence_classification" in encoder.heads and len(encoder.labels) > 1:
        if encoder.problem_type in (None, ONE_LABEL):
            return CLASSIFY
        what = f"its head is for {encoder.problem_type}"
    elif encoder is not None:
        what = f"its heads are: {', '.join(encoder.heads) or 'none, it embeds texts'}"
    else:
        what = f"it is for {manifest.task}"
    raise InputError(
        f"prove measures classifiers with one label per text, and text generators; {bundle.folder} is"
        f" neither: {what}. `planforge selftest {bundle.folder}` compares it with PyTorch's answers"
    )


def read_texts(bundle: Bundle, task: str, path: Path) -> Texts:
    """Read the rows of a file; refuse another task's, and labels that the bundle does not have."""
    if not path.is_file():
        raise InputError(f"--data {path}: there is no such file")
    if task == SCORE:
        table = read_text_table(path, ("text",), ("label",))
        if "label" in table.columns:
            raise InputError(
                f"{path} has a column 'label', and {bundle.folder} generates text: give a file of texts alone"
            )
    else:
        table = read_text_table(path, ("text", "label"), ("pair", "pytorch"))
    count = len(table.lines)
    if not 1 <= count <= MAX_TEXTS:
        raise DataError(f"{path} has {count or 'no'} rows; prove measures 1 to {MAX_TEXTS} texts")
    columns = [table.columns[name] for name in ("text", "pair") if name in table.columns]
    rows = tuple(zip(*columns, strict=True))
    if bundle.manifest.encoder is None:
        return Texts(table, rows)
    labels = bundle.manifest.encoder.labels
    numbers = {
        name: number_labels(table, name, labels) for name in ("label", "pytorch") if name in table.columns
    }
    return Texts(table, rows, numbers["label"], numbers.get("pytorch", ()))


def number_labels(table: TextTable, column: str, labels: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of a column's labels; refuse one that a classifier does not have."""
    known = {label: number for number, label in enumerate(labels)}
    for row, label in enumerate(table.columns[column]):
        if label not in known:
            raise DataError(
                f"{table.find_place(row)}: the {column} {label!r:.80} is none of the bundle's:"
                f" {', '.join(labels):.500}{did_you_mean(label, labels)}"
            )
    return tuple(known[label] for label in table.columns[column])


def measure(work: Work, texts: Texts, progress: Callable[[str], None], is_reference: bool = False) -> Run:
    """Run every row in a process of its own; a reference, whose results alone count, generates nothing."""
    what = work.precision or "the bundle"
    progress(f"loading {what}")
    with contextlib.closing(Child(f"{__package__}.worker", what, asdict(work))) as child:
        gpu = child.facts["gpu"]["uuid"] if child.facts["gpu"] else ""
        memory = MemoryWatch(child.facts["process"], gpu)
        order = sorted(range(len(texts.rows)), key=lambda row: -sum(map(len, texts.rows[row])))
        memory.note(ask(child, texts, order[:LONGEST]))
        results: list[list[Any]] = []
        times: list[float] = []
        with PowerMeter(gpu) as meter:
            for rows in cut_rows(len(texts.rows)):
                progress(f"measuring {child.facts['artifact']}: {rows[0]} of {len(texts.rows)} texts")
                answer = ask(child, texts, rows)
                results += answer["results"]
                times += answer["ms"]
        memory.note(answer)
        token_times: list[float] = []
        if work.task == SCORE and not is_reference:
            progress(f"measuring {child.facts['artifact']}: generating")
            prompts = [result[2] for result in results[:GENERATED]]
            answer = child.ask(json.dumps({"generate": prompts}))
            token_times = answer["ms"]
            memory.note(answer)
    joules = find_joules(meter, len(times))
    return Run(child.facts, results, times, token_times, memory.rss_mb, memory.gpu_mb, joules)


def cut_rows(count: int) -> Iterator[range]:
    """Yield the numbers of rows that a process is asked for at one time."""
    for start in range(0, count, AT_ONCE):
        yield range(start, min(count, start + AT_ONCE))


def ask(child: Child, texts: Texts, rows: Sequence[int]) -> dict[str, Any]:
    """Return what a process measured of rows; name the row that it refused."""
    answer = child.ask(json.dumps({"texts": [texts.rows[row] for row in rows]}))
    if "refused" in answer:
        raise DataError(f"{texts.table.find_place(rows[answer['refused']])}: {answer['why']}")
    return answer


def find_joules(meter: PowerMeter, texts: int) -> Joules | None:
    """Return the energy of each text; None where the machine tells no power."""
    found = meter.find_mean()
    if found is None:
        return None
    source, watts = found
    return Joules(source, round(watts * meter.seconds / texts, 6), round(watts, 3))


def read_results(task: str, run: Run) -> dict[str, Any]:
    """Return a run's results by the names of a proof's fields."""
    if task == CLASSIFY:
        return {"answers": tuple(result[0] for result in run.results)}
    losses = tuple(result[0] for result in run.results)
    return {"losses": losses, "tokens": tuple(result[1] for result in run.results)}


def add_reference(
    proof: Proof, bundle: Bundle, texts: Texts, work: Work, progress: Callable[[str], None]
) -> Proof:
    """Return a proof with what PyTorch answers, and where that is from."""
    if texts.pytorch:
        where = f"the column pytorch of {proof.data['name']}"
        return replace(proof, compared_with=where, reference=texts.pytorch)
    artifact = find_reference(bundle)
    if artifact is None:
        return replace(proof, compared_with="nothing: the bundle has no graph in fp32 that equals PyTorch")
    if artifact.id == proof.artifact and proof.backend == OrtCpuBackend.name:
        return replace(proof, compared_with=ITSELF)
    same = replace(proof, artifact=artifact.id, backend=OrtCpuBackend.name)
    proofs = read_whole_evidence(bundle)
    known = next((old for old in proofs if describe_work(old) == describe_work(same)), None)
    if known is not None:
        machine = known.machine.get("cpu", "another machine")
        where = f"{artifact.id} on {same.backend}, as measured on {machine}"
        return set_reference(proof, where, known.answers, known.losses)
    try:
        run = measure(replace(work, precision=artifact.precision), texts, progress, is_reference=True)
    except DataError:
        raise
    except PlanForgeError as error:
        return replace(proof, compared_with=f"nothing: {artifact.id} does not run here: {error}")
    results = read_results(proof.task, run)
    where = f"{artifact.id} on {same.backend}, run here"
    return set_reference(proof, where, results.get("answers", ()), results.get("losses", ()))


def describe_work(proof: Proof) -> tuple[Any, ...]:
    """Return what is equal in proofs of one graph on one engine and the same texts, read alike."""
    return proof.artifact, proof.backend, proof.data["sha256"], proof.labels, proof.truth, proof.tokens


def set_reference(proof: Proof, where: str, answers: tuple[int, ...], losses: tuple[float, ...]) -> Proof:
    return replace(proof, compared_with=where, reference=answers, reference_losses=losses)


def find_reference(bundle: Bundle) -> Artifact | None:
    """Return the graph in fp32 that `load` takes on a CPU, if it was compared with PyTorch and passed."""
    graphs = [
        artifact
        for artifact in bundle.manifest.artifacts
        if artifact.precision == "fp32" and artifact.dialect in CPU_DIALECTS
    ]
    chosen = min(graphs, key=lambda artifact: CPU_DIALECTS.index(artifact.dialect), default=None)
    return chosen if chosen is not None and chosen.passed else None


def describe_machine(gpu: dict[str, Any] | None, root: Path = ROOT) -> dict[str, str]:
    """Return what a measurement depends on of this machine, and of the GPU that took part, if one did."""
    board = find_jetson(root)
    found = {
        "cpu": find_processor_name(root),
        "system": platform.platform(),
        "gpu": gpu["name"] if gpu else None,
        "board": board.board if board else None,
        "power": board.power.mode if board else None,
    }
    return {name: text for name, text in found.items() if text}


def list_tools() -> dict[str, str]:
    """Return the versions of PlanForge and of the packages that run bundles."""
    found = {"planforge": version("planforge")}
    for module in DISTRIBUTIONS:
        if module not in ("onnx", "torch"):
            found |= find_package(module).versions
    return found
