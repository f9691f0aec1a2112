"""Verifies any ONNX file: compares it with the same graph node by node, and with another file."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ...runtime.apps.check.metrics import VectorMetrics, measure_vectors
from ...runtime.apps.check.outcome import Comparison, Outcome, judge
from ...runtime.backends.backend import Array, Arrays, Program
from ...runtime.backends.ort_program import OrtProgram
from ...runtime.backends.threads import choose_threads
from ...runtime.bundle.manifest import Artifact, TensorSpec
from ...runtime.errors import BackendError, InputError, ManifestError
from ..errors import VerificationError, shorten_error
from ..execution.node_executor import (
    NODE_BY_NODE,
    ExecutedProgram,
    NodeExecutor,
    NotFiniteError,
    WideExecutor,
    list_inputs,
)
from ..execution.replay import Replay, Step
from ..execution.rounding_noise import RoundingExecutor, find_code_bits, list_live_nodes, rounds_to_codes
from ..limits import CAPS, compute_limits
from ..passes.weight_files import load_graph
from ..tasks.base import Progress
from .bisect import FirstMismatch, Tolerance, find_first_mismatch
from .report import VerificationReport
from .structure import compare_files

PRECISIONS = ("int4", "int8", "fp16")  # lowest first
RUNNING = "running it at all"
MAX_INPUTS = 8  # that a message lists
LENGTHS = (2, 8)  # of made-up inputs: the first named axis, and every other
Results: TypeAlias = "dict[str, Array] | NotFiniteError | BackendError"
Gap: TypeAlias = "tuple[dict[str, Array], dict[str, Array]] | None"


@dataclasses.dataclass(frozen=True)
class OnnxFile:
    """An ONNX file that is not part of a bundle."""

    path: Path
    model: ir.Model
    artifact: Artifact  # the types of its inputs and outputs, and the lowest precision of anything in it

    @classmethod
    def load(cls, path: Path) -> OnnxFile:
        """Read a graph; its weights stay mapped."""
        if not path.is_file():
            raise VerificationError(f"{path} is not there")
        try:
            model = load_graph(path)
            if model.functions:
                InlinePass()(model)
            model.graph.sort()  # ONNX Runtime sorts too
        except VerificationError:
            raise
        except Exception as error:  # protobuf's own
            raise VerificationError(f"{path} is not an ONNX file: {shorten_error(error)}") from error
        graph = model.graph
        precision = find_precision(graph)
        try:
            inputs, outputs = (
                tuple(TensorSpec(str(v.name), "data", read_dtype(v, path), ()) for v in side)
                for side in (list_inputs(graph), graph.outputs)
            )
        except ManifestError as error:
            raise VerificationError(f"{path}: {error}") from error
        opset = graph.opset_imports.get("", 0)
        artifact = Artifact(path.name, "file", precision, opset, path.name, (), "", inputs, outputs)
        return cls(path, model, artifact)


def find_precision(graph: ir.Graph) -> str:
    """Return the lowest precision that an output depends on, by quantized operators and results' types."""
    live = list_live_nodes(graph)
    bits = {bits for node in live for bits in find_code_bits(node)}
    if bits:
        return "int4" if min(bits) <= 4 else "int8"
    return "fp16" if has_half(graph) else "fp32"


def has_half(graph: ir.Graph) -> bool:
    """Tell whether an output depends on values in fp16."""
    live = list_live_nodes(graph)
    values = {value for node in live for value in (*node.inputs, *node.outputs)} | set(graph.outputs)
    return any(value is not None and value.dtype == ir.DataType.FLOAT16 for value in values)


def read_dtype(value: ir.Value, path: Path) -> str:
    if value.dtype is None:
        raise VerificationError(f"{path}: {value.name!r} has no type")
    return str(value.dtype.numpy().name)


def verify_file(
    path: Path, against: str | Path | None, inputs: str | Path | None, progress: Progress
) -> VerificationReport:
    """Compare ONNX Runtime, as it would run a file, with the same graph node by node, and with another file.

    Node by node every result is rounded to its type, and all must be finite. Where a node
    cannot run alone, such as a Loop, two files are compared on ONNX Runtime.
    """
    file = OnnxFile.load(path)
    other = None if against is None else OnnxFile.load(Path(against))
    feeds = make_inputs(file) if inputs is None else read_inputs(Path(inputs), file)
    check_feeds(file, feeds)
    if other is not None:
        check_same_inputs(file, other)
        check_feeds(other, feeds)
    reference = f"itself {NODE_BY_NODE}"
    progress(f"verifying {path.name}: ort-cpu")
    try:
        engine = run_on_engine(file, feeds)
    except VerificationError as error:
        if other is None or inputs is not None:
            raise
        # Inputs were made up: what the files hold is compared without running them.
        unfit = Comparison.from_error(path.name, "ort-cpu", RUNNING, error)
        read = compare_files(path.name, file.model, other.model, other.path.name)
        return VerificationReport(False, (unfit, read), reference=other.path.name)
    if isinstance(engine, BackendError):
        unloadable = Comparison.from_error(path.name, "ort-cpu", RUNNING, engine)
        return VerificationReport(False, (unloadable,), reference=reference)
    progress(f"verifying {path.name}: {NODE_BY_NODE}")
    nodes = run_node_by_node(file, feeds)
    itself: tuple[Comparison, ...] = ()
    if not isinstance(nodes, BackendError):
        # Both sides read the same stored values; what they round on the way may differ by a step.
        graph = file.model.graph
        own = "int8" if rounds_to_codes(graph) else "fp16" if has_half(graph) else "fp32"
        gap = None if own == "fp32" else measure_rounding(file, feeds, stored=False)
        itself = (compare_outputs(file, engine, nodes, own, f"against {NODE_BY_NODE}", gap),)
    elif other is None:
        raise VerificationError(
            f"{path} cannot be run {NODE_BY_NODE}: {nodes}; compare it with another file: --against FILE"
        )
    if other is None:
        return VerificationReport(False, itself, reference=reference)
    reference = f"{reference} and {other.path.name}" if itself else other.path.name
    progress(f"verifying {other.path.name}")
    both, mismatches = compare_with_file(file, other, feeds, engine, nodes)
    read = compare_files(path.name, file.model, other.model, other.path.name)
    return VerificationReport(False, (*itself, both, read), mismatches, reference=reference)


def compare_with_file(
    file: OnnxFile, other: OnnxFile, feeds: Arrays, engine: Results, nodes: Results
) -> tuple[Comparison, tuple[FirstMismatch, ...]]:
    """Compare a file's results, on ONNX Runtime and node by node, with another's; find the node at fault."""
    precisions = (file.artifact.precision, other.artifact.precision)
    precision = next((name for name in PRECISIONS if name in precisions), "fp32")
    case = f"against {other.path.name}"
    want = run_node_by_node(other, feeds)
    on_engine = isinstance(nodes, BackendError) or isinstance(want, BackendError)
    if on_engine:
        want = run_on_engine(other, feeds)
        if isinstance(want, BackendError):
            raise VerificationError(f"{other.path} cannot be compared with: {want}")
    coarse = other if precision == other.artifact.precision else file  # the one that rounds
    gap = None if precision == "fp32" else measure_rounding(coarse, feeds, stored=True)
    if on_engine:
        return compare_outputs(file, engine, want, precision, case, gap), ()
    both = compare_outputs(file, nodes, want, precision, f"{NODE_BY_NODE}, {case}", gap)
    if both.passed or isinstance(want, Exception):
        return both, ()
    return both, find_node_at_fault(file, other, feeds, CAPS[precision]["max_error"])


def check_same_inputs(file: OnnxFile, other: OnnxFile) -> None:
    """Refuse to compare files whose inputs have different names."""
    one = [spec.name for spec in file.artifact.inputs]
    two = [spec.name for spec in other.artifact.inputs]
    if set(one) != set(two):
        raise InputError(
            f"{file.path} has the inputs {', '.join(one)}, {other.path} has {', '.join(two)}: give files"
            " with the same inputs"
        )


def check_feeds(file: OnnxFile, feeds: Arrays) -> None:
    """Refuse arrays of another shape than a file takes."""
    for value in list_inputs(file.model.graph):
        shape = value.shape
        got = feeds[str(value.name)].shape
        if shape is None:
            continue
        fits = [not isinstance(n, int) or n == g for n, g in zip(shape, got, strict=False)]
        if len(shape) != len(got) or not all(fits):
            raise InputError(f"{file.path}: input {value.name!r} needs the shape {shape}, not {got}")


def cast_inputs(file: OnnxFile, feeds: Arrays) -> dict[str, Array]:
    return {spec.name: np.asarray(feeds[spec.name], spec.dtype) for spec in file.artifact.inputs}


def run_on_engine(file: OnnxFile, feeds: Arrays) -> dict[str, Array] | BackendError:
    """Return the results of ONNX Runtime, or the reason why it cannot load the file."""
    try:
        program = OrtProgram(file.path, choose_threads(None).count)
    except BackendError as error:
        return error
    try:
        return program.run(cast_inputs(file, feeds), {})
    except BackendError as error:
        raise VerificationError(
            f"{file.path} does not run with these inputs: {error}; give an array for each of its inputs with"
            f" --inputs FILE.npz: {describe_inputs(file)}"
        ) from error


def describe_inputs(file: OnnxFile) -> str:
    """Return the inputs as in "x float32 [batch,4]"; only the first ones if there are many."""
    found = [
        f"{spec.name} {spec.dtype} {value.shape}"
        for spec, value in zip(file.artifact.inputs, list_inputs(file.model.graph), strict=True)
    ]
    return "; ".join(found[:MAX_INPUTS]) + ("" if len(found) <= MAX_INPUTS else "; ...")


def run_node_by_node(file: OnnxFile, feeds: Arrays) -> Results:
    """Return the results node by node, or the node that is not finite, or that cannot run alone."""
    try:
        return ExecutedProgram(NodeExecutor(file.model), file.artifact).run(cast_inputs(file, feeds), {})
    except (NotFiniteError, BackendError) as error:
        return error
    except TypeError as error:  # a type that numpy does not have
        return BackendError(shorten_error(error))


def measure_rounding(file: OnnxFile, feeds: Arrays, stored: bool) -> Gap:
    """Return a file's results in fp32, and with its rounding; None if it cannot be run so.

    Results that are fp16 in the file are rounded, and what is rounded to int8 on the way moves by a step.
    With `stored` so are inputs in fp16, and the stored values change as their rounding has changed them:
    those in fp16, and the codes of quantized operators.
    """
    given = cast_inputs(file, feeds)
    half = {name for name, array in given.items() if array.dtype == np.float16}

    def note(node: ir.Node, name: str, array: Array) -> None:
        if array.dtype == np.float16:
            half.add(name)

    wide = {
        name: np.asarray(feeds[name], np.float32) if stored and name in half else array
        for name, array in given.items()
    }
    try:
        NodeExecutor(file.model, note).run(given)
        exact = WideExecutor(file.model).run(wide)
        rounded = RoundingExecutor(file.model, half, stored).run(wide)
    except (NotFiniteError, BackendError, TypeError):
        return None
    return exact, rounded


def compare_outputs(
    file: OnnxFile, got: Results, want: Results, precision: str, case: str, gap: Gap
) -> Comparison:
    """Compare all outputs, each as one vector per row; the difference within `gap` is the limit."""
    broken = [str(side) for side in (got, want) if isinstance(side, Exception)]
    if isinstance(got, Exception) or isinstance(want, Exception):
        outcome = Outcome({"finite": False}, {}, tuple(broken[:1]))
    else:
        outcome = judge_outputs(got, want, precision, gap)
    return Comparison(artifact=file.path.name, backend="ort-cpu", case=case, **vars(outcome))


def judge_outputs(got: Arrays, want: Arrays, precision: str, gap: Gap) -> Outcome:
    names = ("max_error", "cosine_gap")
    metrics: dict[str, float | bool | int | None] = {}
    limits: dict[str, float] = {}
    failures = [f"{name}: is an output of one file only" for name in sorted(got.keys() ^ want.keys())]
    for name in (name for name in want if name in got):
        array = want[name]
        if got[name].shape != array.shape:
            failures.append(f"{name}: is {got[name].shape} instead of {array.shape}")
        elif array.dtype.kind != "f":
            if not np.array_equal(got[name], array):
                failures.append(f"{name}: integers differ")
        elif array.size:
            found = measure_rows(got[name], array)
            lost = None if gap is None else measure_rows(gap[1][name], gap[0][name])
            usual = compute_limits(precision, lost if lost is not None and lost.finite else None, names)
            failures += [f"{name}: {failure}" for failure in judge(found, usual)]
            values = dict(found.to_json())
            del values["mean_cosine_gap"]  # nobody knows whether a row is a text
            metrics |= {f"{name}.{key}": value for key, value in values.items()}
            limits |= {f"{name}.{key}": value for key, value in usual.items()}
    return Outcome(metrics, limits, tuple(failures))


def measure_rows(got: Array, want: Array) -> VectorMetrics:
    """Measure each row of the last axis as a vector."""
    width = want.shape[-1] if want.ndim else 1
    a, b = (array.reshape(-1, width).astype(np.float32) for array in (got, want))
    same = np.isinf(b) & (a == b)  # what is masked
    a[same] = b[same] = 0.0
    return measure_vectors(a, b)


def find_node_at_fault(
    file: OnnxFile, other: OnnxFile, feeds: Arrays, allowed: float
) -> tuple[FirstMismatch, ...]:
    """Return the first node of a file whose distance to its namesake in the other is not allowed."""

    def drive(program: Program) -> None:
        program.run(dict(feeds), {})

    replay = Replay(drive, (Step("run", np.zeros((0, 0), np.int64)),), ())
    values = replay.collect_values(other.model, other.artifact)
    tolerances = {key: Tolerance(array, allowed, other.path.name) for key, array in values.items()}
    mismatch = find_first_mismatch(file.model, file.artifact, replay, [tolerances])
    return () if mismatch is None else (dataclasses.replace(mismatch, artifact=file.path.name),)


def read_inputs(path: Path, file: OnnxFile) -> dict[str, Array]:
    """Read the arrays by the names of the graph's inputs."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise InputError(
            f"the inputs {path} cannot be read: {error.strerror or shorten_error(error)}"
        ) from error
    except (ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"the inputs {path} cannot be read as .npz: np.savez writes such files") from error
    missing = [spec.name for spec in file.artifact.inputs if spec.name not in arrays]
    if missing:
        raise InputError(f"{path} has no array {missing[0]!r}; it has {', '.join(arrays) or 'none'}")
    return {spec.name: arrays[spec.name] for spec in file.artifact.inputs}


def make_inputs(file: OnnxFile) -> dict[str, Array]:
    """Return values that most models accept: 0 and 1 for ids, ones for masks, normal floats."""
    random = np.random.default_rng(0)
    lengths: dict[str, int] = {}

    def find_length(dim: int | ir.SymbolicDim) -> int:
        if isinstance(dim, int):
            return dim
        return lengths.setdefault(str(dim.value), LENGTHS[1] if lengths else LENGTHS[0])

    feeds = {}
    for value in list_inputs(file.model.graph):
        shape = [find_length(dim) for dim in value.shape or ()]
        name = str(value.name)
        dtype = np.dtype(read_dtype(value, file.path))
        if dtype.kind == "f":
            feeds[name] = random.standard_normal(shape).astype(dtype)
        elif dtype.kind == "b" or "mask" in name:
            feeds[name] = np.ones(shape, dtype)
        else:
            feeds[name] = random.integers(0, 2, shape).astype(dtype)
    return feeds
