from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from planforge.runtime.decoding.sampling import (
    Sampling,
    choose,
    compute_logprobs,
    log_softmax,
    make_generators,
    process,
)
from planforge.runtime.errors import BackendError, InputError

torch = pytest.importorskip("torch")
logits_process = pytest.importorskip("transformers.generation.logits_process")

fast = settings(deadline=None, max_examples=200)
Float32 = npt.NDArray[np.float32]

logit = st.one_of(
    st.floats(-50, 50, width=32),
    st.integers(-4, 4).map(float),  # ties
    st.just(-math.inf),  # suppressed by the graph
)
rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=logit).filter(
    lambda logits: bool(np.isfinite(logits.max(axis=-1)).all())
)
options = st.builds(
    Sampling,
    temperature=st.none() | st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.01, 1),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 3),
)


def histories_for(data: st.DataObject, logits: Float32) -> list[list[int]]:
    length = data.draw(st.integers(0, 10))
    ids = st.integers(0, logits.shape[1] + 2)  # beyond the logits too: a larger embedding
    return [data.draw(st.lists(ids, min_size=length, max_size=length)) for _ in logits]


def reference(
    logits: Float32, histories: list[list[int]], sampling: Sampling, *, nucleus: bool = True
) -> Float32:
    """The processors of transformers, in the order in which its generate() applies them."""
    ids = torch.tensor(histories, dtype=torch.int64)
    scores = torch.from_numpy(logits.copy())
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        scores = logits_process.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    if sampling.temperature is not None:
        scores = logits_process.TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k is not None:
        scores = logits_process.TopKLogitsWarper(sampling.top_k)(ids, scores)
    if nucleus and sampling.top_p is not None and sampling.top_p < 1.0:
        scores = logits_process.TopPLogitsWarper(sampling.top_p)(ids, scores)
    processed: Float32 = scores.numpy()
    return processed


def softmax(row: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(row.astype(np.float64) - row.max())
    return np.asarray(weights / weights.sum())


@fast
@given(logits=rows, sampling=options, data=st.data())
def test_processing_is_that_of_transformers(logits: Float32, sampling: Sampling, data: st.DataObject) -> None:
    histories = histories_for(data, logits)
    before = logits.copy()
    got = process(logits, histories, sampling)
    np.testing.assert_array_equal(logits, before)
    assert got.dtype == np.float32
    whole = reference(logits, histories, sampling, nucleus=False)
    if sampling.top_p is None or sampling.top_p == 1.0:
        np.testing.assert_array_equal(got, whole)  # to the last bit
        return
    for mine, theirs, row in zip(got, reference(logits, histories, sampling), whole, strict=True):
        kept = mine > -np.inf
        expected = theirs > -np.inf
        np.testing.assert_array_equal(mine[kept], row[kept])
        # Sorted, because torch keeps arbitrary ones of equal logits. A sum may lie on the border to
        # within float32's rounding, where exp of the two libraries decides: one token more or less.
        ours = np.sort(mine[kept])
        others = np.sort(theirs[expected])
        if len(ours) == len(others):
            np.testing.assert_array_equal(ours, others)
        else:
            mass = np.cumsum(np.sort(softmax(row)))
            assert np.abs(mass - (1 - sampling.top_p)).min() < 1e-6


def test_published_size_equals_transformers() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (2, 50257)).astype(np.float32)
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1)
    histories = [[1, 2, 3, 3], [50256, 9, 9, 9]]
    for case in (sampling, Sampling(top_p=0.9)):
        expected = reference(logits, histories, case)
        np.testing.assert_array_equal(process(logits, histories, case), expected)


def test_ties_at_the_borders() -> None:
    logits = np.array([[1, 3, 2, 2, 2]], dtype=np.float32)
    top_k = process(logits, [[]], Sampling(top_k=2))
    np.testing.assert_array_equal(top_k > -np.inf, [[False, True, True, True, True]])
    equal = np.zeros((1, 4), dtype=np.float32)
    top_p = process(equal, [[]], Sampling(top_p=0.5))
    np.testing.assert_array_equal(top_p > -np.inf, [[True, True, False, False]])
    least = process(equal, [[]], Sampling(top_p=1e-9))
    np.testing.assert_array_equal(least > -np.inf, [[True, False, False, False]])


@fast
@given(logits=rows, data=st.data())
def test_greedy_is_torchs_argmax(logits: Float32, data: st.DataObject) -> None:
    sampling = Sampling(repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])))
    histories = histories_for(data, logits)
    expected = torch.from_numpy(reference(logits, histories, sampling)).argmax(-1).numpy()
    ids = choose(logits, histories, sampling, [])
    np.testing.assert_array_equal(ids, expected)
    assert all(type(token) is int for token in ids)


def test_draws_follow_the_distribution() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0, -math.inf, -9.0]], dtype=np.float32)
    sampling = Sampling(temperature=1.5, repetition_penalty=1.2, seed=1)
    draws = 20_000
    generators = make_generators(1, [0])
    history = [[0, 3]]
    counts = np.zeros(6)
    for _ in range(draws):
        counts[choose(logits, history, sampling, generators)[0]] += 1
    expected = softmax(reference(logits, history, sampling)[0]) * draws
    assert counts[4] == 0
    likely = expected > 0
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 18.5, "4 degrees of freedom: 0.1 % of fair samples exceed 18.47"


@fast
@given(logits=rows, sampling=options.filter(lambda each: not each.greedy), seed=st.integers(0, 99))
def test_draws_stay_within_what_processing_left(logits: Float32, sampling: Sampling, seed: int) -> None:
    histories: list[list[int]] = [[] for _ in logits]
    ids = choose(logits, histories, sampling, make_generators(seed, range(len(logits))))
    kept = process(logits, histories, sampling)[np.arange(len(logits)), ids]
    assert np.isfinite(kept).all()


@fast
@given(logits=rows, seed=st.integers(0, 2**80), sampling=options)
def test_a_row_draws_the_same_in_any_batch(logits: Float32, seed: int, sampling: Sampling) -> None:
    def draw(members: list[int]) -> list[list[int]]:
        generators = make_generators(seed, members)
        histories: list[list[int]] = [[] for _ in members]
        steps = [choose(logits[members], histories, sampling, generators) for _ in range(3)]
        drawn: list[list[int]] = np.stack(steps, axis=1).tolist()
        return drawn

    everyone = list(range(len(logits)))
    together = draw(everyone)
    assert [draw([row])[0] for row in everyone] == together
    assert draw(everyone[::-1])[::-1] == together


def test_generators_are_those_that_the_design_names() -> None:
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence(7, spawn_key=(3,))))
    assert make_generators(7, [3])[0].random() == expected.random()


def test_without_a_seed_each_call_draws_anew() -> None:
    first, second = make_generators(None, [0, 0])
    assert first.random() == second.random(), "one call has one entropy"
    assert make_generators(None, [0])[0].random() != make_generators(None, [0])[0].random()


@fast
@given(logits=rows)
def test_log_softmax_is_torchs(logits: Float32) -> None:
    expected = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    got = log_softmax(logits)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    ids = np.zeros(len(logits), dtype=np.int64)
    # float32 exponentials, each right to 6e-8, summed in float64
    np.testing.assert_allclose(compute_logprobs(logits, ids), got[:, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(dtype: Any) -> None:
    logits = np.array([[1, 2, 3]], dtype=dtype)
    assert process(logits, [[]], Sampling(top_k=1)).dtype == np.float32
    assert log_softmax(logits).dtype == np.float64
    high = np.array([[30, 20, 34]], dtype=dtype)  # whose exponentials are beyond float16
    np.testing.assert_allclose(compute_logprobs(high, np.array([0])), log_softmax(high)[:, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ([0.0, math.nan], "NaN"),
        ([math.nan, math.inf], "NaN"),
        ([0.0, math.inf], "infinity"),
        ([-math.inf, -math.inf], "nothing but -inf"),
    ],
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1, top_p=0.5)])
def test_broken_logits_are_refused(bad: list[float], found: str, sampling: Sampling) -> None:
    logits = np.array([[1, 2], bad], dtype=np.float32)
    generators = make_generators(0, [0, 1])
    with warnings.catch_warnings(), pytest.raises(BackendError, match=f"{found} in row 1"):
        warnings.simplefilter("error")
        choose(logits, [[], []], sampling, generators)
    with pytest.raises(BackendError, match=f"{found} in row 1"):
        log_softmax(logits)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1e-60),
        Sampling(temperature=1e-20, repetition_penalty=1e-40),
    ],
)
def test_options_that_leave_float32_are_refused(sampling: Sampling) -> None:
    with pytest.raises(InputError, match="overflow float32"):
        process(np.array([[3, 4]], dtype=np.float32), [[0]], sampling)


@pytest.mark.parametrize("temperature", [1e-20, 1e-37, 1e-38, 1e-40, 1e-60, 5e-324])
def test_a_temperature_next_to_0_leaves_the_likeliest_tokens(temperature: float) -> None:
    """The softmax of torch in float64, of logits that are divided there."""
    logits = np.array([[3, 4, 4, -math.inf], [-9, -2, -7, -2.1], [0, 40, 30, -math.inf]], np.float32)
    exact = torch.tensor(logits, dtype=torch.float64)
    exact = (exact - exact.max(-1, keepdim=True).values) / temperature
    for sampling in (
        Sampling(temperature=temperature),
        Sampling(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1),
    ):
        scores = torch.tensor(process(logits, [[], [], []], sampling), dtype=torch.float64)
        torch.testing.assert_close(scores.softmax(-1), exact.softmax(-1))
        tokens = choose(logits, [[], [], []], sampling, make_generators(1, [0, 1, 2]))
        assert tokens[0] in (1, 2) and tokens[1:] == [1, 1]


def test_rows_must_match() -> None:
    logits = np.zeros((2, 3), dtype=np.float32)
    with pytest.raises(InputError, match="histories has 1 rows, but logits has 2"):
        process(logits, [[]], Sampling())
    with pytest.raises(InputError, match="1 generators were given for 2 rows"):
        choose(logits, [[], []], Sampling(top_k=2), make_generators(0, [0]))


NUMBERS = [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, True, "1", [1], 10**400]
INTEGERS = [-1, 1.0, math.nan, True, "1", [1]]
BAD = [
    *(("temperature", value, r"omit it \(None\)") for value in NUMBERS[2:]),
    *(("min_p", value, "None disables it") for value in [*NUMBERS, 1.0001]),
    *(("top_p", value, "None disables it") for value in [*NUMBERS, 1.0001]),
    *(("repetition_penalty", value, "1.0 disables it") for value in [*NUMBERS, None]),
    *(("top_k", value, "None disables it") for value in [*INTEGERS, 0]),
    *(("no_repeat_ngram_size", value, "None disables it") for value in [*INTEGERS, 0]),
    *(("seed", value, "None samples differently") for value in INTEGERS),
]


@pytest.mark.parametrize(("name", "value", "hint"), BAD)
def test_options_out_of_range_are_refused(name: str, value: Any, hint: str) -> None:
    with pytest.raises(InputError, match=rf"^{name} is .*; it must be .*{hint}"):
        Sampling(**{name: value})


def test_options_in_range() -> None:
    assert Sampling().greedy
    assert Sampling(repetition_penalty=1.2, seed=3).greedy
    assert not Sampling(temperature=1).greedy
    assert not Sampling(top_k=10**9).greedy
    assert not Sampling(top_p=1).greedy
    assert not Sampling(min_p=1).greedy
    assert Sampling(temperature=0, top_k=5, top_p=0.5, min_p=0.1).greedy
    assert Sampling(temperature=0.0).greedy
    numpy_numbers = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), seed=2**200)
    assert not numpy_numbers.greedy
