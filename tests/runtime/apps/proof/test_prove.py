"""`prove` measures what it says, compared with transformers and scikit-learn; no test looks at times."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from transformers import GPT2LMHeadModel

from planforge.exporter.checkpoints.source import resolve_source
from planforge.runtime import TextEncoder, TextGenerator
from planforge.runtime.apps.diagnostics.child import Child
from planforge.runtime.apps.proof import prove as prove_module
from planforge.runtime.apps.proof.evidence import Proof
from planforge.runtime.apps.proof.prove import ITSELF, prove
from planforge.runtime.errors import DataError, InputError

from ....helpers.machines import Machine
from .conftest import LABELS, draw_texts, write_lines, write_table

VERSES = [
    "In the beginning God created the heaven and the earth.",
    "And it came to pass in those days, that he went out into the mountain.",
    "Behold, the king said unto his servants, Come hither.",
    "O my God",
    "the the the the",
]


def test_a_classifier_is_measured_as_transformers_and_scikit_learn_do(
    classifier: Path, expected: Callable[[list[str]], list[int]], tmp_path: Path
) -> None:
    """Labels of another text, or in another order, or an F1 of one class, are other numbers."""
    texts = draw_texts(130)  # more than a process is asked for at one time
    answers = expected(texts)
    truth = [answer if number % 3 else (answer + 1) % 3 for number, answer in enumerate(answers)]
    assert len(set(answers)) > 1
    table = write_table(tmp_path / "eval.tsv", texts, [LABELS[number] for number in truth])
    proof = prove(classifier, table, threads=1)
    assert proof.answers == tuple(answers)
    assert proof.truth == tuple(truth)
    assert proof.intervals["accuracy"].value == pytest.approx(accuracy_score(truth, answers))
    assert proof.intervals["f1"].value == pytest.approx(f1_score(truth, answers, average="macro"))
    assert (proof.compared_with, proof.count_flips()) == (ITSELF, None)
    assert proof.artifact == "encoder.ort.fp32" and proof.backend == "ort-cpu"
    assert proof.file in [
        artifact.file for artifact in TextEncoder.load(classifier).bundle.manifest.artifacts
    ]
    assert 0 < proof.latency_ms["p50"] <= proof.latency_ms["p99"]
    assert proof.peak_rss_mb is not None and proof.peak_rss_mb > 20
    assert proof.joules is None and not proof.layers
    assert Proof.from_json(json.loads(json.dumps(proof.to_json())), "a file") == proof


def test_flips_are_counted_against_the_column_of_pytorchs_labels(
    classifier: Path, expected: Callable[[list[str]], list[int]], tmp_path: Path
) -> None:
    texts = draw_texts(20)
    answers = expected(texts)
    pytorch = [LABELS[(answer + (number < 3)) % 3] for number, answer in enumerate(answers)]
    table = write_table(tmp_path / "e.tsv", texts, [LABELS[0]] * 20, pytorch=pytorch)
    proof = prove(classifier, table)
    assert proof.count_flips() == 3
    assert proof.compared_with == "the column pytorch of e.tsv"
    assert proof.intervals["flips"].value == pytest.approx(3 / 20)


def test_without_that_column_fp32_is_the_reference(
    classifier: Path,
    expected: Callable[[list[str]], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = draw_texts(20)
    table = write_table(tmp_path / "e.tsv", texts, [LABELS[0]] * 20)
    proof = prove(classifier, table, precision="fp16")
    assert proof.artifact == "encoder.portable.fp16"
    assert proof.reference == tuple(expected(texts))
    assert proof.compared_with == "encoder.ort.fp32 on ort-cpu, run here"
    # As a board does, to which a bundle came that was measured before: the graph does not run again.
    first = replace(prove(classifier, table, precision="fp32"), machine={"cpu": "A server"})
    flipped = replace(first, answers=tuple((answer + 1) % 3 for answer in first.answers))
    monkeypatch.setattr(prove_module, "read_whole_evidence", lambda bundle: (flipped,))
    again = prove(classifier, table, precision="fp16")
    assert again.reference == flipped.answers
    assert again.compared_with == "encoder.ort.fp32 on ort-cpu, as measured on A server"
    assert again.count_flips() == sum(a != b for a, b in zip(again.answers, flipped.answers, strict=True)) > 0


def test_what_was_not_compared_with_pytorch_is_no_reference(whole_bundle: Path, tmp_path: Path) -> None:
    proof = prove(whole_bundle, write_lines(tmp_path / "t.txt", VERSES), precision="int8")
    assert proof.compared_with == "nothing: the bundle has no graph in fp32 that equals PyTorch"
    assert not proof.reference_losses


@pytest.mark.parametrize("name", ["t.txt", "t.tsv", "t.jsonl"])
def test_perplexity_is_transformers(demo_bundle: Path, tmp_path: Path, name: str) -> None:
    """Over all tokens of all texts: not the mean of the texts' perplexities, nor one token shifted."""
    lines = [json.dumps({"text": verse}) for verse in VERSES] if name == "t.jsonl" else VERSES
    proof = prove(demo_bundle, write_lines(tmp_path / name, lines), precision="fp32")
    folder = resolve_source("gpt2-demo").folder
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    total = count = 0.0
    with TextGenerator.load(demo_bundle) as generator:
        for verse, loss, tokens in zip(VERSES, proof.losses, proof.tokens, strict=True):
            ids = torch.tensor([generator.encode_prompt(verse)])
            with torch.no_grad():
                want = float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
            assert tokens == ids.shape[1] - 1
            # Of each token's log-probability fp32 may lose 1e-4, by verify's limit.
            assert loss == pytest.approx(want, abs=1e-4 * tokens)
            total += want
            count += tokens
    assert proof.intervals["perplexity"].value == pytest.approx(math.exp(total / count), rel=1e-4)
    assert proof.token_ms is not None and proof.token_ms["p50"] > 0
    assert (proof.task, proof.labels, proof.answers) == ("score", (), ())


def test_energy_is_what_the_power_and_the_time_make(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path, monkeypatch).command("tegrastats", "while :; do echo VDD_IN 5000mW/1mW; done")
    started = time.perf_counter()
    proof = prove(demo_bundle, write_lines(tmp_path / "t.txt", VERSES * 40))
    elapsed = time.perf_counter() - started
    assert proof.joules is not None
    assert proof.joules.mean_watts == 5.0
    assert proof.joules.source == "tegrastats, VDD_IN of the module"
    # Half of the texts take the median or longer, and all of them less than the whole command.
    least = 0.5 * 1e-3 * proof.latency_ms["p50"]
    assert 5.0 * least <= proof.joules.per_text <= 5.0 * elapsed / proof.texts


BAD = [
    ("e.tsv", "a b\tLABEL_0\nc\tLABEL_3\n", r"e\.tsv, line 2: the label 'LABEL_3' is none .*did"),
    ("e.tsv", "text\tlabel\tpytorch\na\tLABEL_0\tyes\n", "e.tsv, line 2: the pytorch 'yes' is none"),
    ("e.tsv", "", "e.tsv is empty"),
    ("e.tsv", "text\tlabel\n", "e.tsv has no rows; prove measures 1 to"),
    ("e.tsv", "text\tlabel\n \tLABEL_0\n", "e.tsv, line 2 has an empty text"),
    ("e.tsv", "text\tsummary\na b\tc\n", "e.tsv, line 1: the label 'summary' is none of the bundle's"),
    ("e.csv", "text,summary\na b,c\n", "e.csv has no columns 'label'; it has: text, summary"),
    ("e.txt", "a\nb\n", "a text file has a single column, not text, label"),
    ("e.jsonl", '{"text": "a", "label": "LABEL_1"}\n{"text": "b"}\n', "line 2: label is missing"),
    ("e.pdf", "", "is not one of the supported kinds"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD)
def test_a_file_that_cannot_be_used_is_named_with_its_line(
    classifier: Path, tmp_path: Path, name: str, content: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "__init__", None)  # nothing runs before
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=words):
        prove(classifier, tmp_path / name)


def test_too_long_texts_are_refused_before_the_others_run(
    classifier: Path, demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = Child.ask

    def note(child: Child, line: str) -> dict[str, Any]:
        asked.append(line)
        return ask(child, line)

    monkeypatch.setattr(Child, "ask", note)
    texts = draw_texts(200)
    texts[150] = "a " * 600
    table = write_table(tmp_path / "e.tsv", texts, [LABELS[0]] * 200)
    with pytest.raises(DataError, match=r"e\.tsv, line 152: the text has \d+ tokens, the model takes \d+"):
        prove(classifier, table)
    assert len(asked) == 2  # to load, and the longest
    verses = write_lines(tmp_path / "t.txt", [*VERSES, "the king " * 300])
    with pytest.raises(DataError, match=r"t\.txt, line 6: the text has \d+ tokens, the model takes 256"):
        prove(demo_bundle, verses)
    with pytest.raises(DataError, match=r"t\.txt, line 2: score needs a text of at least 2 tokens"):
        prove(demo_bundle, write_lines(tmp_path / "t.txt", [VERSES[0], "a"]))


def test_bundles_of_other_tasks(
    marian_bundle: Path,
    minilm_bundle: Path,
    demo_bundle: Path,
    head_bundle: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    table = write_table(tmp_path / "e.tsv", ["a"], ["LABEL_0"])
    for bundle, words in (
        (marian_bundle, "it is for translation"),
        (minilm_bundle, "it embeds texts"),
        (head_bundle("ranker"), "its heads are: sequence_classification"),
        (head_bundle("tagger"), "token_classification"),
    ):
        with pytest.raises(InputError, match=words):
            prove(bundle, table)
    with pytest.raises(InputError, match=r"has a column 'label', and .* generates text"):
        prove(demo_bundle, table)
    with pytest.raises(InputError, match="there is no such file"):
        prove(demo_bundle, tmp_path / "none.tsv")


def test_an_engine_that_dies_is_an_error(classifier: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(classifier, tmp_path / "damaged"))
    for path in (damaged / "onnx").iterdir():
        path.write_bytes(b"0" * path.stat().st_size)
    table = write_table(tmp_path / "e.tsv", ["a"], ["LABEL_0"])
    with pytest.raises(Exception, match="has changed since it was exported") as caught:
        prove(damaged, table)
    assert "sha256" in str(caught.value)


def test_pairs_are_read_as_pairs(classifier: Path, tmp_path: Path) -> None:
    pairs: list[Any] = [("a", "b c"), ("g", "d e f"), ("b b", "a")]
    table = write_table(
        tmp_path / "e.tsv", [a for a, _ in pairs], ["LABEL_0"] * 3, pair=[b for _, b in pairs]
    )
    with TextEncoder.load(classifier) as encoder:
        want = tuple(LABELS.index(result.label) for result in encoder.classify(pairs))
    assert prove(classifier, table).answers == want
