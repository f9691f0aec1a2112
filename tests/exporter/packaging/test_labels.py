"""What a package's labels are held to: transformers' pipeline is right for every kind of classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter.packaging.default_checks import compare_labels
from planforge.runtime.bundle.defaults import EncoderDefaults

from ...helpers.models import random_bert, write_wordpiece

TEXT = "hello world"


@pytest.mark.parametrize(
    ("labels", "problem_type"),
    [
        (1, "regression"),
        (1, "multi_label_classification"),
        (3, "regression"),
        (3, "multi_label_classification"),
        (3, "single_label_classification"),
    ],
)
def test_scores_are_those_of_the_pipeline(labels: int, problem_type: str, tmp_path: Path) -> None:
    write_wordpiece(tmp_path)
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    model: Any = random_bert("BertForSequenceClassification", 3, num_labels=labels, problem_type=problem_type)
    build: Any = transformers.pipeline
    rows = build("text-classification", model=model, tokenizer=tokenizer, top_k=None)([TEXT])[0]
    given = [{"place": 0, **row} for row in rows]
    with torch.inference_mode():
        logits = model(**tokenizer(TEXT, return_tensors="pt")).logits.numpy()
    defaults = EncoderDefaults(
        64,
        {},
        heads=("sequence_classification",),
        labels=tuple(model.config.id2label.values()),
        problem_type=problem_type,
    )
    assert not compare_labels(TEXT, given, logits, defaults, "sequence_classification", 1e-5)
    wrong = [{**row, "score": row["score"] + np.float32(0.1)} for row in given]
    assert "the bundle's is" in compare_labels(TEXT, wrong, logits, defaults, "sequence_classification", 1e-5)
