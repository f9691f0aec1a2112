"""`planforge run` and `fit-head` of encoders, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers

from planforge.runtime import TextEncoder

from ..helpers.cli import error_line, planforge
from ..helpers.models import tiny_bert, write_mean_pooling, write_wordpiece


def lines(*arguments: str | Path, stdin: str = "") -> list[Any]:
    done = planforge("run", *arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_export_and_run_give_sentence_transformers_vector(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_wordpiece(folder)
    tiny_bert(folder)
    write_mean_pooling(folder)
    done = planforge("export", folder, "-o", tmp_path / "B", "--target", "cpu", "--precision", "fp32")
    assert done.returncode == 0, done.stderr
    assert "passed: cosine of vectors" in done.stdout
    (line,) = lines(tmp_path / "B", "some text")
    want = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode("some text")
    np.testing.assert_allclose(line["embedding"], want, atol=1e-6)
    assert line["dropped"] == 0


def test_embeddings_as_text_and_from_stdin(minilm_bundle: Path) -> None:
    done = planforge("run", minilm_bundle, stdin="one text\n\nanother text\n")
    first, blank, last = done.stdout.splitlines()
    assert blank == ""
    rows = [list(map(float, line.split())) for line in (first, last)]
    with TextEncoder.load(minilm_bundle) as encoder:
        np.testing.assert_allclose(rows, encoder.embed(["one text", "another text"]), atol=1e-5)


def test_a_mark_of_utf_8_is_no_text_and_utf_16_is_named(minilm_bundle: Path, tmp_path: Path) -> None:
    """PowerShell and Notepad write both."""
    marked = planforge("run", minilm_bundle, stdin="\ufeffone text\n")
    assert marked.stdout == planforge("run", minilm_bundle, stdin="one text\n").stdout != ""
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one text"}\n', encoding="utf-8-sig")
    assert planforge("run", minilm_bundle, "--input", file).stdout == marked.stdout
    file.write_text('{"text": "one text"}\n', encoding="utf-16")
    line = error_line("run", minilm_bundle, "--input", file, code=1)
    assert f"{file} is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8" in line


def test_every_task_prints_json_with_the_fields_of_its_result(head_bundle: Callable[[str], Path]) -> None:
    (one,) = lines(head_bundle("classifier"), "a text", "--pair", "another")
    with TextEncoder.load(head_bundle("classifier")) as model:
        want = model.classify("a text", "another")
    assert (one["label"], one["score"], one["probabilities"]) == (want.label, want.score, want.probabilities)
    ranked = lines(head_bundle("ranker"), "a b", "c d", "e f", "--query", "what", "--top-k", "2")
    assert [set(r) for r in ranked] == [{"index", "text", "score", "dropped"}] * 2
    assert ranked[0]["score"] >= ranked[1]["score"]
    (tags,) = lines(head_bundle("tagger"), "a b c")
    assert {"entities", "dropped"} == set(tags)
    (answers,) = lines(head_bundle("reader"), "it is a b c", "--question", "what?", "--n-best", "2")
    assert len(answers["answers"]) == 2
    assert set(answers["answers"][0]) == {"text", "score", "start", "end"}
    (filled,) = lines(head_bundle("pretrained"), "a [MASK] c", "--top-k", "4")
    assert [len(mask) for mask in filled["masks"]] == [4]
    (follows,) = lines(head_bundle("pretrained"), "a b", "--pair", "c d")
    assert 0 < follows["probability"] < 1


def test_json_lines_hold_pairs(head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"question": "what?", "context": "it is a b"}\n{"question": "a", "context": "b c"}\n')
    assert len(lines(head_bundle("reader"), "--input", pairs)) == 2
    stdin = '{"text": "a"}\n{"text": "a", "pair": "b"}\n'
    alone, paired = lines(head_bundle("classifier"), "--input", "-", stdin=stdin)
    assert alone["probabilities"] != paired["probabilities"]
    for wrong in ('{"txt": "a"}', '{"text": "a", "pair": 5}', '{"text": "a", "context": "b"}', "[" * 10000):
        pairs.write_text(wrong + "\n")
        assert "line 1" in error_line("run", head_bundle("classifier"), "--input", pairs, code=1)


def test_pairs_of_several_queries_keep_their_order(
    head_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    texts = ["a b", "c d", "e f", "g 1", "2 3"]
    lines_of = [json.dumps({"query": f"what {i}", "text": text}) for i, text in enumerate(texts)]
    pairs.write_text("\n".join(lines_of))
    found = lines(head_bundle("ranker"), "--task", "rank", "--input", pairs)
    assert [one["text"] for one in found] == texts
    assert "needs --query" in error_line(
        "run", head_bundle("ranker"), "--task", "rank", "--input", pairs, "--top-k", "1"
    )


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("classifier", ["a", "--task", "answer"], "answer needs the head question_answering; this bundle's"),
        ("classifier", ["a", "--task", "sing"], "task 'sing' is not one of"),
        ("classifier", ["a", "--task", "generate"], "is an encoder"),
        ("classifier", ["a", "--temperature", "1"], "--temperature cannot be used with the task classify"),
        ("classifier", ["a", "--query", "b"], "rank needs a cross-encoder with a single score"),
        ("classifier", ["a", "--task", "rank"], "rank needs --query TEXT"),
        ("classifier", ["a", "--pair", "b", "--question", "c"], "give only one of --pair, --question"),
        ("reader", ["a"], "answer needs --question TEXT, or pairs"),
        ("tagger", ["a", "--pair", "b"], "--pair cannot be used with the task tag"),
        ("pretrained", ["no mask"], "has no [MASK] to fill"),
        ("tagger", ["a", "--truncation", "middle"], "error: --truncation='middle' is not one of"),
        ("tagger", ["a b " * 200, "--stride", "900"], "texts[0]: --stride=900 must be from 0 to"),
        ("tagger", ["a", "--batch-size", "64"], "error: --batch-size=64 is more than the 32 rows"),
        ("tagger", ["a", "--batch-size", "64"], "export it again for more (planforge export --max-batch)"),
    ],
)
def test_wrong_use_is_one_line(
    head_bundle: Callable[[str], Path], name: str, arguments: list[str], words: str
) -> None:
    assert words in error_line("run", head_bundle(name), *arguments)


def test_a_generator_has_no_encoder_tasks(demo_bundle: Path) -> None:
    assert "generates text" in error_line("run", demo_bundle, "a", "--task", "embed")
    assert "--pooling cannot be used" in error_line("run", demo_bundle, "a", "--pooling", "cls")


def test_texts_that_are_empty_odd_or_huge(minilm_bundle: Path, tmp_path: Path) -> None:
    huge = tmp_path / "huge.jsonl"
    texts = ["", "!!! ??? ...", "\u200b\u200d", "long words " * 100_000]
    huge.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    done = planforge("run", minilm_bundle, "--input", huge, "--json")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [bool(r["dropped"]) for r in results] == [False, False, False, True]
    assert "dropped (truncation='head'); truncation='windows' keeps all" in done.stderr


def test_fit_head_prints_accuracy_and_a_confusion_matrix(minilm_bundle: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    good = ["great", "lovely", "superb", "wonderful"]
    bad = ["awful", "bad", "boring", "dreadful"]
    rows = [
        f"a {w} {n}\t{label}\n"
        for label, ws in (("good", good), ("bad", bad))
        for w in ws
        for n in ("film", "play", "book", "song", "show")
    ]
    table.write_text("".join(rows))
    done = planforge("fit-head", minilm_bundle, table, "-o", tmp_path / "B2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["accuracy"] >= 0.8 and result["labels"] == ["bad", "good"]
    assert sum(map(sum, result["confusion"])) == 10
    assert Path(result["picture"]).is_file()
    done = planforge("fit-head", minilm_bundle, table, "-o", tmp_path / "B2", "--force")
    assert "true \\ predicted" in done.stdout and "accuracy" in done.stdout
    (one,) = lines(tmp_path / "B2", "a lovely evening")
    assert one["label"] == "good"
    table.write_text("a\tgood\nb\tgood\nbroken\n")
    line = error_line("fit-head", minilm_bundle, table, "-o", tmp_path / "B3", code=1)
    assert "line 3: the record has 1 fields" in line
