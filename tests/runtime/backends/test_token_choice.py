"""The graphs that choose tokens on a GPU: what they compute, and that their files are those of their text."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from planforge.exporter.passes.choice_graphs import make_choice_graphs
from planforge.runtime.backends.token_choice import GRAPHS

LOGITS = (np.random.default_rng(0).standard_normal((5, 1000)) * 8).astype(np.float32)


def choose(name: str, logits: Any, count: int | None = None) -> list[Any]:
    session = onnxruntime.InferenceSession(GRAPHS / f"{name}.onnx", providers=["CPUExecutionProvider"])
    inputs = {"logits": logits}
    if count is not None:
        inputs["count"] = np.array([count], np.int64)
    return list(session.run(None, inputs))


def test_the_files_are_written_by_the_text_in_the_exporter() -> None:
    """`python -m planforge.exporter.passes.choice_graphs` writes them."""
    assert {path.name: path.read_bytes() for path in GRAPHS.iterdir()} == make_choice_graphs()


def test_the_likeliest_token() -> None:
    logits, ids, log_sum = choose("likeliest", LOGITS)
    assert ids[:, 0].tolist() == LOGITS.argmax(axis=1).tolist() and ids.dtype == np.int32
    assert logits[:, 0].tolist() == LOGITS.max(axis=1).tolist()
    expected = torch.logsumexp(torch.from_numpy(LOGITS).double(), 1).numpy()
    np.testing.assert_allclose(log_sum[:, 0], expected, rtol=1e-6)


def test_the_candidates() -> None:
    logits, ids, log_sum = choose("candidates", LOGITS, 64)
    values, places = torch.topk(torch.from_numpy(LOGITS), 64)
    assert ids.tolist() == places.tolist() and logits.tolist() == values.tolist()
    assert log_sum.tolist() == choose("likeliest", LOGITS)[2].tolist()


@pytest.mark.parametrize("name", ["likeliest", "candidates"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_shows_in_the_sum(name: str, value: float) -> None:
    logits = LOGITS.copy()
    logits[2, 500] = value
    log_sum = choose(name, logits, 4 if name == "candidates" else None)[2]
    assert np.isfinite(log_sum[:, 0]).tolist() == [True, True, False, True, True]


def test_large_logits_do_not_overflow() -> None:
    assert choose("likeliest", LOGITS + np.float32(1e4))[2][0, 0] == pytest.approx(1e4, rel=1e-2)
