"""A few sound controls of `make controls`, and the smallest fault that each limit catches.

Faults of growing size are planted in graphs; what it took is written to build/smallest-faults.md.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export
from planforge.exporter.limits import TABLE as CAPPED
from planforge.exporter.precisions import PRECISIONS
from planforge.runtime.bundle.manifest import Artifact

from ..helpers.ground import Ground
from ..helpers.models import WORDPIECES, tiny_bert, write_mean_pooling, write_wordpiece
from ..helpers.paths import ROOT
from .__main__ import CONTROLS as ALL
from .judging import FALSE_ALARM, PASSED, format_table, judge_control
from .limits import format_limits, measure_limits

TABLE = ROOT / "build" / "smallest-faults.md"
CONTROLS = {"GPT-2": 4, "BERT": 2, "Transformer": 3}
TRIED = {
    "GPT-2": ("fp32", "fp16", "int8", "int4", "fp32-kv8", "int8-kv8"),
    "BERT": ("fp32", "fp16", "int8", "int4"),
    "Transformer": ("fp32", "fp16", "int8", "int4"),
}


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


def export_sentences(folder: Path, precision: list[str], **options: Any) -> Ground:
    """Return the bundle of a tiny BERT that gives vectors of as many texts as a mean takes."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64}
    tiny_bert(folder / "bert", "BertModel", **sizes)
    write_wordpiece(folder / "bert")
    texts = "".join(f"hello {word}, it is {word}\n" for word in WORDPIECES[-20:])
    (folder / "bert" / "prompts.txt").write_text(texts, encoding="utf-8")
    if "outputs" not in options:
        write_mean_pooling(folder / "bert")
    export(folder / "bert", folder / "bundle", precision=precision, verify=False, **options)
    return Ground(folder / "bundle", folder / "copy")


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """An encoder whose vector is that of a pooler."""
    folder = tmp_path_factory.mktemp("sentences")
    targets = ["cpu", "portable"]
    return export_sentences(
        folder, ["fp32", "fp16", "int8", "int4"], target=targets, outputs=["pooler_output"]
    )


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """An encoder whose vectors find texts."""
    return export_sentences(tmp_path_factory.mktemp("embedder"), ["int8"], target=["cpu"])


def list_tried(
    judged: Callable[[str], Judged], sentences: Ground, embedder: Ground, marian: Ground, pictures: Ground
) -> list[tuple[Ground, Artifact]]:
    """Return a graph of every kind and precision, with its bundle."""
    tried = []
    for family in CONTROLS:
        ground = judged(family).ground
        artifacts = [a for a in ground.bundle.manifest.artifacts if a.precision in TRIED[family]]
        tried += [(ground, a) for a in {(a.graph, a.precision): a for a in artifacts}.values()]
    tried += [(sentences, a) for a in {a.precision: a for a in sentences.bundle.manifest.artifacts}.values()]
    tried += [(embedder, a) for a in embedder.bundle.manifest.artifacts]
    tried += [(marian, a) for a in marian.bundle.manifest.artifacts if a.dialect == "inplace"]
    denoisers = [a for a in pictures.bundle.manifest.artifacts if a.graph == "unet"]
    return tried + [(pictures, a) for a in {a.precision: a for a in denoisers}.values()]


def test_each_limit_follows_from_rounding_and_catches_what_is_three_times_that(
    judged: Callable[[str], Judged],
    sentences: Ground,
    embedder: Ground,
    marian_bundle: Path,
    picture_bundle: Path,
    tmp_path: Path,
) -> None:
    marian = Ground(marian_bundle, tmp_path / "marian")
    pictures = Ground(picture_bundle, tmp_path / "pictures")
    limits = [
        limit
        for ground, artifact in list_tried(judged, sentences, embedder, marian, pictures)
        for limit in measure_limits(ground, artifact)
    ]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(format_limits(limits), encoding="utf-8")
    of_labels = {"probability_error", "label_changes"}  # of classifiers: see test_labels.py
    assert {limit.metric for limit in limits} == {*CAPPED, "score_error"} - of_labels
    assert {limit.artifact.rpartition(".")[2] for limit in limits} == PRECISIONS.keys() - {
        "int4-kv8",
        "fp16-kv8",
        *(name for name, kind in PRECISIONS.items() if kind.quantizes_in_half or kind.engine),
    }
    loose = [(one.artifact, one.name, why) for one in limits for why in one.list_faults()]
    assert loose == []


def test_limits_twenty_times_as_loose_are_told(
    judged: Callable[[str], Judged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail, by each limit."""
    ground = judged("GPT-2").ground
    honest = ground.limits
    monkeypatch.setattr(
        ground, "limits", lambda precision: {name: 20 * x for name, x in honest(precision).items()}
    )
    limits = measure_limits(ground, ground.bundle.manifest.artifact("decoder.ort.int8"))
    told = {limit.name for limit in limits if list(limit.list_faults())}
    assert told == {limit.name for limit in limits}
