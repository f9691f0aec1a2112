"""Computes the calibration of an export again, so that a damaged graph cannot set its own limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..limits import CAPS
from ..passes.fp16_ranges import read_choices
from ..passes.int8_rows import (
    ALPHAS,
    CONSTANT_ALPHAS,
    ROW_FORMATS,
    RowProduct,
    RowRule,
    StaticRule,
    compute_smoothing,
    divide,
    read_rule,
    round_product,
)
from ..passes.kv_cache import list_cache_scales
from ..passes.quantize import QuantizedWeights
from ..passes.static_rows import ALPHAS as STATIC_ALPHAS
from ..passes.static_rows import make_smoothing
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..passes.weights import read_array
from ..precisions import PRECISIONS
from ..reference_model import is_module
from ..tasks.verifier import Verifier
from .calibration import Calibration, compute_cache_scales, hash_texts, sample_rows

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from ..reference_model import ReferenceModel

Array = npt.NDArray[np.float32]

# How far fp32 on other machines may move a scale: an engine's results may be off by the cap of fp32, in units
# of at most the largest value. A scale that is 1 % off costs nothing compared with the headroom of 25 %.
ABSOLUTE = CAPS["fp32"]["max_error"]  # of a cache's largest scale
RELATIVE = 0.01
# For a graph without a hash of its texts: with other texts few of the largest values are the same.
ALIKE = 0.9


def read_calibration(bundle: Bundle, model: ReferenceModel) -> Calibration:
    """Return the calibration of a bundle's graphs, with weights rounded again from the model's own.

    So a graph whose weights are damaged does not set its own limits. The scales of a cache and the
    smoothing are the graph's: `repeat_calibration` computes them again. Nothing is rounded with GPTQ here:
    what it chose is read from graphs that are sound, by `adopt_stored_weights`.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    weights: dict[str, QuantizedWeights] = {}
    scales: dict[str, Array] = {}
    fp32_nodes = {}
    for artifact in bundle.manifest.artifacts:
        if not artifact.quantization and not artifact.is_half:
            continue
        graph = load_graph(bundle.path(artifact.file)).graph
        if artifact.is_half:
            fp32_nodes[artifact.recipe_id] = read_choices(graph)
        if "bits" in artifact.quantization:
            read_quantization(artifact, graph, tensors, weights)
        for _, cache, scale in list_cache_scales(graph):
            if scale is not None and scale.const_value is not None:
                scales[str(cache.name)] = np.array(scale.const_value.numpy())  # torch warns of what is mapped
    return Calibration(weights, scales, fp32_nodes)


def read_quantization(
    artifact: Artifact, graph: ir.Graph, tensors: Mapping[str, Tensor], found: dict[str, QuantizedWeights]
) -> None:
    """Add to `found` the weights that the manifest's entry of a graph, and the graph itself, describe."""
    told = artifact.quantization
    others = told.get("other_bits", {})
    rules = told.get("rows", {})
    read = {name: partial(read_array, tensor) for name, tensor in tensors.items()}  # the model may rest
    kind = PRECISIONS[artifact.precision]
    new = QuantizedWeights(int(told["bits"]), int(told["block_size"]), {}, read, formats=kind.formats)
    weights = found.setdefault(kind.weights, new)
    weights.bits.update({name: bits for name, bits in others.items() if bits not in kind.formats})
    smoothings = {}
    for stored in read_weights(graph, rules):
        name = stored.names[0]
        if stored.rows is not None:
            smoothings[stored.names] = stored.rows.smoothing
        elif name in tensors:  # an import's may be none of the model's
            weights.bits[name] = others.get(name, weights.usual_bits)
    for key, rule in rules.items():
        names = tuple(key.split("+"))
        weight = join_weights(tensors, names)
        product = round_product(weight, smoothings.get(names), read_rule(rule))
        weights.products[names] = replace(product, together=tuple(rule.get("together", ())))


def join_weights(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Array:
    """Return the weights of a product side by side (K, N)."""
    columns: Array = np.concatenate([tensors[name].detach().numpy() for name in names]).T
    return columns


def repeat_calibration(verifier: Verifier, model: ReferenceModel, calibration: Calibration) -> Calibration:
    """Return the calibration of graphs, computed again from the same texts, all but the weights.

    That are a cache's scales, and how an encoder's int8 products smooth and round what they read. With other
    texts than the export's, such as a user's prompts, they stay those of the graphs.
    """
    if not calibration.follows_texts:
        return calibration
    texts = hash_texts(verifier)
    recorded = {artifact.quantization.get("texts") for artifact in verifier.bundle.manifest.artifacts}
    recorded.discard(None)
    if recorded and recorded != {texts}:
        return calibration
    scales = compute_cache_scales(verifier, model) if calibration.cache_scales else {}
    weights = {
        kind: replace(own, products=repeat_products(verifier, model, own.products))
        for kind, own in calibration.weights.items()
    }
    again = replace(calibration, cache_scales=scales, weights=weights, texts=texts)
    return again if recorded or are_alike(calibration, again) else calibration


def repeat_products(
    verifier: Verifier, model: ReferenceModel, products: Mapping[tuple[str, ...], RowProduct]
) -> dict[tuple[str, ...], RowProduct]:
    """Return an encoder's products with the smoothing and the rule that follow from the rows they read.

    How much is smoothed, and whether one step serves all rows, was chosen at export and is taken from there.
    """
    if not products or not is_module(model):
        return dict(products)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    run = partial(verifier.run_calibration_texts, model)
    rows = sample_rows(model, [names[0] for names in products], run)
    found = {}
    for names, product in products.items():
        weight = join_weights(tensors, names)
        joined = join_weights(tensors, product.together or names)
        found[names] = repeat_product(product, rows[names[0]].numpy(), weight, joined)
    return found


def repeat_product(product: RowProduct, x: Array, weight: Array, joined: Array) -> RowProduct:
    """Return a product of rows like x (M, K) and a weight (K, N), with the nearest known smoothing.

    `joined` (K, ...) has the columns of all weights that decide the smoothing.
    """
    is_static = isinstance(product.rule, StaticRule)
    smoothing = product.smoothing
    if smoothing is not None:
        logs = np.log(smoothing)
        make = make_smoothing if is_static else compute_smoothing
        alphas = STATIC_ALPHAS if is_static else sorted({*ALPHAS, *CONSTANT_ALPHAS})
        choices = [make(x, joined, alpha) for alpha in alphas]
        smoothing = min(choices, key=lambda choice: float(np.median(np.abs(np.log(choice) - logs))))
    again = round_product(weight, smoothing, repeat_rule(product.rule, divide(x, smoothing)))
    return replace(again, error=product.error, together=product.together)


def repeat_rule(rule: RowRule | StaticRule, x: Array) -> RowRule | StaticRule:
    """Return the rule of the same kind for rows like x (M, K)."""
    if isinstance(rule, StaticRule):
        return StaticRule.of(x, ROW_FORMATS[rule.format], rule.clip)
    return RowRule.of(x) if rule.step is None else RowRule.of_all(x)


def are_alike(calibration: Calibration, again: Calibration) -> bool:
    """Tell whether so many values are the same that they must come from the same texts."""
    scales = calibration.cache_scales
    far = [find_far(scales[name], scale, RELATIVE, ABSOLUTE) for name, scale in again.cache_scales.items()]
    for kind, weights in calibration.weights.items():
        for names, product in weights.products.items():
            expected = again.weights[kind].products[names].smoothing
            if product.smoothing is not None and expected is not None:
                far.append(find_far(product.smoothing, expected, 2 * RELATIVE))
    return bool(far) and 1 - float(np.concatenate(far).mean()) >= ALIKE


def find_far(found: Array, expected: Array, relative: float, absolute: float = 0.0) -> npt.NDArray[np.bool_]:
    """Tell which scales differ from those that the same texts give; `absolute` is in units of the largest."""
    if found.shape != expected.shape:
        return np.ones(expected.shape, bool)
    allowed = relative * expected + absolute * expected.max()
    far: npt.NDArray[np.bool_] = ~((np.abs(found - expected) <= allowed) & (found > 0))  # NaN is not
    return far
