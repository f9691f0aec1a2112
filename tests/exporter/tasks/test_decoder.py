"""A decoder's cases as data: transformers' logits at their places, what cases in code measure, and faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.levels import STANDARD, Level
from planforge.exporter.reference_model import load_our_model
from planforge.exporter.tasks.decoder import choose
from planforge.exporter.tasks.passages import open_plain_tokenizer
from planforge.exporter.tasks.registry import TASKS
from planforge.runtime.apps.check.case import CaseSet, Known
from planforge.runtime.apps.check.case_arrays import from_arrays, to_arrays
from planforge.runtime.apps.check.decoder import DecoderEngine
from planforge.runtime.apps.check.judge import list_comparisons
from planforge.runtime.apps.check.outcome import Outcome
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec
from planforge.runtime.decoding.decoder import Decoder

TASK = TASKS["text-generation"]
FOLDER = DEMOS / "gpt2-demo"
ANY = dict.fromkeys(
    ("max_error", "mean_kl", "random.max_error", "text_kl", "top1_changes", "perplexity_change"), 1e9
)
LIMITS = {**ANY, "max_error": 1e-4, "random.max_error": 1e-4}


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path) -> Bundle:
    return Bundle.open(demo_bundle)


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Any:
    return load_our_model(FOLDER, bundle.manifest.max_length)


def make_set(model: Any, bundle: Bundle, level: Level) -> CaseSet:
    return TASK.answer(model, bundle, choose(model, bundle, read_prompts(None, FOLDER)[:6], level=level))


@pytest.fixture(scope="module")
def case_set(model: Any, bundle: Bundle) -> CaseSet:
    return make_set(model, bundle, STANDARD)


def compare(bundle: Bundle, artifact: Artifact, case_set: CaseSet, limits: Any = ANY) -> dict[str, Outcome]:
    decoder = Decoder(OrtCpuBackend().open(bundle, artifact), artifact)
    try:
        engine = DecoderEngine(decoder, lambda: (open_plain_tokenizer(bundle),) * 2)
        found = list_comparisons(engine, case_set, artifact, limits)
        return {name: run() for name, run in found.items()}
    finally:
        decoder.close()


def list_graphs(bundle: Bundle) -> Iterator[Artifact]:
    return (artifact for artifact in bundle.manifest.artifacts if artifact.precision == "fp32")


def test_answers_are_the_logits_of_transformers(case_set: CaseSet) -> None:
    reference = transformers.GPT2LMHeadModel.from_pretrained(FOLDER).float().eval()
    looked_at = 0
    for number, text in enumerate(case_set.texts):
        if text.repeats > 1:
            continue
        with torch.no_grad():
            want = reference(torch.tensor([text.tokens])).logits[0].numpy()
        for output, by_text in case_set.answers.items():
            known = by_text.get(number)
            if known is None or output not in ("logits", "columns"):
                continue
            there = want[known.positions]
            there = there[:, list(case_set.columns)] if output == "columns" else there
            np.testing.assert_allclose(known.values, there, atol=2e-4)
            looked_at += len(known.positions)
    assert looked_at > 500


def test_a_wrong_number_at_one_place_is_found_there(bundle: Bundle, case_set: CaseSet) -> None:
    case = next(c for c in case_set.cases if len(c.rows) == 3 and not c.shares_past)
    step, row = len(case.rows[1].ends) - 1, 1
    text, end = case.rows[row].text, case.rows[row].ends[step]
    known = case_set.answers["columns"][text]
    values = known.values.copy()
    values[np.searchsorted(known.positions, end - 1), 0] += 1.0
    wrong = {**case_set.answers["columns"], text: Known(known.positions, values)}
    damaged = dataclasses.replace(case_set, answers={**case_set.answers, "columns": wrong}, cases=(case,))
    artifact = next(list_graphs(bundle))
    (outcome,) = compare(bundle, artifact, damaged, LIMITS).values()
    assert outcome.location == (case, step, row)
    assert f"in row {row} of a batch of 3" in outcome.failures[0]
    assert not any(each.failures for each in compare(bundle, artifact, case_set, LIMITS).values())


def test_arrays_keep_a_set_whole(case_set: CaseSet) -> None:
    read = from_arrays(to_arrays(case_set))
    assert (read.texts, read.cases, read.columns) == (case_set.texts, case_set.cases, case_set.columns)
    for output, by_text in case_set.answers.items():
        for text, known in by_text.items():
            for one, other in zip(read.answers[output][text], known, strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_thinned_set_runs_at_the_places_that_are_left(bundle: Bundle, case_set: CaseSet) -> None:
    thinned = TASK.thin_for_file(case_set)
    artifact = next(list_graphs(bundle))
    found = compare(bundle, artifact, thinned, LIMITS)
    assert found.keys() == compare(bundle, artifact, case_set, LIMITS).keys()
    prompts = sum(bool(text.tokens) for text in case_set.texts[:7])
    assert found["prefill and decode, batch 1"].metrics["rows"] == 3 * prompts
    assert not any(outcome.failures for outcome in found.values())


def test_a_small_plan_gets_the_rows_that_it_takes(bundle: Bundle, case_set: CaseSet) -> None:
    artifact = next(list_graphs(bundle))
    assert [case_set.fit(case, artifact) for case in case_set.cases] == [[case] for case in case_set.cases]
    small = limit_axes(artifact, batch=3, tokens=40)
    found = compare(bundle, small, case_set, LIMITS)
    assert {"greedy, 8 prompts, padded", "random batches, padded, seed 0"} <= found.keys()
    assert "full context" not in found
    assert not any(outcome.failures for outcome in found.values())
    for case in case_set.cases:
        for part in case_set.fit(case, small):
            assert len(part.rows) <= 3 and case_set.count_columns(part) <= 40
            for row in part.rows:  # as many of its steps as there is room for
                assert any(
                    row.text == one.text and row.ends == one.ends[: len(row.ends)] for one in case.rows
                ) or (case.runner == "every" and row.ends[-1] <= 40)


def limit_axes(artifact: Artifact, **sizes: int) -> Artifact:
    """Return a graph as a plan of it that takes fewer rows and tokens."""

    def limit(spec: TensorSpec) -> TensorSpec:
        axes = [
            dataclasses.replace(axis, opt=1, max=sizes[axis.name])
            if isinstance(axis, Axis) and axis.name in sizes
            else axis
            for axis in spec.axes
        ]
        return dataclasses.replace(spec, axes=tuple(axes))

    return dataclasses.replace(artifact, inputs=tuple(map(limit, artifact.inputs)))


def test_arrays_of_another_format_are_refused(case_set: CaseSet) -> None:
    arrays = to_arrays(case_set)
    older = str(arrays["plan"]).replace('"format": 3', '"format": 2')
    with pytest.raises(KeyError, match="format 3"):
        from_arrays({**arrays, "plan": np.array(older)})
