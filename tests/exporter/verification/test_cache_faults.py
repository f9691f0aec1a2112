"""Faults planted in a graph that keeps keys and values in int8: each is caught, and its node named."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export, verify
from planforge.exporter.calibration.calibration import Calibration, hash_texts
from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.calibration.repeat import read_calibration, repeat_calibration
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.verification.structure import READING, compare_structure
from planforge.exporter.verification.verify import OTHER_TEXTS
from planforge.runtime.bundle.bundle import Bundle

from ...conftest import Once
from ...helpers.faults import (
    Fault,
    Plant,
    change_weight,
    constant,
    late_positions,
    node_of,
    rescaled,
    swapped_scales,
    transposed,
)
from ...helpers.graphs import replace_graph
from ...helpers.ground import Ground

ARTIFACT = "decoder.ort.fp32-kv8"
ATTENTION = "GroupQueryAttention"


@pytest.fixture(scope="session")
def cache_bundle(once: Callable[[str], Once]) -> Path:
    """gpt2-demo with keys and values in int8, for contexts of 128 tokens. Don't change it."""
    with once("gpt2-kv8") as (folder, first):
        if first:
            precision = ["fp32", "fp32-kv8"]
            export("gpt2-demo", folder, precision=precision, target=["cpu"], max_length=128, verify=False)
    return folder


@pytest.fixture(scope="module")
def ground(cache_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(cache_bundle, tmp_path_factory.mktemp("damaged") / "kv8")


def late_slot(module: str) -> Plant:
    """A layer's attention that begins a slot too late, where there is one."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, ATTENTION)
        int32 = ir.TensorType(ir.DataType.INT32)
        one = constant(model, "one", np.array([1], np.int32))
        late = ir.node("Add", [node.inputs[5], one])
        slots = ir.node("Shape", [node.inputs[3]], {"start": 2, "end": 3})
        narrow = ir.node("Cast", slots.outputs, {"to": ir.DataType.INT32})
        last = ir.node("Sub", [narrow.outputs[0], one])
        there = ir.node("Min", [late.outputs[0], last.outputs[0]])
        nodes = [late, slots, narrow, last, there]
        for each in nodes:
            each.outputs[0].type = ir.TensorType(ir.DataType.INT64) if each is slots else int32
        model.graph.insert_before(node, nodes)
        node.replace_input_with(5, there.outputs[0])

    return plant


FAULTS = [
    Fault("a scale of keys halved", rescaled("cache.2.key", 0.4), "h.2.attn", (ATTENTION,)),
    Fault("a scale of values times 20", rescaled("cache.1.value", 20.0), "h.1.attn", (ATTENTION,)),
    Fault("scales of keys and values swapped", swapped_scales("h.0.attn"), "h.0.attn", (ATTENTION,)),
    Fault("a cache slot late", late_slot("h.2.attn"), "h.2.attn", (ATTENTION,)),
    Fault("a transposed weight", transposed("h.1.attn.c_proj"), "h.1.attn.c_proj", ("MatMul",)),
    Fault("a position off by one", late_positions("wpe"), "wpe", ("Gather",)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_of_a_graph_with_its_cache_in_int8_is_named(ground: Ground, fault: Fault) -> None:
    with ground.damaged(ARTIFACT, fault) as bundle:
        failed, mismatch = ground.examined(bundle, bundle.manifest.artifact(ARTIFACT))
    assert failed
    assert mismatch is not None
    assert (mismatch.module, mismatch.op_type) in {(fault.module, op_type) for op_type in fault.op_types}


def test_a_sound_graph_passes_and_accuses_nobody(ground: Ground) -> None:
    failed, mismatch = ground.examined(ground.bundle, ground.bundle.manifest.artifact(ARTIFACT))
    assert failed == []
    assert mismatch is None


def test_modules_are_held_to_what_rounding_the_cache_does(ground: Ground) -> None:
    """Without rounding, attention would have fp32's tolerance, and be accused whatever the fault."""
    _, modules = ground.sound_references(ARTIFACT)
    graph = ground.bundle.manifest.artifact(ARTIFACT)
    allowed = {name: band.allowed for (step, name), band in modules.items() if step == 0}
    assert graph.precision == "fp32-kv8"
    assert min(allowed.values()) == 1e-4  # before the first attention nothing is rounded
    assert max(allowed.values()) > 1e-2


def small_channels(cache: str, channels: slice, factor: float) -> Plant:
    """Some channels of a layer's keys or values whose scale is too small, which clips large numbers."""

    def change(scale: Any) -> Any:
        scale[channels] *= factor
        return scale

    return lambda model: change_weight(model.graph.initializers[f"{cache}.scale"], change)


def exchanged_heads(cache: str) -> Plant:
    """The scales of the first two heads exchanged."""

    def change(scale: Any) -> Any:
        heads = scale.reshape(4, -1)  # of gpt2-demo
        return heads[[1, 0, 2, 3]].reshape(scale.shape)

    return lambda model: change_weight(model.graph.initializers[f"{cache}.scale"], change)


CHANNELS = {
    "4 of 256 channels of keys": (small_channels("cache.1.key", slice(10, 14), 1 / 6), "4 of whose 256"),
    "8 of 256 channels of values": (small_channels("cache.2.value", slice(0, 8), 1 / 3), "8 of whose 256"),
    "heads exchanged": (exchanged_heads("cache.3.value"), "channels are not what the export's texts need"),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_each_channel_is_held_to_its_own_scale(ground: Ground, name: str) -> None:
    """They were passed: limits came from the same scales, and of all scales only a median was compared."""
    plant, told = CHANNELS[name]
    with ground.damaged(ARTIFACT, Fault(name, plant, "", ())) as bundle:
        damaged = read_calibration(bundle, ground.model)
        again = repeat_calibration(ground.verifier, ground.model, damaged)
        read = compare_structure(
            bundle, bundle.manifest.artifact(ARTIFACT), None, again.cache_scales, same_texts=bool(again.texts)
        )
    (failure,) = read.failures
    assert told in failure
    for cache, scale in again.cache_scales.items():  # what PyTorch rounds with is not the damaged graph's
        np.testing.assert_allclose(scale, ground.calibration.cache_scales[cache], rtol=1e-4)


def test_the_scales_are_computed_again_from_the_texts_of_the_export_alone(ground: Ground) -> None:
    """Of other texts a graph's scales may differ, and stay what PyTorch rounds with."""
    manifest = ground.bundle.manifest
    recorded = {artifact.quantization.get("texts") for artifact in manifest.artifacts} - {None}
    assert recorded == {hash_texts(ground.verifier)}

    def repeat(texts: str | None, scales: dict[str, Any]) -> Calibration:
        artifacts = [
            dataclasses.replace(a, quantization={"cache_bits": 8} | ({"texts": texts} if texts else {}))
            for a in manifest.artifacts
        ]
        bundle = Bundle(ground.bundle.folder, dataclasses.replace(manifest, artifacts=tuple(artifacts)))
        verifier = dataclasses.replace(ground.verifier, bundle=bundle)
        return repeat_calibration(verifier, ground.model, Calibration(cache_scales=scales))

    scales = dict(ground.calibration.cache_scales)
    assert repeat(None, scales).texts  # an older bundle does not tell, and its scales do
    assert not repeat("another", scales).texts
    random = np.random.default_rng(0)
    others = {name: scale * random.uniform(0.8, 1.25, scale.shape) for name, scale in scales.items()}
    again = repeat(None, others)
    assert not again.texts
    assert again.cache_scales is others


def test_verify_reads_the_scales_of_a_cache(cache_bundle: Path, tmp_path: Path) -> None:
    """A step twice as large loses a bit, which limits that are taken with the same steps would allow."""
    damaged = Path(shutil.copytree(cache_bundle, tmp_path / "damaged"))
    replace_graph(damaged, ARTIFACT, rescaled("cache.2.key", 2.0))
    report = verify(damaged, source="gpt2-demo", only=[ARTIFACT], level="quick")
    (failure,) = [f for c in report.comparisons if c.backend == READING for f in c.failures]
    assert "of h.2.attn has 'cache.2.key.scale', 256 of whose 256 channels are not" in failure
    assert not [mismatch for mismatch in report.mismatches if mismatch.layer != 2]


def test_a_verdict_says_that_its_texts_are_others(cache_bundle: Path, tmp_path: Path) -> None:
    """Their scales may differ rightly, so the graph's own count, and nothing is refused."""
    texts = read_prompts(None, DEMOS / "gpt2-demo")
    (tmp_path / "prompts.txt").write_text("\n".join(text.replace("\n", " ") for text in texts[::2]))
    report = verify(
        cache_bundle, source="gpt2-demo", only=[ARTIFACT], prompts=tmp_path / "prompts.txt", level="quick"
    )
    assert report.passed
    assert OTHER_TEXTS in report.notes
