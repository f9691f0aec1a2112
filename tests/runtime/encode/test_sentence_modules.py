"""Bundles of what sentence-transformers 6 saves, against its encode() and CrossEncoder.predict()."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    LayerNorm,
    Module,
    Normalize,
    Pooling,
    Transformer,
)
from torch import nn

from planforge.exporter import export
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.exporter.errors import CheckpointError
from planforge.exporter.verification.verify import verify
from planforge.runtime import TextEncoder

from ...helpers.models import edit_json, tiny_bert, write_wordpiece

TEXTS = ["hello world", "the plan is not it!", "Is it Paris? " * 12, "forge", ""]
PROMPTS = {"query": "[MASK] plan: ", "plain": "hello world: "}
MODES = ("cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
MADE_BY_RUNTIME: tuple[Any, ...] = ("cls", "mean", "max", "lasttoken")  # of the tokens' vectors
PAIRS = [("hello world", text) for text in TEXTS]
TORCH = "torch.nn.modules"


def list_modules(width: int) -> list[Module]:
    """Modules behind a pooling, each of which changes the vector, in an order that nobody publishes."""
    norm = LayerNorm(width)
    nn.init.normal_(norm.norm.weight)
    nn.init.normal_(norm.norm.bias)
    return [Normalize(), Dropout(0.3), norm, Dense(width, 12), Normalize(), Dense(12, 7)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    write_wordpiece(folder)
    tiny_bert(folder)
    return folder


def save(checkpoint: Path, *modules: Module) -> Path:
    folder = checkpoint.parent / "sentences"
    model = SentenceTransformer(
        modules=[Transformer(str(checkpoint)), *modules], prompts=PROMPTS, device="cpu"
    )
    model.save(str(folder), create_model_card=False)
    return folder


@pytest.mark.parametrize("include_prompt", [True, False])
def test_vectors_of_all_modules_are_those_of_encode(checkpoint: Path, include_prompt: bool) -> None:
    torch.manual_seed(0)
    pooling = Pooling(32, MODES, include_prompt=include_prompt)
    folder = save(checkpoint, pooling, *list_modules(32 * len(MODES)))
    bundle = checkpoint.parent / "bundle"
    export(folder, bundle, precision=["fp32"], target="cpu", verify="standard")
    reference = SentenceTransformer(str(folder), device="cpu")
    vectors = {}
    with TextEncoder.load(bundle) as model:
        for name in (None, *PROMPTS):
            vectors[name] = model.embed(TEXTS, prompt_name=name)
            expected = reference.encode(TEXTS, prompt_name=name)
            np.testing.assert_allclose(vectors[name], expected, atol=2e-5)
            futures = model.submit("embed", TEXTS, prompt_name=name).result()
            np.testing.assert_allclose([one.vector for one in futures], expected, atol=2e-5)
        given = model.embed(TEXTS, prompt=PROMPTS["plain"])
        np.testing.assert_allclose(given, reference.encode(TEXTS, prompt=PROMPTS["plain"]), atol=2e-5)
    assert np.abs(vectors["query"] - vectors[None]).max() > 0.01
    assert np.abs(vectors["query"] - vectors["plain"]).max() > 0.01
    assert verify(bundle, level="full").passed


def test_each_pooling_leaves_a_prompt_out_as_encode_does(checkpoint: Path) -> None:
    folder = save(checkpoint, Pooling(32, MODES, include_prompt=False))
    bundle = checkpoint.parent / "bundle"
    export(folder, bundle, precision=["fp32"], target="cpu", verify=False)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, prompt_name="query")
    with TextEncoder.load(bundle) as model:
        np.testing.assert_allclose(model.embed(TEXTS, prompt_name="query"), expected, atol=1e-5)
        parts = dict(zip(MODES, np.split(expected, len(MODES), axis=1), strict=True))
        for mode in MADE_BY_RUNTIME:
            found = model.embed(TEXTS, prompt_name="query", pooling=mode)
            np.testing.assert_allclose(found, parts[mode], atol=1e-5)


def save_scorer(checkpoint: Path, labels: int = 1, **options: Any) -> Path:
    tiny_bert(checkpoint, "BertForSequenceClassification", num_labels=labels, seed=11)
    folder = checkpoint.parent / "scorer"
    CrossEncoder(str(checkpoint), device="cpu", **options).save_pretrained(str(folder))
    return folder


def predict(folder: Path) -> Any:
    return CrossEncoder(str(folder), device="cpu").predict(PAIRS)


def rank(bundle: Path) -> list[float]:
    with TextEncoder.load(bundle) as model:
        ranked = model.rank(PAIRS[0][0], TEXTS)
    return [one.score for one in sorted(ranked, key=lambda one: one.index)]


@pytest.mark.parametrize("activation", [None, nn.Identity(), nn.Sigmoid()], ids=str)
def test_scores_of_what_a_cross_encoder_saves_are_those_of_predict(
    checkpoint: Path, activation: nn.Module | None
) -> None:
    folder = save_scorer(checkpoint, activation_fn=activation)
    assert (folder / "modules.json").is_file()
    bundle = checkpoint.parent / "bundle"
    export(folder, bundle, precision=["fp32"], target="cpu", verify="standard")
    expected = predict(folder)
    assert np.ptp(expected) > 0.05
    assert rank(bundle) == pytest.approx(expected, abs=1e-5)
    assert verify(bundle, level="full").passed


def read_activation(folder: Path) -> str:
    defaults = Checkpoint(Source("folder", str(folder), folder)).encoder
    assert defaults is not None
    return defaults.score_activation


@pytest.mark.parametrize("has_modules", [True, False])
@pytest.mark.parametrize(
    "name", [None, f"{TORCH}.linear.Identity", f"{TORCH}.activation.Sigmoid", "own.Identity"]
)
@pytest.mark.parametrize("config", [None, f"{TORCH}.linear.Identity"])
def test_the_activation_is_the_one_that_predict_takes(
    checkpoint: Path, has_modules: bool, name: str | None, config: str | None
) -> None:
    """Of the two files that may name one, and also without modules.json."""
    folder = save_scorer(checkpoint)
    edit_json(folder / "config_sentence_transformers.json", activation_fn=name)
    if config is not None:
        edit_json(folder / "config.json", sentence_transformers={"activation_fn": config})
    if not has_modules:
        (folder / "modules.json").unlink()
    taken = CrossEncoder(str(folder), device="cpu").activation_fn
    assert read_activation(folder) == type(taken).__name__.lower()


def test_an_activation_of_others_is_told(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_scorer(checkpoint)
    edit_json(folder / "config_sentence_transformers.json", activation_fn="own.Identity")
    with caplog.at_level(logging.WARNING, "planforge"):
        assert read_activation(folder) == "sigmoid"
    assert "the activation 'own.Identity' is ignored, as it is not a class of torch" in caplog.text
    edit_json(folder / "config_sentence_transformers.json", activation_fn=f"{TORCH}.activation.Tanh")
    with pytest.raises(CheckpointError, match=r"config_sentence_transformers.json: .*Tanh' must be Sigmoid"):
        read_activation(folder)


def test_a_cross_encoder_of_several_classes_classifies(checkpoint: Path) -> None:
    folder = save_scorer(checkpoint, labels=3)
    bundle = checkpoint.parent / "bundle"
    export(folder, bundle, precision=["fp32"], target="cpu", verify=False)
    expected = CrossEncoder(str(folder), device="cpu").predict(PAIRS, apply_softmax=True)
    with TextEncoder.load(bundle) as model:
        found = [[*one.probabilities.values()] for one in model.classify(PAIRS)]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_cross_encoders_prompt_stands_before_the_first_text(checkpoint: Path) -> None:
    folder = save_scorer(checkpoint, prompts=PROMPTS, default_prompt_name="query")
    bundle = checkpoint.parent / "bundle"
    export(folder, bundle, precision=["fp32"], target="cpu", verify=False)
    expected = predict(folder)
    assert rank(bundle) == pytest.approx(expected, abs=1e-5)
    edit_json(folder / "config_sentence_transformers.json", default_prompt_name=None)
    assert np.abs(predict(folder) - expected).max() > 1e-3


def test_a_transformer_alone_makes_no_vector(checkpoint: Path) -> None:
    folder = save(checkpoint, Pooling(32))
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:1]))
    with pytest.raises(CheckpointError, match="sets transformer_task='feature-extraction'; only 'sequence-c"):
        Checkpoint(Source("folder", str(folder), folder))
    (folder / "sentence_bert_config.json").unlink()
    with pytest.raises(CheckpointError, match="a Transformer alone; add a Pooling"):
        Checkpoint(Source("folder", str(folder), folder))


def test_what_changes_the_model_changes_its_hash(checkpoint: Path) -> None:
    folder = save_scorer(checkpoint)
    file = folder / "config_sentence_transformers.json"
    hashed: Callable[[], str] = Source("folder", str(folder), folder).compute_sha256
    first = hashed()
    edit_json(file, __version__={"pytorch": "9"})
    assert hashed() == first
    found = {first}
    for change in (
        {"activation_fn": f"{TORCH}.linear.Identity"},
        {"prompts": {"query": "q: "}},
        {"default_prompt_name": "query"},
    ):
        edit_json(file, **change)
        found.add(hashed())
    assert len(found) == 4
    shutil.copy(file, file.with_suffix(".old"))
    (folder / "modules.json").unlink()  # without it sentence-transformers does not read the settings either
    without = hashed()
    file.unlink()
    assert hashed() == without
