"""A context longer than what is read of it: its end, behind keys and values that are repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.reference.decoder_samples import (
    CONTEXT_ROWS,
    Expectation,
    answer,
    choose_questions,
    fill_context,
)
from planforge.models import load_model
from planforge.runtime import TextGenerator
from planforge.runtime.apps.check import decoders as golden
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.decoder import Decoder

from ...helpers.llamas import shallow_llama, write_dialects
from ...helpers.plans import only

CONTEXT = 2500
WINDOW = 100
LIMIT = 1e-4  # on logits


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


@pytest.fixture(scope="module")
def expected(folder: Path, texts: list[str]) -> Expectation:
    model = load_model(folder / "checkpoint")
    return answer(model, choose_questions(model, Bundle.open(folder / "bundle"), texts))


def test_a_text_fills_the_context() -> None:
    text = range(10, 17)
    for length, read in ((50, 100), (100, 60), (2500, 1024), (4096, 1024), (8191, 1024), (131072, 1024)):
        filled = fill_context(text, length, read)
        assert len(filled) == filled.repeats * len(filled.tokens) + len(filled.tail) == length
        assert filled.repeats == max(1, length // read)
        assert len(filled.tail) >= CONTEXT_ROWS or filled.repeats == 1
        assert len(filled.tokens) >= read - CONTEXT_ROWS or filled.repeats == 1


def test_the_end_is_that_of_transformers(folder: Path, expected: Expectation) -> None:
    assert expected.context.repeats == 4 and len(expected.context) == CONTEXT
    published: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", dtype=torch.float32
    )
    cache: Any = transformers.DynamicCache()
    with torch.no_grad():
        published(torch.tensor([expected.context.tokens]), past_key_values=cache)
        for layer in cache.layers:
            layer.keys = layer.keys.repeat(1, 1, expected.context.repeats, 1)
            layer.values = layer.values.repeat(1, 1, expected.context.repeats, 1)
        logits = published(torch.tensor([expected.context.tail]), past_key_values=cache).logits[
            0, -CONTEXT_ROWS:
        ]
    np.testing.assert_allclose(expected.context_logits, logits.numpy(), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("dialect", ["ort", "portable", "inplace"])
def test_every_dialect_fills_its_cache(
    folder: Path, expected: Expectation, dialect: str, tmp_path: Path
) -> None:
    with TextGenerator.load(only(folder / "bundle", tmp_path / "only", f"decoder.{dialect}.fp32")) as model:
        kept = golden.from_arrays(golden.to_arrays(expected))
        for known in (expected, kept):
            got, want = golden.fill_context(model.decoder, known)
            assert len(want) > 1 and want.std() > 0.1
            np.testing.assert_allclose(got, want, rtol=0, atol=LIMIT)
        assert is_past_seen(model.decoder, expected)


def is_past_seen(decoder: Decoder, expected: Expectation) -> bool:
    """Return whether the end of the context is another where what is repeated is another."""
    run = decoder.start(1, len(expected.context))
    run.prefill([expected.context.tokens[::-1]])
    run.repeat(expected.context.repeats)
    got = run.prefill([expected.context.tail])
    return bool(np.abs(got[0] - expected.context_logits[-1]).max() > 10 * LIMIT)


def test_positions_that_are_wrong_far_away_alone_are_seen(
    folder: Path, expected: Expectation, texts: list[str]
) -> None:
    model = load_model(folder / "checkpoint")
    tables: Any = model.rotary
    assert len(tables.cos) == CONTEXT
    tables.cos[2400:] = tables.cos[2300:2400].clone()
    wrong = answer(model, choose_questions(model, Bundle.open(folder / "bundle"), texts))
    assert np.abs(wrong.context_logits - expected.context_logits).max() > 10 * LIMIT
    np.testing.assert_array_equal(wrong.edge_logits, expected.edge_logits)


def test_golden_data_of_earlier_bundles_has_a_whole_context(expected: Expectation) -> None:
    arrays = golden.to_arrays(expected)
    del arrays["context.repeats"], arrays["context.tail"]
    earlier = golden.from_arrays(arrays)
    assert earlier.context == golden.Context(expected.context.tokens)
