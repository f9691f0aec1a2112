"""The nodes of an ONNX file, and the types of its tensors, without the onnx package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .ort_prepared import GRAPH_INITIALIZER, GRAPH_NODE, MODEL_GRAPH, find_branches
from .protobuf import ENTRY_KEY, ENTRY_VALUE, Span, find_fields, find_numbers, read_fields

# Numbers of fields in onnx.proto.
GRAPH_VALUES = (11, 12, 13)  # inputs, outputs, and what lies between
NODE_INPUT = 1
NODE_OUTPUT = 2
NODE_NAME = 3
NODE_OPERATOR = 4
NODE_DOMAIN = 7
NODE_METADATA = 9
VALUE_NAME = 1
VALUE_TYPE = 2
TYPE_TENSOR = 1
TENSOR_TYPE = 1
TENSOR_SHAPE = 2
SHAPE_AXIS = 1
WEIGHT_TYPE = 2
WEIGHT_NAME = 8
# ONNX's types by their numbers.
NAMES = (
    "float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64 complex64"
    " complex128 bfloat16 float8e4m3fn float8e4m3fnuz float8e5m2 float8e5m2fnuz uint4 int4 float4e2m1"
)
TYPES = dict(enumerate(NAMES.split(), start=1))

MODULE = "planforge.module"  # a node's metadata: its module in PyTorch
WEIGHT = ".weight"  # what the name of a module's weight has behind its path


class FileTensor(NamedTuple):
    """The type of a tensor of an ONNX file, and how many axes it has, where a value's shape tells."""

    dtype: str
    axes: int | None


class FileNode(NamedTuple):
    """A node of an ONNX file: operator, module, and the inputs and results of known types, by number."""

    operator: str
    module: str
    inputs: Mapping[int, FileTensor]
    results: Mapping[int, FileTensor]


def read_nodes(model: bytes) -> dict[str, list[FileNode]]:
    """Return the nodes of an ONNX file, those of branches too, by their names, which several may share."""
    found: defaultdict[str, list[FileNode]] = defaultdict(list)
    for graph in find_fields(model, Span(0, len(model)), MODEL_GRAPH):
        for name, node in list_nodes(model, graph, {}):
            found[name].append(node)
    return dict(found)


def list_nodes(model: bytes, graph: Span, outer: Mapping[str, FileTensor]) -> Iterator[tuple[str, FileNode]]:
    """Yield the nodes of a graph and of its branches, by their names.

    A node's module is in its metadata, or in the name of the weight that it reads. `outer` are the tensors of
    the graphs around this one, whose own names another branch may have too.
    """
    tensors = {**outer, **dict(list_tensors(model, graph))}
    for node in find_fields(model, graph, GRAPH_NODE):
        fields = group_fields(model, node)
        inputs = read_texts(model, fields[NODE_INPUT])
        outputs = read_texts(model, fields[NODE_OUTPUT])
        modules = [name.partition(WEIGHT)[0] for name in inputs if WEIGHT in name]
        for entry in fields[NODE_METADATA]:
            pair = group_fields(model, entry)
            if read_texts(model, pair[ENTRY_KEY]) == [MODULE]:
                modules[:0] = read_texts(model, pair[ENTRY_VALUE])
        operator, domain = (
            "".join(read_texts(model, fields[field])) for field in (NODE_OPERATOR, NODE_DOMAIN)
        )
        known, results = (
            {number: tensors[name] for number, name in enumerate(names) if name and name in tensors}
            for names in (inputs, outputs)
        )
        found = FileNode(name_operator(operator, domain), modules[0] if modules else "", known, results)
        yield "".join(read_texts(model, fields[NODE_NAME])), found
        for branch in find_branches(model, node):
            yield from list_nodes(model, branch, tensors)


def name_operator(operator: str, domain: str) -> str:
    """Return an operator's name with its domain, unless that is ONNX's own."""
    return operator if domain in ("", "ai.onnx") else f"{domain}.{operator}"


def list_tensors(model: bytes, graph: Span) -> Iterator[tuple[str, FileTensor]]:
    """Yield the types of a graph's tensors that are known, by their names."""
    for number, content in read_fields(model, graph):
        axes: int | None
        if number == GRAPH_INITIALIZER:
            name, types = WEIGHT_NAME, list(find_numbers(model, content, WEIGHT_TYPE))
            axes = None
        elif number in GRAPH_VALUES:
            name, types, axes = VALUE_NAME, [], None
            for tensor in find_fields(model, content, VALUE_TYPE, TYPE_TENSOR):
                types += find_numbers(model, tensor, TENSOR_TYPE)
                for shape in find_fields(model, tensor, TENSOR_SHAPE):
                    axes = len(list(find_fields(model, shape, SHAPE_AXIS)))
        else:
            continue
        if types:
            text = "".join(read_texts(model, find_fields(model, content, name)))
            yield text, FileTensor(TYPES.get(types[0], ""), axes)


def group_fields(model: bytes, message: Span) -> defaultdict[int, list[Span]]:
    """Return the contents of a message's fields, by their numbers."""
    grouped: defaultdict[int, list[Span]] = defaultdict(list)
    for number, content in read_fields(model, message):
        grouped[number].append(content)
    return grouped


def read_texts(model: bytes, spans: Iterable[Span]) -> list[str]:
    return [model[span.start : span.end].decode() for span in spans]


def find_module(name: str, nodes: Mapping[str, Sequence[FileNode]]) -> str:
    """Return the module of a node, by its name; "" where none is known, or nodes of several have the name.

    ONNX Runtime calls a node that it fused after the first of them: "node_MatMul_2/MatMulAddFusion".
    """
    parts = name.split("/")
    for end in range(len(parts), 0, -1):
        own = "/".join(parts[:end])
        modules = {node.module for node in nodes.get(own, ()) if own}
        if modules - {""}:
            return modules.pop() if len(modules) == 1 else ""
    return ""
