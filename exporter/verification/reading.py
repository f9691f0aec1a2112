"""Compares the files of a bundle's graphs, without running them, with the model that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ...runtime.apps.check.judge import ENOUGH
from ...runtime.apps.check.outcome import Comparison
from ...runtime.apps.stage_progress import CountedLine
from ...runtime.backends.backend import Array
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..calibration.calibration import Calibration, compute_cache_scales, sample_rows
from ..graphs import list_tensors
from ..memory import give_back_mapped_pages
from ..passes.quantize import QuantizedWeights
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..passes.weights import LazyMapping, read_array
from ..precisions import PRECISIONS
from ..reference_model import is_module
from ..tasks.base import Progress
from ..tasks.fitted_head import LinearHead
from ..tasks.verifier import Verifier
from .quantized_weights import Rows
from .structure import CASE, compare_structure, shorten

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

MOST = 512  # rows of each product: errors that matter show in some hundreds
TEXTS = 1  # that are read for it, where there are many


def list_tensors_to_compare(bundle: Bundle, model: ReferenceModel) -> Mapping[str, Array]:
    """Return the tensors to compare weights with: the checkpoint's, and scikit-learn's for a fitted head."""
    tensors = list_tensors(model)
    head = LinearHead.load(bundle)
    if head is not None:
        import torch

        tensors |= {"head.weight": torch.from_numpy(head.weight), "head.bias": torch.from_numpy(head.bias)}
    return LazyMapping(tensors, read_array)


def compute_scales_to_compare(verifier: Verifier, model: ReferenceModel) -> dict[str, Array]:
    """Return the expected scales of int8 caches; nothing where there is too little real text."""
    artifacts = verifier.bundle.manifest.artifacts
    if not any(PRECISIONS[artifact.precision].cache_bits for artifact in artifacts):
        return {}
    enough = sum(len(text.tokens) for text in verifier.expected.calibration) >= ENOUGH
    return compute_cache_scales(verifier, model) if enough else {}


def compare_by_reading(
    verifier: Verifier,
    progress: Progress,
    model: ReferenceModel | None,
    calibration: Calibration | None = None,
) -> dict[str, Comparison]:
    """Compare every graph's file, by the graph's id: see `compare_structure`."""
    bundle = verifier.bundle
    tensors = None if model is None else list_tensors_to_compare(bundle, model)
    scales: Mapping[str, Array] = {}
    quantized: Mapping[str, QuantizedWeights] = {}
    same_texts = calibration is not None and bool(calibration.texts)
    if calibration is not None and same_texts:
        scales = calibration.cache_scales
        quantized = calibration.weights
    elif model is not None:
        scales = compute_scales_to_compare(verifier, model)
    rows: Rows = make_row_reader(verifier, model) if model is not None else lambda name: None
    read = {}
    artifacts = bundle.manifest.artifacts
    for number, artifact in enumerate(artifacts):
        line = f"comparing {CASE}: {artifact.id}"
        progress(CountedLine(line, number, len(artifacts), "graphs"))
        weights = quantized.get(PRECISIONS[artifact.precision].weights)
        read[artifact.id] = compare_structure(
            bundle,
            artifact,
            tensors,
            scales,
            rows,
            same_texts,
            None if weights is None else weights.products,
        )
        if model is not None:
            read[artifact.id] = add_modules(read[artifact.id], verifier, artifact, model)
        give_back_mapped_pages()
    return read


def add_modules(
    read: Comparison, verifier: Verifier, artifact: Artifact, model: ReferenceModel
) -> Comparison:
    """Add the modules that compute something else to the comparison of a graph that passed."""
    if not is_module(model) or not read.passed:
        return read
    from .module_check import check_modules

    faults, counts = check_modules(verifier, artifact, model)
    return replace(read, metrics={**read.metrics, **counts}, failures=tuple(shorten(faults)))


def make_row_reader(verifier: Verifier, model: ReferenceModel) -> Rows:
    """Return a function from a weight's name to the rows that its product reads (M, K).

    The texts are read once, when somebody asks first; bundles without GPTQ's weights never ask.
    """

    @cache
    def read_texts() -> dict[str, Array]:
        if not is_module(model):
            return {}
        run = partial(verifier.thin(TEXTS).run_calibration_texts, model)
        sampled = sample_rows(model, list_names(verifier), run, coarse=True, most=MOST)
        return {name: rows.float().numpy() for name, rows in sampled.items()}

    return lambda name: read_texts().get(name)


def list_names(verifier: Verifier) -> list[str]:
    """Return the weights that GPTQ may have rounded; for those rounded as one, the first."""
    bundle = verifier.bundle
    names: list[str] = []
    for artifact in bundle.manifest.artifacts:
        if artifact.quantization:
            graph = load_graph(bundle.path(artifact.file)).graph
            stored = read_weights(graph, artifact.quantization.get("rows", {}))
            names += [weight.names[0] for weight in stored if weight.may_be_gptq]
    return list(dict.fromkeys(names))
