"""Graphs as ONNX Runtime saved them once for this processor: optimized, with their packed weights in a file.

ONNX Runtime 1.31 packs the weights again when it opens such a graph, and compares: it needs the weights that
are not packed too, so that the file holds both. What is saved is the optimizing, the memory of the packed
weights, whose pages are the file's, and the first touch of that memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact
from ..errors import BackendError, PlanForgeError
from .dialects import CPU_DIALECTS
from .ort_program import (
    OrtProgram,
    import_onnxruntime,
    list_disabled,
    make_options,
    make_session,
    wrap_ort_errors,
)
from .prepared import PreparedGraph
from .protobuf import ENTRY_KEY, ENTRY_VALUE, Span, find_fields, read_fields
from .requirements import products_saturate

log = logging.getLogger("planforge")

EXTERNAL_BYTES = "1024"  # weights below are kept in the graph itself

# Packed weights have a layout that begins at such an address. ONNX Runtime 1.31 puts those of less than 1 MiB
# anywhere in the file, and computes NaN from them. An entry's value is the key of the packed weight, and
# offset;length;checksum of each piece; one whose key is no packed weight's is passed over, and the weight is
# packed again in memory.
ALIGNMENT = 64
PACKED_NAME = b"prepacked_"  # what the names of such entries begin with
PACKED_VALUE = re.compile(rb"([A-Za-z]\w*\+\d+)((?:\|\d+;\d+;\d+)+)")
PIECE = re.compile(rb"\|(\d+);")
UNKNOWN_FORM = "this version of ONNX Runtime saves packed weights in an unknown format"

# Numbers of fields in onnx.proto.
MODEL_GRAPH = 7
GRAPH_NODE = 1
GRAPH_INITIALIZER = 5
NODE_ATTRIBUTE = 5
ATTRIBUTE_GRAPH = 6
ATTRIBUTE_GRAPHS = 11
TENSOR_EXTERNAL_DATA = 13


def open_prepared(
    bundle: Bundle, artifact: Artifact, threads: int, *, verify: bool, make: bool
) -> OrtProgram | None:
    """Return a graph as it was prepared; None where it was not, or cannot be, which one log line says.

    What is stale is deleted and made anew, as it was asked for once; with `make`, so is what was never there.
    """
    for name in (artifact.file, *artifact.data):
        bundle.locate(name)  # a bundle that lacks a file is refused, whatever is kept of it
    try:
        prepared = find_prepared(bundle, artifact)
        if prepared.exists():
            program = open_current(prepared, artifact, threads, verify)
            if program is not None:
                return program
            log.info(
                "%s was prepared for another version or machine, or has changed; preparing it again",
                artifact.id,
            )
        elif not make:
            return None
        make_prepared(bundle, artifact, prepared)
        return open_current(prepared, artifact, threads, verify)
    except (OSError, PlanForgeError) as error:
        log.log(logging.WARNING if make else logging.INFO, "%s starts unprepared: %s", artifact.id, error)
        return None


def find_prepared(bundle: Bundle, artifact: Artifact) -> PreparedGraph:
    """Return where a graph is kept, by what ONNX Runtime would make of it here."""
    engine = {
        "onnxruntime": import_onnxruntime().__version__,
        "disabled": list_disabled(artifact),
        "exact": artifact.may_saturate and products_saturate(),
    }
    return PreparedGraph.of(bundle, artifact, engine)


def find_all_prepared(bundle: Bundle) -> Iterator[PreparedGraph]:
    """Yield where each graph of a bundle that runs on a CPU is kept, if it is."""
    for artifact in bundle.manifest.artifacts:
        if artifact.dialect in CPU_DIALECTS:
            yield find_prepared(bundle, artifact)


def open_current(
    prepared: PreparedGraph, artifact: Artifact, threads: int, verify: bool
) -> OrtProgram | None:
    """Open what was prepared; delete it, and return None, where it is not what it should be."""
    if prepared.is_current():
        with ThreadPoolExecutor(1, "planforge-hash") as pool:
            right = pool.submit(prepared.check_data, verify)
            try:
                saturate = artifact.may_saturate
                program = OrtProgram(prepared.graph, threads, optimized=True, may_saturate=saturate)
            except BackendError as error:
                log.debug("%s: %s", prepared.folder, error)
                program = None
        if program is not None and right.result():
            prepared.note_use()
            return program
        if program is not None:
            program.close()
    prepared.remove()
    return None


def make_prepared(bundle: Bundle, artifact: Artifact, prepared: PreparedGraph) -> None:
    """Let ONNX Runtime save a graph; raise a BackendError where that cannot be done."""
    path = bundle.path(artifact.file)
    disabled = list_disabled(artifact)

    def save(graph: Path, data: str) -> None:
        options = make_options(threads=None, may_saturate=artifact.may_saturate)
        options.optimized_model_filepath = str(graph)
        for key, value in {
            "session.optimized_model_external_initializers_file_name": data,
            "session.optimized_model_external_initializers_min_size_in_bytes": EXTERNAL_BYTES,
            "session.save_external_prepacked_constant_initializers": "1",
        }.items():
            options.add_session_config_entry(key, value)
        with wrap_ort_errors(f"ONNX Runtime cannot save {path.name}"), bundle.check_meanwhile(artifact.data):
            make_session(path, options, disabled=disabled)
        graph.write_bytes(pass_over_unaligned(graph.read_bytes()))

    weight_bytes = sum(bundle.manifest.files[name].bytes for name in artifact.data)
    prepared.make(weight_bytes, save)


def pass_over_unaligned(model: bytes) -> bytes:
    """Return a saved model that does not use the packed weights which begin between two aligned addresses.

    Raises a BackendError where ONNX Runtime has written entries of another form.
    """
    changed = bytearray(model)
    count = 0
    for value in find_packed_values(model):
        entry = PACKED_VALUE.fullmatch(model, value.start, value.end)
        if entry is None:
            raise BackendError(UNKNOWN_FORM)
        count += 1
        key, pieces = entry.groups()
        if any(int(offset) % ALIGNMENT for offset in PIECE.findall(pieces)):
            changed[value.start : value.start + len(key)] = b"_" * len(key)
    if count != model.count(PACKED_NAME):
        raise BackendError(UNKNOWN_FORM)
    return bytes(changed)


def find_packed_values(model: bytes) -> Iterator[Span]:
    """Yield where the values of the entries lie that say where a weight's packed form is."""
    for main_graph in find_fields(model, Span(0, len(model)), MODEL_GRAPH):
        for graph in find_graphs(model, main_graph):
            for entry in find_fields(model, graph, GRAPH_INITIALIZER, TENSOR_EXTERNAL_DATA):
                fields = dict(read_fields(model, entry))
                name = fields.get(ENTRY_KEY)
                value = fields.get(ENTRY_VALUE)
                if name and value and model.startswith(PACKED_NAME, name.start, name.end):
                    yield value


def find_graphs(model: bytes, graph: Span) -> Iterator[Span]:
    """Yield where a graph lies, and each graph that its nodes have as an attribute."""
    yield graph
    for node in find_fields(model, graph, GRAPH_NODE):
        for branch in find_branches(model, node):
            yield from find_graphs(model, branch)


def find_branches(model: bytes, node: Span) -> Iterator[Span]:
    """Yield where the graphs lie that a node has as attributes."""
    for attribute in find_fields(model, node, NODE_ATTRIBUTE):
        for number, content in read_fields(model, attribute):
            if number in (ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS):
                yield content
