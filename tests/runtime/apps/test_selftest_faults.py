"""What computes another model does not pass, though every hash is right.

Plans run on an emulated GPU, on which ONNX Runtime executes their graphs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime.apps.check import translator
from planforge.runtime.apps.check.case import Case, CaseSet, Known, Row, Searching, Text
from planforge.runtime.apps.check.divergence import Sample, follow
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.backends.ort_program import OrtProgram
from planforge.runtime.decoding.beam import Hypothesis
from planforge.runtime.decoding.decoder import DecoderRun

from ...helpers import emulated_gpu as helpers_emulated_gpu
from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.selftest import (
    DRAWN_TARGETS,
    ENCODING,
    STEPS,
    TRANSLATING,
    bundle_named,
    change_weight,
    copied,
    failed,
)

Results = dict[str, npt.NDArray[Any]]


# Of tiny random models fp16's own rounding hides what is smaller.
@pytest.mark.parametrize(("precision", "factor"), [("fp32", 1.01), ("fp16", 1.1)])
@pytest.mark.parametrize(
    ("name", "graph", "ending"),
    [
        ("gpt2", "decoder", "h.1.mlp.c_fc.weight.transposed"),
        ("classifier", "encoder", "layers.1.intermediate.weight.transposed"),
        ("marian", "encoder", "encoder.layers.0.attention.value.weight.transposed"),
        ("marian", "decoder", "decoder.layers.1.feed_forward.inner.weight.transposed"),
    ],
)
def test_a_changed_weight_whose_hash_is_mended_fails(
    name: str,
    graph: str,
    ending: str,
    precision: str,
    factor: float,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    bundle = copied(bundle_named(name, request), tmp_path)
    dialect, suffix = ("ort", "") if precision == "fp32" else ("portable", "_fp16")
    change_weight(bundle, f"{graph}.{dialect}.{precision}", ending + suffix, factor)
    result = selftest(bundle, "ort-cpu", precision)
    assert not result.passed
    assert any("at most" in why for why in failed(result).values())


def scaled(results: Results) -> None:
    results["logits"] = results["logits"] * np.float32(1.02)


def not_a_number(results: Results) -> None:
    results["logits"] = np.where(np.arange(results["logits"].shape[-1]) == 7, np.nan, results["logits"])


def of_the_next_row(results: Results) -> None:
    results["logits"] = np.roll(results["logits"], 1, axis=0)


def keys_and_values_swapped(results: Results) -> None:
    for name in [name for name in results if name.endswith(".key")]:
        value = name.removesuffix("key") + "value"
        results[name], results[value] = results[value], results[name]


def run_with(fault: Callable[[Results], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every engine of the emulated GPU compute something else."""

    class Faulty(OrtProgram):
        def run(self, *arguments: Any) -> Results:
            results = super().run(*arguments)
            if "logits" in results or fault is keys_and_values_swapped:
                fault(results)
            return results

    monkeypatch.setattr(helpers_emulated_gpu, "OrtProgram", Faulty)


@pytest.mark.parametrize(
    ("name", "fault", "unseen"),
    [
        ("gpt2", scaled, ()),
        ("gpt2", not_a_number, ()),
        # A prefill alone has nothing cached, and of one row there is no next.
        ("gpt2", keys_and_values_swapped, ("prompts of 128, 129 tokens", "real text")),
        (
            "gpt2",
            of_the_next_row,
            ("prefill and decode, batch 1", "prompts of 128, 129 tokens", "full context", STEPS),
        ),
        # The encoder has no logits; rounding changes those of drawn targets as much in a random model.
        ("marian", scaled, (*ENCODING, *DRAWN_TARGETS)),
        # fp16's limit of a beam's score is wide for a random model.
        ("marian", keys_and_values_swapped, TRANSLATING[-1:]),
    ],
)
def test_an_engine_that_computes_something_else_fails(
    name: str,
    fault: Callable[[Results], None],
    unseen: Sequence[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = bundle_named(name, request)
    run_with(fault, monkeypatch)
    with emulated_gpu(bundle):
        result = selftest(bundle)
    assert result.backend == "tensorrt-rtx" and not result.passed
    assert {c.case for c in result.comparisons} - failed(result).keys() == set(unseen)
    if fault is not_a_number:
        assert all("NaN or infinity in the results" in why for why in failed(result).values())
        json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_beams_whose_cache_rows_stay_where_they_are_fail(
    precision: str, dates_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though PyTorch cannot be asked what such targets score."""
    monkeypatch.setattr(DecoderRun, "copy_rows", lambda self, copies: None)
    found = failed(selftest(dates_bundle, "ort-cpu", precision))
    assert list(found) == ["4 beams, 4 sources, padded"]
    assert "score_error is" in found["4 beams, 4 sources, padded"]


def test_targets_that_nobody_found_are_scored_step_by_step(
    marian_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonsense = Hypothesis((3, 4, 5, 0), 0.0, "eos")
    monkeypatch.setattr(
        translator, "search_beams", lambda engine, case_set, case, *_: [[nonsense]] * len(case.rows)
    )
    found = failed(selftest(marian_bundle, "ort-cpu"))
    assert list(found) == [TRANSLATING[-1]]
    assert "score_error is" in found[TRANSLATING[-1]]


V = 4


class Scripted:
    """A decoder that has chosen token 3, and goes on as it likes."""

    def decode(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        assert tokens == [3]
        return np.zeros((1, V), np.float32)


@given(margin=st.floats(0, 1))
def test_another_token_fails_where_pytorch_was_surer_than_rounding(margin: float) -> None:
    """At fp32's limit 1e-4, two logits may change places at twice that; so under 1e-4 a flip is reported."""
    known = np.array([[0.5, 0.1, 0.2, 0.3]], np.float32)
    sample = Sample((1,), (2, 0), (margin, 1.0), (1,), known)
    followed = follow(
        cast(DecoderRun, Scripted()),
        np.array([[0.0, 0.1, 0.2, 0.9]], np.float32),
        [sample],
        {"max_error": 1e-4},
    )
    (divergence,) = followed.divergences
    assert (divergence.want, divergence.got, divergence.margin) == (2, 3, margin)
    assert followed.common_prefix == 0
    assert bool(followed.failures) == (margin > 2e-4)


@pytest.mark.parametrize(
    ("error", "score", "failures"),
    [
        (1e-5, -0.9, ()),  # however much worse than PyTorch's own, -0.1: a near tie was pruned before it
        (1e-3, -0.9, ("search.max_error is 0.001, at most 0.0001 is allowed",)),
        (1e-5, -0.8, ("score_error is 0.1, at most 0.0002 is allowed",)),
        (float("nan"), -0.9, ("search.NaN or infinity in the results",)),
    ],
)
def test_a_search_is_judged_by_its_logits_and_scores_whatever_target_it_finds(
    error: float, score: float, failures: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that ends on another target than PyTorch's, with logits that are off by an error."""
    texts = (Text((1, 0)), Text((7,), source=0), Text((7, 2, 0), source=0))
    best = {2: Known(np.array([0]), np.array([-0.1]))}
    case = Case("beams", "decoder", (Row(1, (1,)),), (), "beams")
    case_set = CaseSet(texts, (case,), {"score": best}, search=Searching(2, 8, (0,), ()))
    follower = SimpleNamespace(errors=[])

    def search(engine: Any, case_set: Any, case: Any, follower: Any) -> list[list[Hypothesis]]:
        follower.errors.append(error)
        return [[Hypothesis((3, 0), -0.9, "eos")]]

    monkeypatch.setattr(translator, "search_beams", search)
    model = SimpleNamespace(score=lambda source, target: score, follow=lambda case_set, case: follower)
    limits = {"score_error": 2e-4, "search.max_error": 1e-4}
    outcome = translator.compare_beams(cast(Any, None), case_set, [case], limits, cast(Any, model))
    assert outcome.failures[: len(failures)] == failures
    assert bool(outcome.failures) == bool(failures)
