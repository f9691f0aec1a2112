"""Variants of the Transformer that tutorials teach, and longer texts than a model was trained with."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planforge.exporter import export
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import find_demo, resolve_source
from planforge.exporter.commands.inspection import describe_context
from planforge.models import Transformer, save_model
from planforge.runtime import Translator
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.defaults import GenerationDefaults
from planforge.runtime.bundle.export_again import suggest_export_again
from planforge.runtime.errors import InputError

from ..helpers.faults import Fault, epsilon, node_of, perturbed, transposed
from ..helpers.llamas import tiny_llama
from ..helpers.models import edit_json, embedded, random_transformer, torch_reference
from ..helpers.verdicts import PlantedBundle, keep_answers

TRAINED = 40  # positions of the training
LONGER = 56  # of an export beyond it
SHARED = {"share_layers": True, "final_norms": "decoder", "target_positions": False}
FROM_NORM = {"norm_first": True, "residual_from_norm": True, "final_norms": True, "bias": False}
TEXTS = ["May 3, 1998", "the 2nd of September 2007 and 2012-12-21 or so"]  # 11 and 46 letters, a token each
PRODUCT = ("MatMul",)
NORM = ("LayerNormalization",)
STEPS = 10


def write_variant(folder: Path, **settings: Any) -> Transformer:
    """Write a random checkpoint with transformer-demo's tokenizers."""
    leave_out = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(find_demo("transformer-demo"), folder, ignore=leave_out)
    demo = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {name: demo[name] for name in ("source_vocab_size", "target_vocab_size")}
    model = random_transformer(**sizes, max_positions=TRAINED, decoder_layers=2, **settings)
    save_model(model, folder)
    edit_json(folder / "generation_config.json", max_length=...)
    return model


def search_greedily(model: Transformer, source: Tensor, defaults: GenerationDefaults) -> list[int]:
    """The likeliest tokens by PyTorch's own Transformer, read whole at each step, up to the end token."""
    reference = torch_reference(model)
    ids = torch.tensor([[defaults.decoder_start]])
    with torch.no_grad():
        for _ in range(STEPS):
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            hidden = reference(
                embedded(model, "source", source), embedded(model, "target", ids), tgt_mask=mask
            )
            logits = nn.functional.linear(hidden[:, -1], model.output.weight, model.output.bias)
            logits[:, list(defaults.suppressed)] = -math.inf
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
            if int(ids[0, -1]) in defaults.eos:
                break
    return ids[0, 1:].tolist()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Path]:
    """One layer for all, its model and its bundle, for longer texts than those of the training; verified."""
    folder = tmp_path_factory.mktemp("shared")
    model = write_variant(folder / "checkpoint", **SHARED)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu", "portable"], "verify": "quick"}
    bundle = folder / "bundle"
    result = export(folder / "checkpoint", bundle, max_length=LONGER, extrapolate=True, **options)
    assert result.report is not None and result.report.with_pytorch and result.report.passed
    return model, bundle


@pytest.fixture(scope="module")
def from_norm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Path]:
    folder = tmp_path_factory.mktemp("from-norm")
    model = write_variant(folder / "checkpoint", **FROM_NORM)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
    result = export(folder / "checkpoint", folder / "bundle", **options)
    assert result.report is not None and result.report.with_pytorch and result.report.passed
    return model, folder / "bundle"


@pytest.mark.parametrize("name", ["shared", "from_norm"])
def test_translations_are_those_of_pytorchs_own_transformer(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The longer text goes beyond the positions of the training, in the bundle that takes it."""
    model, bundle = request.getfixturevalue(name)
    with Translator.load(bundle) as translator:
        defaults = translator.defaults
        longest = translator.max_length
        for text in TEXTS:
            ids = [*defaults.prefix, *translator.source_tokenizer.encode(text), defaults.source_eos]
            if len(ids) > longest:
                continue
            want = search_greedily(model, torch.tensor([ids]), defaults)
            got = translator.translate(text, num_beams=1, max_new_tokens=STEPS)
            assert [token for token in want if token not in defaults.eos] == list(got.token_ids)


def test_layers_that_share_weights_have_one_source(shared: tuple[Transformer, Path]) -> None:
    """Its keys and values are computed and kept once."""
    artifact = Bundle.open(shared[1]).manifest.artifact("encoder.portable.fp32")
    assert [spec.name for spec in artifact.outputs] == ["cross.0.key", "cross.0.value"]


def skip_norm(model: Any) -> None:
    """The usual residual: what attention gives is added to the layer's input, not to its norm."""
    norm = node_of(model, f"{RESIDUAL}.norm", "LayerNormalization")
    (add,) = (node for node, _ in norm.outputs[0].uses() if node.op_type == "Add")
    add.replace_input_with(list(add.inputs).index(norm.outputs[0]), norm.inputs[0])


ATTENTION = "encoder.layers.0.attention.output"
FEED_FORWARD = "decoder.layers.0.feed_forward.inner"
RESIDUAL = "encoder.layers.0.attention_residual"
CROSS = "decoder.layers.1.cross_attention.query"
PLANTED = [
    (
        "shared",
        "encoder.portable.fp32",
        Fault("a transposed weight", transposed(ATTENTION), ATTENTION, PRODUCT),
    ),
    (
        "shared",
        "decoder.portable.fp32",
        Fault("weights 1 % off", perturbed(FEED_FORWARD), FEED_FORWARD, PRODUCT),
    ),
    (
        "shared",
        "decoder.portable.fp32",
        Fault("epsilon 1e-2", epsilon("decoder.norm", 1e-2), "decoder.norm", NORM),
    ),
    ("from_norm", "encoder.ort.fp32", Fault("a residual before its norm", skip_norm, RESIDUAL, ("Add",))),
    ("from_norm", "decoder.ort.fp32", Fault("a transposed weight", transposed(CROSS), CROSS, PRODUCT)),
]


@pytest.fixture(scope="module")
def planted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], PlantedBundle]]:
    """Return a copy of the sound bundle of a variant."""
    copies = tmp_path_factory.mktemp("damaged")

    @functools.cache
    def copy(name: str) -> PlantedBundle:
        _, bundle = request.getfixturevalue(name)
        return PlantedBundle(name, bundle, copies / name)

    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield copy


@pytest.mark.parametrize(
    ("name", "artifact", "fault"), PLANTED, ids=lambda value: getattr(value, "name", value)
)
def test_faults_in_variants_are_refused_and_named(
    planted: Callable[[str], PlantedBundle], name: str, artifact: str, fault: Fault
) -> None:
    verdict = planted(name).judge(artifact, fault)
    assert verdict.is_caught and verdict.is_right, verdict


def test_longer_texts_are_for_positions_that_are_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_variant(tmp_path / "sines")
    source = resolve_source(str(tmp_path / "sines"))
    with pytest.raises(InputError, match=f"context of {TRAINED}; extrapolate=True .* computes positions"):
        Checkpoint(source, max_length=LONGER)
    assert Checkpoint(source, max_length=LONGER, extrapolate=True).choices.max_length == LONGER
    assert f"positions behind {TRAINED} tokens, the longest text of the model's training" in caplog.text
    write_variant(tmp_path / "learned", positions="learned")
    with pytest.raises(
        InputError, match=f"has learned those of {TRAINED} tokens and no others. Leave it out"
    ):
        Checkpoint(resolve_source(str(tmp_path / "learned")), max_length=LONGER, extrapolate=True)


def test_a_recurrent_model_names_its_setting() -> None:
    for options in ({"max_length": 1024}, {"max_length": 1024, "extrapolate": True}):
        with pytest.raises(
            InputError, match=r"set max_positions of its config\.json to export it for longer"
        ):
            Checkpoint(resolve_source("recurrent-demo"), **options)  # type: ignore[arg-type]


def test_rotary_positions_are_computed_unless_they_depend_on_the_length(tmp_path: Path) -> None:
    for name, computes in (("llama 2", True), ("phi-4-mini", False)):
        tiny_llama(tmp_path / name, name)
        config: Any = Checkpoint(resolve_source(str(tmp_path / name))).config
        assert config.computes_positions == computes


def test_the_command_that_exports_again_extrapolates(shared: tuple[Transformer, Path]) -> None:
    assert f"--max-length {LONGER} --extrapolate" in suggest_export_again(Bundle.open(shared[1]))


def test_a_bundle_that_extrapolates_says_so(shared: tuple[Transformer, Path]) -> None:
    manifest = Bundle.open(shared[1]).manifest
    assert describe_context(manifest).startswith(f"{LONGER} tokens; trained with {TRAINED}, positions")
