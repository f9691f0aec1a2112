"""How much each level of verification computes, and what it says of that."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from planforge.exporter import verify
from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.levels import CALIBRATION, FULL, LEVELS, STANDARD, parse_verify
from planforge.exporter.tasks.decoder import CONTEXT
from planforge.exporter.tasks.decoder_answers import choose_for_gaps
from planforge.exporter.tasks.gaps import compare_answers
from planforge.exporter.tasks.passages import thin_passages
from planforge.exporter.tasks.pytorch_decoder import open_reference
from planforge.exporter.tasks.random_cases import count_alike, count_tokens
from planforge.exporter.tasks.registry import TASKS
from planforge.exporter.tasks.rounding import Rounding
from planforge.exporter.tasks.verifier import open_verifier
from planforge.exporter.verification.verify import find_recorded_source
from planforge.models import load_model
from planforge.models.language_model import LanguageModel
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

TASK = TASKS["text-generation"]


@pytest.mark.parametrize("weights", [10**6, 124 * 10**6, 10**9, 7 * 10**9])
def test_no_level_computes_more_than_the_next(weights: int) -> None:
    sizes = list(range(1, 9))
    costs = [
        (
            level.count_text(weights),
            level.count_context(weights),
            count_tokens(weights, level),
            count_alike(weights, sizes, level),
            level.cached,
        )
        for level in LEVELS.values()
    ]
    for less, more in itertools.pairwise(costs):
        assert all(a <= b for a, b in zip(less, more, strict=True))


def test_passages_are_thinned_to_so_many_tokens() -> None:
    passages = [tuple(range(100))] * 5
    assert thin_passages(passages, FULL.count_text(10**9)) == passages
    assert list(map(len, thin_passages(passages, 250))) == [100, 100]
    assert list(map(len, thin_passages(passages, 30))) == [30]


def test_what_verify_takes() -> None:
    assert parse_verify(True) is STANDARD and parse_verify(False) is None and parse_verify("full") is FULL
    with pytest.raises(InputError, match="level 'ful' is not one of quick, standard, full; did you mean"):
        parse_verify("ful")


def test_a_quick_verdict_says_what_it_left_out(demo_bundle: Path) -> None:
    only = ["decoder.ort.fp32"]
    quick = verify(demo_bundle, only=only, level="quick")
    parity = next((demo_bundle / "checks").glob("parity-*.json"))
    usual = json.loads(parity.read_text(encoding="utf-8"))  # of the export
    assert quick.passed and usual["passed"]
    assert quick.level == "quick" and usual["level"] == "standard"
    cases = {comparison.case for comparison in quick.comparisons}
    assert {"weights and modules", "prefill and decode, batch 1"} < cases
    compared = [comparison for comparison in quick.comparisons if comparison.artifact in only]
    assert len(compared) < len([c for c in usual["comparisons"] if c["artifact"] in only])
    assert "full context" not in cases and not [case for case in cases if "random" in case]
    assert "random batches, and single steps at every position" in quick.left_out
    assert quick.describe_level().startswith("Verified at the level quick: a smoke test, without ")
    assert json.loads(json.dumps(quick.to_json()))["left_out"] == list(quick.left_out)
    assert quick.collect_gates()[only[0]]["level"] == "quick"


def test_a_level_that_leaves_out_measures_less_of_fp16_and_judges_by_as_much(demo_bundle: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    source = find_recorded_source(bundle)
    assert source is not None
    model = load_model(source.folder)
    texts = [text[:400] for text in read_prompts(None, source.folder)]
    least = dataclasses.replace(
        STANDARD, random_work=1.0, min_random=32, text_work=0.0, min_text=768, context_work=0.0
    )
    verifier = open_verifier(bundle, model, texts, level=least)
    expected = verifier.expected
    rounding = Rounding(dtype=torch.float16)
    gaps = verifier.measure_gaps(model, rounding)
    with rounding.apply(model):
        rounded = TASK.answer(model, bundle, expected, rounding=rounding)
    whole = compare_answers(TASK, expected, rounded)
    assert gaps["text"].rows < whole["text"].rows
    alone = compare_answers(TASK, expected.restrict(expected.answers["margin"]), rounded)
    for metric in ("max_error", "mean_kl"):  # the ends of passages are judged beside the prompts
        assert getattr(gaps[""], metric) >= getattr(alone[""], metric)
    assert gaps[""].rows > alone[""].rows
    # A much longer context is read than a passage: its own end is measured.
    (number,) = (case.rows[0].text for case in expected.cases if case.name == CONTEXT)
    every = list(expected.texts)
    every[number] = dataclasses.replace(every[number], tokens=every[number].tokens * 3, past=0, repeats=1)
    _, ends = choose_for_gaps(dataclasses.replace(expected, texts=tuple(every)), rounding)
    assert choose_for_gaps(expected, rounding)[1] and not ends


def test_calibration_measures_the_same_without_a_verdict(demo_bundle: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    source = find_recorded_source(bundle)
    assert source is not None
    model = load_model(source.folder)
    assert isinstance(model, LanguageModel)
    texts = [text[:400] for text in read_prompts(None, source.folder)]
    small = [dataclasses.replace(level, text_work=0.0) for level in (STANDARD, CALIBRATION)]
    usual, alone = (open_verifier(bundle, model, texts, level=level) for level in small)
    names = [{case.name for case in verifier.expected.cases} for verifier in (usual, alone)]
    assert {CONTEXT, "random batches, padded, seed 0"} <= names[0] and not {
        CONTEXT,
        "random batches, padded, seed 0",
    } & names[1]
    assert usual.expected.calibration == alone.expected.calibration
    rounding = Rounding(weights={"lm_head.weight": model.lm_head.weight.numpy() * np.float32(1.01)})
    gaps = usual.thin(8).measure_gaps(model, rounding)
    assert gaps == alone.thin(8).measure_gaps(model, rounding)
    assert 0 < getattr(gaps[""], "max_error") < 1  # noqa: B009 - a measure of several kinds


def test_the_logits_of_some_tokens_are_those_of_all(demo_bundle: Path) -> None:
    source = find_recorded_source(Bundle.open(demo_bundle))
    assert source is not None
    model = load_model(source.folder)
    assert isinstance(model, LanguageModel)
    head = model.lm_head.weight
    for rounding in (None, Rounding(dtype=torch.float16)):
        reference = open_reference(model, rounding)
        with contextlib.nullcontext() if rounding is None else rounding.apply(model):
            whole = reference.compute_logits([5, 7, 9, 4], slice(None))
            some = reference.compute_columns([5, 7, 9, 4], [3, 0, 8])
        # One product may be added in another order, and in fp16 then be rounded to the next number.
        assert some == pytest.approx(whole[:, [3, 0, 8]], abs=1e-5, rel=1e-5 if rounding is None else 2**-10)
    assert model.lm_head.weight is head
