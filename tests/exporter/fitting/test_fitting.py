"""fit-head: a classifier on a frozen encoder, held against scikit-learn and against PyTorch."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pandas
import pytest
import sentence_transformers
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split

from benchmarks.movie_reviews import movie_reviews
from planforge.exporter import export, fit_head, verify
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.fitting.labelled_texts import read_table
from planforge.exporter.fitting.regression import FOLDS, STRENGTHS
from planforge.exporter.verification import verify as verify_module
from planforge.exporter.verification.golden_answers import GOLDEN
from planforge.exporter.verification.structure import READING
from planforge.runtime import TextEncoder
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import DataError, InputError

from ...helpers.faults import change_weight, perturbed
from ...helpers.graphs import replace_graph
from ...helpers.models import tiny_bert, write_wordpiece
from ...helpers.verdicts import keep_answers

WORDS = ["cat", "dog", "sun", "rain", "tree", "bread", "stone", "river"]


def sentences(count: int, classes: int) -> list[tuple[str, str]]:
    """Random letters, whose class is the number of their b's: something that features can tell."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        kind = int(random.integers(classes))
        letters = ["b"] * (4 * kind) + list(random.choice(list("acdefg"), 10))
        random.shuffle(letters)
        rows.append((" ".join(letters), f"class {kind}"))
    return rows


def write_rows(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def encoder_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT without heads, with all hidden states, verified."""
    folder = tmp_path_factory.mktemp("fitting")
    tiny_bert(folder / "checkpoint", "BertModel", num_hidden_layers=4)
    write_wordpiece(folder / "checkpoint")
    options: dict[str, Any] = {"target": ["cpu"], "outputs": ["hidden_states"], "verify": "quick"}
    return export(folder / "checkpoint", folder / "bundle", max_length=40, **options).bundle


@pytest.mark.parametrize(
    ("classes", "features"),
    [
        (2, "embedding"),
        (2, "embeddings"),
        (3, "embedding"),
        (3, "concat_last_four"),
        (3, "sum_all"),
        (3, "cls"),
    ],
)
def test_the_graph_and_scikit_learn_agree(
    encoder_bundle: Path, tmp_path: Path, classes: int, features: str
) -> None:
    rows = sentences(160, classes)
    table = write_rows(tmp_path / "table.tsv", rows)
    result = fit_head(encoder_bundle, table, tmp_path / "fitted", features=features)
    texts = [text for text, _ in rows]
    with TextEncoder.load(encoder_bundle) as encoder:
        if features == "embedding":
            matrix = encoder.embed(texts)
        else:
            options: dict[str, Any] = {"layers": "last" if features == "cls" else features}
            found = encoder.features(texts, **options)
            matrix = np.stack([f.vectors[0] if features == "cls" else f.vectors.mean(0) for f in found])
    labels = [label for _, label in rows]
    train, test = train_test_split(np.arange(160), test_size=0.25, random_state=0, stratify=labels)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    search = GridSearchCV(LogisticRegression(max_iter=2000), {"C": STRENGTHS}, cv=folds)
    search.fit(matrix[train], np.array(labels)[train])
    held_out = [texts[i] for i in test]
    with TextEncoder.load(result.bundle) as fitted:
        got = fitted.classify(held_out)
    assert [g.label for g in got] == search.predict(matrix[test]).tolist()
    shares = np.array([[g.probabilities[label] for label in result.labels] for g in got])
    np.testing.assert_allclose(shares, search.predict_proba(matrix[test]), atol=1e-4)
    true = [labels[i] for i in test]
    assert result.accuracy == pytest.approx(np.mean([g.label == t for g, t in zip(got, true, strict=True)]))
    expected = confusion_matrix(true, search.predict(matrix[test]), labels=result.labels)
    np.testing.assert_array_equal(np.array(result.confusion), expected)
    assert len(set(g.label for g in got)) == classes
    assert result.accuracy > 1.5 / classes  # the features say something


def test_the_head_is_one_gemm_in_every_graph_and_all_of_it_is_verified(
    encoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_rows(tmp_path / "table.tsv", sentences(120, 2))
    before = {p: p.read_bytes() for p in encoder_bundle.rglob("*") if p.is_file()}
    fitted = fit_head(encoder_bundle, table, tmp_path / "deep" / "fitted", features="concat_last_four").bundle
    assert {p: p.read_bytes() for p in encoder_bundle.rglob("*") if p.is_file()} == before
    manifest = Bundle.open(fitted).manifest
    for artifact in manifest.artifacts:
        path = str(fitted / artifact.file)
        onnx.checker.check_model(path, full_check=True)
        graph = onnx.load(path, load_external_data=False).graph
        assert [n.op_type for n in graph.node].count("Gemm") == 1
        assert graph.node[-1].op_type == "Gemm" and graph.node[-1].output[0] == "logits"
        assert artifact.gate["passed"] and artifact.gate["measured"]["logits.mean_kl"] is not None
    checkpoint = encoder_bundle.parent / "checkpoint"
    assert verify(fitted, level="quick").with_pytorch  # the recorded source is found from the new folder too
    report = verify(fitted, source=checkpoint)  # PyTorch's features, scikit-learn's weights
    assert report.passed, [(c.case, c.failures) for c in report.comparisons]
    assert report.with_pytorch
    ran = [c for c in report.comparisons if c.backend == "ort-cpu"]
    assert ran and all("logits.max_error" in c.metrics for c in ran)
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    report = verify(fitted)
    assert report.passed and not report.with_pytorch
    listed = set(manifest.files) | {"manifest.json"}
    assert {p.relative_to(fitted).as_posix() for p in fitted.rglob("*") if p.is_file()} == listed
    assert next((fitted / "checks").glob("confusion-*.png")).read_bytes().startswith(b"\x89PNG")


def test_faults_in_and_below_a_head_are_named(encoder_bundle: Path, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "table.tsv", sentences(160, 2))
    bundle = fit_head(encoder_bundle, table, tmp_path / "fitted", features="sum_all").bundle
    artifact = Bundle.open(bundle).manifest.artifacts[0].id
    assert verify(bundle, only=[artifact], level="quick").passed
    replace_graph(bundle, artifact, perturbed("layers.1.intermediate"))
    (mismatch,) = verify(bundle, only=[artifact], level="quick").mismatches
    assert mismatch.module == "layers.1.intermediate"
    bundle = fit_head(encoder_bundle, table, tmp_path / "again", features="sum_all").bundle
    replace_graph(bundle, artifact, head_off)
    (failed,) = [
        c for c in verify(bundle, only=[artifact], level="quick").comparisons if c.backend == READING
    ]
    assert "weight 'head.weight' of node 'head_gemm" in failed.failures[0]


def test_answers_of_another_head_are_not_taken(encoder_bundle: Path, tmp_path: Path) -> None:
    """The model, the questions and the labels are the same, so the head alone tells the answers apart."""
    rows = sentences(120, 2)
    others = {"class 0": "class 1", "class 1": "class 0"}
    tables = {"first": rows, "second": [(text, others[label]) for text, label in rows]}
    with keep_answers(tmp_path / "cache"):
        for name, table in tables.items():
            fitted = fit_head(encoder_bundle, write_rows(tmp_path / f"{name}.tsv", table), tmp_path / name)
            report = verify(fitted.bundle, source=encoder_bundle.parent / "checkpoint", level="quick")
            assert report.passed and not report.answers_kept


def head_off(model: ir.Model) -> None:
    change_weight(model.graph.initializers["head.weight"], lambda weight: weight * 1.001)


def test_a_head_that_is_not_scikit_learns_is_noticed(encoder_bundle: Path, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "table.tsv", sentences(120, 2))
    fitted = fit_head(encoder_bundle, table, tmp_path / "fitted").bundle
    head = next((fitted / "checks").glob("head-*.npz"))
    with np.load(head) as file:
        weight = file["weight"]
        bias = file["bias"]
    np.savez(head, weight=weight * 1.01, bias=bias)
    manifest = json.loads((fitted / "manifest.json").read_text())
    from planforge.runtime.bundle.bundle import compute_sha256

    name = head.relative_to(fitted).as_posix()
    manifest["files"][name] = {"sha256": compute_sha256(head), "bytes": head.stat().st_size}
    (fitted / "manifest.json").write_text(json.dumps(manifest))
    report = verify(fitted, source=encoder_bundle.parent / "checkpoint")
    assert not report.passed
    assert all(
        f.startswith(("logits", "weight 'head.weight'"))
        for c in report.comparisons
        if c.artifact != GOLDEN
        for f in c.failures
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a b\tx\nc d\tx\n", "only the label 'x'"),
        ("", "is empty; its first line must name the columns"),
        ("text\tlabel\n", "has no rows"),
        ("a\tx\nb\ty\tz\n", "line 2: the record has 3 fields, the file's columns are 2"),
        ("a\tx\n\nb\n", "line 3: the record has 1 fields"),
        ("a\tx\n\ty\n", "line 2 has an empty text"),
        ("a\tx\nb\t \n", "line 2 has an empty label"),
        ("id\tlabel\ttext\n1\tx\n", "line 2: the record has 2 fields, the file's columns are 3"),
    ],
)
def test_a_broken_table_names_the_line(
    encoder_bundle: Path, tmp_path: Path, content: str, words: str
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text(content)
    with pytest.raises(InputError, match=words):
        fit_head(encoder_bundle, table, tmp_path / "fitted")
    assert not (tmp_path / "fitted").exists()


def test_tables_may_name_their_columns_and_come_from_windows(tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_bytes('\ufeffid\tlabel\ttext\r\n1\tx\ta \u2028b\r\n2\ty\t"c\r\n'.encode())
    rows = read_table(table)
    assert (rows.texts, rows.labels, rows.lines) == (("a \u2028b", '"c'), ("x", "y"), (2, 3))
    table.write_bytes("a\tx".encode("utf-16"))
    with pytest.raises(InputError, match="is UTF-16, not UTF-8"):
        read_table(table)
    table.write_bytes(b"a\tx\n\xffb\ty")
    with pytest.raises(InputError, match="line 2: text is not UTF-8: byte 1 is 0xff"):
        read_table(table)


def test_tables_are_in_the_formats_of_batch(tmp_path: Path) -> None:
    """As pandas writes them, a mark of UTF-8 and quotes among it; labels may be numbers."""
    texts = ["a, b", 'c "q"\nd', "\u00e9"]
    frame = pandas.DataFrame({"id": [1, 2, 3], "label": [0, 1, 0], "text": texts})
    frame.to_csv(tmp_path / "a.csv", index=False, quoting=csv.QUOTE_ALL, encoding="utf-8-sig")
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        rows = read_table(tmp_path / name)
        assert (rows.texts, rows.labels, rows.lines) == (tuple(texts), ("0", "1", "0"), (1, 2, 3)), name


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "a\tx\n", "a text file has a single column, not text, label; use .jsonl, .csv or .tsv"),
        ("a.xlsx", "", r"not one of the supported kinds: \.txt, .*\.parquet"),
        ("a.csv", "a,b\n1,2\n", "has no columns 'text'; it has: a, b"),
        ("a.csv", "text,label\na,x\nb\n", "row 2: the record has 1 fields, the file's columns are 2"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text": 3}\n', "line 2: text must be a text, not int 3"),
        ("a.jsonl", '{"text": "a", "label": 1.5}\n', "line 1: label must be a text, not float 1.5"),
        ("a.parquet", "no", "not a readable Parquet file"),
    ],
)
def test_a_table_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=words):
        read_table(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": "first"}, "features='first' is not one of embedding, cls, embeddings"),
        ({"test_share": 1.5}, "test_share=1.5 must be"),
        ({"test_share": 0.01}, "is less than one row per class"),
        ({"seed": -1}, "seed=-1 must be"),
    ],
)
def test_choices_that_cannot_be(
    encoder_bundle: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    table = write_rows(tmp_path / "table.tsv", sentences(60, 2))
    with pytest.raises(InputError, match=words):
        fit_head(encoder_bundle, table, tmp_path / "fitted", **options)


def test_bundles_that_no_head_fits_on(encoder_bundle: Path, demo_bundle: Path, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "table.tsv", sentences(60, 2))
    with pytest.raises(InputError, match="fit-head needs an encoder"):
        fit_head(demo_bundle, table, tmp_path / "fitted")
    with pytest.raises(InputError, match="written over"):
        fit_head(encoder_bundle, table, encoder_bundle, force=True)
    few = write_rows(tmp_path / "few.tsv", [("a", "x"), ("b", "y"), *sentences(20, 1)])
    with pytest.raises(InputError, match="the class 'x' has 1 row; at least 8 are needed"):
        fit_head(encoder_bundle, few, tmp_path / "fitted")
    words = tmp_path / "words.tsv"
    words.write_text("text\tlabels\nEva lives\tname other\n", encoding="utf-8")
    with pytest.raises(DataError, match="columns text and labels, which are those of words: add --per-token"):
        fit_head(encoder_bundle, words, tmp_path / "fitted")
    fitted = fit_head(encoder_bundle, table, tmp_path / "fitted").bundle
    with pytest.raises(InputError, match="already has a sequence_classification head"):
        fit_head(fitted, table, tmp_path / "again")


@pytest.mark.slow
def test_movie_reviews_reach_what_sentence_transformers_vectors_do(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    """A twelfth of the 10,605 sentences; fit_head itself checks that the graph agrees with scikit-learn."""
    everything = movie_reviews(tmp_path)
    assert len(everything) == 10605
    rows = everything[::12]
    result = fit_head(minilm_bundle, write_rows(tmp_path / "twelfth.tsv", rows), tmp_path / "fitted")
    assert result.accuracy >= 0.7  # of all of them 0.77: benchmarks/classify.py
    model = sentence_transformers.SentenceTransformer(str(resolve_source("bert-demo").folder), device="cpu")
    matrix = model.encode([text for text, _ in rows], batch_size=32, show_progress_bar=False)
    labels = np.array([label for _, label in rows])
    train, test = train_test_split(np.arange(len(rows)), test_size=0.25, random_state=0, stratify=labels)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    search = GridSearchCV(LogisticRegression(max_iter=2000), {"C": STRENGTHS}, cv=folds)
    search.fit(matrix[train], labels[train])
    assert abs(result.accuracy - search.score(matrix[test], labels[test])) <= 0.005
