"""Gives what the products of a bundle's weights read of real text, where GPTQ may have rounded them."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from ...runtime.backends.backend import Array
from ..calibration.calibration import sample_rows
from ..comparison.tasks import AnyExaminer
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..reference.model import is_module
from .quantized_weights import Rows

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel

MOST = 512  # rows of each product: errors that matter show in some hundreds
TEXTS = 1  # that are read for it, where there are many


def make_row_reader(examiner: AnyExaminer, model: ReferenceModel) -> Rows:
    """Return a function that gives what a weight's product reads (M, K), by the weight's name.

    The texts are read once, when somebody asks first; bundles without GPTQ's weights never ask.
    """

    @cache
    def read_texts() -> dict[str, Array]:
        if not is_module(model):
            return {}
        run = partial(examiner.thin(TEXTS).run_calibration_texts, model)
        sampled = sample_rows(model, list_names(examiner), run, coarse=True, most=MOST)
        return {name: rows.float().numpy() for name, rows in sampled.items()}

    return lambda name: read_texts().get(name)


def list_names(examiner: AnyExaminer) -> list[str]:
    """Return the weights that GPTQ may have rounded; of those that are rounded as one the first."""
    bundle = examiner.bundle
    names: list[str] = []
    for artifact in bundle.manifest.artifacts:
        if artifact.quantization:
            graph = load_graph(bundle.path(artifact.file)).graph
            stored = read_weights(graph, artifact.quantization.get("rows", {}))
            names += [weight.names[0] for weight in stored if weight.may_be_gptq]
    return list(dict.fromkeys(names))
