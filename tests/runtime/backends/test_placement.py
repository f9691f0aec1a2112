"""Which nodes on the CPU compute shapes: the types and sizes of their results tell, not their operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.shape_inference
import pytest

from planforge.runtime.backends import ort_cuda_backend
from planforge.runtime.backends.captured_step import CapturedGraphs
from planforge.runtime.backends.cuda_memory import Device
from planforge.runtime.backends.graph_file import TYPES
from planforge.runtime.backends.ort_cuda_backend import PROVIDER, OrtCudaProgram
from planforge.runtime.backends.placement import Placement, read_placement
from planforge.runtime.errors import BackendUnavailableError

from ...helpers.emulated_ort_cuda import CPU_PROVIDER, emulated_ort_cuda
from ...helpers.lint import Case, model_of

MS = ("com.microsoft",)
# The names are the operators', and the modules their names in lower case.
SHAPE = "s = Shape(x)"
BRANCHES = (
    "then_branch = a () => ({0}[1] p) {{ p = Neg(t) }},"
    " else_branch = b () => ({0}[1] q) {{ q = Identity(t) }}"
)


def write_graph(body: str, path: Path, inferred: bool = True) -> onnx.ModelProto:
    """Write a graph whose nodes are called by their operators, and say which modules they are of."""
    model: onnx.ModelProto = model_of(Case("g", "", body, 20, domains=MS))
    if inferred:
        model = onnx.shape_inference.infer_shapes(model)
    for node in model.graph.node:
        node.name = node.op_type
        entry = node.metadata_props.add()
        entry.key, entry.value = "planforge.module", node.op_type.lower()
    onnx.save(model, path)
    return model


def place(nodes: Sequence[Any], path: Path) -> Placement:
    """What is said of a session that has these nodes on the CPU."""
    parts = [SimpleNamespace(ep_name=CPU_PROVIDER, get_nodes=lambda: nodes)]
    session = SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)
    found = read_placement(session, PROVIDER, CapturedGraphs("g"), path)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("body", "operator", "is_shape"),
    [
        (f"(float[n,m] x) => (int64[2] y) {{ {SHAPE} y = Identity(s) }}", "Shape", True),
        (f"(float[n,m] x) => (int64[2] y) {{ {SHAPE} y = Identity(s) }}", "Identity", True),
        ("(float[n,m] x) => (float[n,m] y) { y = Identity(x) }", "Identity", False),
        ("(bool[n] c, int64[n] a, int64[n] b) => (int64[n] y) { y = Where(c, a, b) }", "Where", True),
        ("(bool[n] c, bool[n] a, bool[n] b) => (bool[n] y) { y = Where(c, a, b) }", "Where", False),
        ("(bool[n,m] c, int64 a, int64 b) => (int64[n,m] y) { y = Where(c, a, b) }", "Where", False),
        ("(float16 a, float16 b, float16 c) => (float16[n] y) { y = Range(a, b, c) }", "Range", False),
        ("(int64 a, int64 b, int64 c) => (int64[n] y) { y = Range(a, b, c) }", "Range", True),
        ("(int64[n] a) => (float16[n] y) { y = Cast <to = 10>(a) }", "Cast", False),
        ("(int64[n] a) => (int32[n] y) { y = Cast <to = 6>(a) }", "Cast", True),
        ("(int64[n] a, int64[n] b) => (bool[n] y) { y = Less(a, b) }", "Less", True),
        ("(float16[n] a, float16[n] b) => (float16[n] y) { y = Add(a, b) }", "Add", False),
        ("(bool[n,m] a) => (bool[n,m] y) { y = Not(a) }", "Not", False),
        ("(int64[n] a, int64[n] b) => (int64[n] y) { y = BitwiseAnd(a, b) }", "BitwiseAnd", False),
        ("(int64[n] a) => (int64 y) { y = ReduceProd <keepdims = 0>(a) }", "ReduceProd", False),
        ("(int32[n] a) => (int32 y) { y = ReduceProd <keepdims = 0>(a) }", "ReduceProd", True),
        ("(float16[n,4] x) => (float16[n,4] y) { y = com.microsoft.QuickGelu(x) }", "QuickGelu", False),
    ],
)
def test_a_shape_is_told_by_its_type_and_size(
    body: str, operator: str, is_shape: bool, tmp_path: Path
) -> None:
    path = tmp_path / "g.onnx"
    nodes = [node for node in write_graph(body, path).graph.node if node.op_type == operator]
    placement = place(nodes, path)
    assert (placement.gpu, placement.shapes) == (0, int(is_shape))
    assert [str(node) for node in placement.others] == (
        [] if is_shape else [f"{operator} '{operator}' of {operator.lower()}"]
    )


@pytest.mark.parametrize(("dtype", "is_shape"), [("int64", True), ("float", False)])
def test_nodes_of_a_branch_are_told_too(dtype: str, is_shape: bool, tmp_path: Path) -> None:
    body = f"(bool c, {dtype}[1] t) => ({dtype}[1] y) {{ y = If(c) <{BRANCHES.format(dtype)}> }}"
    model = write_graph(body, tmp_path / "g.onnx")
    (branch,) = (a.g for a in model.graph.node[0].attribute if a.name == "then_branch")
    branch.node[0].name = "inner"
    onnx.save(model, tmp_path / "g.onnx")
    assert place(branch.node, tmp_path / "g.onnx").shapes == is_shape


@pytest.mark.parametrize(
    ("operator", "domain", "is_shape"),
    [
        ("Squeeze", "", True),
        ("Where", "ai.onnx", True),
        ("Not", "", True),
        ("Softmax", "", False),
        ("Bitshift", "", False),
        ("GroupQueryAttention", "com.microsoft", False),
        ("MatMulIntegerToFloat", "com.microsoft", False),
    ],
)
def test_of_unknown_types_the_table_decides(
    operator: str, domain: str, is_shape: bool, tmp_path: Path
) -> None:
    """ONNX Runtime made the node, or the file has no types."""
    write_graph("(float[n,m] x) => (int64[2] y) { y = Shape(x) }", tmp_path / "g.onnx")
    for name in ("made", "Shape/made", "Shape"):
        node = SimpleNamespace(op_type=operator, domain=domain, name=name)
        placement = place([node], tmp_path / "g.onnx")
        assert placement.shapes == is_shape
        assert [other.module for other in placement.others] == (
            [] if is_shape else ["" if name == "made" else "shape"]
        )


def test_a_file_without_types_is_read(tmp_path: Path) -> None:
    body = f"(float[n,m] x) => (int64[2] y) {{ {SHAPE} y = Identity(s) }}"
    nodes = write_graph(body, tmp_path / "g.onnx", inferred=False).graph.node
    assert place(nodes, tmp_path / "g.onnx").shapes == len(nodes)


@pytest.mark.parametrize(("dtype", "is_shape"), [("int64", True), ("float16", False)])
def test_of_results_without_types_the_inputs_tell(dtype: str, is_shape: bool, tmp_path: Path) -> None:
    """Add has kernels for whole numbers too; the result's type is not in the file."""
    body = f"({dtype}[n] x) => ({dtype}[n] y) <{dtype}[1] w = {{1}}> {{ s = Add({{0}}) y = Identity(s) }}"
    for inputs in ("x, w", "u, w", "x, u"):
        made = body.replace("{0}", inputs).replace("{ s", "{ u = Identity(x) s", 1)
        nodes = write_graph(made, tmp_path / "g.onnx", inferred=False).graph.node
        assert place([nodes[1]], tmp_path / "g.onnx").shapes == is_shape


@pytest.mark.parametrize("name", ["", "same"])
@pytest.mark.parametrize("order", [1, -1])
def test_of_nodes_with_one_name_each_must_compute_a_shape(name: str, order: int, tmp_path: Path) -> None:
    """A message names no module of such nodes, but of a name that only one has."""
    body = f"(float[n,m] x) => (float[n,m] y, int64[2] z) {{ {SHAPE} y = Identity(x) z = Identity(s) }}"
    model = write_graph(body, tmp_path / "g.onnx")
    real, shape = model.graph.node[1:]
    real.name = shape.name = name
    real.metadata_props[0].value = "another"
    del model.graph.node[1:]
    model.graph.node.extend([real, shape][::order])
    onnx.save(model, tmp_path / "g.onnx")
    placement = place(model.graph.node, tmp_path / "g.onnx")
    assert placement.shapes == 1  # Shape
    assert [(node.operator, node.module) for node in placement.others] == [("Identity", "")] * 2


def test_a_name_in_two_branches_is_two_tensors(tmp_path: Path) -> None:
    branches = (
        "then_branch = a () => (int64[1] p) { r = Neg(t) p = Identity(r) },"
        " else_branch = b () => (int64[1] q) { r = Neg(u) q = Cast <to = 7>(r) }"
    )
    body = f"(bool c, int64[1] t, float[1] u) => (int64[1] y) {{ y = If(c) <{branches}> }}"
    model = write_graph(body, tmp_path / "g.onnx")
    inner = {attribute.name: attribute.g.node[0] for attribute in model.graph.node[0].attribute}
    for name, node in inner.items():
        node.name = name
    onnx.save(model, tmp_path / "g.onnx")
    for name, is_shape in (("then_branch", True), ("else_branch", False)):
        assert place([inner[name]], tmp_path / "g.onnx").shapes == is_shape


def test_real_data_that_has_no_kernel_is_refused(tmp_path: Path) -> None:
    """The emulated provider goes by ONNX Runtime's own list of kernels."""
    body = "(int8[n,m] a, int8[n,m] b) => (float[n,m] y) { w = Max(a, b) y = Cast <to = 1>(w) }"
    write_graph(body, tmp_path / "g.onnx")
    told = r"run some nodes of g\.onnx on the CPU, at each step: 1 x Max \(Max 'Max' of max\); export it"
    with emulated_ort_cuda():
        vars(ort_cuda_backend)["import_onnxruntime"]().preload_dlls()
        with pytest.raises(BackendUnavailableError, match=told):
            OrtCudaProgram(tmp_path / "g.onnx", Device())
        program = OrtCudaProgram(tmp_path / "g.onnx", Device(), cpu_nodes=True)
        assert str(program.placement) == "1 nodes on the GPU, 0 of shapes on the CPU, 1 others on the CPU"
        program.close()


def test_the_numbers_of_types_are_those_of_onnx() -> None:
    names = {"float": "float32", "double": "float64"}
    known = {number: name.lower() for name, number in onnx.TensorProto.DataType.items() if number in TYPES}
    assert {number: names.get(name, name) for number, name in known.items()} == TYPES
