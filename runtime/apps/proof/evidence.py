"""Evidence: what was measured of a bundle on a file of texts, and the file of it in the bundle.

N texts
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ...bundle.bundle import Bundle
from ...bundle.json_reader import Reader, parse_json
from ...errors import BundleError, ManifestError
from .intervals import Interval, find_f1_interval, find_perplexity_interval, find_wilson_interval

log = logging.getLogger("planforge")

PREFIX = "checks/evidence-"  # of its name in a bundle
FORMAT = 1
MAX_BYTES = 64 * 2**20
MAX_TEXTS = 100_000  # of one proof, whose answers and losses must fit
MAX_PROOFS = 8  # of one bundle, the newest
CLASSIFY = "classify"
SCORE = "score"


@dataclass(frozen=True)
class Joules:
    """Energy: what was measured, by what, and for each text."""

    source: str  # such as "tegrastats VDD_IN"
    per_text: float
    mean_watts: float


@dataclass(frozen=True)
class Proof:
    """One graph or plan, measured on one file of texts.

    Attributes:
        artifact: the graph's id; of a plan, of the one that it was built from.
        file: of the bundle, that ran; its name follows from its content.
        backend: the engine.
        machine: what it ran on, by "cpu", "system" and, where there are such, "board", "power" and the "gpu"
            that took part.
        tools: versions of packages, by their names.
        date: of the measurement, in UTC.
        data: "name" and "sha256" of the file of texts.
        task: "classify" or "score".
        latency_ms: "p50" and "p99" of one text, alone in its batch; of "score", to read it.
        peak_rss_mb: the most memory of the process; None where the system does not say.
        threads: that computed; None of a GPU.
        gpu_memory_mb: the most memory of the GPU that the process was seen with, between texts; None without
            a GPU, and where its driver does not say.
        labels: of "classify", the classes that `truth`, `answers` and `reference` are indices of.
        truth: N labels of the file.
        answers: N labels that this graph gave.
        losses: of "score", N sums of -log p in nats.
        tokens: N numbers of tokens that the sums are over.
        compared_with: what `reference` is from, in words; "" where there is none.
        reference: N labels of PyTorch; empty where there are none.
        reference_losses: the same of "score".
        token_ms: "p50" and "p99" between two generated tokens; None of a classifier.
        joules: None where the machine does not say.
        layers: of a plan, milliseconds of each layer by profile; empty where they were not measured.
    """

    artifact: str
    file: str
    backend: str
    machine: Mapping[str, str]
    tools: Mapping[str, str]
    date: str
    data: Mapping[str, str]
    task: str
    latency_ms: Mapping[str, float]
    peak_rss_mb: float | None
    threads: int | None = None
    gpu_memory_mb: float | None = None
    labels: tuple[str, ...] = ()
    truth: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    compared_with: str = ""
    reference: tuple[int, ...] = ()
    reference_losses: tuple[float, ...] = ()
    token_ms: Mapping[str, float] | None = None
    joules: Joules | None = None
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        return self.artifact.rpartition(".")[2]

    @property
    def texts(self) -> int:
        """The number of texts."""
        return len(self.answers) or len(self.losses)

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is of: a later measurement of the same takes its place."""
        what = self.artifact, self.file, self.backend, self.threads
        return *what, sorted(self.machine.items()), self.data["sha256"]

    def count_flips(self) -> int | None:
        """Return how many labels are not PyTorch's; None where those are not known."""
        if not self.reference:
            return None
        return sum(a != b for a, b in zip(self.answers, self.reference, strict=True))

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """What it is worth, by the names "accuracy", "f1" and "flips", or "perplexity"."""
        if self.task == SCORE:
            found = {"perplexity": find_perplexity_interval(self.losses, self.tokens)}
            if self.reference_losses:
                reference = find_perplexity_interval(self.reference_losses, self.tokens)
                found["reference_perplexity"] = reference
            return found
        right = sum(a == b for a, b in zip(self.answers, self.truth, strict=True))
        found = {
            "accuracy": find_wilson_interval(right / self.texts, self.texts),
            "f1": find_f1_interval(self.truth, self.answers),
        }
        flips = self.count_flips()
        if flips is not None:
            found["flips"] = find_wilson_interval(flips / self.texts, self.texts)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return its fields, with the intervals as "intervals", which take long to compute."""
        value = {name: part for name, part in asdict(self).items() if part not in ((), {}, None, "")}
        return value | {"intervals": {name: interval._asdict() for name, interval in self.intervals.items()}}

    @staticmethod
    def from_json(value: Any, file: str) -> Proof:
        """Return the proof of a file's entry; raise a ManifestError that names what is wrong."""
        r = Reader(value, "proof", file)
        joules = r.value.get("joules")
        proof = Proof(
            artifact=r.get("artifact", str),
            file=r.get("file", str),
            backend=r.get("backend", str),
            date=r.get("date", str),
            task=r.get("task", str),
            machine=r.texts("machine"),
            tools=r.texts("tools"),
            data=r.texts("data"),
            truth=r.list_of("truth", int, ()),
            answers=r.list_of("answers", int, ()),
            tokens=r.list_of("tokens", int, ()),
            reference=r.list_of("reference", int, ()),
            losses=read_numbers(r, "losses"),
            reference_losses=read_numbers(r, "reference_losses"),
            labels=r.list_of("labels", str, ()),
            compared_with=r.get("compared_with", str, ""),
            latency_ms=read_map(r, "latency_ms"),
            token_ms=None if r.value.get("token_ms") is None else read_map(r, "token_ms"),
            peak_rss_mb=r.number("peak_rss_mb", None),
            threads=r.get("threads", int, None),
            gpu_memory_mb=r.number("gpu_memory_mb", None),
            joules=None if joules is None else read_joules(Reader(joules, "joules", file)),
            layers={
                name: read_map(Reader(r.get("layers", dict), "layers", file), name)
                for name in r.get("layers", dict, {})
            },
        )
        proof.check(file)
        vars(proof)["intervals"] = read_intervals(r, proof.task)  # which a changed copy computes anew
        return proof

    def check(self, file: str) -> None:
        """Refuse columns of other lengths, and labels that there are not."""
        columns: list[Sequence[Any]] = [self.truth, self.answers]
        others: list[Sequence[Any]] = [self.reference]
        if self.task == SCORE:
            columns = [self.losses, self.tokens]
            others = [self.reference_losses]
        columns += [other for other in others if other]
        indices = (*self.truth, *self.answers, *self.reference)
        if (
            self.task not in (CLASSIFY, SCORE)
            or not self.texts
            or any(len(column) != self.texts for column in columns)
            or any(not 0 <= index < len(self.labels) for index in indices)
            or any(count < 1 for count in self.tokens)
            or not {"name", "sha256"} <= set(self.data)
            or not all(
                {"p50", "p99"} <= set(times) for times in (self.latency_ms, self.token_ms or self.latency_ms)
            )
        ):
            raise ManifestError(f"{file}: the proof of {self.artifact!r:.60} does not fit together")


def read_numbers(r: Reader, name: str) -> tuple[float, ...]:
    """Return a list of numbers; empty where there is none."""
    values = r.get(name, list, [])
    return tuple(Reader({name: value}, r.what, r.file).number(name, 0.0) for value in values)


def read_map(r: Reader, name: str) -> dict[str, float]:
    """Return an object of numbers."""
    values = Reader(r.get(name, dict), name, r.file)
    return {key: values.number(key, 0.0) for key in values.value}


def read_intervals(r: Reader, task: str) -> dict[str, Interval]:
    """Return the intervals of a proof as they were when it was written."""
    stored = Reader(r.get("intervals", dict), "intervals", r.file)
    found = {name: read_map(stored, name) for name in stored.value}
    needed = ("perplexity",) if task == SCORE else ("accuracy", "f1")
    if not found.keys() >= set(needed) or any(set(ends) != set(Interval._fields) for ends in found.values()):
        raise ManifestError(f"{r.file}: proof.intervals does not fit together")
    return {name: Interval(**ends) for name, ends in found.items()}


def read_joules(r: Reader) -> Joules:
    return Joules(r.get("source", str), r.number("per_text", 0.0), r.number("mean_watts", 0.0))


def list_evidence_files(bundle: Bundle) -> list[str]:
    """Return the names of a bundle's files of evidence: one, or none."""
    return [name for name in bundle.manifest.files if name.startswith(PREFIX)]


def read_evidence(bundle: Bundle) -> tuple[Proof, ...]:
    """Return what was measured of a bundle's graphs and plans; of those that are gone, nothing.

    Raises:
        BundleError: the file is damaged, too large, or of another version.
    """
    found: list[Proof] = []
    for name in list_evidence_files(bundle):
        size = bundle.manifest.files[name].bytes
        if size > MAX_BYTES:
            raise BundleError(f"{bundle.folder}: {name} has {size} bytes; evidence may have {MAX_BYTES}")
        try:
            r = Reader(parse_json(bundle.path(name).read_text(encoding="utf-8")), "evidence", name)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{bundle.folder}: {name} is not valid JSON: {error}") from error
        if r.get("format", int) != FORMAT:
            raise ManifestError(f"{bundle.folder}: {name} has another format than {FORMAT}; prove again")
        found += (Proof.from_json(value, name) for value in r.get("proofs", list))
    return tuple(proof for proof in found if proof.file in bundle.manifest.files)


def read_whole_evidence(bundle: Bundle) -> tuple[Proof, ...]:
    """Return what `read_evidence` does, or nothing and a warning where that is damaged."""
    try:
        return read_evidence(bundle)
    except BundleError as error:
        log.warning("%s; it is left out", error)
        return ()


def write_evidence(proofs: Sequence[Proof]) -> str:
    """Return the text of a bundle's file of evidence."""
    value = {"format": FORMAT, "proofs": [proof.to_json() for proof in proofs]}
    return json.dumps(value, indent=None, ensure_ascii=False, allow_nan=False) + "\n"


def add_proof(proofs: Sequence[Proof], new: Proof) -> list[Proof]:
    """Return proofs with a new one, in place of an earlier one of the same; the newest stay."""
    return [*(proof for proof in proofs if proof.key != new.key), new][-MAX_PROOFS:]
