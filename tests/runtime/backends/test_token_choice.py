"""The graph that chooses tokens on a GPU, and what the host does without it: what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from planforge.exporter.passes.choice_graphs import make_choice_graphs
from planforge.runtime.backends.token_choice import GRAPHS, MAX_CANDIDATES, choose_on_host
from planforge.runtime.bundle.artifact import CANDIDATES

LOGITS = (np.random.default_rng(0).standard_normal((5, 1000)) * 8).astype(np.float32)


def choose_by_graph(logits: Any) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(GRAPHS / "candidates.onnx", providers=["CPUExecutionProvider"])
    count = np.array([min(MAX_CANDIDATES, logits.shape[1])], np.int64)
    return dict(zip(CANDIDATES, session.run(None, {"logits": logits, "count": count}), strict=True))


both = pytest.mark.parametrize("choose", [choose_by_graph, choose_on_host])
Choose = Callable[[Any], dict[str, Any]]


def test_the_file_is_written_by_the_text_in_the_exporter() -> None:
    """`python -m planforge.exporter.passes.choice_graphs` writes it."""
    assert {path.name: path.read_bytes() for path in GRAPHS.iterdir()} == make_choice_graphs()


@both
def test_the_candidates(choose: Choose) -> None:
    found = choose(LOGITS)
    values, places = torch.topk(torch.from_numpy(LOGITS), 64)
    logits, ids, log_sum = (found[name] for name in CANDIDATES)
    order = np.argsort(-logits, axis=-1)
    assert np.take_along_axis(ids, order, -1).tolist() == places.tolist() and ids.dtype == np.int32
    assert np.take_along_axis(logits, order, -1).tolist() == values.tolist() and logits.dtype == np.float32
    expected = torch.logsumexp(torch.from_numpy(LOGITS).double(), 1).numpy()
    np.testing.assert_allclose(log_sum[:, 0], expected, rtol=1e-6)


@both
def test_a_small_vocabulary_is_all_candidates(choose: Choose) -> None:
    assert np.sort(choose(LOGITS[:, :7])["candidate_ids"], -1).tolist() == [list(range(7))] * 5


@both
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_shows_in_the_sum(choose: Choose, value: float) -> None:
    logits = LOGITS.copy()
    logits[2, 500] = value
    log_sum = choose(logits)["log_sum"]
    assert np.isfinite(log_sum[:, 0]).tolist() == [True, True, False, True, True]


@both
def test_large_logits_do_not_overflow(choose: Choose) -> None:
    assert choose(LOGITS + np.float32(1e4))["log_sum"][0, 0] == pytest.approx(1e4, rel=1e-2)
