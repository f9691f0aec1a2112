"""Calibrates a model for its precisions: blocks of weights, scales of the cache, nodes that stay in fp32."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.apps.stage_progress import StageCounter
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..errors import ExportError
from ..execution.node_executor import ExecutedProgram, NodeExecutor, NotFiniteError
from ..graphs import describe_in_fp32
from ..memory import give_back_memory
from ..number_formats import CPU_INTEGERS, NumberFormat
from ..passes.fp16_ranges import Fp32Reason, choose_fp32_nodes
from ..passes.int8_rows import (
    ATTENTION_WORTH,
    CONSTANT_WORTH,
    Linears,
    RowProduct,
    choose_product,
    find_attention_products,
    find_linears,
)
from ..passes.quantize import MIN_ROWS, QuantizedWeights, find_lookups
from ..passes.quantized_weight import QuantizedWeight
from ..passes.static_rows import choose_static_product, split_product
from ..passes.weights import read_array
from ..precisions import PRECISIONS
from ..reference_model import is_module, offload_weights, restore_weights
from ..tasks.verifier import Verifier
from .blocks import Measure, choose_blocks, select_known_weights
from .run_gptq import round_groups
from .static_products import choose_static_products

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor, nn

    from ...models.quantized_files import FileCodes
    from ..reference_model import ReferenceModel
    from ..tasks.rounding import Rounding

log = logging.getLogger("planforge")

Array = npt.NDArray[np.float32]

# Keys and values that nobody saw while calibrating may be this much larger; clipping costs far more than
# the coarser steps.
HEADROOM = 1.25
SEARCHED = 8  # texts with which a rounding is chosen; more of them judge it
QUICKLY_SEARCHED = 1  # with which it is, where one tells enough
CALIBRATION_ROWS = 2048  # kept of a linear's input; half as many give nearly the same result


@dataclass(frozen=True)
class Calibration:
    """The results of calibrating a model, which the passes to fp16, int8 and int4 need."""

    weights: Mapping[str, QuantizedWeights] = field(default_factory=dict)  # by `Precision.weights`
    cache_scales: Mapping[str, Array] = field(default_factory=dict)  # (H * D,) by the cache's input
    # of graphs in fp16, by their recipe's id: nodes that stay in fp32, or are scaled
    fp32_nodes: Mapping[str, Mapping[str, Fp32Reason]] = field(default_factory=dict)
    texts: str = ""  # the hash of those that decided; empty where that is not known

    @property
    def follows_texts(self) -> bool:
        """Return whether texts decided any scales: those of a cache, or of the rows that products read."""
        return bool(self.cache_scales) or any(weights.products for weights in self.weights.values())

    def make_rounding(self, precision: str) -> Rounding | None:
        """Return the rounding by which PyTorch loses as much as the precision does; None for fp32."""
        import torch

        from ..tasks.rounding import Rounding

        kind = PRECISIONS[precision]
        if precision == "fp32":
            return None
        if kind.engine:
            return Rounding(torch.bfloat16)
        weights = self.weights.get(kind.weights, QuantizedWeights(0, 0, {}, {}))
        scales = self.cache_scales if kind.cache_bits else {}
        values = weights.dequantize()
        if kind.is_half:
            floats = Rounding(torch.float16, weights=values, cache_scales=scales, keeps_tables=True)
            return replace(floats, products=weights.products)
        return Rounding(
            weights=values,
            activation_block=weights.size,
            cache_scales=scales,
            products=weights.products,
        )

    def describe(self, artifact: Artifact) -> dict[str, Any]:
        """Return the manifest's description of an artifact's quantization."""
        kind = PRECISIONS[artifact.precision]
        found = self.weights[kind.weights].to_json() if kind.weight_bits else {}
        if kind.cache_bits:
            found["cache_bits"] = kind.cache_bits
        if self.texts and ("rows" in found or kind.cache_bits):
            found["texts"] = self.texts
        return found


def calibrate(
    verifier: Verifier,
    model: ReferenceModel,
    graphs: Mapping[str, ir.Model],
    progress: Callable[[str], None] = lambda line: None,
    quantizer: str = "gptq",
    kept: Mapping[str, FileCodes] = {},
) -> Calibration:
    """Calibrate a model for the precisions of the examined bundle, whose graphs are given by recipe id.

    `quantizer` is that of a `Request`; `kept` are codes of weights that others quantized, by their names.
    """
    run = partial(verifier.run_calibration_texts, model)
    manifest = verifier.bundle.manifest
    kinds = [PRECISIONS[artifact.precision] for artifact in manifest.artifacts]
    scales = {}
    if any(kind.cache_bits for kind in kinds):
        progress("calibrating the cache")
        scales = compute_cache_scales(verifier, model)
    weights = {}
    if any(kind.weight_bits for kind in kinds):
        assert is_module(model)  # an import of graphs alone has no precision with quantized weights
        codes = keep_codes(kept, model)
        weights = choose_weights(verifier, model, graphs, run, progress, quantizer == "gptq", codes)
    fp32_nodes = {}
    for artifact in manifest.artifacts:
        if artifact.is_half and artifact.recipe_id not in fp32_nodes:
            progress("calibrating fp16")
            graph = graphs[artifact.recipe_id].graph
            ranges = measure_ranges(verifier, artifact, graphs)
            fp32_nodes[artifact.recipe_id] = choose_fp32_nodes(graph, ranges)
    return Calibration(weights, scales, fp32_nodes, hash_texts(verifier))


def choose_weights(
    verifier: Verifier,
    model: nn.Module,
    graphs: Mapping[str, ir.Model],
    run: Callable[[], None],
    progress: Callable[[str], None],
    gptq: bool,
    kept: Mapping[str, QuantizedWeight],
) -> dict[str, QuantizedWeights]:
    """Return the quantized weights of each precision that has some."""
    artifacts = verifier.bundle.manifest.artifacts
    kinds = {(kind := PRECISIONS[a.precision]).weights: kind for a in artifacts}
    measures = make_measures(verifier, model)
    sample = partial(sample_rows_to_rest, model, run) if gptq else None
    chosen = {}
    for name, kind in sorted(kinds.items()):
        if not kind.weight_bits:
            continue
        recipes = {a.recipe_id for a in artifacts if PRECISIONS[a.precision].weights == name}
        own = [graph for recipe_id, graph in graphs.items() if recipe_id in recipes]
        known = select_known_weights(own, model, with_tables=not kind.is_half)
        tables = {weight.name for graph in own for _, weight in find_lookups(graph.graph)} & known.keys()
        products = {}
        own_codes = {} if kind.is_half else {n: codes for n, codes in kept.items() if n in known}
        if kind.rounds_rows and verifier.task.rounds_rows and not own_codes:
            products = choose_row_products(model, own[0].graph, run, gptq, progress, kind.rows)
        if kind.rows is not None:
            begun = QuantizedWeights(kind.weight_bits, 0, {}, known, formats=kind.formats)
            chosen[name] = choose_static_products(begun, products, measures, progress)
            restore_weights(model)
            continue
        by_rows = {name for names in products for name in names}
        by_blocks = {n: read for n, read in known.items() if n not in by_rows and n not in own_codes}
        # What others left in floats has 8 bits beside codes of theirs: tables, most often, and the head.
        bits = 8 if own_codes else kind.weight_bits
        begun = QuantizedWeights(bits, 0, {}, by_blocks, formats=kind.formats)
        blocks = choose_blocks(begun, sample, measures, tables, progress) if by_blocks else begun
        blocks = keep_beside(blocks, own_codes, kind.weight_bits) if own_codes else blocks
        chosen[name] = replace(blocks, products=products)
        restore_weights(model)
        give_back_memory()
    return chosen


def keep_codes(codes: Mapping[str, FileCodes], model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the weights of a model that a checkpoint's files quantized, as they are.

    A weight that the model has another way, such as with rows in another order, is left out: a warning says
    how many.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for name, own in codes.items():
        if name not in parameters:
            continue
        middle = 1 << (own.bits - 1)
        zeros = (own.zeros.astype(np.int16) - middle).astype(np.int8)
        weight = QuantizedWeight(
            (own.codes.astype(np.int16) - middle).astype(np.int8),
            own.scales,
            CPU_INTEGERS[own.bits],
            kept=True,
            zeros=zeros if zeros.any() else None,
            order=own.order,
        )
        if np.array_equal(weight.dequantize(), read_array(parameters[name])):
            found[name] = weight
    if anew := sorted(codes.keys() - found.keys()):
        words = "%d of %d quantized weights, such as %s, cannot keep their codes, and are quantized anew"
        log.warning(words, len(anew), len(codes), anew[0])
    return found


def keep_beside(chosen: QuantizedWeights, kept: Mapping[str, QuantizedWeight], bits: int) -> QuantizedWeights:
    """Return weights with those that files quantized beside them; most have the files' blocks."""
    return replace(
        chosen,
        usual_bits=bits,
        size=max(weight.size for weight in kept.values()),
        bits={**chosen.bits, **{name: weight.format.bits for name, weight in kept.items()}},
        read={**chosen.read, **{name: weight.dequantize for name, weight in kept.items()}},
        compensated={**chosen.compensated, **kept},
    )


def hash_texts(verifier: Verifier) -> str:
    """Return the sha256 of the tokens that a verifier's model is calibrated with."""
    ids = [list(text.tokens) for text in verifier.expected.calibration]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def make_measures(verifier: Verifier, model: ReferenceModel) -> list[Measure]:
    """Return the measures of a rounding's loss, the quickest first; only one where there are few texts."""
    verifiers = [verifier.thin(texts) for texts in (QUICKLY_SEARCHED, SEARCHED)]
    if all(thinned.expected is verifier.expected for thinned in verifiers):
        verifiers = [verifier]
    return [partial(thinned.measure_gaps, model) for thinned in verifiers]


def measure_ranges(
    verifier: Verifier, artifact: Artifact, graphs: Mapping[str, ir.Model]
) -> dict[str, float]:
    """Return the largest magnitude of each result of a graph in fp32, node by node on real text."""
    largest: dict[str, float] = {}

    def keep_largest(node: ir.Node, name: str, array: npt.NDArray[Any]) -> None:
        if array.dtype.kind == "f" and array.size:
            largest[name] = max(largest.get(name, 0.0), float(np.abs(array).max()))

    def open_other(other: Artifact) -> ExecutedProgram:
        return ExecutedProgram(NodeExecutor(graphs[other.recipe_id]), other)

    bundle = verifier.bundle
    others = tuple(map(describe_in_fp32, bundle.manifest.artifacts))  # a decoder reads its encoder
    in_fp32 = Bundle(bundle.folder, replace(bundle.manifest, artifacts=others))
    full = describe_in_fp32(artifact)
    replay = replace(verifier, bundle=in_fp32, open_other=open_other).make_replay(full, whole=True)
    try:
        replay.drive(ExecutedProgram(NodeExecutor(graphs[artifact.recipe_id], keep_largest), full))
    except NotFiniteError as error:
        raise ExportError(f"even in fp32 the model gives infinite or NaN values: {error}") from error
    return largest


def compute_cache_scales(verifier: Verifier, model: ReferenceModel) -> dict[str, Array]:
    """Return a step for each head and channel of each layer's keys and values, by their range in real text.

    The text is read in pieces as long as the context, so that late positions are seen too.
    """
    reference = verifier.task.open_reference(model, verifier.bundle, None)
    context = verifier.bundle.manifest.max_length
    largest: dict[str, Array] = {}
    text = [token for text in verifier.expected.calibration for token in text.tokens]
    for start in range(0, len(text), context):
        for layer, pair in enumerate(reference.compute_keys_values(text[start : start + context])):
            for kind, tensor in zip(("key", "value"), pair, strict=True):
                magnitudes = tensor.abs().amax(dim=(0, 2)).flatten().numpy()  # (H * D,)
                name = f"cache.{layer}.{kind}"
                largest[name] = np.maximum(largest.get(name, magnitudes), magnitudes)
    step = np.float32(HEADROOM / 127)
    return {name: np.maximum(magnitudes, 1e-6) * step for name, magnitudes in largest.items()}


def choose_row_products(
    model: nn.Module,
    graph: ir.Graph,
    run: Callable[[], None],
    gptq: bool,
    progress: Callable[[str], None] = lambda line: None,
    format: NumberFormat | None = None,
) -> dict[tuple[str, ...], RowProduct]:
    """Return the int8 form of an encoder's linears, chosen by the rows that they read in real text.

    A weight that several places read has one form: that of those that read most weights at once. With a
    `format`, that of plans, weights that read the same have products of their own.
    """
    from ..tasks.rounding import find_linear

    stage = "calibrating int8" if format is None else f"calibrating {format.name} rows"
    found: dict[tuple[str, ...], Linears] = {}
    for linears in sorted(find_linears(graph), key=lambda linears: -len(linears.names)):
        if not {name for names in found for name in names}.intersection(linears.names):
            found[linears.names] = linears
    # Others have no rows to choose by: their weights alone are quantized.
    found = {
        names: linears
        for names, linears in found.items()
        if all(find_linear(model, name) is not None for name in names)
        and (format is None or all(weight.rows >= MIN_ROWS for weight in linears.weights))
    }
    progress(f"{stage}: reading text")
    rows = sample_rows(model, [names[0] for names in found], run)
    found = {names: linears for names, linears in found.items() if names[0] in rows}
    attention = find_attention_products(graph)
    count = StageCounter(progress, f"{stage}: choosing scales", "weights")
    total = sum(map(len, found))
    products: dict[tuple[str, ...], RowProduct] = {}
    for names, linears in found.items():
        worth = ATTENTION_WORTH if attention.issuperset(linears.matmuls) else CONSTANT_WORTH
        x = rows[names[0]].numpy()
        if format is None:
            products[names] = choose_product(x, linears.join_weights(), worth)
        else:
            products[names] = choose_static_product(x, linears.join_weights(), format)
        count(sum(map(len, products)), total)
    if not gptq:
        return products if format is None else split_products(products, found)

    def compensate(names: tuple[str, ...], x: Array) -> RowProduct:
        return products[names].compensate(x, found[names].join_weights())

    widths = {names: linears.width for names, linears in found.items()}
    compensated = round_groups(compensate, widths, rows, progress, f"{stage}: GPTQ")
    products = dict(zip(found, compensated, strict=True))
    return products if format is None else split_products(products, found)


def split_products(
    products: Mapping[tuple[str, ...], RowProduct], found: Mapping[tuple[str, ...], Linears]
) -> dict[tuple[str, ...], RowProduct]:
    """Return the product of each weight by itself."""
    parts = [split_product(products[names], linears) for names, linears in found.items()]
    return {name: product for own in parts for name, product in own.items()}


def sample_rows_to_rest(
    model: nn.Module, run: Callable[[], object], weights: Iterable[str]
) -> dict[str, Tensor]:
    """Return coarse samples of the rows that linears read, and offload the model's fp32 weights."""
    rows = sample_rows(model, weights, run, coarse=True)
    offload_weights(model)
    give_back_memory()
    return rows


def sample_rows(
    model: nn.Module,
    weights: Iterable[str],
    run: Callable[[], object],
    coarse: bool = False,
    most: int = CALIBRATION_ROWS,
) -> dict[str, Tensor]:
    """Return a sample (M, K) of the rows that each weight's linear reads while PyTorch runs.

    Linears that read the same, such as queries, keys and values, have one tensor, of at most `most` rows.
    `coarse` ones are in bfloat16: those of a large model take as much memory as its weights.
    """
    from ..tasks.rounding import find_linear

    sampler = RowSampler(coarse, most)
    with contextlib.ExitStack() as hooks:
        for name in weights:
            if (linear := find_linear(model, name)) is not None:
                hooks.callback(linear.register_forward_pre_hook(sampler.make_hook(name)).remove)
        run()
    joined = {rows: rows.join() for rows in sampler.samples.values()}
    return {name: joined[rows] for name, rows in sampler.samples.items()}


class RowSampler:
    """Samples the rows that linears read; those that read one tensor share a sample."""

    def __init__(self, coarse: bool, most: int) -> None:
        self.coarse = coarse
        self.most = most
        self.samples: dict[str, SampledRows] = {}  # by the weights' names
        self.last: tuple[Any, SampledRows] | None = None  # the tensor that was read last, and its sample

    def make_hook(self, name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        """Return a forward pre-hook of the linear that has a weight."""

        def sample(module: Any, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            if self.last is not None and self.last[0] is x:
                self.samples.setdefault(name, self.last[1])
                return
            own = self.samples.setdefault(name, SampledRows(self.most))
            own.add(x.reshape(-1, x.shape[-1]).bfloat16() if self.coarse else x.reshape(-1, x.shape[-1]))
            self.last = x, own

        return sample


class SampledRows:
    """Every n-th of the given rows, with n such that at most `most` are kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.parts: list[Tensor] = []
        self.stride = 1
        self.seen = 0

    def add(self, rows: Tensor) -> None:
        """Sample rows (M, K)."""
        self.parts.append(rows[-self.seen % self.stride :: self.stride].clone())
        self.seen += len(rows)
        while sum(map(len, self.parts)) > self.most:
            self.parts = [self.join()[::2].clone()]
            self.stride *= 2

    def join(self) -> Tensor:
        """Return the sample (M, K)."""
        import torch

        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts)]
        return self.parts[0]
