"""Turns TensorRT's messages, and its silent omissions, into errors that name the ONNX node.

Serves the modules tensorrt and tensorrt_rtx alike: their objects are typed Any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ...runtime.backends.architectures import describe_sm
from ...runtime.backends.tensorrt_library import NOISE, NUMPY_TYPES
from ...runtime.bundle.artifact import SLOTS, Artifact, TensorSpec
from ..errors import BuildError

# A profile that contradicts the graph is only a warning, and a plan that fails while running.
FATAL_WARNING = re.compile(r"not self-consistent")

# "ITensor::f: Error Code 4: API Usage Error (node: what happened. In f at /_src/x.cpp:37)"
WRAPPED = re.compile(r"^.*?Error Code \d+: [^(]*\((?P<text>.*)\)$")
POSITION = re.compile(r"\s*In \S+ at \S+?:\d+(?=$|\s)")
CONDITION = re.compile(r'^.*&& "(?P<text>.*)"$')  # the condition that failed, and what it means
ASSERTION = re.compile(r"Assertion failed: \S.*?: (?=\S)")

TYPES = r"Half|Float|BFloat16|Int\d+|Bool"

# Messages of TensorRT that are frequent and unclear, and what to write instead.
TRANSLATIONS = (
    (r"^false$", "TensorRT has no such operator"),
    (
        r"Cannot compile operation '(?P<node>[^']*)' for Turing .*?: (?P<what>[^.]*) is not supported",
        "{node} is {what}, for which there is no kernel on {sm75}: name the other GPUs by --sm",
    ),
    (
        r"Cannot compile for target\(s\) (?P<sm>[^,]*), because the model contains HW-specific",
        "the graph computes in a type that {sm} does not have: name the other GPUs by --sm",
    ),
    (
        r"cache has type (?P<a>\w+) but must have type Float, Half, or BFloat16",
        "it writes a cache of {a} in place, and plans do so in floats alone",
    ),
    (r"Plugin not found", "TensorRT has no such operator, and no plugin of that name is loaded"),
    (
        rf"types?\b.* (?P<a>{TYPES})\b.* (?P<b>{TYPES})\b",
        "its inputs have the types {a} and {b}; plans need the Cast written in the graph",
    ),
    (
        r"must have a static sequence length",
        "the length of its cache is not a number; the profiles must freeze the slots axis",
    ),
    (
        r"Requested size was (?P<size>\d+) bytes",
        "it needs {size} bytes to work in: give a larger --workspace (in MiB), or none",
    ),
    (r"Failed to open file: (?P<file>.*)$", "the weights file {file} is missing"),
    (
        r"weights offset/length out of range for file: (?P<file>\S+).*file size=(?P<size>\d+)",
        "the weights file {file} is cut short at {size} bytes",
    ),
    (
        r"Profile k(?P<end>MIN|OPT|MAX) values are not self-consistent\. (?P<node>\S+): "
        r"(?P<why>.*?)\.? (In \S+ at|Instruction:) ",
        "the {end} shapes of a profile contradict each other at ONNX node {node!r}: {why}",
    ),
)


def explain_parse_errors(parser: Any, messages: Iterable[str]) -> str:
    """Return the parser's errors, node by node; those about files come from the log, which tells more."""
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    lines = [explain_node_error(error) for error in errors if error.node() >= 0]
    if not lines:  # not about a node: the weights, or the file itself
        lines = [translate_message(text) for text in messages] or ["the ONNX parser gives no reason"]
        lines = lines[:1]
    return "; ".join(dict.fromkeys(lines))


def explain_node_error(error: Any) -> str:
    """Return one parser error in words: the node, its operator, the functions around it, and the fault."""
    named = hasattr(error, "node_name")  # from 10.0 on
    name = error.node_name() if named else ""
    operator = error.node_operator() if named else "its operator is not said"
    node = repr(name) if name else f"number {error.node()}"
    callers = error.local_function_stack() if named else ()
    inside = "".join(f" inside {caller}" for caller in reversed(callers))
    lines = [line for line in error.desc().splitlines() if not NOISE.search(line)]
    told = [line for line in lines if not line.startswith("Invalid Node")]
    return f"ONNX node {node} ({operator}){inside}: " + "; ".join(
        translate_message(line, name) for line in told or [str(error.code())]
    )


def explain_build_errors(messages: Iterable[str]) -> str:
    """Return why no plan was built, from the log's errors."""
    lines = dict.fromkeys(translate_message(text) for text in messages)
    return "; ".join(lines) or "TensorRT gives no reason"


def translate_message(message: str, node: str = "") -> str:
    """Return a message on one line, without TensorRT's own source positions."""
    text = " ".join(message.split())
    for pattern, words in TRANSLATIONS:
        if match := re.search(pattern, text):
            return words.format(**match.groupdict(), sm75=describe_sm("sm75"))
    for wrapping in (WRAPPED, CONDITION):
        if match := wrapping.search(text):
            text = match["text"]
    text = ASSERTION.sub("", POSITION.sub("", text))
    return text.removeprefix(f"{node}: ").strip()


def check_network(network: Any, artifact: Artifact, slots: int | None) -> None:
    """Refuse a network whose inputs, outputs or updates in place differ from the artifact's."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    problems = find_differences("input", inputs, artifact.inputs, slots)
    problems += find_differences("output", outputs, artifact.outputs, slots)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    read = [layer.get_input(i) for layer in layers for i in range(layer.num_inputs)]
    used = {tensor.name for tensor in read if tensor is not None}
    problems += [f"input {t.name!r} reaches no layer" for t in inputs if t.name not in used]
    updates = {
        layer.get_output(0).name: layer.get_input(0).name
        for layer in layers
        if layer.type.name == "KV_CACHE_UPDATE"
    }
    problems += [
        f"output {output!r} is an update in place of {updates.get(output, 'nothing')!r}, expected"
        f" of {artifact.aliases.get(output, 'nothing')!r}"
        for output in sorted(updates.keys() | artifact.aliases.keys())
        if updates.get(output) != artifact.aliases.get(output)
    ]
    if problems:
        raise BuildError(f"TensorRT understood {artifact.id} differently: {'; '.join(problems)}")


def find_differences(
    side: str, tensors: Sequence[Any], specs: Sequence[TensorSpec], slots: int | None
) -> list[str]:
    """Return how a network's inputs or outputs differ from the artifact's."""
    found = {t.name: (str(NUMPY_TYPES.get(t.dtype.name, t.dtype.name)), tuple(t.shape)) for t in tensors}
    expected = {spec.name: (spec.dtype, find_network_shape(spec, slots)) for spec in specs}
    problems = [f"{side} {name!r} is missing" for name in expected if name not in found]
    problems += [f"{side} {name!r} is unknown" for name in found if name not in expected]
    return problems + [
        f"{side} {name!r} is {found[name][0]} {found[name][1]}, expected {dtype} {shape}"
        for name, (dtype, shape) in expected.items()
        if name in found and found[name] != (dtype, shape)
    ]


def find_network_shape(spec: TensorSpec, slots: int | None) -> tuple[int, ...]:
    """Return a tensor's shape in a network: -1 for dynamic axes, slots as a number."""
    names = [slots if name == SLOTS and slots is not None else name for name in spec.axis_names()]
    return tuple(name if isinstance(name, int) else -1 for name in names)
