"""A classifier whose labels vary, files of texts for it, and evidence that is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from planforge.exporter import export
from planforge.runtime.apps.proof.evidence import Proof

from ....helpers.models import tiny_bert, write_wordpiece

Once: TypeAlias = Any
WORDS = ["a", "b", "c", "d", "e", "f", "g"]
LABELS = ("LABEL_0", "LABEL_1", "LABEL_2")


def draw_texts(count: int) -> list[str]:
    random = np.random.default_rng(7)
    return [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(count)]


def write_table(path: Path, texts: list[str], labels: list[str], **columns: list[str]) -> Path:
    rows = zip(texts, labels, *columns.values(), strict=True)
    lines = ["\t".join(("text", "label", *columns)), *("\t".join(row) for row in rows)]
    return write_lines(path, lines)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_proof(truth: Sequence[int], answers: Sequence[int], **changes: Any) -> Proof:
    """Evidence of a classifier that gave these labels."""
    times = {"p50": 1.0, "p99": 2.0}
    fields: dict[str, Any] = {
        **{
            "artifact": "encoder.ort.fp32",
            "file": "onnx/a.onnx",
            "backend": "ort-cpu",
            "machine": {"cpu": "c"},
        },
        **{"tools": {}, "date": "2026-01-01", "data": {"name": "e.tsv", "sha256": "1"}, "task": "classify"},
        **{"latency_ms": times, "peak_rss_mb": None, "labels": LABELS, "truth": tuple(truth)},
    }
    return Proof(**{**fields, "answers": tuple(answers), **changes})


def make_scores(losses: Sequence[float], **changes: Any) -> Proof:
    """Evidence of a generator that gave these losses to texts of 10 tokens."""
    fields: dict[str, Any] = {"task": "score", "labels": (), "tokens": (10,) * len(losses)}
    return make_proof((), (), losses=tuple(losses), **{**fields, **changes})


def give_logits(checkpoint: Path, texts: list[str]) -> torch.Tensor:
    """What transformers answers, a text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])


@pytest.fixture(scope="session")
def classifier(once: Callable[[str], Once]) -> Path:
    """A tiny BERT, in fp32 and fp16, verified, whose classes are balanced. Don't change it."""
    with once("balanced-classifier") as (folder, first):
        if first:
            checkpoint = folder / "checkpoint"
            tiny_bert(checkpoint, "BertForSequenceClassification", num_labels=3, num_hidden_layers=1)
            write_wordpiece(checkpoint)
            middle = give_logits(checkpoint, draw_texts(60)).mean(0)
            model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
            with torch.no_grad():
                model.classifier.bias -= middle
                model.classifier.weight *= 10
                model.classifier.bias *= 10
            model.save_pretrained(checkpoint)
            export(checkpoint, folder / "bundle", target=["cpu", "portable"])
    return Path(folder / "bundle")


@pytest.fixture(scope="session")
def expected(classifier: Path) -> Callable[[list[str]], list[int]]:
    """The numbers of the labels that transformers gives."""
    return lambda texts: give_logits(classifier.parent / "checkpoint", texts).argmax(-1).tolist()
