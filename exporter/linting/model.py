"""An ONNX file in the form that rules read: types and shapes are inferred, and weights are not loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx.defs
import onnx.shape_inference
import onnx_ir as ir

from ...runtime.errors import InputError
from ..tensorrt.older import rewrite_for_tensorrt_8
from ..tensorrt_versions import Version

INTEGERS = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
SMALL = 4096  # bytes: what is larger is a weight, and isn't read
# What passes its first input's numbers on, in another form.
FORMS = ("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")

Numbers = npt.NDArray[np.generic]
Formal = onnx.defs.OpSchema.FormalParameter
Typed = tuple[Formal, ir.DataType]


@dataclass(frozen=True)
class LintModel:
    """A graph and its file."""

    path: Path
    model: ir.Model  # types and shapes inferred as far as onnx can; large weights have no data
    inside: Mapping[str, bytes]  # the bytes of large weights that lie in the file itself, by name
    opsets: Mapping[ir.Node, int]  # the version of ONNX's own operators by node; a function has its own
    in_bundle: bool  # `planforge build` makes its plan

    @property
    def nodes(self) -> Iterable[ir.Node]:
        """Return every node, also those of branches and functions."""
        return self.opsets.keys()

    @classmethod
    def load(cls, path: Path, in_bundle: bool, rewritten: Version | None = None) -> LintModel:
        """Read a file without its external data; raise InputError if it is missing or not ONNX.

        Args:
            path: the file.
            in_bundle: whether it is a bundle's.
            rewritten: the TensorRT 8 that `planforge build` rewrites it for.
        """
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file, so it is not read")
        try:
            proto = onnx.load(path, format="protobuf", load_external_data=False)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # protobuf's own
            raise InputError(f"{path} is not an ONNX file: {join_lines(error)}") from error
        if not proto.graph.node and not proto.graph.output:
            raise InputError(f"{path} is not an ONNX file, or is an empty one: it has no graph")
        if rewritten is not None:
            proto = rewrite(proto, rewritten)
        inside = take_out_weights(proto)
        forget_long_shapes(proto)
        with suppress(Exception):  # some faults of a graph stop onnx; the rules see the rest
            proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        try:
            with silence_onnx_ir():
                model = ir.from_proto(proto)
        except Exception as error:  # onnx_ir has no one base of its errors
            raise InputError(f"{path} has a graph that cannot be read: {join_lines(error)}") from error
        graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
        opsets = {node: opset_of(g) for g in graphs for node in ir.traversal.RecursiveGraphIterator(g)}
        if not all(isinstance(name, str) for node in opsets for name in names_of(node)):
            raise InputError(f"{path} has a graph that cannot be read: a name in it is not UTF-8")
        return cls(path, model, inside, opsets, in_bundle)

    def find_nodes(self, *operators: str) -> list[ir.Node]:
        """Return the nodes of some of ONNX's own operators."""
        return [node for node in self.nodes if node.op_type in operators and is_standard(node)]

    def find_schema(self, node: ir.Node) -> onnx.defs.OpSchema | None:
        """Return ONNX's schema of a node; None if it has none in this version."""
        return load_schema(node.op_type, self.opsets[node]) if is_standard(node) else None

    def list_input_types(self, node: ir.Node) -> list[Typed]:
        """Return the types of a node's inputs, as `list_types` gives them."""
        schema = self.find_schema(node)
        return [] if schema is None else list_types(node.inputs, schema.inputs)

    def list_weights(self) -> list[ir.Value]:
        """Return every initializer whose type is known, those of branches too."""
        graphs = [self.model.graph, *(g for node in self.nodes for g in list_subgraphs(node))]
        values = [value for graph in graphs for value in graph.initializers.values()]
        return [v for v in values if type_of(v.const_value) is not None]


def rewrite(proto: onnx.ModelProto, version: Version) -> onnx.ModelProto:
    """Return a graph as `planforge build` hands it to TensorRT 8, or unchanged if that refuses it."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    try:
        rewrite_for_tensorrt_8(changed, version)
    except Exception:  # a damaged graph has no schemas, or no types; the rules tell what it has
        return proto
    return changed


@contextmanager
def silence_onnx_ir() -> Iterator[None]:
    """Keep onnx_ir from printing on stderr what a finding reports anyway."""
    log = logging.getLogger("onnx_ir")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def join_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def take_out_weights(proto: onnx.ModelProto) -> dict[str, bytes]:
    """Take large weights out of a graph, so that inference copies none; return their bytes by name."""
    inside = {}
    for tensor in proto.graph.initializer:
        data = tensor.raw_data
        if tensor.data_location != onnx.TensorProto.EXTERNAL and len(data) > SMALL:
            inside[tensor.name] = data
            tensor.ClearField("raw_data")
    return inside


def forget_long_shapes(proto: onnx.ModelProto) -> None:
    """Forget the lengths that a damaged graph declares for integers, as inference would allocate them.

    It follows the numbers of lists that are shapes, which have a few elements.
    """
    graph = proto.graph
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind = value.type.tensor_type
        is_list = len(kind.shape.dim) == 1 and kind.elem_type in INTEGERS
        if is_list and kind.shape.dim[0].dim_value > SMALL:
            kind.shape.dim[0].ClearField("dim_value")


def names_of(node: ir.Node) -> list[object]:
    """Return the names of a node; in a damaged file some are bytes."""
    values = [value.name for value in (*node.inputs, *node.outputs) if value is not None]
    names = [node.op_type, node.domain, node.name, *values, *node.attributes]
    return [name for name in names if name is not None]


def list_subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Return a node's branches, or its body."""
    return [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def opset_of(graph: ir.Graph | ir.Function) -> int:
    """Return the version of ONNX's own operators, 1 where none is named."""
    imports = graph.opset_imports
    return imports.get("", imports.get("ai.onnx", 1))


def is_standard(node: ir.Node) -> bool:
    return node.domain == ""  # onnx_ir calls "ai.onnx" so, too


@cache
def load_schema(operator: str, opset: int) -> onnx.defs.OpSchema | None:
    """Return ONNX's schema of an operator in a version; None if it isn't there."""
    try:
        return onnx.defs.get_schema(operator, min(opset, onnx.defs.onnx_opset_version()))
    except (onnx.defs.SchemaError, TypeError):  # TypeError: a version that is not a small number
        return None


def find_input(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input, or None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def find_output(node: ir.Node, index: int) -> ir.Value | None:
    """Return an output, or None where a damaged node has none."""
    return node.outputs[index] if index < len(node.outputs) else None


def has_input(node: ir.Node, index: int) -> bool:
    value = find_input(node, index)
    return value is not None and bool(value.name)


def read_attribute(node: ir.Node, name: str, default: object = None) -> object:
    """Return an attribute's value; a string as str."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def dims_of(value: ir.Value | None) -> list[int | str | None] | None:
    """Return a shape with numbers, names and None; None if its rank is unknown."""
    if value is None or value.shape is None:
        return None
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def type_of(value: ir.Value | ir.TensorProtocol | None) -> ir.DataType | None:
    """Return an element type; None if it is unknown."""
    dtype = None if value is None else value.dtype
    return None if dtype == ir.DataType.UNDEFINED else dtype


def list_types(values: Sequence[ir.Value | None], formals: Sequence[Formal]) -> list[Typed]:
    """Return the known types of tensors, each with ONNX's description; the last one may repeat."""
    found = []
    for index, value in enumerate(values if formals else ()):
        dtype = type_of(value)
        if value is not None and dtype is not None and isinstance(value.type, ir.TensorType):
            found.append((formals[min(index, len(formals) - 1)], dtype))
    return found


def name_type(dtype: ir.DataType) -> str:
    return dtype.name.lower()


def read_constant(value: ir.Value | None) -> Numbers | None:
    """Return the numbers of a constant that is not a weight; None if large, in another file or damaged."""
    node = None if value is None else value.producer()
    try:
        if node is not None and node.op_type == "ConstantOfShape":
            found = node.attributes.get("value")
            tensor = None if found is None else found.as_tensor()
        else:
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
        if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.dtype == ir.DataType.STRING:
            return None
        return tensor.numpy() if tensor.nbytes <= SMALL else None
    except Exception:  # the parser will say so
        return None


def is_constant(value: ir.Value | None) -> bool:
    """Tell whether a value depends on no input: a weight, or computed of weights and of known shapes."""
    waiting = [value]
    seen = set()
    while waiting:
        value = waiting.pop()
        if value is None or value.is_initializer() or id(value) in seen:
            continue
        seen.add(id(value))
        node = value.producer()
        if node is None or list_subgraphs(node):
            return False
        if node.op_type in ("Shape", "Size"):
            dims = dims_of(find_input(node, 0))
            if dims is None or not all(isinstance(dim, int) for dim in dims):
                return False
            continue
        waiting.extend(node.inputs)
    return True
