"""fit-head for tags: a head on each token, held against scikit-learn and against PyTorch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from sklearn.linear_model import LogisticRegression

from planforge.exporter import export, fit_head, verify
from planforge.exporter.fitting.fitting import FitResult
from planforge.exporter.verification.structure import READING
from planforge.exporter.verification.verify import find_recorded_source
from planforge.runtime import TextEncoder
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import DataError, InputError

from ...helpers.faults import change_weight
from ...helpers.graphs import replace_graph
from ...helpers.models import tiny_bert, write_wordpiece

LETTERS = list("abcdefgh")
TEXTS = 200
TAGS = {"a": "B-X", "b": "B-X", "c": "I-X", "d": "B-Y"}  # of single letters; others are outside


def make_rows(count: int) -> list[tuple[str, str]]:
    """Random letters with a tag each, which the letter says."""
    random = np.random.default_rng(0)
    texts = [random.choice(LETTERS, random.integers(3, 12)).tolist() for _ in range(count)]
    return [(" ".join(words), " ".join(TAGS.get(word, "O") for word in words)) for words in texts]


def write_table(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("text\tlabels\n" + "".join(f"{text}\t{tags}\n" for text, tags in rows), encoding="utf-8")
    return path


def read_spans(text: str, tags: list[str]) -> list[tuple[str, int, int]]:
    """The label, start and end of each entity: "I-" goes on with one of its kind, else it begins one."""
    spans: list[tuple[str, int, int]] = []
    going = ""
    for word, tag in zip(re.finditer(r"\S+", text), tags, strict=True):
        prefix, _, label = tag.partition("-")
        if prefix == "I" and label == going:
            spans[-1] = (label, spans[-1][1], word.end())
        elif tag != "O":
            spans.append((label, word.start(), word.end()))
        going = label
    return spans


@pytest.fixture(scope="module")
def encoder_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tagging")
    tiny_bert(folder / "checkpoint", "BertModel", num_hidden_layers=1)
    write_wordpiece(folder / "checkpoint")
    return export(
        folder / "checkpoint", folder / "bundle", target="cpu", max_length=40, verify="quick"
    ).bundle


@pytest.fixture(scope="module")
def fitted(encoder_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    folder = tmp_path_factory.mktemp("tagged")
    return fit_head(
        encoder_bundle, write_table(folder / "t.tsv", make_rows(TEXTS)), folder / "b", per_token=True
    )


def test_tags_are_those_of_scikit_learn(encoder_bundle: Path, fitted: FitResult) -> None:
    """The head is a logistic regression of each word's state, with the C that was chosen."""
    rows = make_rows(TEXTS)
    with TextEncoder.load(encoder_bundle) as encoder:
        states = [encoder.features(text, layers="last").vectors[1:-1] for text, _ in rows]
    assert [len(one) for one in states] == [len(text.split()) for text, _ in rows]
    lines = re.search(
        r'"held_out_lines": \[(.*?)\]', next(fitted.bundle.glob("checks/fit-*.json")).read_text()
    )
    assert lines is not None
    held_out = {int(line) - 2 for line in lines[1].split(", ")}  # the first line names the columns
    kept = [number for number in range(TEXTS) if number not in held_out]
    tags = [tag for number in kept for tag in rows[number][1].split()]
    model = LogisticRegression(max_iter=2000, C=fitted.C).fit(np.concatenate([states[n] for n in kept]), tags)
    assert fitted.labels == tuple(model.classes_)
    assert fitted.training == len(tags)
    right = total = 0
    with TextEncoder.load(fitted.bundle) as tagger:
        for number in sorted(held_out):
            text, wanted = rows[number]
            predicted = model.predict(states[number]).tolist()
            right += sum(tag == own for tag, own in zip(wanted.split(), predicted, strict=True))
            total += len(predicted)
            spans = [(entity.label, entity.start, entity.end) for entity in tagger.tag(text).entities]
            assert spans == read_spans(text, predicted)
    assert fitted.accuracy == pytest.approx(right / total)
    assert sum(map(sum, fitted.confusion)) == total
    assert fitted.accuracy > 0.75  # half of the letters are outside


def test_all_graphs_are_verified_with_the_head(fitted: FitResult) -> None:
    for artifact in Bundle.open(fitted.bundle).manifest.artifacts:
        assert artifact.gate["passed"] and artifact.gate["measured"]["logits.max_error"] is not None
    report = verify(fitted.bundle, level="quick")
    assert report.with_pytorch and report.list_failures() == []


def test_a_fault_in_the_head_is_refused_and_named(fitted: FitResult, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fitted.bundle, tmp_path / "bundle"))
    artifact = Bundle.open(folder).manifest.artifacts[0]

    def plant(model: ir.Model) -> None:
        change_weight(model.graph.initializers["head.weight"], lambda weight: 1.05 * weight)

    replace_graph(folder, artifact.id, plant)
    report = verify(folder, source=fitted_source(fitted), level="quick", only=[artifact.id])
    read = [failure for c in report.comparisons if c.backend == READING for failure in c.failures]
    assert any("head.weight" in failure for failure in read)


def fitted_source(fitted: FitResult) -> Path:
    """The checkpoint, which the bundle records by a path of its own."""
    source = find_recorded_source(Bundle.open(fitted.bundle))
    assert source is not None
    return source.folder


def test_wrong_tables_and_choices_are_one_line(encoder_bundle: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.tsv", [("a b c", "O O")])
    with pytest.raises(DataError, match=r"t\.tsv, line 2 has 3 words and 2 labels; each word has one"):
        fit_head(encoder_bundle, table, tmp_path / "new", per_token=True)
    with pytest.raises(DataError, match="has 1 label; a tagger needs two classes"):
        fit_head(encoder_bundle, write_table(table, [("a b", "O O")]), tmp_path / "new", per_token=True)
    with pytest.raises(InputError, match="features='cls' is not one of embeddings"):
        fit_head(encoder_bundle, table, tmp_path / "new", per_token=True, features="cls")
    few = write_table(tmp_path / "few.tsv", [("a e a e", "B-X O B-X O")] * 5)
    with pytest.raises(InputError, match="there are 5 texts; a tagger needs at least 10"):
        fit_head(encoder_bundle, few, tmp_path / "new", per_token=True)
    assert not (tmp_path / "new").exists()
