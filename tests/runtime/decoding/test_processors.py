"""Processors of logits against transformers' own, alone, together, and in whole answers.

frequency_penalty and presence_penalty are held to the formula of OpenAI's documentation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers.generation import logits_process

from planforge.exporter.checkpoints.source import DEMOS
from planforge.runtime import TextGenerator, load
from planforge.runtime.decoding.candidates import choose_results
from planforge.runtime.decoding.history import TokenHistory
from planforge.runtime.decoding.processors import find_highest
from planforge.runtime.decoding.sampling import Sampling, choose, make_generators, process
from planforge.runtime.errors import InputError

from ...helpers.candidates import artifact_of
from ...helpers.generation import LOOKUP, REUSE, generator

Float32 = npt.NDArray[np.float32]
fast = settings(deadline=None, max_examples=150)
V = 20
some_logits = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.just(V)),
    elements=st.one_of(st.floats(-30, 30, width=32), st.integers(-4, 4).map(float)),
)


def histories_for(data: st.DataObject, logits: Float32) -> list[list[int]]:
    length = data.draw(st.integers(1, 14))
    ids = st.integers(0, 3)  # few, so that they repeat
    return [data.draw(st.lists(ids, min_size=length, max_size=length)) for _ in logits]


def run(processor: Any, logits: Float32, histories: list[list[int]]) -> Float32:
    found: Float32 = processor(torch.tensor(histories), torch.from_numpy(logits.copy())).numpy()
    return found


@fast
@given(logits=some_logits, min_p=st.floats(0.001, 1))
def test_min_p_is_that_of_transformers(logits: Float32, min_p: float) -> None:
    shares = torch.softmax(torch.from_numpy(logits), -1).numpy()
    shares /= shares.max(axis=-1, keepdims=True)
    assume(not np.isclose(shares, min_p, rtol=1e-4).any())  # the two libraries' exp differ by a rounding
    histories = [[0]] * len(logits)
    wanted = run(logits_process.MinPLogitsWarper(min_p), logits, histories)
    np.testing.assert_array_equal(process(logits, histories, Sampling(min_p=min_p)), wanted)


@fast
@given(logits=some_logits, size=st.integers(1, 5), data=st.data())
def test_no_repeat_ngram_is_that_of_transformers(logits: Float32, size: int, data: st.DataObject) -> None:
    histories = histories_for(data, logits)
    wanted = run(logits_process.NoRepeatNGramLogitsProcessor(size), logits, histories)
    sampling = Sampling(no_repeat_ngram_size=size)
    np.testing.assert_array_equal(process(logits, histories, sampling), wanted)


biases = st.dictionaries(st.integers(0, V - 1), st.floats(-20, 20) | st.just(-math.inf), max_size=6)


@fast
@given(logits=some_logits, bias=biases)
def test_logit_bias_is_the_sequence_bias_of_transformers(logits: Float32, bias: dict[int, float]) -> None:
    histories = [[0]] * len(logits)
    wanted = logits
    if bias:
        sequences: Any = {(token,): added for token, added in bias.items()}
        wanted = run(logits_process.SequenceBiasLogitsProcessor(sequences), logits, histories)
    np.testing.assert_array_equal(process(logits, histories, Sampling(logit_bias=bias)), wanted)


def squeeze(token_ids: Sequence[int], logits: Float32) -> Float32:
    """A processor that depends on the history, and that does not commute with the others."""
    assert logits.dtype == np.float32
    lowered: Float32 = np.minimum(logits, np.float32(len(token_ids) % 7))
    return lowered


class TorchSqueeze(transformers.LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return torch.minimum(scores, torch.tensor(float(input_ids.shape[1] % 7)))


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.GPT2LMHeadModel.from_pretrained(DEMOS / "gpt2-demo").float().eval()


@fast
@given(logits=some_logits, data=st.data())
def test_the_order_is_that_of_transformers(reference: Any, logits: Float32, data: st.DataObject) -> None:
    histories = histories_for(data, logits)
    config = transformers.GenerationConfig(
        do_sample=True,
        repetition_penalty=1.7,
        no_repeat_ngram_size=2,
        sequence_bias={(5,): 4.0, (1,): -3.0},
        temperature=0.6,
        top_k=9,
        min_p=0.01,
        pad_token_id=0,
    )
    reference._prepare_special_tokens(config, True, device="cpu")
    processors = reference._get_logits_processor(
        config, input_ids_seq_length=len(histories[0]), logits_processor=[TorchSqueeze()], device="cpu"
    )
    wanted = run(processors, logits, histories)
    sampling = Sampling(
        repetition_penalty=1.7,
        no_repeat_ngram_size=2,
        logit_bias={5: 4.0, 1: -3.0},
        logits_processor=squeeze,
        temperature=0.6,
        top_k=9,
        min_p=0.01,
    )
    found = process(logits, histories, sampling)
    highest = wanted.max(axis=-1, keepdims=True)
    assume(not np.isclose(np.exp(found - highest), 0.01, rtol=1e-4).any())
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@fast
@given(
    length=st.integers(1, 2000),
    count=st.one_of(st.integers(1, 60), st.integers(1, 2000)),
    levels=st.sampled_from([3, 100, 2**20]),  # few give ties
    forbidden=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_border_of_top_k_is_torchs(
    length: int, count: int, levels: int, forbidden: float, seed: int
) -> None:
    count = min(count, length)
    random = np.random.default_rng(seed)
    row = random.integers(-levels, levels, length).astype(np.float32)
    row[random.random(length) < forbidden] = -np.inf
    assert find_highest(row, count) == torch.from_numpy(row).topk(count).values[-1].item()


def test_temperature_0_is_greedy_whatever_else_is_given() -> None:
    logits = np.array([[0.1, 3, 2], [5, 5, 1]], np.float32)
    sampling = Sampling(temperature=0, top_k=2, top_p=0.5, min_p=0.1, seed=1)
    generators = make_generators(1, [0, 1])
    assert choose(logits, [[0], [0]], sampling, generators) == [1, 0]
    assert sampling.greedy


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(logit_bias={0: -math.inf, 1: -math.inf}), "logit_bias=.* leaves no token"),
        (Sampling(no_repeat_ngram_size=1), "no_repeat_ngram_size=1 leaves no token"),
        (
            Sampling(logits_processor=lambda ids, row: row[:1]),
            r"float32 \(1,\); it must return float32 logits of shape \(2,\)",
        ),
        (Sampling(logits_processor=lambda ids, row: None), "object"),  # type: ignore[arg-type]
        (
            Sampling(logits_processor=lambda ids, row: row * np.nan),
            "logits_processor makes the logits overflow",
        ),
        (Sampling(logit_bias={2: 1.0}), "logit_bias names token 2, but the model's tokens are 0 to 1"),
    ],
)
def test_processors_that_leave_nothing_to_choose_are_named(sampling: Sampling, words: str) -> None:
    with pytest.raises(InputError, match=words):
        process(np.array([[1, 2]], np.float32), [[0, 1]], sampling)


def test_what_candidates_are_not_enough_for_needs_all_logits() -> None:
    picking = artifact_of(V).add_candidates(6)
    assert choose_results(picking, Sampling(temperature=0, top_k=999)) != ("logits",)
    assert choose_results(picking, Sampling(top_k=3, min_p=0.1)) != ("logits",)
    for sampling in (
        Sampling(min_p=0.1),
        Sampling(logit_bias={1: 1.0}),
        Sampling(no_repeat_ngram_size=2),
        Sampling(logits_processor=squeeze),
    ):
        assert choose_results(picking, sampling) == ("logits",)
    assert choose_results(picking, Sampling(), top_logprobs=1) == ("logits",)


def penalize(logits: npt.NDArray[Any], answer: Sequence[int], frequency: float, presence: float) -> Any:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence"""
    counts = Counter(answer)
    changed = np.array(logits, np.float64)
    for token in range(len(changed)):
        c = counts[token]
        changed[token] = changed[token] - c * frequency - float(c > 0) * presence
    return changed


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0), (0, 1.5), (2, -2), (-0.25, 0.75)])
def test_penalties_are_openais_formula_over_the_answer_alone(frequency: float, presence: float) -> None:
    random = np.random.default_rng(1)
    logits = random.normal(size=(2, 12)).astype(np.float32)
    histories = [TokenHistory([1, 1, 2]), TokenHistory([5])]
    answers = [[3, 3, 1, 3], [99, 7]]  # an id without a logit
    for history, answer in zip(histories, answers, strict=True):
        history.extend(answer)
    sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence)
    expected = [
        penalize(row, answer, frequency, presence) for row, answer in zip(logits, answers, strict=True)
    ]
    np.testing.assert_allclose(process(logits, histories, sampling), expected, atol=1e-5)


# Whole answers


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Any:
    with load(demo_bundle) as opened:
        yield opened


PROMPT = "And it came to pass, when the king of Israel heard these words, that he"


LIKELY = 12  # a token of the plain answer


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"logit_bias": {LIKELY: -9.0, 11: 2.5}}, {"sequence_bias": {(LIKELY,): -9.0, (11,): 2.5}}),
        ({"logits_processor": squeeze}, {"logits_processor": [TorchSqueeze()]}),
    ],
)
def test_greedy_answers_with_processors_are_transformers(
    model: TextGenerator, reference: Any, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    ids = torch.tensor([model.tokenizer.encode(PROMPT)])
    shared = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    plain = reference.generate(ids, **shared)[0, ids.shape[1] :].tolist()
    wanted = reference.generate(ids, **shared, **theirs)[0, ids.shape[1] :].tolist()
    assert wanted != plain
    for how in ({}, LOOKUP, REUSE):
        assert list(model.generate(PROMPT, max_new_tokens=30, **options, **how).token_ids) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 3},
        {"temperature": 1.5, "min_p": 0.05, "seed": 4},
        {"logit_bias": {2: 3.0}, "temperature": 0.7, "seed": 2},
    ],
)
def test_speculation_draws_what_is_drawn_without(options: dict[str, Any]) -> None:
    plain, _ = generator("inplace")
    looking, _ = generator("inplace")
    for prompt in ("abcabcabc", "aabbaabb", "abcdabcd"):
        wanted = plain.generate(prompt, max_new_tokens=30, **options)
        found = looking.generate(prompt, max_new_tokens=30, **options, **LOOKUP)
        assert found.token_ids == wanted.token_ids


def test_a_processor_is_called_once_for_each_token_that_comes() -> None:
    for how in ({}, LOOKUP, REUSE):
        model, _ = generator("inplace", counts=True)
        seen: list[tuple[int, ...]] = []

        def note(token_ids: Sequence[int], logits: Float32) -> Float32:
            seen.append(tuple(token_ids))  # noqa: B023
            return logits

        answer = model.generate("abcdefghijkab", max_new_tokens=12, logits_processor=note, **how)
        prompt = [*range(11), 0, 1]
        assert seen == [(*prompt, *answer.token_ids[:n]) for n in range(12)]
        if how is LOOKUP:
            assert answer.accepted_tokens > 0


def test_a_processor_sees_no_row_that_has_ended() -> None:
    model, _ = generator("inplace", counts=True, eos=(3,))
    seen: list[int] = []

    def note(token_ids: Sequence[int], logits: Float32) -> Float32:
        seen.append(token_ids[0])
        return logits

    model.generate(["abc", "efg"], max_new_tokens=4, logits_processor=note)
    assert seen == [0, 4, 4, 4, 4]


@pytest.mark.parametrize(("frequency", "presence"), [(1.0, 0.0), (0.0, 2.0), (2.0, -1.0)])
def test_whole_answers_with_penalties(model: TextGenerator, frequency: float, presence: float) -> None:
    """The oracle as a processor of the caller's gives the same answer; the prompt does not count."""
    prompt = "the the the of of"
    length = model.count_tokens(prompt)

    def run_oracle(tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        changed: npt.NDArray[np.float32] = penalize(logits, tokens[length:], frequency, presence).astype("f4")
        return changed

    usual = model.generate(prompt, max_new_tokens=40, ignore_eos=True)
    expected = model.generate(prompt, max_new_tokens=40, ignore_eos=True, logits_processor=run_oracle)
    options: dict[str, Any] = {"frequency_penalty": frequency, "presence_penalty": presence}
    answer = model.generate(prompt, max_new_tokens=40, ignore_eos=True, **options)
    assert answer.token_ids == expected.token_ids != usual.token_ids
    submitted = model.submit(prompt, max_new_tokens=40, ignore_eos=True, **options).result()
    assert submitted.token_ids == expected.token_ids
    guessed = model.generate(
        prompt, max_new_tokens=40, ignore_eos=True, speculative="prompt-lookup", **options
    )
    assert guessed.token_ids == expected.token_ids


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_penalties_out_of_range_are_refused(model: TextGenerator, name: str) -> None:
    for value in (2.1, -2.1, float("nan"), "1", True):
        refused: Any = value
        with pytest.raises(InputError, match=name):
            Sampling(**{name: refused})
    options: dict[str, Any] = {name: 1.0}
    with pytest.raises(InputError, match=name):
        model.generate("a", num_beams=2, **options)
