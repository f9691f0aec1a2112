"""Find references for a graph whose model cannot be traced again: of imports, and without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from ...runtime.bundle.manifest import Artifact
from ..calibration.calibration import Calibration
from ..comparison.tasks import AnyExaminer
from ..errors import VerificationError
from ..execution.trial import Key
from ..graphs import recipe_of
from ..limits import CAPS
from ..passes.weight_files import load_graph
from ..reference.model import is_module
from ..tracing.modules import find_results_by_scope, find_scope, read_results
from .bisect import Band, Witnesses, module_bands, node_bands, remove_padding

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel

ADD_FP32 = (
    "it would be held against the same graph in fp32, if that passed; where it is missing, add fp32 to"
    " --precision"
)
NO_REFERENCE = (
    "nothing is at hand that is known to be right: --source CHECKPOINT, with weights that PyTorch reads, or"
    " the same graph in another dialect, such as --target cpu,portable"
)


def find_witnesses(
    examiner: AnyExaminer,
    artifact: Artifact,
    graph: ir.Model,
    sound: Sequence[Artifact],
    model: ReferenceModel | None = None,
    calibration: Calibration | None = None,
) -> Witnesses:
    """Return all references that a graph's nodes can be compared with.

    Args:
        examiner: of the bundle whose graph failed.
        artifact: the graph that failed.
        graph: its ONNX model.
        sound: the bundle's graphs in fp32 that did not fail.
        model: the model in PyTorch, another exporter's graphs, or None.
        calibration: how the bundle's int8 and int4 numbers were chosen.

    Raises:
        VerificationError: there is no reference; says what would be one.
    """
    nodes: dict[Key, Band] = {}
    modules: dict[Key, Band] = {}
    bundle = examiner.bundle
    trial = examiner.trial(artifact)
    twin = next((other for other in sound if recipe_of(other) == recipe_of(artifact)), None)
    if twin is not None and artifact.precision != "fp32":
        nodes = node_bands(trial, artifact, load_graph(bundle.path(twin.file)), twin, None)
    if model is not None and is_module(model):
        results = results_in(graph, [path for path, _ in model.named_modules()])
        rounding = None if calibration is None else calibration.rounding(artifact.precision)
        if results and (rounding is not None or artifact.precision == "fp32"):
            modules = module_bands(trial, graph, model, rounding, results)
    if not modules and artifact.precision == "fp32":
        others = [other for other in sound if other.graph == artifact.graph and other.id != artifact.id]
        for other in others[:1]:
            modules = sibling_bands(examiner, graph, other)
    if not nodes and not modules:
        raise VerificationError(NO_REFERENCE if artifact.precision == "fp32" else ADD_FP32)
    return Witnesses(nodes, modules)


def results_in(graph: ir.Model, paths: Sequence[str]) -> Mapping[str, str]:
    """Return the values that are a module's result: as tracing noted them, or as nodes' names say."""
    return read_results(graph) or find_results_by_scope(graph.graph, paths)


def scopes_in(graph: ir.Model) -> list[str]:
    """Return the modules that the nodes' names show."""
    return list(dict.fromkeys(find_scope(node) for node in graph.graph))


def sibling_bands(examiner: AnyExaminer, graph: ir.Model, other: Artifact) -> dict[Key, Band]:
    """Return bands of modules' results, from the same model in another dialect that has passed.

    Args:
        examiner: of the bundle that has both.
        graph: the graph that failed.
        other: the sound one, in fp32.
    """
    sibling = load_graph(examiner.bundle.path(other.file))
    trial = examiner.trial(other)
    own = results_in(graph, scopes_in(graph))
    theirs = {path: name for name, path in results_in(sibling, scopes_in(sibling)).items()}
    values = trial.collect_values(sibling, other)
    bands: dict[Key, Band] = {}
    for step in range(len(trial.steps)):
        for name, path in own.items():
            array = values.get((step, theirs.get(path, "")))
            if array is not None and trial.select_tokens(step, array) is not None:
                meant = remove_padding(trial, step, array)
                bands[step, name] = Band(meant, CAPS["fp32"]["max_error"], other.id)
    return bands
