"""The layers of plans: the inspector's text, their PyTorch modules, and their times on an emulated GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from planforge.exporter.commands.layers import map_modules
from planforge.exporter.tensorrt.builder import load_graph
from planforge.exporter.tensorrt.layers import find_nodes, parse_layers, read_plan_layers
from planforge.runtime.backends.tensorrt_library import make_logger
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BackendError

from ...helpers.cli import error_line, planforge
from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.plans import of_tensorrt, with_manifest

# As in NVIDIA's guide, "Engine Inspector"; the metadata as TensorRT 8.6 and later add it.
DOCUMENTED = """{"Layers": [{
  "Name": "node_of_gpu_0/res4_0_branch2a_1 + node_of_gpu_0/res4_0_branch2a_bn_1",
  "LayerType": "CaskConvolution",
  "Inputs": [
  {
    "Name": "gpu_0/res3_3_branch2c_bn_3",
    "Dimensions": [16,512,28,28],
    "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format."
  }],
  "Outputs": [
  {
    "Name": "gpu_0/res4_0_branch2a_bn_2",
    "Dimensions": [16,256,28,28],
    "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format."
  }],
  "ParameterType": "Convolution",
  "Weights": {"Type": "Int8", "Count": 131072},
  "TacticValue": "0x11bde0e1d9f2f35d",
  "Metadata": "[ONNX Layer: a]\x1e[ONNX Layer: b]\x1f[ONNX Layer: c]"
},{
  "Name": "(Unnamed Layer* 0) [Shuffle] [profile 1]",
  "LayerType": "NoOp",
  "Inputs": [],
  "Outputs": [{"Name": "y", "Dimensions": [-1,2], "Format/Datatype": "N/A due to dynamic shapes"}],
  "Metadata": ""
}],
"Bindings": ["x", "y", "x [profile 1]", "y [profile 1]"]
}"""


def edit_profiling(profiling: str) -> Callable[[dict[str, Any]], None]:
    """As if the plans had been built with --profiling."""

    def change(value: dict[str, Any]) -> None:
        for plan in value["plans"]:
            plan["profiling"] = profiling

    return change


# The inspector's text


def test_the_documented_text_is_read() -> None:
    (layer,) = parse_layers(DOCUMENTED, 0, {"a": "res4", "b": "res4", "c": ""}, {})
    assert layer.type == "CaskConvolution"
    assert layer.nodes == ("a", "b", "c") and layer.modules == ("res4",)
    assert [tensor.dimensions for tensor in layer.inputs] == [(16, 512, 28, 28)]
    assert layer.outputs[0].format == "Thirty-two wide channel vectorized row major Int8 format."
    (second,) = parse_layers(DOCUMENTED, 1, {}, {("(Unnamed Layer* 0) [Shuffle]", 0): 0.5})
    assert (second.type, second.time_ms, second.modules) == ("NoOp", 0.5, ())
    assert second.outputs[0].dimensions == (-1, 2)


def test_times_of_other_layers_are_refused() -> None:
    with pytest.raises(BackendError, match="timed 'another', which is none of the plan's layers"):
        parse_layers(DOCUMENTED, 1, {}, {("another", 0): 0.5})


def test_names_alone_are_layers_too() -> None:
    text = json.dumps({"Layers": ["a + b", "a + b", "c [profile 1]"]})
    found = parse_layers(text, 0, {"a": "h.0", "b": "h.1"}, {("a + b", 0): 1.0, ("a + b", 1): 2.0})
    assert [(layer.name, layer.modules, layer.time_ms) for layer in found] == [
        ("a + b", ("h.0", "h.1"), 1.0),
        ("a + b", ("h.0", "h.1"), 2.0),
    ]
    with pytest.raises(BackendError, match="the engine inspector's text cannot be read: 'no engine'"):
        parse_layers("no engine", 0, {}, {})


@pytest.mark.parametrize(
    ("name", "metadata", "nodes"),
    [
        ("__myl_Fc_myl0_3", "[ONNX Layer: a]\x1f[ONNX Layer: b]\x1e[ONNX Layer: a]", ("a", "b")),
        ("__myl_Fc_myl0_3", "[ONNX Layer: x[0]]\x1f[ONNX Layer: /h.0/MatMul]", ("x[0]", "/h.0/MatMul")),
        ("{ForeignNode[w32...mm2]}", "", ("w32", "mm2")),
        ("Reformatting CopyNode for Input Tensor 0 to a + b", "", ("a", "b")),
        ("Reformatting CopyNode for Output Tensor 1 to a", "", ("a",)),
    ],
)
def test_the_nodes_of_a_layer(name: str, metadata: str, nodes: tuple[str, ...]) -> None:
    assert find_nodes(name, metadata) == nodes


# The real TensorRT-RTX, as far as it goes without a GPU


def test_the_parser_of_tensorrt_rtx_names_nodes_as_they_are_read(demo_bundle: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    manifest = Bundle.open(demo_bundle).manifest
    graph = demo_bundle / manifest.artifact("decoder.inplace.fp16").file
    modules = map_modules(graph)
    log = make_logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse(load_graph(graph, manifest.max_length).SerializeToString(), str(graph))
    metadata = [network.get_layer(index).metadata for index in range(network.num_layers)]
    named = {node for text in metadata if text for node in find_nodes("", text)}
    assert len(named) > 100 and named <= set(modules)
    assert {modules[node] for node in named} >= {"h.0.attn", "h.0.mlp.c_fc", "ln_f", "lm_head"}


def test_a_plan_of_tensorrt_rtx_has_the_nodes_that_are_read(demo_bundle: Path) -> None:
    (plan,) = Bundle.open(demo_bundle).manifest.plans
    graph = demo_bundle / Bundle.open(demo_bundle).manifest.artifact(plan.built_from).file
    content = (demo_bundle / plan.file).read_bytes()
    fused = re.findall(
        rb"\[ONNX Layer: [^\x00-\x1d\"]+?\](?:[\x1e\x1f]\[ONNX Layer: [^\x00-\x1d\"]+?\])+", content
    )
    assert len(fused) > 10
    for metadata in fused:
        assert set(find_nodes("", metadata.decode())) <= set(map_modules(graph))


# An emulated GPU


@pytest.mark.parametrize("library", ["tensorrt-rtx", "tensorrt"])
def test_each_layer_has_its_modules_types_and_time(library: str, own_bundle: Path) -> None:
    with_manifest(own_bundle, edit_profiling("detailed"))
    if library == "tensorrt":
        with_manifest(own_bundle, of_tensorrt)
    bundle = Bundle.open(own_bundle)
    (plan,) = bundle.manifest.plans
    graph = own_bundle / bundle.manifest.artifact(plan.built_from).file
    nodes = onnx.load(graph).graph.node
    with emulated_gpu(own_bundle, library) as cuda:
        found = read_plan_layers(bundle, plan, map_modules(graph), runs=3)
        assert cuda.used == 0
    assert [profile.name for profile in found.profiles] == ["prefill", "append", "decode"]
    for profile, described in zip(found.profiles, plan.profiles, strict=True):
        best = {name: lengths[1] for name, lengths in described["axes"].items()}
        assert profile.shapes["input_ids"] == (best["batch"], best["tokens"])
        assert [node for layer in profile.layers[1:] for node in layer.nodes] == [node.name for node in nodes]
        # The emulated GPU reports 1/1024 ms for the first layer, and as much more for each that follows.
        assert [layer.time_ms for layer in profile.layers] == [
            number / 1024 for number in range(1, len(profile.layers) + 1)
        ]
        formats = {tensor.format for layer in profile.layers for tensor in layer.inputs}
        assert "Row major linear FP16 format" in formats and not any("N/A" in one for one in formats)
        modules = {module for layer in profile.layers for module in layer.modules}
        assert {"wte", "h.0.attn", "h.1.mlp.c_fc", "ln_f", "lm_head"} <= modules


def test_a_plan_that_keeps_names_or_nothing(own_bundle: Path) -> None:
    bundle = Bundle.open(own_bundle)
    (plan,) = bundle.manifest.plans
    modules = map_modules(own_bundle / bundle.manifest.artifact(plan.built_from).file)
    with emulated_gpu(own_bundle):
        found = read_plan_layers(bundle, plan, modules)
    assert {(layer.type, layer.time_ms) for layer in found.profiles[0].layers} == {("", None)}
    assert any(layer.modules for layer in found.profiles[2].layers)
    with_manifest(own_bundle, edit_profiling("none"))
    bundle = Bundle.open(own_bundle)
    with emulated_gpu(own_bundle), pytest.raises(BackendError, match="keeps nothing of its layers; build it"):
        read_plan_layers(bundle, bundle.manifest.plans[0], {})


# The command


def test_inspect_shows_layers_and_draws_their_times(own_bundle: Path, tmp_path: Path) -> None:
    with_manifest(own_bundle, edit_profiling("detailed"))
    plan = own_bundle / Bundle.open(own_bundle).manifest.plans[0].file
    picture = tmp_path / "layers.png"
    with emulated_gpu(own_bundle):
        done = planforge("inspect", plan, "--layers", "--time", "--json", "--plot", picture)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)["plans"]
        table = planforge("inspect", own_bundle, "--layers").stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["gpu"] == "Emulated GPU" and found["built_from"] == "decoder.inplace.fp16"
    layer = found["profiles"][2]["layers"][1]
    assert set(layer) == {"name", "type", "nodes", "modules", "inputs", "outputs", "time_ms"}
    assert "profile decode" in table and "h.0.attn" in table and " ms" not in table
    assert not re.search(r"[\x1e\x1f]", table)


def test_inspect_says_what_layers_need(own_bundle: Path, tmp_path: Path) -> None:
    line = error_line("inspect", own_bundle, "--layers", code=1)
    assert "only on a machine that runs it: no NVIDIA driver was found" in line
    assert "--profiling detailed`, then `planforge inspect" in line
    with emulated_gpu(own_bundle):
        assert "keeps only names of its layers" in planforge("inspect", own_bundle, "--layers").stdout
    assert "add --layers" in error_line("inspect", own_bundle, "--time")
    assert "add them" in error_line("inspect", own_bundle, "--layers", "--plot", tmp_path / "x.png")
    stray = tmp_path / "x.plan"
    stray.write_bytes(b"vtrt")
    assert "is no plan of a bundle" in error_line("inspect", stray, "--layers")
    with_manifest(own_bundle, lambda value: value.update(plans=[]))
    assert "has no plan; build one: planforge build" in error_line("inspect", own_bundle, "--layers")
