"""Graphs for plans in int8, int4, fp8 and NVFP4: what an export writes, the faults that are found, the plans.

TensorRT-RTX's own parser and builder are the judges of the plans; none is run here, as that takes a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from planforge.exporter import build, export
from planforge.exporter.calibration.repeat import read_quantization
from planforge.exporter.options import choose_targets_and_precisions
from planforge.exporter.passes.quantize import QuantizedWeights
from planforge.exporter.passes.weight_files import load_graph
from planforge.exporter.tensorrt.build import Options
from planforge.runtime import TextGenerator
from planforge.runtime.backends.dialects import choose_artifact
from planforge.runtime.backends.plan_compatibility import find_plans, keep_first_precision
from planforge.runtime.backends.tensorrt_library import LIBRARIES
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Plan
from planforge.runtime.errors import InputError

from ...controls.models import write_control
from ...helpers.faults import Fault, Plant, constant
from ...helpers.verdicts import PlantedBundle, keep_answers
from ..tensorrt.test_hardware import needs_rtx

OPERATOR = ("DequantizeLinear", "MatMul")
MODULE = "h.1.mlp.c_fc"
QUANTIZED = ["w8a16", "w4a16", "fp8a16", "nvfp4a16"]
Codes = npt.NDArray[Any]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedBundle]:
    """A random GPT-2 of two layers, with a cache that grows: it needs no plan."""
    folder = tmp_path_factory.mktemp("gpt2")
    write_control(4, folder / "checkpoint")
    options: dict[str, Any] = {"precision": ["fp32", *QUANTIZED], "verify": False, "max_length": 64}
    export(folder / "checkpoint", folder / "bundle", target=["portable"], **options)
    with keep_answers(folder / "answers"):
        yield PlantedBundle("GPT-2", folder / "bundle", folder / "copy")


def find_dequantize(model: ir.Model) -> ir.Node:
    """Return the node that dequantizes the weight of the module, not its scales."""
    (node,) = [node for node in model.graph if node.name == f"{MODULE}.weight/dequantize"]
    return node


def changed(index: int, change: Callable[[Codes], Codes]) -> Plant:
    """Other codes, or other scales, of the weight of a module."""

    def plant(model: ir.Model) -> None:
        node = find_dequantize(model)
        value = node.inputs[index]
        assert value is not None
        if (producer := value.producer()) is not None:  # NVFP4's scales are dequantized too
            value = producer.inputs[0]
        assert value is not None and value.const_value is not None
        kind = value.const_value.numpy().dtype
        made = change(np.array(value.const_value.numpy().astype(np.float32))).astype(kind)
        assert (made != value.const_value.numpy()).any()
        value.const_value = ir.Tensor(np.ascontiguousarray(made), dtype=value.dtype, name=value.name)

    return plant


def swap_neighbours(codes: Codes) -> Codes:
    """Exchange the two values of each byte, as if the halves were read in the other order."""
    return codes.reshape(-1, 2)[:, ::-1].reshape(codes.shape)


def swap_blocks(codes: Codes) -> Codes:
    return np.concatenate([codes[32:64], codes[:32], codes[64:]])


def add_zero_points(model: ir.Model) -> None:
    node = find_dequantize(model)
    codes, scale = node.inputs[:2]
    assert codes is not None and codes.const_value is not None
    assert scale is not None and scale.shape is not None
    zeros = np.ones(scale.shape.numpy(), np.int8)
    made = constant(model, "zero_points", zeros)
    made.const_value = ir.Tensor(zeros.astype(codes.const_value.numpy().dtype), dtype=codes.dtype)
    made.dtype = ir.DataType(codes.const_value.dtype)
    node.resize_inputs(3)
    node.replace_input_with(2, made)


def change_unit(factor: float) -> Plant:
    """Another unit of NVFP4's scales, which are the same with it."""

    def plant(model: ir.Model) -> None:
        node = find_dequantize(model)
        scale = node.inputs[1]
        dequantize = None if scale is None else scale.producer()
        assert dequantize is not None
        for value, own in zip(dequantize.inputs, (1 / factor, factor), strict=True):
            assert value is not None and value.const_value is not None
            array = value.const_value.numpy()
            made = (array.astype(np.float32) * own).astype(array.dtype)
            value.const_value = ir.Tensor(made, dtype=value.dtype, name=value.name)

    return plant


FAULTS = {
    "scales off by one column": changed(1, lambda scale: np.roll(scale, 1, axis=-1)),
    "scales 10 % too large": changed(1, lambda scale: scale * 1.1),
    "a clipped tail": changed(0, lambda codes: np.clip(codes, -0.7 * codes.max(), 0.7 * codes.max())),
    "halves of bytes swapped": changed(0, swap_neighbours),
    "blocks in another order": changed(0, swap_blocks),
    "zero points": add_zero_points,
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_fault_is_found_and_its_module_named(name: str, precision: str, planted: PlantedBundle) -> None:
    fault = Fault(name, FAULTS[name], MODULE, OPERATOR)
    verdict = planted.judge(f"decoder.portable.{precision}", fault)
    assert verdict.is_caught and verdict.is_right, verdict


def test_a_unit_of_scales_that_does_not_follow_from_the_checkpoint_is_found(planted: PlantedBundle) -> None:
    """It limits the smallest scale, so a graph must not choose it."""
    fault = Fault("unit", change_unit(2.0**10), MODULE, OPERATOR)
    verdict = planted.judge("decoder.portable.nvfp4a16", fault)
    assert verdict.is_caught and verdict.is_right, verdict


def test_sound_graphs_pass(planted: PlantedBundle) -> None:
    """Random weights lose more than a trained model's; PyTorch, rounded the same way, loses as much."""
    report = planted.verify()
    failed = {c.artifact for c in report.comparisons if not c.passed}
    assert failed <= report.limited


def test_a_graph_in_int8_runs_on_a_cpu(planted: PlantedBundle) -> None:
    texts = {}
    for precision in ("fp32", "w8a16"):
        with TextGenerator.load(planted.folder, backend="ort-cpu", precision=precision) as model:
            texts[precision] = model.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).token_ids
    assert texts["w8a16"] == texts["fp32"]


@pytest.mark.parametrize(
    ("target", "given", "expected"),
    [
        (["rtx"], ["int8"], ["w8a16"]),
        (["rtx"], ["fp16", "int4"], ["fp16", "w4a16"]),
        (["cpu"], ["int8"], ["int8"]),
        (["cpu", "rtx"], ["fp32", "fp16", "int8"], ["fp32", "fp16", "int8"]),
        (["portable"], ["w8a16"], ["w8a16"]),
        (["rtx"], ["fp8", "nvfp4"], ["fp8a16", "nvfp4a16"]),
        (["cpu", "rtx"], ["int8", "fp8"], ["int8", "fp8a16"]),
    ],
)
def test_int8_means_what_each_target_has(target: list[str], given: list[str], expected: list[str]) -> None:
    assert choose_targets_and_precisions(target, given) == (target, expected)


def test_on_gpus_alone_int8_and_int4_are_of_graphs_in_fp16() -> None:
    in_half = ["w8a16", "w4a16", "w8a16-kv8", "fp16"]
    given = ["int8", "int4", "int8-kv8", "fp16"]
    for targets in (["cuda"], ["cuda", "rtx"]):
        assert choose_targets_and_precisions(targets, given) == (targets, in_half)
    for targets in (["cpu", "cuda"], ["cuda", "portable"]):
        assert choose_targets_and_precisions(targets, given) == (targets, given)


def test_a_precision_of_plans_alone_leaves_the_cpu_out() -> None:
    assert choose_targets_and_precisions(None, ["w4a16"]) == (["rtx"], ["w4a16"])
    assert choose_targets_and_precisions(None, ["fp32", "fp8"]) == (["rtx"], ["fp32", "fp8a16"])
    assert choose_targets_and_precisions(None, ["fp32", "fp16"]) == (["cpu", "rtx"], ["fp32", "fp16"])
    assert choose_targets_and_precisions(None, ["int4"]) == (["cpu"], ["int4"])


@pytest.mark.parametrize(("precision", "sm", "first"), [("fp8", "sm86", "sm89"), ("nvfp4", "sm89", "sm120")])
def test_a_gpu_without_kernels_is_refused_before_anything_is_read(
    tmp_path: Path, precision: str, sm: str, first: str
) -> None:
    with pytest.raises(InputError, match=rf"--sm {sm} has no kernels for fp[48], which begin with {first} "):
        export(tmp_path / "none", tmp_path / "B", target="rtx", precision=precision, sms=[sm])


def test_onnx_runtime_runs_no_fp4(planted: PlantedBundle) -> None:
    with pytest.raises(InputError, match="'nvfp4a16' runs in a plan alone, as ONNX Runtime has no fp4"):
        TextGenerator.load(planted.folder, backend="ort-cpu", precision="nvfp4a16")


def test_a_default_that_a_cpu_cannot_run_is_none_there(planted: PlantedBundle) -> None:
    """`bench --set-default` may have chosen it on a GPU."""
    opened = Bundle.open(planted.folder)
    bundle = Bundle(opened.folder, replace(opened.manifest, default_precision="nvfp4a16"))
    assert choose_artifact(bundle, "decoder", None).precision == "fp32"
    alone = tuple(a for a in opened.manifest.artifacts if a.precision == "nvfp4a16")
    bundle = Bundle(opened.folder, replace(opened.manifest, artifacts=alone))
    with pytest.raises(InputError, match="runs in a plan alone"):
        choose_artifact(bundle, "decoder", None)


def test_weights_that_stayed_floats_stay_so_when_a_bundle_is_verified_again(planted: PlantedBundle) -> None:
    bundle = Bundle.open(planted.folder)
    artifact = bundle.manifest.artifact("decoder.portable.fp8a16")
    told = {**artifact.quantization, "other_bits": {f"{MODULE}.weight": 16}}
    graph = load_graph(bundle.path(artifact.file)).graph
    found: dict[str, QuantizedWeights] = {}
    read_quantization(replace(artifact, quantization=told), graph, {}, found)
    weights = found["fp8a16"]
    assert f"{MODULE}.weight" not in weights and weights.bits[f"{MODULE}.weight"] == 16
    assert weights.to_json()["other_bits"] == {f"{MODULE}.weight": 16}


@needs_rtx
def test_plans_of_all_precisions_are_built_and_smaller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    precisions = ["fp32", "fp16", "int8", "int4", "fp8", "nvfp4"]
    result = export("gpt2-demo", tmp_path / "B", target="rtx", precision=precisions, verify=False)
    plans = {plan.built_from.rpartition(".")[2]: plan for plan in result.manifest.plans}
    assert list(plans) == ["fp16", *QUANTIZED]
    sizes = {name: (tmp_path / "B" / plan.file).stat().st_size for name, plan in plans.items()}
    assert max(sizes["w4a16"], sizes["nvfp4a16"]) < sizes["fp16"]  # half of so small a plan are kernels
    every = LIBRARIES["tensorrt-rtx"].sms
    assert plans["fp16"].sms == plans["w8a16"].sms == every
    assert plans["w4a16"].sms == tuple(sm for sm in every if sm != "sm75")  # which has no int4
    assert plans["fp8a16"].sms == ("sm89", "sm120", "sm121")
    assert plans["nvfp4a16"].sms == ("sm120", "sm121")
    check_choice(Bundle.open(tmp_path / "B"))
    older = build(tmp_path / "B", sms=["sm75"]).plans
    assert [plan.built_from for plan in older] == ["decoder.inplace.fp16", "decoder.inplace.w8a16"]
    told = [text for record in caplog.records if "Leave out sm75" in (text := record.getMessage())]
    assert len(told) == len(set(told)) == 3  # each once
    assert [text.rpartition("--sm ")[2] for text in told] == [
        ",".join(plans[name].sms) for name in ("w4a16", "fp8a16", "nvfp4a16")
    ]
    two = build(tmp_path / "B", sms=["sm86"], precisions=["fp16", "int8"]).plans
    assert [plan.built_from for plan in two] == ["decoder.inplace.fp16", "decoder.inplace.w8a16"]
    with pytest.raises(InputError, match="'fp32': the bundle has no such graph that plans are built from"):
        build(tmp_path / "B", precisions=["fp32"])
    stripped = build(tmp_path / "B", sms=["sm86"], options=Options(strip=True)).plans
    assert [plan.built_from.rpartition(".")[2] for plan in stripped] == ["fp16", "w8a16", "w4a16"]
    for plan in stripped:  # codes and scales stay in the plan
        assert all(weight.dtype in ("float16", "float32") for weight in plan.weights)
        assert not any("dequantize" in weight.name or ".int" in weight.name for weight in plan.weights)


def check_choice(bundle: Bundle) -> None:
    """Without a wish the first precision of the export runs that has plans for all graphs."""
    passed = tuple(replace(a, gate={"passed": True}) for a in bundle.manifest.artifacts)

    def find(precision: str | None, *plans: Plan) -> list[str]:
        manifest = replace(bundle.manifest, artifacts=passed, plans=plans)
        found = find_plans(Bundle(bundle.folder, manifest), "tensorrt-rtx", precision)
        found = keep_first_precision(bundle, found)
        return [plan.built_from for plan in found["decoder"]]

    half, eight, four, *_ = bundle.manifest.plans
    assert find("w4a16", half, eight, four) == find("int4", half, eight, four) == ["decoder.inplace.w4a16"]
    assert find(None, four, eight, half) == ["decoder.inplace.fp16"]
    assert find(None, four, eight) == ["decoder.inplace.w8a16"]
