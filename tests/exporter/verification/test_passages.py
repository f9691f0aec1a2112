"""What real text says of a decoder, held against formulas by hand and against PyTorch.

V vocabulary, T tokens
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.exporter.limits import compute_limits
from planforge.exporter.tasks.decoder import Builder, add_passages
from planforge.exporter.tasks.decoder_answers import KEPT_LOGITS
from planforge.exporter.tasks.passages import MAX_PASSAGES, PASSAGE_TOKENS, cut_passages
from planforge.exporter.tasks.registry import TASKS
from planforge.runtime.apps.check.case import CaseSet, Known, Location
from planforge.runtime.apps.check.case_arrays import from_arrays, to_arrays
from planforge.runtime.apps.check.decoder import reduce, see
from planforge.runtime.apps.check.files import read_golden, write_golden
from planforge.runtime.apps.check.judge import measure_passages
from planforge.runtime.apps.check.metrics import TextMetrics
from planforge.runtime.apps.check.outcome import judge

Array = npt.NDArray[np.float32]


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def make_set(passages: list[tuple[int, ...]], logits: list[Array]) -> CaseSet:
    """Passages, and a model's logits (T - 1, V) of each as PyTorch's answers."""
    builder = Builder()
    add_passages(builder, passages, logits[0].shape[1])
    chosen = CaseSet(tuple(builder.texts), tuple(builder.cases), builder.wanted)
    answers = {
        output: {
            text: Known(
                known.positions, reduce(chosen, output, text, known.positions, logits[text][known.positions])
            )
            for text, known in by_text.items()
        }
        for output, by_text in chosen.answers.items()
    }
    return dataclasses.replace(chosen, answers={"margin": {}, **answers})


def measure_text(got: list[Array], case_set: CaseSet) -> TextMetrics:
    """What an engine's logits of each passage measure."""
    cases = zip(case_set.cases, got, strict=True)
    return measure_passages(
        [see(case_set, Location(case, 0, 0), 0, logits) for case, logits in cases], case_set
    )


def by_hand() -> tuple[CaseSet, Array, Array]:
    """Three predictions of four tokens, PyTorch's and an engine's."""
    want = np.array([log(0.5, 0.25, 0.25), log(0.1, 0.8, 0.1), log(0.2, 0.2, 0.6)], np.float32)
    got = np.array([log(0.25, 0.5, 0.25), log(0.1, 0.8, 0.1), log(0.3, 0.2, 0.5)], np.float32)
    # An offset of all logits of a row changes no probability.
    return make_set([(2, 0, 1, 0)], [want + 5]), got - 3, want + 5


def test_what_text_says_is_what_the_formulas_say() -> None:
    case_set, got, _ = by_hand()
    kl = [
        0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5),
        0.0,
        0.2 * math.log(0.2 / 0.3) + 0.6 * math.log(0.6 / 0.5),
    ]
    metrics = measure_text([got], case_set)
    assert metrics.text_kl == pytest.approx(sum(kl) / 3, rel=1e-5)
    assert metrics.top1_changes == pytest.approx(1 / 3)
    # The text is 0, 1, 0: probabilities 0.5, 0.8, 0.2 become 0.25, 0.8, 0.3.
    change = ((0.5 * 0.8 * 0.2) / (0.25 * 0.8 * 0.3)) ** (1 / 3) - 1
    assert metrics.perplexity_change == pytest.approx(change, rel=1e-5)
    assert (metrics.finite, metrics.rows) == (True, 3)


def test_a_gain_counts_as_no_change_and_the_same_as_nothing() -> None:
    case_set, _, want = by_hand()
    surer = np.array([log(0.9, 0.05, 0.05), log(0.05, 0.9, 0.05), log(0.9, 0.05, 0.05)], np.float32)
    assert measure_text([surer], case_set).perplexity_change == 0.0
    same = measure_text([want], case_set)
    assert (same.text_kl, same.top1_changes, same.perplexity_change) == (0.0, 0.0, 0.0)
    assert not judge(same, compute_limits("int8", same, TextMetrics.LIMITED))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    _, got, want = by_hand()
    got[1, 2] = bad
    metrics = measure_text([want, got], make_set([(2, 0, 1, 0)] * 2, [want, want]))
    assert not metrics.finite and metrics.rows == 6
    for limits in (dict.fromkeys(TextMetrics.LIMITED, math.inf), {}):
        assert judge(metrics, limits)
    assert metrics.to_json()["text_kl"] is None  # JSON has no NaN
    with pytest.raises(ValueError, match="not finite"):
        compute_limits("int8", metrics, TextMetrics.LIMITED)


def test_counted_shares_have_their_cap_and_kl_nine_times_what_rounding_does() -> None:
    gap = TextMetrics(1e-4, 1e-3, 1e-3, True, 100)
    limits = compute_limits("int8", gap, TextMetrics.LIMITED)
    share = limits.pop("top1_changes")
    assert limits == {"text_kl": pytest.approx(9e-4), "perplexity_change": 0.01}
    # The largest share of which a hundred draws may show fp32's own, 0.005, within 2.58 deviations.
    assert share - 0.005 == pytest.approx(2.58 * math.sqrt(share * (1 - share) / 100))
    assert (
        compute_limits("int8", dataclasses.replace(gap, text_kl=1.0), TextMetrics.LIMITED)["text_kl"] == 0.005
    )


def random_passages(
    seed: int, lengths: list[int], V: int
) -> tuple[list[tuple[int, ...]], list[Array], list[Array]]:
    """Tokens, PyTorch's logits, and an engine's."""
    random = np.random.default_rng(seed)
    want = [3 * random.standard_normal((length - 1, V)).astype(np.float32) for length in lengths]
    got = [logits + 0.5 * random.standard_normal(logits.shape).astype(np.float32) for logits in want]
    return [tuple(random.integers(0, V, length).tolist()) for length in lengths], want, got


shapes = {"seed": st.integers(0, 999), "lengths": st.lists(st.integers(2, 40), min_size=1, max_size=4)}


@settings(deadline=None, max_examples=40)
@given(**shapes, V=st.integers(2, 30))
def test_measures_are_torchs(seed: int, lengths: list[int], V: int) -> None:
    passages, logits, got = random_passages(seed, lengths, V)
    metrics = measure_text(got, make_set(passages, logits))
    own, want = (torch.from_numpy(np.concatenate(side)).double() for side in (got, logits))
    tokens = torch.tensor([token for passage in passages for token in passage[1:]])
    kl = torch.nn.functional.kl_div(
        own.log_softmax(-1), want.log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert metrics.text_kl == pytest.approx(float(kl), rel=1e-4, abs=1e-7)
    assert metrics.top1_changes == pytest.approx((own.argmax(-1) != want.argmax(-1)).float().mean().item())
    lost = [torch.nn.functional.cross_entropy(side, tokens).exp().item() for side in (own, want)]
    assert metrics.perplexity_change == pytest.approx(max(0.0, lost[0] / lost[1] - 1), rel=1e-3, abs=1e-5)


@settings(deadline=None, max_examples=20)
@given(**shapes)
def test_golden_data_gives_the_same_verdict(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lengths: list[int]
) -> None:
    passages, want, got = random_passages(seed, lengths, 20)
    whole = make_set(passages, want)
    path = tmp_path_factory.mktemp("golden") / "golden.npz"
    write_golden(path, to_arrays(TASKS["text-generation"].thin_for_file(whole)), {"int8": {"text_kl": 0.1}})
    arrays, limits = read_golden(path)
    again = from_arrays(arrays)
    assert limits == {"int8": {"text_kl": 0.1}}
    assert [text.tokens for text in again.texts] == passages
    full = measure_text(got, whole)
    thin = measure_text(got, again)
    # Of all positions, but for the distributions, of which some are kept.
    assert (thin.top1_changes, thin.rows) == (full.top1_changes, full.rows)
    assert thin.perplexity_change == pytest.approx(full.perplexity_change, rel=1e-6)
    rows = [again.answers["logits"][text].positions for text in range(len(passages))]
    most = KEPT_LOGITS[0][1]
    assert [len(own) for own in rows] == [min(most, len(logits)) for logits in want]
    some = [np.concatenate([side[i][own] for i, own in enumerate(rows)]) for side in (got, want)]
    own, known = (torch.from_numpy(side).double().log_softmax(-1) for side in some)
    kl = torch.nn.functional.kl_div(own, known, reduction="batchmean", log_target=True)
    assert thin.text_kl == pytest.approx(float(kl), rel=1e-4, abs=1e-7)
    for logits in got:
        logits[-1, 0] = np.nan
    assert judge(measure_text(got, again), {})


def test_passages_are_the_texts_in_order_cut_to_the_context() -> None:
    texts = [[1] * 300, [2] * 100, [3] * 369]
    whole = [token for text in texts for token in text]
    judged, rest = cut_passages(texts, 1024)
    assert [len(tokens) for tokens in (*judged, *rest)] == [PASSAGE_TOKENS] * 3  # the last, of one, is none
    assert [token for tokens in (*judged, *rest) for token in tokens] == whole[:768]
    judged, rest = cut_passages(texts, 100)
    assert [len(tokens) for tokens in (*judged, *rest)] == [100] * 7 + [69]
    assert len(judged) == 5  # three of five
    assert sum(map(len, cut_passages([[1] * 10**6], 1024))) == MAX_PASSAGES


def test_a_text_of_one_passage_is_judged_and_calibrated_with() -> None:
    assert cut_passages([[1, 2], [3]], 1024) == ([(1, 2, 3)], [(1, 2, 3)])
    assert cut_passages([[1]], 1024) == ([], [])


def test_of_a_large_vocabulary_some_logits_are_held_and_every_token_is_judged() -> None:
    """128 MiB: 50,000 tokens of 4 bytes each make 671 rows, which 5 passages share."""
    logits = np.zeros((255, 50_000), np.float32)
    logits[:, 7] = 1
    case_set = make_set([(7,) * 256] * 5, [logits] * 5)
    known = {output: by_text[0] for output, by_text in case_set.answers.items() if by_text}
    assert len(known["likeliest"].values) == len(known["logprob"].values) == 255
    assert len(known["logits"].values) == 134
    assert known["logits"].positions[[0, -1]].tolist() == [0, 254]
    metrics = measure_text([logits] * 5, case_set)
    assert (metrics.rows, metrics.text_kl, metrics.top1_changes) == (5 * 255, 0.0, 0.0)
