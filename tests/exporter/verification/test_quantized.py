"""gpt2-demo in int8 and int4: what its bundle holds, and which faults a verification finds in it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import load_file

from planforge.exporter import export, exporting, verify
from planforge.exporter.calibration.calibration import Calibration, calibrate
from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.calibration.repeat import read_calibration
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.number_formats import CPU_SIZES
from planforge.exporter.precisions import PRECISIONS
from planforge.exporter.tasks.passages import cut_passages
from planforge.exporter.verification import verify as verify_module
from planforge.models import load_model
from planforge.runtime import TextGenerator
from planforge.runtime.apps.check.case_arrays import from_arrays
from planforge.runtime.apps.check.files import read_golden
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.backends.ort_program import OrtBuffer
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.decoding.decoder import Decoder
from planforge.runtime.decoding.static_cache import GroupQueryCache
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.cache import in_steps
from ...helpers.graphs import nodes, replace_graph

DEMO = DEMOS / "gpt2-demo"
LETTERS = 1500  # of each of `TEXTS` texts to verify with
TEXTS = 3
pytestmark = pytest.mark.usefixtures("kept_answers")


@dataclass(frozen=True)
class Exported:
    """A bundle, the texts that it was calibrated and verified with, and what the calibration found."""

    folder: Path
    prompts: Path
    calibration: Calibration


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("whole")
    texts = (DEMO / "prompts.txt").read_text(encoding="utf-8").splitlines()[:TEXTS]
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{text[:LETTERS]}\n" for text in texts), encoding="utf-8")
    found: list[Calibration] = []

    def watched(*arguments: Any) -> Calibration:
        found.append(calibrate(*arguments))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "calibrate", watched)
        names = ["fp32", "int8", "int4", "fp32-kv8", "int8-kv8"]
        export("gpt2-demo", folder / "bundle", target=["cpu"], precision=names, prompts=prompts)
    return Exported(folder / "bundle", prompts, found[0])


@pytest.fixture(scope="module")
def published() -> transformers.GPT2LMHeadModel:
    model: transformers.GPT2LMHeadModel = transformers.GPT2LMHeadModel.from_pretrained(
        DEMO, dtype=torch.float32
    )
    model.eval()
    return model


def test_every_precision_passes_its_gate(exported: Exported) -> None:
    bundle = Bundle.open(exported.folder)
    bundle.verify_files()
    artifacts = bundle.manifest.artifacts
    assert [a.id for a in artifacts] == [
        f"decoder.ort.{p}" for p in ("fp32", "int8", "int4", "fp32-kv8", "int8-kv8")
    ]
    for artifact in artifacts:
        kind = PRECISIONS[artifact.precision]
        measured = artifact.gate["measured"]
        assert artifact.gate["passed"]
        assert "text_kl" in measured
        wanted = {"bits": kind.weight_bits, "cache_bits": kind.cache_bits}
        found = {name: artifact.quantization.get(name) for name in wanted}
        assert found == wanted
        assert (artifact.quantization.get("block_size") in CPU_SIZES) == bool(kind.weight_bits)


def test_weights_are_stored_once_for_all_that_can_share_them(exported: Exported) -> None:
    tensors = load_file(DEMO / "model.safetensors")
    sizes = {name: tensor.shape for name, tensor in tensors.items() if not name.endswith(".attn.bias")}
    bundle = Bundle.open(exported.folder)
    data = {a.precision: a.data for a in bundle.manifest.artifacts}
    assert data["fp32"] == data["fp32-kv8"] and data["int8"] == data["int8-kv8"]
    assert len(list((exported.folder / "onnx").glob("*.data"))) == 3
    quantization = bundle.manifest.artifact("decoder.ort.int8").quantization
    for precision in ("fp32", "int8"):
        expected = 0
        for name, shape in sizes.items():
            count = int(np.prod(shape))
            if precision == "int8" and len(shape) == 2 and "wpe" not in name:
                # A byte each, and a float a block.
                expected += count + 4 * count // quantization["block_size"]
            else:
                expected += 4 * count
        (file,) = data[precision]
        size = (exported.folder / file).stat().st_size
        large = sum(int(np.prod(shape)) * 4 >= 2**20 for shape in sizes.values())
        assert expected <= size <= expected + 65536 * large  # which begin at a page
    graphs = (exported.folder / "onnx").glob("*.onnx")
    assert all(graph.stat().st_size < 60_000 for graph in graphs)


def test_an_int8_cache_takes_a_quarter_and_its_model_runs(exported: Exported) -> None:
    manifest = Bundle.open(exported.folder).manifest
    floats, whole = (
        count_cache_bytes(manifest.artifact(f"decoder.ort.{p}"), 2, 100) for p in ("fp32", "fp32-kv8")
    )
    assert floats == 4 * whole
    texts = {}
    for precision in ("fp32", "int8-kv8"):
        with TextGenerator.load(exported.folder, precision=precision, threads=1) as model:
            texts[precision] = model.generate("And God said", max_new_tokens=8).token_ids
    assert texts["int8-kv8"] == texts["fp32"]


def scales_in(bundle: Bundle, artifact: str) -> dict[str, npt.NDArray[np.float32]]:
    """The steps of keys and values, (H * D,) by the cache's name, as a graph holds them."""
    graph = ir.load(bundle.path(bundle.manifest.artifact(artifact).file)).graph
    found = {}
    for name, value in graph.initializers.items():
        if name.startswith("cache.") and value.const_value is not None:
            found[name.removesuffix(".scale")] = value.const_value.numpy()
    return found


def test_steps_of_the_cache_are_what_the_text_reaches_and_some(
    exported: Exported, published: transformers.GPT2LMHeadModel
) -> None:
    bundle = Bundle.open(exported.folder)
    arrays, _ = read_golden(next((exported.folder / "checks").glob("golden-*.npz")))
    tokenizer = Tokenizer.from_file(bundle.path(bundle.manifest.tokenizer["files"][0]))
    encoded = [tokenizer.encode(text) for text in read_prompts(exported.prompts)]
    context = bundle.manifest.max_length
    judged, texts = cut_passages(encoded, context)
    assert texts and not set(texts) & set(judged)  # what is judged calibrates nothing
    assert not {text.tokens for text in from_arrays(arrays).texts} & set(texts)
    joined = [token for tokens in texts for token in tokens]
    largest: dict[str, npt.NDArray[np.float32]] = {}
    for start in range(0, len(joined), context):
        for name, x in in_steps(published, joined[start : start + context], None).items():
            reached = np.abs(x).max(1).reshape(-1)
            largest[name] = np.maximum(largest.get(name, reached), reached)
    found = scales_in(bundle, "decoder.ort.fp32-kv8")
    assert set(found) == set(largest)
    for name, scale in found.items():
        np.testing.assert_allclose(scale * 127, 1.25 * largest[name], rtol=1e-4)


def test_int8_slots_are_the_rounded_keys_and_values(
    exported: Exported, published: transformers.GPT2LMHeadModel
) -> None:
    bundle = Bundle.open(exported.folder)
    artifact = bundle.manifest.artifact("decoder.ort.fp32-kv8")
    decoder = Decoder(OrtCpuBackend(1).open(bundle, artifact), artifact)
    prompts = [list(range(100, 160)), list(range(900, 930))]
    run = decoder.start(2, 64)
    run.prefill(prompts)
    cache = run.cache
    assert isinstance(cache, GroupQueryCache)
    for b, prompt in enumerate(prompts):
        steps = in_steps(published, prompt, scales_in(bundle, artifact.id))
        for name, exact in steps.items():
            buffer = cache.buffers[name]
            assert isinstance(buffer, OrtBuffer) and buffer.array.dtype == np.int8
            got = buffer.array[b, :, : len(prompt)].astype(np.float32)
            want = np.clip(np.rint(exact), -128, 127)
            assert len(np.unique(want)) > 60
            # Rounding in one layer that falls the other way moves those behind it by a part of a step.
            near = np.abs(exact - np.floor(exact) - 0.5) < (1e-3 if name.startswith("cache.0.") else 0.05)
            np.testing.assert_array_equal(got[~near], want[~near])
            assert np.abs(got - want).max() <= 1
            assert (got != want).mean() < 0.01
    decoder.close()


def test_a_later_verification_finds_the_calibration_of_the_export(exported: Exported) -> None:
    again = read_calibration(Bundle.open(exported.folder), load_model(DEMO))
    first = exported.calibration
    assert set(again.weights) == set(first.weights) == {"int8", "int4"}
    parameters = dict(load_model(DEMO).named_parameters())
    for kind, weights in again.weights.items():
        assert weights.size == first.weights[kind].size
        assert set(weights) == set(first.weights[kind])
        assert set(weights) == {n for n, p in parameters.items() if p.ndim == 2} - {"wpe.weight"}
        for name, blocks in weights.items():
            if kind == "int8":  # int4 is rounded with compensation
                np.testing.assert_array_equal(blocks.codes, first.weights[kind][name].codes)
            np.testing.assert_array_equal(blocks.scale, first.weights[kind][name].scale)
            if kind == "int8":
                off = np.abs(blocks.dequantize() - parameters[name].detach().numpy())
                steps = np.abs(blocks.scale).repeat(weights.size, axis=1)
                assert (off <= 0.501 * steps).all()
    assert set(again.cache_scales) == set(first.cache_scales)
    for name, scale in again.cache_scales.items():
        np.testing.assert_array_equal(scale, first.cache_scales[name])


def test_verification_passes_with_pytorch(exported: Exported) -> None:
    report = verify(exported.folder, prompts=exported.prompts, level="quick")
    assert report.with_pytorch and report.passed
    assert {c.artifact for c in report.comparisons if c.case == "real text"} == {
        f"decoder.ort.{p}" for p in ("fp32", "int8", "int4", "fp32-kv8", "int8-kv8")
    }


def scale_of(model: ir.Model, weight: str) -> ir.Value:
    """The steps (N, K / b) of a weight."""
    (node,) = [
        n for n in nodes(model, "MatMulNBits") if str(n.inputs[1] and n.inputs[1].name).startswith(weight)
    ]
    assert node.inputs[2] is not None
    return node.inputs[2]


def change(value: ir.Value, function: Callable[[npt.NDArray[np.float32]], Any]) -> None:
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    value.const_value = ir.tensor(np.asarray(function(array), array.dtype), name=value.name)


def perturb_a_layer(model: ir.Model, factor: float = 1.1) -> None:
    for weight in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        change(scale_of(model, f"h.2.{weight}."), lambda scale: scale * factor)


def perturb_a_layer_a_little(model: ir.Model) -> None:
    perturb_a_layer(model, 1.05)


def swap_keys_and_values(model: ir.Model) -> None:
    attention = nodes(model, "GroupQueryAttention")[1]
    joined = attention.inputs[0]
    assert joined is not None
    split = ir.node("Split", [joined], {"axis": 2, "num_outputs": 3}, num_outputs=3)
    q, k, v = split.outputs
    swapped = ir.node("Concat", [q, v, k], {"axis": 2})
    model.graph.insert_before(attention, [split, swapped])
    attention.replace_input_with(0, swapped.outputs[0])


def zero_a_block(model: ir.Model) -> None:
    """Forgets the first block of every row of a weight."""
    change(scale_of(model, "h.1.mlp.c_fc."), lambda scale: scale * (np.arange(scale.shape[1]) > 0))


def clip_the_cache(model: ir.Model) -> None:
    for name, value in model.graph.initializers.items():
        if name.startswith("cache.1.value"):
            change(value, lambda scale: scale * 0.3)


def with_fault(exported: Exported, folder: Path, artifact: str, fault: Callable[[ir.Model], None]) -> Path:
    """A copy of the bundle that has one graph only, with a fault."""
    own = Path(shutil.copytree(exported.folder, folder))
    manifest = Bundle.open(own).manifest
    alone = dataclasses.replace(manifest, artifacts=(manifest.artifact(artifact),))
    (own / "manifest.json").write_text(alone.to_json(), encoding="utf-8")
    replace_graph(own, artifact, fault)
    return own


def without_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)


@pytest.mark.parametrize(
    ("precision", "fault", "by_pytorch"),
    [
        ("int8", perturb_a_layer, True),
        ("int8", perturb_a_layer_a_little, False),
        ("int8", swap_keys_and_values, True),
        ("int8", zero_a_block, True),
        ("int8-kv8", clip_the_cache, True),
    ],
)
def test_planted_faults_are_caught(
    exported: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    fault: Callable[[ir.Model], None],
    by_pytorch: bool,
) -> None:
    own = with_fault(exported, tmp_path / "bundle", f"decoder.ort.{precision}", fault)
    if by_pytorch:
        only = [f"decoder.ort.{precision}"]
        report = verify(own, prompts=exported.prompts, only=only, level="quick")
        assert report.with_pytorch and not report.passed
        assert "real text" in {c.case for c in report.comparisons if not c.passed}
    without_checkpoint(monkeypatch)
    report = verify(own)  # by the limits of the export
    assert not report.with_pytorch and not report.passed


def test_golden_data_passes_what_was_exported(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checkpoint(monkeypatch)
    report = verify(exported.folder)
    assert report.passed and not report.with_pytorch
