"""The layers of plans: the inspector's text, their PyTorch modules, and their times on an emulated GPU."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.commands.layers import map_modules, read_nodes
from planforge.exporter.tensorrt.build import Options
from planforge.exporter.tensorrt.builder import load_graph
from planforge.exporter.tensorrt.layers import find_nodes, find_profiles, parse_layers, read_plan_layers
from planforge.exporter.tensorrt.listing import read_listing
from planforge.exporter.tensorrt.plans import build
from planforge.models import load_model
from planforge.runtime.backends.tensorrt_library import make_logger
from planforge.runtime.bundle.bundle import Bundle, compute_sha256
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


# What TensorRT-RTX 1.7.1 wrote at the end of a build: a product and what follows it, then a softmax.
LISTED = """Layers:
Name: mm_myl0_0, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [8,64], Strides: [64,1],\
 StrideOrder: [1,0], Datatype: Half, Format: (Linear) Row major linear format }], Constants: [ {\
 Name: w_constantHalf_myl0, Dimensions: [64,64], Strides: [64,1], StrideOrder: [1,0], Datatype: Half,\
 Format: (Linear) Row major linear format }], Outputs: [ { Name: __myln_k_arg__bb1_2_myl0,\
 Dimensions: [8,64], Strides: [64,1], StrideOrder: [1,0], Datatype: Half,\
 Format: (Arbitrary) Format with stride order = [1,0] }], TacticName: __myelin_CASK_STUB, StreamId: 0,\
 Metadata: [ONNX Layer: mm]\x1f[ONNX Layer: re]
Name: __mye1_0_myl0_1, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: ,\
 StreamId: 0, Metadata:\x20

I/O Tensors:
 Name: x, IOMode: Input, DataType: Half, Dimensions: [8,64], Location: Device
"""


def test_the_list_of_a_build_is_read_as_an_inspector_s_text() -> None:
    text = json.dumps({"Layers": read_listing(LISTED)})
    first, second = parse_layers(text, 0, {"mm": "fc", "re": "fc.act"}, {})
    assert (first.type, first.nodes, first.modules) == ("gemm", ("mm", "re"), ("fc", "fc.act"))
    assert [(t.name, t.dimensions, t.format) for t in first.inputs] == [
        ("x", (8, 64), "Row major linear format, Half")
    ]
    assert [t.format for t in first.outputs] == ["Format with stride order = [1,0], Half"]
    assert (second.type, second.nodes, second.inputs) == ("shape_call", ("__mye1_0_myl0_1",), ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Layers:\nmm\nsm",
        LISTED.replace("Outputs", "Results"),
        LISTED.replace("Dimensions: [8,64]", "Dimensions: [8,N]"),
        LISTED.replace("Datatype", "Kind"),
    ],
)
def test_a_list_of_another_form_is_none(text: str) -> None:
    assert read_listing(text) == []


def test_a_layer_s_profile_is_told_by_what_it_is_connected_to() -> None:
    def layer(name: str, *tensors: str) -> dict[str, Any]:
        return {"Name": name, "Inputs": [{"Name": tensor} for tensor in tensors]}

    layers = [
        layer("a_myl0_0", "x"),
        layer("inner_myl1_0", "y_myl1"),  # of the second profile, as the next layer of its subgraph is
        layer("outer_myl1_1", "x [profile 1]"),
        layer("a [profile 2]_myl2_0", "x"),
        layer("without_myl3_0", "z_myl3"),  # of the profile before it
        layer("Reformat", "x"),
        layer("Reformat [profile 1]"),
    ]
    assert find_profiles(layers) == [0, 1, 1, 2, 2, 0, 1]


# The real TensorRT-RTX, as far as it goes without a GPU


@pytest.fixture(scope="module")
def detailed_bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with its plan, and a second one that was built with --profiling detailed. Don't change it."""
    pytest.importorskip("tensorrt_rtx")
    folder = Path(shutil.copytree(demo_bundle, tmp_path_factory.mktemp("detailed") / "bundle"))
    build(folder, sms=["RTX 30"], options=Options(profiling="detailed"))
    return folder


def test_a_build_without_a_gpu_keeps_the_layers(detailed_bundle: Path) -> None:
    bundle = Bundle.open(detailed_bundle)
    first, plan = bundle.manifest.plans
    assert first.layers is None and plan.layers is not None and plan.sms == ("sm86",)
    content = (detailed_bundle / plan.file).read_bytes()
    described = json.loads((detailed_bundle / plan.layers).read_text(encoding="utf-8"))["Layers"]
    told = {node for layer in described if layer["Metadata"] for node in find_nodes("", layer["Metadata"])}
    assert len(told) > 50 and all(f"[ONNX Layer: {node}]".encode() in content for node in told)
    done = planforge("inspect", detailed_bundle, "--layers", "--json")
    value = json.loads(done.stdout)
    (found,) = value["plans"]
    assert (found["file"], found["gpu"]) == (plan.file, None)
    assert [profile["name"] for profile in found["profiles"]] == ["prefill", "append", "decode"]
    assert sum(len(profile["layers"]) for profile in found["profiles"]) == len(described)
    modules = {name for name, _ in load_model(find_demo("gpt2-demo")).named_modules()}
    for number, profile in enumerate(found["profiles"]):
        tensors = {t["name"] for layer in profile["layers"] for t in (*layer["inputs"], *layer["outputs"])}
        suffix = f" [profile {number}]" if number else ""
        assert {f"input_ids{suffix}", f"logits{suffix}"} <= tensors
        named = {module for layer in profile["layers"] for module in layer["modules"]}
        assert {"wte", "h.0.attn", "h.1.mlp.c_fc", "lm_head"} <= named <= modules
    assert list(value["left_out"]) == [first.file]
    assert [graph["file"] for graph in value["graphs"]] == [bundle.manifest.artifact(first.built_from).file]
    table = planforge("inspect", detailed_bundle / plan.file, "--layers").stdout
    assert "profile decode" in table and "h.0.attn" in table and not re.search(r"[\x1e\x1f]", table)
    assert table.splitlines()[-1].startswith(f"{plan.file} is shown as TensorRT listed it at its build")
    line = error_line("inspect", detailed_bundle / plan.file, "--layers", "--time", code=1)
    assert "shows them as TensorRT listed them" in line


def test_a_plan_s_list_goes_with_it(detailed_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(detailed_bundle, tmp_path / "bundle"))
    before = Bundle.open(folder).manifest
    assert before.plans[1].layers is not None
    assert planforge("prune", folder, "--keep", "cpu").returncode == 0
    after = Bundle.open(folder).manifest
    assert after.plans == () and before.plans[1].layers not in after.files
    assert not list((folder / "plans").glob("*")) and Bundle.open(folder).manifest.export_id


@pytest.mark.parametrize("content", ["[]", '{"Layers": [5]}', '{"Layers": [{"Inputs": 5}]}', "{"])
def test_a_list_that_cannot_be_read_is_one_line(detailed_bundle: Path, tmp_path: Path, content: str) -> None:
    folder = Path(shutil.copytree(detailed_bundle, tmp_path / "bundle"))
    plan = Bundle.open(folder).manifest.plans[1]
    assert plan.layers is not None
    path = folder / plan.layers
    path.write_text(content, encoding="utf-8")
    lines = planforge("inspect", folder / plan.file, "--layers").stdout.splitlines()
    assert (
        lines[-1].startswith("left out: ") and plan.layers in lines[-1] and "the manifest says" in lines[-1]
    )

    def trust(value: dict[str, Any]) -> None:
        value["files"][plan.layers] = {"sha256": compute_sha256(path), "bytes": path.stat().st_size}

    with_manifest(folder, trust)
    lines = planforge("inspect", folder / plan.file, "--layers").stdout.splitlines()
    told = f"left out: {plan.file}: {plan.layers} is no list of layers; build the plan again: planforge build"
    assert told in lines[-1]


# Graphs


def test_the_nodes_of_a_graph_have_their_modules_types_and_shapes(demo_bundle: Path) -> None:
    path = demo_bundle / Bundle.open(demo_bundle).manifest.artifact("decoder.ort.fp32").file
    graph = onnx.load(path, load_external_data=False).graph
    found = read_nodes(path)
    assert [(node.name, node.type.rpartition(".")[2]) for node in found] == [
        (node.name, node.op_type) for node in graph.node
    ]
    modules = {name for name, _ in load_model(find_demo("gpt2-demo")).named_modules()}
    assert {module for node in found for module in node.modules} <= modules
    (attention,) = (node for node in found if node.modules == ("h.0.attn",) and "Attention" in node.type)
    assert attention.outputs[0].dimensions == ("batch", "tokens", 256)
    last = {t.name: t for node in found for t in node.outputs}["logits"]
    (declared,) = (value.type.tensor_type for value in graph.output if value.name == "logits")
    assert last.dimensions == tuple(d.dim_param or d.dim_value for d in declared.shape.dim)
    assert last.format == onnx.TensorProto.DataType.Name(declared.elem_type).lower()
    weights = {tensor.name for tensor in graph.initializer}
    assert not weights & {t.name for node in found for t in node.inputs}


def test_inspect_shows_the_nodes_of_a_graph(demo_bundle: Path, tmp_path: Path) -> None:
    path = demo_bundle / Bundle.open(demo_bundle).manifest.artifact("decoder.ort.fp32").file
    done = planforge("inspect", path, "--layers")
    assert re.search(r"MatMul +h.0.mlp.c_fc +batch x tokens x 256 float", done.stdout)
    (graph,) = json.loads(planforge("inspect", path, "--layers", "--json").stdout)["graphs"]
    assert graph["file"] == path.name and set(graph["layers"][0]) >= {"name", "type", "modules", "outputs"}
    assert "and x.onnx is a graph" in error_line("inspect", "x.onnx", "--layers", "--time")
    assert "x.onnx does not exist" in error_line("inspect", "x.onnx", "--layers")
    damaged = tmp_path / "x.onnx"
    damaged.write_bytes(b"no graph")
    assert "is not an ONNX file" in error_line("inspect", damaged, "--layers")


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
    (plan,) = Bundle.open(own_bundle).manifest.plans
    shown = planforge("inspect", own_bundle, "--layers").stdout
    graph = Bundle.open(own_bundle).manifest.artifact(plan.built_from).file
    first, *_, last = shown.splitlines()
    told = rf"{graph}, \d+ nodes, in place of the layers of {plan.file}, which cannot be read here: see below"
    assert re.fullmatch(told, first) and "h.0.attn" in shown
    timed = error_line("inspect", own_bundle, "--layers", "--time", code=1)
    for line in (last, timed):
        assert "only on a machine that runs it: no NVIDIA driver was found" in line
        assert "--profiling detailed` keeps a list of them at its build" in line
    nodes = f"`planforge inspect {own_bundle / graph} --layers` shows the nodes of its graph"
    assert nodes in timed and nodes not in last  # they are shown already
    with_manifest(own_bundle, of_tensorrt)  # which builds where the plan runs
    assert "There, `planforge build" in planforge("inspect", own_bundle, "--layers").stdout.splitlines()[-1]
    with emulated_gpu(own_bundle, "tensorrt"):
        assert "keeps only names of its layers" in planforge("inspect", own_bundle, "--layers").stdout
    assert "add --layers" in error_line("inspect", own_bundle, "--time")
    assert "add them" in error_line("inspect", own_bundle, "--layers", "--plot", tmp_path / "x.png")
    stray = tmp_path / "x.plan"
    stray.write_bytes(b"vtrt")
    assert "is no plan of a bundle" in error_line("inspect", stray, "--layers")
    with_manifest(own_bundle, lambda value: value.update(plans=[]))
    shown = planforge("inspect", own_bundle, "--layers").stdout
    assert all(f"{a.file}, " in shown for a in Bundle.open(own_bundle).manifest.artifacts)
    assert "has no plan, so these are the nodes of its graphs; build one: planforge build" in shown
    line = error_line("inspect", own_bundle, "--layers", "--time")
    assert "has no plan; build one: planforge build" in line
