"""What whole numbers need to know of a model: how large a block may be, how large keys and values get."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..comparison.examiners import examiner_of
from ..errors import ExportError
from ..gate import COUNTED
from ..graphs import in_fp32, recipe_of
from ..passes.fp16_ranges import Choice, choose
from ..passes.fp16_ranges import recorded as recorded_choices
from ..passes.int8_encoder import UNSMOOTHING
from ..passes.int8_rows import RowProduct, RowRule, nearest_product
from ..precisions import PRECISIONS

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...models.checkpoint import Model
    from ..gate import Gaps
    from ..passes.int8_encoder import Linears
    from ..passes.quantize import Blocks
    from ..reference.rounding import Rounding

log = logging.getLogger("planforge")

Array = npt.NDArray[np.float32]

# Keys and values that nobody saw while calibrating may be this much larger; clipping costs far more than
# the coarser steps.
HEADROOM = 1.25
CALIBRATION_ROWS = 2048  # that are kept of what a linear reads; half as many give nearly the same
# Shares of the caps that weights alone may take; the rest is for what activations lose. Counted words are
# coarse: where no block keeps them, the gate will say so, and the largest that is close otherwise will do.
SHARE = 0.5
COUNTED_SHARE = 0.9
FAR, COUNTS_APART, CLOSE = range(3)


@dataclass(frozen=True)
class QuantizedWeights:
    """A model's weights in whole numbers.

    Attributes:
        size: columns of a block.
        done: by parameter name.
    """

    size: int
    done: dict[str, Blocks]


@dataclass(frozen=True)
class Calibration:
    """What the passes to whole numbers need.

    Attributes:
        blocks: by the weights' bits.
        cache_scales: (H * D,) by the cache's input.
        products: of an encoder in int8, whose activations are rounded too; by their parameters' names.
        fp32_nodes: of graphs in fp16, by their recipe's id: nodes that stay in fp32, or are scaled.
    """

    blocks: Mapping[int, QuantizedWeights] = field(default_factory=dict)
    cache_scales: Mapping[str, Array] = field(default_factory=dict)
    products: Mapping[tuple[str, ...], RowProduct] = field(default_factory=dict)
    fp32_nodes: Mapping[str, Mapping[str, Choice]] = field(default_factory=dict)

    def rounding(self, precision: str) -> Rounding | None:
        """What PyTorch has to round to lose what a precision loses; None of fp32, which rounds nothing."""
        import torch

        from ..reference.rounding import Rounding

        kind = PRECISIONS[precision]
        if precision == "fp32":
            return None
        if precision == "fp16":
            return Rounding(torch.float16)
        weights = self.blocks[kind.weight_bits].done if kind.weight_bits else {}
        return Rounding(
            weights={name: blocks.dequantized() for name, blocks in weights.items()},
            cache_scales=self.cache_scales if kind.cache_bits else {},
            products=self.products if precision == "int8" else {},
        )

    def described(self, artifact: Artifact) -> dict[str, Any]:
        """What the manifest says of it."""
        kind = PRECISIONS[artifact.precision]
        found: dict[str, Any] = {}
        if kind.weight_bits:
            weights = self.blocks[kind.weight_bits]
            found |= {"bits": kind.weight_bits, "block_size": weights.size}
            if others := {b.bits for b in weights.done.values()} - {kind.weight_bits}:
                found |= {"table_bits": others.pop()}
        if self.products and artifact.precision == "int8":
            found |= {
                "rows": {"+".join(names): product.described() for names, product in self.products.items()}
            }
        return found | ({"cache_bits": kind.cache_bits} if kind.cache_bits else {})


def calibrate(bundle: Bundle, model: Model, graphs: Mapping[str, ir.Model], expected: Any) -> Calibration:
    """Chooses the largest block that PyTorch, with weights rounded so, finds well inside the caps.

    Args:
        bundle: names the graphs to come.
        graphs: with their weights, by their recipe's id.
        expected: what the bundle's examiner asked PyTorch.

    Raises:
        ExportError: no block divides a weight's width; names it.
    """
    from ..passes.quantize import table_names

    examiner = examiner_of(bundle.manifest)

    def gaps(rounding: Rounding) -> Gaps:
        return examiner.gaps(model, bundle, expected, rounding)

    def run() -> None:
        examiner.run_texts(model, expected)

    kinds = [PRECISIONS[artifact.precision] for artifact in bundle.manifest.artifacts]
    scales = cache_scales(model, expected) if any(kind.cache_bits for kind in kinds) else {}
    bits = sorted({kind.weight_bits for kind in kinds if kind.weight_bits})
    in_ort = [graph for name, graph in graphs.items() if name.endswith(".ort")]
    products = {}
    if 8 in bits and bundle.manifest.task == "text-encoding":
        products = row_products(model, in_ort[0].graph, run)
    blocks = {}
    everything = known_weights(in_ort, model) if bits else {}
    tables = {name for graph in in_ort for name in table_names(graph.graph)}
    for b in bits:
        by_rows = {name for names in products for name in names} if b == 8 else set()
        weights = {name: read for name, read in everything.items() if name not in by_rows}
        rows = rows_read(model, weights, run) if b == 4 else {}  # int8 is close enough without
        blocks[b] = chosen_blocks(weights, b, rows, gaps, tables)
    half = [artifact for artifact in bundle.manifest.artifacts if artifact.precision == "fp16"]
    fp32_nodes = {
        recipe_of(a): choose(graphs[recipe_of(a)].graph, ranges(bundle, a, graphs, expected)) for a in half
    }
    return Calibration(blocks, scales, products, fp32_nodes)


def ranges(
    bundle: Bundle, artifact: Artifact, graphs: Mapping[str, ir.Model], expected: Any
) -> dict[str, float]:
    """The largest magnitude of each result of a graph in fp32, node by node on real text."""
    from ..execution.node_executor import ExecutedProgram, NotFiniteError

    found: dict[str, float] = {}

    def widen(node: ir.Node, name: str, array: npt.NDArray[Any]) -> None:
        if array.dtype.kind == "f" and array.size:
            found[name] = max(found.get(name, 0.0), float(np.abs(array).max()))

    full = in_fp32(artifact)
    others = tuple(in_fp32(other) for other in bundle.manifest.artifacts)  # a decoder reads its encoder
    bundle = Bundle(bundle.folder, replace(bundle.manifest, artifacts=others))

    def opened(other: Artifact) -> ExecutedProgram:
        return ExecutedProgram(graphs[recipe_of(other)], other)

    trial = examiner_of(bundle.manifest).trial(bundle, full, expected, whole=True, opened=opened)
    try:
        trial.drive(ExecutedProgram(graphs[recipe_of(artifact)], full, widen))
    except NotFiniteError as error:
        raise ExportError(f"the model is not finite in fp32 already: {error}") from error
    return found


def known_weights(graphs: Iterable[ir.Model], model: Model) -> dict[str, Callable[[], Array]]:
    """Return the weights (N, K) that become whole numbers and that PyTorch can round as well, by name.

    An imported graph may hold others, such as a matrix that was folded with a scale. They become whole
    numbers too, as they come; how much that loses only the comparison of the graph shows.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = weights_of(graphs)
    if unknown := [name for name in weights if name not in parameters]:
        log.warning(
            "%d of %d weights are no parameter of the model in PyTorch, such as %s: they are rounded, but not"
            " chosen by how much that loses",
            *(len(unknown), len(weights), products_of(graphs, unknown[0])),
        )
    return {name: read for name, read in weights.items() if name in parameters}


def products_of(graphs: Iterable[ir.Model], weight: str) -> str:
    """Return a weight's name with the node that multiplies by it, for a message."""
    from ..passes.quantize import products

    found = [(node, own.name) for graph in graphs for node, own in products(graph.graph)]
    nodes = [str(node.name) for node, name in found if name == weight]
    return f"{weight!r} of node {nodes[0]!r}" if nodes else repr(weight)


def weights_of(graphs: Iterable[ir.Model]) -> dict[str, Callable[[], Array]]:
    """A function that gives each weight (N, K) that becomes whole numbers, by parameter name."""
    from ..passes.quantize import quantizable

    return {name: read for graph in graphs for name, read in quantizable(graph.graph)}


def chosen_blocks(
    weights: Mapping[str, Callable[[], Array]],
    bits: int,
    rows: Mapping[str, Array],
    gaps: Callable[[Rounding], Gaps],
    tables: Collection[str] = (),
) -> QuantizedWeights:
    """The largest blocks that are close, with tables in int8 where no block is close with them in int4.

    Args:
        weights: functions that give (N, K), by name.
        bits: 8 or 4.
        rows: what the weights read.
        gaps: asks PyTorch.
        tables: names of the weights that are looked up.
    """
    from ..gate import CAPS
    from ..passes.quantize import BLOCK_SIZES, quantize
    from ..reference.rounding import Rounding

    widths = {name: read().shape[1] for name, read in weights.items()}
    odd = {name: width for name, width in widths.items() if width % BLOCK_SIZES[-1]}
    if odd:
        name, width = next(iter(odd.items()))
        raise ExportError(
            f"int{bits} keeps weights in blocks of {BLOCK_SIZES[-1]} columns or more, and the width"
            f" {width} of {name} is not a multiple of {BLOCK_SIZES[-1]}; export fp32 or fp16"
        )
    fitting = [size for size in BLOCK_SIZES if all(width % size == 0 for width in widths.values())]
    caps = CAPS[f"int{bits}"]

    def rounded(table_bits: int, size: int, rows: Mapping[str, Array]) -> QuantizedWeights:
        done = {}
        for name, read in weights.items():
            own, seen = (table_bits, None) if name in tables else (bits, rows.get(name))
            done[name] = quantize(read(), own, size, seen)
        return QuantizedWeights(size, done)

    choices = [(own, size) for own in ((bits, 8) if tables and bits != 8 else (bits,)) for size in fitting]
    best = FAR
    for choice in choices:  # tried without compensation, which takes long and only brings products closer
        found = rounded(*choice, {})
        tried = Rounding(weights={name: blocks.dequantized() for name, blocks in found.done.items()})
        now = closeness(gaps(tried), caps)
        if now > best or best == FAR:  # where none is close, the last
            chosen = choice
            nearest = found
            best = now
        if best == CLOSE:
            break
    return rounded(*chosen, rows) if rows else nearest


def closeness(gaps: Gaps, caps: Mapping[str, float]) -> int:
    """`CLOSE`, or `COUNTS_APART` where only counted words are not, or `FAR`."""
    shares = [
        (name in COUNTED, getattr(gap, name) / caps[name]) for gap in gaps.values() for name in gap.LIMITED
    ]
    if not all(share <= SHARE for counted, share in shares if not counted):  # NaN is far
        return FAR
    return CLOSE if all(share <= COUNTED_SHARE for counted, share in shares if counted) else COUNTS_APART


def cache_scales(model: Any, expected: Any) -> dict[str, Array]:
    """A step for each head and channel of each layer's keys and values, by what they reach in real text.

    The text is read in pieces as long as the context, so that late positions are seen too.
    """
    from ..reference.decoder import reference_of

    reference = reference_of(model)
    context = len(expected.context)
    largest: dict[str, Array] = {}
    text = [token for tokens in expected.texts for token in tokens]
    for start in range(0, len(text), context):
        tokens = text[start : start + context]
        for layer, pair in enumerate(reference.kept(tokens)):
            for kind, tensor in zip(("key", "value"), pair, strict=True):
                found = tensor.abs().amax(dim=(0, 2)).flatten().numpy()  # (H * D,)
                name = f"cache.{layer}.{kind}"
                largest[name] = np.maximum(largest.get(name, found), found)
    return {name: np.maximum(found, 1e-6) * np.float32(HEADROOM / 127) for name, found in largest.items()}


def row_products(model: Model, graph: ir.Graph, run: Callable[[], None]) -> dict[tuple[str, ...], RowProduct]:
    """The int8 form of an encoder's linears, from what they read of real text.

    A weight that several places read has one form: that of those that read most weights at once.
    """
    from ..passes.int8_encoder import linears_of
    from ..passes.int8_rows import choose_product
    from ..reference.rounding import linear_of

    found: dict[tuple[str, ...], Linears] = {}
    for linears in sorted(linears_of(graph), key=lambda linears: -len(linears.names)):
        if not {name for names in found for name in names}.intersection(linears.names):
            found[linears.names] = linears
    # Others have no rows to choose by: their weights alone become whole numbers.
    found = {
        names: linears
        for names, linears in found.items()
        if all(linear_of(model, name) is not None for name in names)
    }
    rows = rows_read(model, [names[0] for names in found], run)
    return {
        names: choose_product(rows.pop(names[0]), linears.weight())
        for names, linears in found.items()
        if names[0] in rows
    }


def rows_read(model: Model, weights: Iterable[str], run: Callable[[], None]) -> dict[str, Array]:
    """What each weight's linear reads while PyTorch runs: a sample (M, K) of its rows."""
    from ..reference.rounding import linear_of

    rows: dict[str, SampledRows] = {}
    hooks = []
    for name in weights:
        if (linear := linear_of(model, name)) is not None:
            rows[name] = SampledRows()
            hooks.append(linear.register_forward_pre_hook(rows[name].hook))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: np.concatenate(sampled.parts) for name, sampled in rows.items() if sampled.parts}


class SampledRows:
    """Every n-th of the rows that a module reads, with n such that at most `CALIBRATION_ROWS` are kept."""

    def __init__(self) -> None:
        self.parts: list[Array] = []
        self.stride = 1
        self.seen = 0

    def hook(self, module: Any, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook."""
        del module
        read = inputs[0].reshape(-1, inputs[0].shape[-1]).numpy()
        self.parts.append(read[-self.seen % self.stride :: self.stride].copy())
        self.seen += len(read)
        while sum(map(len, self.parts)) > CALIBRATION_ROWS:
            self.parts = [np.concatenate(self.parts)[::2]]
            self.stride *= 2


def recorded(bundle: Bundle, model: Model) -> Calibration:
    """What a bundle's graphs were calibrated to, with weights rounded again from the model's own.

    So that a graph whose weights are damaged does not set its own limits; the scales of a cache and the
    smoothing are the graph's, and only the caps hold them. int4 is rounded without compensation here, which
    loses a little more than the graph may.
    """
    from ..passes.quantize import quantize, stored_bits
    from ..passes.weight_files import load_graph

    tensors = dict(model.named_parameters(remove_duplicate=False))
    blocks: dict[int, QuantizedWeights] = {}
    scales: dict[str, Array] = {}
    products: dict[tuple[str, ...], RowProduct] = {}
    fp32_nodes = {}
    for artifact in bundle.manifest.artifacts:
        if not artifact.quantization and artifact.precision != "fp16":
            continue
        graph = load_graph(bundle.path(artifact.file)).graph
        if artifact.precision == "fp16":
            fp32_nodes[recipe_of(artifact)] = recorded_choices(graph)
        if "bits" in artifact.quantization:
            bits = int(artifact.quantization["bits"])
            size = int(artifact.quantization["block_size"])
            done = blocks.setdefault(bits, QuantizedWeights(size, {})).done
            for name, own in stored_bits(graph).items():
                if name not in done and name in tensors:  # an import's may be none of the model's
                    done[name] = quantize(tensors[name].detach().numpy(), own, size)
        for key, rule in artifact.quantization.get("rows", {}).items():
            names = tuple(key.split("+"))
            weight = np.concatenate([tensors[name].detach().numpy() for name in names]).T  # (K, N)
            own_rule = RowRule(rule["zero"], rule["floor"], rule["absolute"])
            products[names] = recorded_product(graph, names[0], own_rule, weight)
        for spec in artifact.inputs:
            scale = graph.initializers.get(f"{spec.name}.scale")
            if scale is not None and scale.const_value is not None:
                scales[spec.name] = np.array(scale.const_value.numpy())  # torch warns of what is mapped
    return Calibration(blocks, scales, products, fp32_nodes)


def recorded_product(graph: ir.Graph, name: str, rule: RowRule, weight: Array) -> RowProduct:
    """The int8 form of a linear (K, N), smoothed as a graph has it."""
    value = graph.initializers.get(name + UNSMOOTHING)
    constant = None if value is None else value.const_value
    smoothing = None if constant is None else np.asarray(1 / constant.numpy(), np.float32)
    return nearest_product(weight, smoothing, rule)
