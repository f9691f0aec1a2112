"""Tokens that a plan picks by itself are those that all logits give."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx.reference import ReferenceEvaluator

from planforge.exporter import build
from planforge.exporter.errors import BuildError
from planforge.exporter.tensorrt.build import Options
from planforge.exporter.tensorrt.candidates import add_candidates
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.candidates import choose_results, choose_tokens, read_scores
from planforge.runtime.decoding.sampling import Sampling, choose, compute_logprobs, make_generators
from planforge.runtime.decoding.state import LOGITS
from planforge.runtime.errors import BackendError, InputError, ManifestError

from ...helpers.candidates import artifact_of
from ...helpers.emulated_gpu import emulated_gpu

V = 30
K = 6
PROMPTS = ["Now therefore", "In the beginning God created the heaven", "And"]


def picking_graph() -> ReferenceEvaluator:
    """Nothing but the part of a graph that picks."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> all (float[rows, {V}] given) => (float[rows, {V}] logits)'
        " { logits = Identity (given) }"
    )
    add_candidates(model, artifact_of(V), K)
    onnx.checker.check_model(model, full_check=True)
    return ReferenceEvaluator(model)


PICKING = picking_graph()


def picked(logits: npt.NDArray[np.float32]) -> Any:
    names = [spec.name for spec in artifact_of(V).add_candidates(K).outputs]
    with np.errstate(all="ignore"):
        results = dict(zip(names, PICKING.run(None, {"given": logits}), strict=True))
    return read_scores({name: value for name, value in results.items() if name != "logits"})


some_logits = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.just(V)),
    elements=st.one_of(st.floats(-300, 300, width=32), st.integers(-4, 4).map(float), st.just(-math.inf)),
).filter(lambda logits: bool(np.isfinite(logits.max(axis=-1)).all()))
enough = st.one_of(
    st.just(Sampling()),
    st.builds(
        Sampling,
        temperature=st.none() | st.floats(0.05, 5),
        top_k=st.integers(1, K),
        top_p=st.none() | st.floats(0.01, 1),
    ),
)


@settings(deadline=None, max_examples=200)
@given(logits=some_logits, sampling=enough, seed=st.integers(0, 99))
def test_candidates_give_the_tokens_and_probabilities_of_all_logits(
    logits: npt.NDArray[np.float32], sampling: Sampling, seed: int
) -> None:
    # More equal ones than candidates: division by the temperature rounds near ones to one value too.
    scaled = logits / np.float32(sampling.temperature or 1.0)
    border = np.sort(scaled, axis=-1)[:, -(sampling.top_k or 1), None]
    assume(((scaled >= border).sum(axis=-1) <= K).all())
    histories = [[0]] * len(logits)
    chosen = choose_tokens(picked(logits), histories, sampling, make_generators(seed, range(len(logits))))
    expected = choose(logits, histories, sampling, make_generators(seed, range(len(logits))))
    np.testing.assert_array_equal(chosen.tokens, expected)
    # One rounding of a sum of 30 parts and one of its logarithm, at the size of the logits.
    limit = 40 * np.finfo(np.float32).eps * max(1.0, float(np.abs(logits[np.isfinite(logits)]).max()))
    assert chosen.logprobs is not None
    np.testing.assert_allclose(chosen.logprobs, compute_logprobs(logits, np.array(expected)), atol=limit)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_cannot_be_used_are_refused_as_before(bad: float) -> None:
    logits = np.linspace(0, 1, 2 * V, dtype=np.float32).reshape(2, V)
    logits[1, 3] = bad
    with pytest.raises(BackendError, match="in row 1 of the batch"):
        choose_tokens(picked(logits), [[0]] * 2, Sampling(), [])


@pytest.mark.parametrize(
    ("sampling", "count", "enough"),
    [
        (Sampling(), 1, True),
        (Sampling(), 0, False),
        (Sampling(top_k=6, temperature=0.7, top_p=0.9), 6, True),
        (Sampling(top_k=7), 6, False),
        (Sampling(temperature=0.7), 6, False),
        (Sampling(top_p=0.7), 6, False),
        (Sampling(repetition_penalty=1.1), 6, False),
    ],
)
def test_all_logits_are_fetched_where_candidates_are_too_few(
    sampling: Sampling, count: int, enough: bool
) -> None:
    artifact = artifact_of(V).add_candidates(count) if count else artifact_of(V)
    assert (choose_results(artifact, sampling) != LOGITS) == enough


def test_a_plan_that_picks_gives_the_same_answers_and_copies_less(own_bundle: Path) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"top_k": 5, "seed": 3},
        {"top_k": 5, "top_p": 0.8, "seed": 3, "temperature": 1.3},
        {"speculative": "prompt-lookup"},
        {"reuse_prompt": True},
        {"top_k": 9, "seed": 3},  # more than it picks
        {"repetition_penalty": 1.2},
    ]

    def answers() -> tuple[list[Any], list[int]]:
        found = []
        copied = []
        with (
            emulated_gpu(own_bundle) as cuda,
            TextGenerator.load(own_bundle, backend="tensorrt-rtx") as model,
        ):
            for options in ways:
                before = cuda.downloaded
                found.append(model.generate(PROMPTS, max_new_tokens=12, **options))
                copied.append(cuda.downloaded - before)
            assert len(model.score(PROMPTS[1]).logprobs) > 3
        return found, copied

    expected, all_logits = answers()
    build(own_bundle, target="rtx", options=Options(candidates=8))
    (plan,) = Bundle.open(own_bundle).manifest.plans
    assert plan.candidates == 8
    found, copied = answers()
    for one, other in zip(found, expected, strict=True):
        assert [row.token_ids for row in one] == [row.token_ids for row in other]
        for row, same in zip(one, other, strict=True):
            np.testing.assert_allclose(row.logprobs, same.logprobs, atol=1e-4)
    vocabulary = Bundle.open(own_bundle).manifest.artifact(plan.built_from).output("logits").axes[-1]
    assert isinstance(vocabulary, int)
    share = (8 * (4 + 4) + 4) / (4 * vocabulary)  # 8 logits, 8 ids and one sum, instead of a row
    assert [c / a for c, a in zip(copied, all_logits, strict=True)] == pytest.approx([share] * 5 + [1] * 2)


def test_what_cannot_be_picked_is_refused(own_bundle: Path, minilm_bundle: Path) -> None:
    with pytest.raises(BuildError, match=r"--top-k 3841 must be 1 to 2048: the model has 2048 tokens"):
        build(own_bundle, target="rtx", options=Options(candidates=3841))
    with pytest.raises(InputError, match="leave it out for text-encoding"):
        build(minilm_bundle, target="rtx", options=Options(candidates=4))
    (plan,) = Bundle.open(own_bundle).manifest.plans
    with pytest.raises(ManifestError, match="candidates is -1"):
        type(plan).from_json({**plan.to_json(), "candidates": -1})
