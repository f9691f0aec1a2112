"""A UNet in Winograd's domain is verified; faults among its nodes are refused and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.passes import winograd
from planforge.exporter.passes.weights import ParameterRef
from planforge.exporter.tracing.modules import find_module
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.diffusion import save_small_pipeline
from ...helpers.faults import Fault, change_weight
from ...helpers.verdicts import PlantedBundle, keep_answers

UNET = "unet.ort.fp32"
CONV = "unet.mid_block.resnets.0.conv1"
SUMS = ("Add", "Sub")
PRODUCTS = ("Gemm",)
Plant = Callable[[ir.Model], None]


def find_constant(model: ir.Model, i: int, j: int) -> ir.Value:
    """Return the convolution's kernels at a point."""
    for value in model.graph.initializers.values():
        stored = ParameterRef.read(value)
        if stored.parameter == f"{CONV}.weight" and list(stored.point or ()) == [i, j]:
            return value
    raise AssertionError(CONV)


def perturb_point(model: ir.Model) -> None:
    change_weight(find_constant(model, 2, 1), lambda kernels: kernels * 1.01)


def exchange_points(model: ir.Model) -> None:
    """Two products read each other's kernels."""
    first = find_constant(model, 0, 1)
    second = find_constant(model, 1, 0)
    ((one, place),) = first.uses()
    ((other, _),) = second.uses()
    one.replace_input_with(place, second)
    other.replace_input_with(place, first)


def change_sign(index: int) -> Plant:
    """Return what adds where one of the convolution's nodes subtracts."""

    def plant(model: ir.Model) -> None:
        node = [n for n in model.graph if n.op_type == "Sub" and find_module(n) == CONV][index]
        wrong = ir.node("Add", list(node.inputs), name=f"{node.name}/wrong")
        wrong.metadata_props.update(node.metadata_props)
        (result,) = wrong.outputs
        result.type = node.outputs[0].type
        result.shape = node.outputs[0].shape
        model.graph.insert_before(node, wrong)
        ir.convenience.replace_all_uses_with(node.outputs[0], result)
        name = node.outputs[0].name
        model.graph.remove(node)
        result.name = name  # by which it is compared

    return plant


FAULTS = [
    Fault("a point's kernels 1 % off", perturb_point, CONV, PRODUCTS),
    Fault("two points exchanged", exchange_points, CONV, PRODUCTS),
    Fault("a sign among the tiles", change_sign(0), CONV, SUMS),
    Fault("a sign among the results", change_sign(-1), CONV, SUMS),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedBundle]:
    """A sound bundle, whose convolutions have few channels and are written so nevertheless."""
    folder: Path = tmp_path_factory.mktemp("winograd")
    save_small_pipeline(folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "LEAST_CHANNELS", 32)
        result = export(folder / "checkpoint", folder / "bundle", target="cpu", precision="fp32")
        assert all(artifact.passed for artifact in result.manifest.artifacts)
        with keep_answers(tmp_path_factory.mktemp("answers")):
            yield PlantedBundle("pictures", folder / "bundle", folder / "damaged")


def test_most_convolutions_are_products(planted: PlantedBundle) -> None:
    bundle = Bundle.open(planted.folder)
    graph = ir.load(bundle.path(bundle.manifest.artifact(UNET).file)).graph
    points = {
        (stored.parameter, *stored.point)
        for value in graph.initializers.values()
        if (stored := ParameterRef.read(value)).point is not None
    }
    convolutions = {parameter for parameter, _, _ in points}
    assert len(convolutions) >= 8 and len(points) == 16 * len(convolutions)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_is_refused_and_named(planted: PlantedBundle, fault: Fault) -> None:
    verdict = planted.judge(UNET, fault)
    assert verdict.is_caught
    assert verdict.is_right, verdict.describe_name()
