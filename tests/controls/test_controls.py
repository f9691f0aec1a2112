"""A few sound controls of `make controls`, and the smallest fault that each limit catches.

The fault is noise in all that a graph returns, of growing size; what it took is written to
build/smallest-faults.md.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export
from planforge.exporter.limits import GAP_FACTOR, QUADRATIC
from planforge.exporter.limits import TABLE as CAPPED
from planforge.exporter.precisions import PRECISIONS
from planforge.runtime.backends.backend import Array, Arrays, BoundGraph, Buffers
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.diagnostics.metrics import Outcome

from ..helpers.ground import Ground
from ..helpers.models import WORDPIECES, tiny_bert, write_wordpiece
from ..helpers.paths import ROOT
from .__main__ import CONTROLS as ALL
from .judging import FALSE_ALARM, PASSED, format_table, judge_control

TABLE = ROOT / "build" / "smallest-faults.md"
CONTROLS = {"GPT-2": 4, "BERT": 2, "Transformer": 3}
TRIED = {
    "GPT-2": ("fp32", "fp16", "int8", "int4", "fp32-kv8", "int8-kv8"),
    "BERT": ("fp32", "fp16", "int8", "int4"),
    "Transformer": ("fp32", "fp16", "int8", "int4"),
}
GROWTH = 3.0
MOST = 10.0  # standard deviations
SLOW = ("greedy", "full", "parts", "prompts", "single steps")  # cases of limits that others have too


@dataclass(frozen=True)
class Judged:
    """A control, what verification said of it, and its bundle."""

    record: dict[str, Any]
    ground: Ground


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Judged]:
    @functools.cache
    def judge(family: str) -> Judged:
        work = tmp_path_factory.mktemp("control")
        record = judge_control(CONTROLS[family], work)
        return Judged(record, Ground(work / f"bundle-{CONTROLS[family]}", work / "copy"))

    return judge


@pytest.mark.parametrize("family", CONTROLS)
def test_a_sound_model_is_not_called_faulty(family: str, judged: Callable[[str], Judged]) -> None:
    record = judged(family).record
    assert record["family"] == family
    assert {"fp32", "fp16", "int8", "int4"} <= record["verdicts"].keys()
    assert [verdict for verdict in record["verdicts"].values() if verdict["verdict"] != PASSED] == []


def test_the_page_shows_what_all_controls_gave() -> None:
    text = (ROOT / "benchmarks/results/controls.json").read_text(encoding="utf-8")
    records = json.loads(text)["controls"]
    assert [record["number"] for record in records] == list(range(ALL))
    verdicts = [verdict["verdict"] for record in records for verdict in record["verdicts"].values()]
    assert FALSE_ALARM not in verdicts
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    assert format_table(records) in page
    assert f"{len(verdicts)} pairs of a model" in page


class NoisyProgram:
    """A program whose results are off by noise, but for a decoder's keys and values."""

    def __init__(self, program: Any, artifact: Artifact, size: float) -> None:
        self.program = program
        self.names = {spec.name for spec in artifact.outputs if not spec.role.startswith("present.")}
        self.size = size
        self.random = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        results = self.disturb_all(self.program.run(inputs, buffers, outputs))
        for name in self.names & buffers.keys():
            array = buffers[name].array  # type: ignore[attr-defined]
            array[...] = self.disturb(array)
        return results

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None) -> BoundGraph:
        bound = self.program.bind(buffers, outputs)
        return lambda inputs: self.disturb_all(bound(inputs))

    def disturb_all(self, results: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self.disturb(a) if name in self.names else a for name, a in results.items()}

    def disturb(self, array: Array) -> Array:
        """Return an array with noise in units of its own standard deviation."""
        noise = self.random.standard_normal(array.shape) * self.size * array.std()
        return np.asarray(array + noise, array.dtype)


@dataclass
class Limit:
    """What noise does to a metric of a graph, until its limit catches it."""

    artifact: str
    name: str
    allowed: float
    sound: float  # what is measured without noise
    within: float = 0.0  # the largest noise with which nothing is over the limit, in any case
    caught: float | None = None  # the smallest for which a case fails

    @property
    def metric(self) -> str:
        return self.name.rpartition(".")[2]

    def take(self, outcomes: Sequence[Outcome], size: float) -> None:
        """Note what was measured with noise of a size."""
        worst = max(outcome.metrics[self.name] for outcome in outcomes if self.name in outcome.metrics)
        words = f"{self.metric} is "
        if worst <= self.allowed:
            self.within = size
        elif self.caught is None and any(words in line for o in outcomes for line in o.failures):
            self.caught = size


def run_cases(ground: Ground, artifact: Artifact, size: float) -> list[Outcome]:
    """Return the outcome of every quick case of a graph whose results have noise."""
    backend = OrtCpuBackend()

    def open_program(other: Artifact) -> Any:
        program = backend.open(ground.bundle, other)
        return NoisyProgram(program, other, size) if other == artifact else program

    engine = ground.examiner.open(artifact, open_program)
    try:
        cases = ground.examiner.list_cases(engine, artifact, ground.limits(artifact.precision))
        return [run() for name, run in cases.items() if not name.startswith(SLOW)]
    finally:
        engine.close()


def measure_limits(ground: Ground, artifact: Artifact) -> list[Limit]:
    """Return every limit of a graph's quick cases, with the smallest noise that it catches."""
    sound, loud = (run_cases(ground, artifact, size) for size in (0.0, MOST))
    # What stays 0 is not measured: mean_cosine_gap, where there are too few texts.
    measured = {name for o in loud for name in o.limits if o.metrics.get(name) != 0}
    allowed = {name: limit for o in sound for name, limit in o.limits.items() if name in measured}
    limits = [
        Limit(artifact.id, name, limit, max(o.metrics[name] for o in sound if name in o.metrics))
        for name, limit in allowed.items()
    ]
    least = min(limit ** (0.5 if name.endswith(QUADRATIC) else 1) for name, limit in allowed.items())
    size = least / 30  # the largest of thousands of numbers is some standard deviations
    while size < MOST and any(limit.caught is None for limit in limits):
        outcomes = run_cases(ground, artifact, size)
        for limit in limits:
            limit.take(outcomes, size)
        size *= GROWTH
    return limits


def format_limits(limits: Sequence[Limit]) -> str:
    rows = ["| graph | limit | without a fault | allowed | smallest noise caught |", "|---|---|---|---|---|"]
    rows += [
        f"| {one.artifact} | {one.name} | {one.sound:.2g} | {one.allowed:.2g} | {one.caught:.1g} |"
        for one in limits
    ]
    return "".join(f"{row}\n" for row in rows)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """A tiny BERT that gives vectors of as many texts as a mean takes."""
    folder = tmp_path_factory.mktemp("sentences")
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64}
    tiny_bert(folder / "bert", "BertModel", **sizes)
    write_wordpiece(folder / "bert")
    texts = "".join(f"hello {word}, it is {word}\n" for word in WORDPIECES[-20:])
    (folder / "bert" / "prompts.txt").write_text(texts, encoding="utf-8")
    precision = ["fp32", "fp16", "int8", "int4"]
    outputs = ["pooler_output"]
    export(
        folder / "bert",
        folder / "bundle",
        precision=precision,
        target=["cpu", "portable"],
        outputs=outputs,
        verify=False,
    )
    return Ground(folder / "bundle", folder / "copy")


def list_tried(
    judged: Callable[[str], Judged], sentences: Ground, marian: Ground
) -> list[tuple[Ground, Artifact]]:
    """Return a graph of every kind and precision, with its bundle."""
    tried = []
    for family in CONTROLS:
        ground = judged(family).ground
        artifacts = [a for a in ground.bundle.manifest.artifacts if a.precision in TRIED[family]]
        tried += [(ground, a) for a in {(a.graph, a.precision): a for a in artifacts}.values()]
    tried += [(sentences, a) for a in {a.precision: a for a in sentences.bundle.manifest.artifacts}.values()]
    return tried + [(marian, a) for a in marian.bundle.manifest.artifacts if a.dialect == "inplace"]


def test_noise_three_times_as_large_as_what_a_limit_lets_pass_is_caught(
    judged: Callable[[str], Judged],
    sentences: Ground,
    marian_bundle: Path,
    tmp_path: Path,
) -> None:
    marian = Ground(marian_bundle, tmp_path / "marian")
    limits = [
        limit
        for ground, artifact in list_tried(judged, sentences, marian)
        for limit in measure_limits(ground, artifact)
    ]
    assert [limit for limit in limits if not limit.sound <= limit.allowed] == []
    # PyTorch rounds weights, and what linears read, as the engine does, so that it loses as much.
    alike = [one for one in limits if one.artifact == "decoder.ort.int8" and one.name == "max_error"]
    sound = [one.sound for one in alike]
    assert [one.allowed / GAP_FACTOR for one in alike] == pytest.approx(sound, rel=0.1)
    assert {limit.metric for limit in limits} == {*CAPPED, "score_error"}
    assert {limit.artifact.rpartition(".")[2] for limit in limits} == PRECISIONS.keys() - {"int4-kv8"}
    assert [limit for limit in limits if limit.caught is None] == []
    step = GROWTH * (1 + 1e-9)
    assert [one for one in limits if one.caught and not one.caught <= step * one.within] == []
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(format_limits(limits), encoding="utf-8")
