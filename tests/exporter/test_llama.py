"""The Llama family through an export: tokens and logits are those of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.exporter.imported.architectures import has_reference_model
from planforge.runtime import TextGenerator

from ..helpers.llamas import LLAMAS, NEW, WINDOW, Reference, list_dialects, shallow_llama, tiny_llama
from ..helpers.models import edit_json
from ..helpers.plans import only

LIMIT = 1e-4  # the issue's, on logits
LONG = "In the beginning God created the heaven and the earth. And the earth was without form, and void"
TEXTS = (LONG, "And", "Let there be light: and there was")
AGAIN = "and he said unto them, and he said unto them, and he said"  # what lookups find something in
# They have nothing in their graphs that others have not.
ALIKE = ("qwen2", "ministral", "gemma", "exaone 4, no windows", "seed-oss", "qwen3-moe, one in two")
KINDS = [name for name in LLAMAS if name not in ALIKE]


@dataclass(frozen=True)
class Pair:
    """A graph, and the checkpoint that it comes from in transformers."""

    model: TextGenerator
    reference: Reference


@pytest.fixture(scope="module")
def references(llama_bundle: Callable[[str], Path]) -> Callable[[str], Reference]:
    return functools.cache(lambda name: Reference(llama_bundle(name) / "checkpoint"))


@pytest.fixture(
    scope="module", params=[f"{name}: {dialect}" for name in KINDS for dialect in list_dialects(name)]
)
def pair(
    request: pytest.FixtureRequest,
    llama_bundle: Callable[[str], Path],
    references: Callable[[str], Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    name, dialect = request.param.split(": ")
    copy = tmp_path_factory.mktemp("llama") / "only"
    with TextGenerator.load(only(llama_bundle(name) / "bundle", copy, f"decoder.{dialect}.fp32")) as model:
        assert model.artifact.dialect == dialect
        yield Pair(model, references(name))


def test_logits_in_steps_are_those_of_one_pass_in_transformers(pair: Pair) -> None:
    """A prompt longer than two windows: some tokens, several on top of them, and then one by one."""
    tokens = pair.model.tokenizer.encode(LONG)
    assert len(tokens) > 2 * WINDOW + 3
    run = pair.model.decoder.start(1, len(tokens))
    found = [run.prefill([tokens[:5]]), *run.extend(tokens[5:-3])]
    found += [run.decode([token]) for token in tokens[-3:]]
    want = pair.reference.compute_logits(tuple(tokens))[4:]
    assert want.std() > 0.1  # it is no constant
    np.testing.assert_allclose(np.concatenate(found), want, rtol=0, atol=LIMIT)


def test_a_batch_of_unequal_lengths_has_the_answers_of_transformers(pair: Pair) -> None:
    answers = pair.model.generate(TEXTS, max_new_tokens=NEW, ignore_eos=True)
    assert len({token for answer in answers for token in answer.token_ids}) > 10
    for text, answer in zip(TEXTS, answers, strict=True):
        wanted = pair.reference.continue_greedily(tuple(pair.model.tokenizer.encode(text)))
        assert answer.token_ids == wanted


def test_a_second_turn_goes_on_from_the_cache_of_the_first(pair: Pair) -> None:
    """Tokens behind those that both turns have are forgotten, and others take their places."""
    model = pair.model
    first = model.generate(LONG, max_new_tokens=NEW, ignore_eos=True, reuse_prompt=True)
    for text in (" And God said", " Let"):
        turn = [*model.tokenizer.encode(LONG), *first.token_ids[:5], *model.tokenizer.encode(text)]
        answer = model.generate(turn, max_new_tokens=NEW, ignore_eos=True, reuse_prompt=True)
        assert answer.prompt_tokens_reused >= len(turn) - 4
        assert answer.token_ids == pair.reference.continue_greedily(tuple(turn))


def test_drafted_tokens_are_those_of_transformers(pair: Pair) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "speculative": "prompt-lookup"}
    answer = pair.model.generate(AGAIN, **options)
    assert answer.token_ids == pair.reference.continue_greedily(tuple(pair.model.tokenizer.encode(AGAIN)))


def test_beams_and_their_scores_are_those_of_transformers(pair: Pair) -> None:
    options: dict[str, Any] = {"num_beams": 3, "n_best": 3, "max_new_tokens": NEW, "ignore_eos": True}
    for text, answer in zip(TEXTS, pair.model.generate(TEXTS, **options), strict=True):
        wanted = pair.reference.search_beams(tuple(pair.model.tokenizer.encode(text)))
        assert [candidate.token_ids for candidate in answer.candidates] == [tokens for tokens, _ in wanted]
        scores = [candidate.score for candidate in answer.candidates]
        np.testing.assert_allclose(scores, [score for _, score in wanted], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["gemma 2", "gemma 3"])
def test_a_default_export_is_verified_and_has_a_plan(name: str, tmp_path: Path) -> None:
    """Windows, caps and two rotations in every dialect, fp16 and TensorRT-RTX's plan among them."""
    pytest.importorskip("tensorrt_rtx")
    shallow_llama(tmp_path / "checkpoint", name)
    target = ["cpu", "portable", "rtx"]
    result = export(tmp_path / "checkpoint", tmp_path / "bundle", target=target, sms=["sm86"])
    assert result.report is not None and result.report.passed and result.report.with_pytorch
    graphs = {(artifact.dialect, artifact.precision) for artifact in result.manifest.artifacts}
    assert graphs >= {("ort", "fp32"), ("portable", "fp16"), ("inplace", "fp16")}
    assert [plan.built_from for plan in result.manifest.plans] == ["decoder.inplace.fp16"]


@pytest.mark.parametrize("name", ["phi-4-mini", "olmo 2", "smollm3", "llama with biases"])
def test_tensorrt_builds_a_plan_of_what_else_attention_has(name: str, tmp_path: Path) -> None:
    """Partial rotations, norms of whole projections, layers without positions, and biases."""
    pytest.importorskip("tensorrt_rtx")
    shallow_llama(tmp_path / "checkpoint", name)
    options: dict[str, Any] = {"target": ["rtx"], "sms": ["sm86"], "verify": False}
    manifest = export(tmp_path / "checkpoint", tmp_path / "bundle", **options).manifest
    assert [plan.built_from for plan in manifest.plans] == ["decoder.inplace.fp16"]


def test_a_trained_llama_passes_in_fp16_and_has_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    result = export("llama-demo", tmp_path / "bundle", target=["rtx"], sms=["sm86"], verify="quick")
    assert result.report is not None and result.report.passed and result.report.with_pytorch
    assert [plan.built_from for plan in result.manifest.plans] == ["decoder.inplace.fp16"]


def test_a_long_context_is_cut_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_llama(tmp_path, "llama 2", max_position_embeddings=8192)
    checkpoint = Checkpoint(Source("folder", str(tmp_path), tmp_path))
    assert checkpoint.choices.max_length == 4096
    assert "context is 4,096 tokens, the model's is 8,192; --max-length 8192 exports all of it" in caplog.text
    assert Checkpoint(checkpoint.source, max_length=8192).choices.max_length == 8192


def test_models_are_ours_by_their_type(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "llama 2")
    assert has_reference_model(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LlamaForSequenceClassification"])
    assert has_reference_model(tmp_path)
    edit_json(tmp_path / "config.json", model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"])
    assert not has_reference_model(tmp_path)
