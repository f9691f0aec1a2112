"""A context longer than what is read of it: its end, behind keys and values that are repeated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.levels import FULL
from planforge.exporter.tasks.decoder import CONTEXT as FULL_CONTEXT
from planforge.exporter.tasks.decoder import choose, fill_context
from planforge.exporter.tasks.random_cases import CONTEXT_ROWS
from planforge.exporter.tasks.registry import TASKS
from planforge.models import load_model
from planforge.runtime import TextGenerator
from planforge.runtime.apps.check.case import CaseSet, Known, Text
from planforge.runtime.apps.check.case_arrays import from_arrays, to_arrays
from planforge.runtime.apps.check.decoder import run
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.llamas import shallow_llama, write_dialects
from ...helpers.plans import only

TASK = TASKS["text-generation"]
CONTEXT = 2500
WINDOW = 100
LIMIT = 1e-4  # on logits
LEVEL = dataclasses.replace(FULL, random_work=0)  # drawn batches have tests of their own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    settings = {"max_position_embeddings": CONTEXT, "sliding_window": WINDOW}
    shallow_llama(folder / "checkpoint", "gemma 3", **settings)
    write_dialects(folder / "checkpoint", folder / "bundle", ["ort", "portable", "inplace"])
    return folder


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return (find_demo("gpt2-demo") / "prompts.txt").read_text(encoding="utf-8").splitlines()[:3]


def ask(model: Any, folder: Path, texts: list[str]) -> CaseSet:
    bundle = Bundle.open(folder / "bundle")
    return TASK.answer(model, bundle, choose(model, bundle, texts, level=LEVEL))


@pytest.fixture(scope="module")
def expected(folder: Path, texts: list[str]) -> CaseSet:
    model = load_model(folder / "checkpoint")
    return ask(model, folder, texts)


def find_context(case_set: CaseSet) -> tuple[Text, Known]:
    """The text of the full context, and what PyTorch answers at its end."""
    (number,) = (case.rows[0].text for case in case_set.cases if case.name == FULL_CONTEXT)
    return case_set.texts[number], case_set.answers["logits"][number]


def test_a_text_fills_the_context() -> None:
    text = range(10, 17)
    for length, read in ((50, 100), (100, 60), (2500, 1024), (4096, 1024), (8191, 1024), (131072, 1024)):
        filled = fill_context(text, length, read)
        tail = len(filled.tokens) - filled.past
        assert filled.count() == filled.repeats * filled.past + tail == length
        assert filled.repeats == max(1, length // read)
        assert filled.repeats == 1 or (tail >= CONTEXT_ROWS and filled.past >= read - CONTEXT_ROWS)


def test_the_end_is_that_of_transformers(folder: Path, expected: CaseSet) -> None:
    context, known = find_context(expected)
    assert context.repeats == 4 and context.count() == CONTEXT
    published: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", dtype=torch.float32
    )
    cache: Any = transformers.DynamicCache()
    with torch.no_grad():
        published(torch.tensor([context.tokens[: context.past]]), past_key_values=cache)
        for layer in cache.layers:
            layer.keys = layer.keys.repeat(1, 1, context.repeats, 1)
            layer.values = layer.values.repeat(1, 1, context.repeats, 1)
        tail = torch.tensor([context.tokens[context.past :]])
        logits = published(tail, past_key_values=cache).logits[0, -CONTEXT_ROWS:]
    np.testing.assert_allclose(known.values, logits.numpy(), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("dialect", ["ort", "portable", "inplace"])
def test_every_dialect_fills_its_cache(folder: Path, expected: CaseSet, dialect: str, tmp_path: Path) -> None:
    with TextGenerator.load(only(folder / "bundle", tmp_path / "only", f"decoder.{dialect}.fp32")) as model:
        for case_set in (expected, from_arrays(to_arrays(TASK.thin_for_file(expected)))):
            (case,) = (case for case in case_set.cases if case.name == FULL_CONTEXT)
            _, known = find_context(case_set)
            seen = list(run(model.decoder, case_set, case))
            got = np.concatenate([one.values["logits"].values for one in seen])
            assert len(known.values) > 1 and known.values.std() > 0.1
            np.testing.assert_allclose(got, known.values, rtol=0, atol=LIMIT)
        context, known = find_context(expected)
        past = context.tokens[: context.past][::-1]
        other = dataclasses.replace(context, tokens=(*past, *context.tokens[context.past :]))
        texts = tuple(other if text == context else text for text in expected.texts)
        *_, last = run(model.decoder, dataclasses.replace(expected, texts=texts), case)
        assert np.abs(last.values["logits"].values[0] - known.values[-1]).max() > 10 * LIMIT


def test_positions_that_are_wrong_far_away_alone_are_seen(
    folder: Path, expected: CaseSet, texts: list[str]
) -> None:
    model = load_model(folder / "checkpoint")
    tables: Any = model.rotary
    assert len(tables.cos) == CONTEXT
    tables.cos[2400:] = tables.cos[2300:2400].clone()
    wrong = ask(model, folder, texts)
    (_, found), (_, known) = find_context(wrong), find_context(expected)
    assert np.abs(found.values - known.values).max() > 10 * LIMIT
    others = [number for number in wrong.answers["margin"]]
    for number in others:
        np.testing.assert_array_equal(
            wrong.answers["logits"][number].values, expected.answers["logits"][number].values
        )
