"""Chooses how large the blocks of quantized weights may be, and which weights have more bits."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...runtime.apps.check.judge import COUNTED
from ..errors import ExportError
from ..limits import CAPS, Gaps
from ..passes.quantize import QuantizedWeights, find_products, find_quantizable
from ..passes.weights import read_array
from .run_gptq import round_weights

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor, nn

    from ..tasks.rounding import Rounding

log = logging.getLogger("planforge")

Array = npt.NDArray[np.float32]

# The share of the caps that a rounding may take; the rest is for an engine's different rounding.
SHARE = 0.9
# A loss of more than this many times its cap is hopeless: GPTQ halves errors, and leaves a quarter of a
# divergence. Untrained weights have such losses, as their likeliest tokens hardly differ from others.
MAX_RECOVERABLE = 4.0
# A quick measure decides if a rounding loses this many times more, or less, than that share, and if counted
# metrics are this many standard deviations away from it: it reads only a few hundred tokens.
SURE = 3.0
DEVIATIONS = 2.0

Measure: TypeAlias = "Callable[[Rounding], Gaps]"
# Gives the rows (M, K) that weights read, by the weights' names.
Sample: TypeAlias = "Callable[[Iterable[str]], dict[str, Tensor]]"


def select_known_weights(
    graphs: Iterable[ir.Model], model: nn.Module, with_tables: bool = True
) -> dict[str, Callable[[], Array]]:
    """Return the weights (N, K) that are quantized and that PyTorch can round as well, by name.

    An imported graph may hold others, such as a matrix that was folded with a scale. They are quantized
    too, as they come; how much that loses only the comparison of the graph shows.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    find = find_quantizable if with_tables else find_products
    names = dict.fromkeys(weight.name for graph in graphs for _, weight in find(graph.graph))
    if unknown := [name for name in names if name not in parameters]:
        log.warning(
            "%d of %d weights, such as %s, are not parameters of the PyTorch model: they are quantized, but"
            " their error is not measured",
            len(unknown),
            len(names),
            name_product(graphs, unknown[0]),
        )
    # A graph may have them transposed.
    return {name: partial(read_array, parameters[name]) for name in names if name in parameters}


def name_product(graphs: Iterable[ir.Model], weight: str) -> str:
    """Return a weight's name with the node that multiplies by it, for a message."""
    found = [(node, own.name) for graph in graphs for node, own in find_products(graph.graph)]
    nodes = [str(node.name) for node, name in found if name == weight]
    return f"{weight!r} of node {nodes[0]!r}" if nodes else repr(weight)


def choose_blocks(
    begun: QuantizedWeights,
    sample: Sample | None,
    measures: Sequence[Measure],
    tables: Collection[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> QuantizedWeights:
    """Return the largest blocks that are close.

    Where none in 4 bits is close, tables are int8, and then kinds of weights, those that lose most for their
    size first, up to half of all weights. Those of fp8 stay floats instead. Where nothing comes near to being
    close, all stay in `bits` and in the largest blocks: others would be slower, and refused as well.

    Args:
        begun: the weights, without blocks, and how they are rounded.
        sample: gives what weights read, for GPTQ, those that read the same in one array. GPTQ rounds no
            table, which is looked up by whole rows too. None does without GPTQ.
        measures: measure in PyTorch what a rounding loses, the quickest first and the most exact last.
        tables: those of the weights that are looked up.
        progress: called with a line for each trial, and for the weights that GPTQ has rounded.
    """
    weights = begun.read
    bits = begun.usual_bits
    shapes = {name: read().shape for name, read in weights.items()}
    sizes = begun.formats[bits].block_sizes
    least = sizes[-1]
    for name, (_, width) in shapes.items():
        if least and width % least:
            raise ExportError(
                f"{begun.formats[bits].name} quantizes weights in blocks of at least {least} columns, but the"
                f" width {width} of {name} is not a multiple of {least}; export fp32 or fp16"
            )
    widths = {width for _, width in shapes.values()}
    fitting = [size for size in sizes if not size or all(width % size == 0 for width in widths)]
    trials = Trials(begun, shapes, measures, progress)
    alike = dict.fromkeys(weights, bits)
    choices = [alike]
    if bits == 4 and tables:
        choices.append(alike | dict.fromkeys(tables, 8))
    is_close = any(trials.search(own, fitting) for own in choices)
    if begun.formats[bits].uses_gptq and not is_close:
        for own in list_mixtures(trials, tables):
            if trials.run(own, fitting[-1]):
                break
    if trials.is_hopeless():
        trials.best = replace(begun, size=fitting[0], bits=alike)
    return trials.best if sample is None else trials.finish(sample, tables)


@dataclass(frozen=True)
class Loss:
    """The largest shares of the caps that a rounding takes."""

    measured: float  # the share for measured metrics
    counted: float  # the share for counted metrics, which is coarse
    doubt: float  # how far `counted` might change with more text

    def is_sure(self) -> bool:
        """Return whether more text would lead to the same verdict on whether the rounding is close."""
        if self.measured >= SHARE * SURE or self.counted - self.doubt > SHARE:
            return True
        return self.measured <= SHARE / SURE and self.counted + self.doubt <= SHARE


def estimate_doubt(gap: Any, name: str, cap: float) -> float:
    """Return how far a count in a text might change with more text, as a share of its cap.

    Tokens that change are counted: the number of as many as are allowed is as uncertain as its root. The
    logarithms of two distributions differ by twice their divergence, squared and averaged.
    """
    variance = SHARE * cap if name == "top1_changes" else 2 * max(0.0, gap.text_kl)
    return DEVIATIONS * math.sqrt(variance / gap.rows) / cap


class Trials:
    """Tries roundings of weights, without GPTQ, which takes long and only brings products closer.

    Attributes:
        best: the weights of the last trial that was close, else of the one that lost least.
    """

    best: QuantizedWeights

    def __init__(
        self,
        begun: QuantizedWeights,
        shapes: Mapping[str, tuple[int, ...]],
        measures: Sequence[Measure],
        progress: Callable[[str], None],
    ) -> None:
        self.begun = begun
        self.shapes = shapes
        bits = begun.usual_bits
        self.caps = CAPS[f"int{bits}"]
        self.stage = f"calibrating {begun.formats[bits].name}"
        self.measures = measures
        self.progress = progress
        self.count = 0
        self.least: tuple[float, float] | None = None  # its losses

    def search(self, own: Mapping[str, int], sizes: Sequence[int]) -> bool:
        """Try bits with blocks of these sizes, the largest of which comes first; return whether one is close.

        Most often the largest is. Where it is not and the smallest are not, none between is.
        """
        if self.run(own, sizes[0]):
            return True
        if len(sizes) == 1 or not self.run(own, sizes[-1]):
            return False
        any(self.run(own, size) for size in sizes[1:-1])
        return True

    def run(self, own: Mapping[str, int], size: int) -> bool:
        """Try bits and a size of blocks; return whether they are close."""
        blocks = f"blocks of {size}" if size else "a scale for each row"
        return self.judge(replace(self.begun, size=size, bits=dict(own)), blocks)

    def judge(self, tried: QuantizedWeights, words: str) -> bool:
        """Try weights, which are described in words; return whether they are close."""
        self.count += 1
        self.progress(f"{self.stage}: trial {self.count}, {words}")
        first, *others = self.measures
        loss = self.measure(tried, first)
        for gaps in others:
            if not loss.is_sure():
                loss = self.measure(tried, gaps)
        is_close = max(loss.measured, loss.counted) <= SHARE
        # What is counted is coarse: it decides where the rest is close.
        shares = (0.0 if loss.measured <= SHARE else loss.measured, loss.counted)
        if is_close or self.least is None or shares <= self.least:
            self.least = shares
            self.best = tried
        return is_close

    def is_hopeless(self) -> bool:
        """Return whether even the trial with the smallest loss lost more than GPTQ can recover."""
        return self.least is not None and max(self.least) > MAX_RECOVERABLE

    def measure(self, tried: QuantizedWeights, gaps: Measure) -> Loss:
        """Return the loss of a rounding; NaN counts as infinitely large."""
        from ..tasks.rounding import Rounding

        rounding = Rounding(weights=tried.dequantize(), activation_block=tried.size)
        if tried.is_half:  # rounding to fp16 itself is small beside it, and takes long
            rounding = Rounding(weights=tried.dequantize(), keeps_tables=True, products=tried.products)
        largest = {True: 0.0, False: 0.0}
        doubt = 0.0
        for gap in gaps(rounding).values():
            for name in self.caps.keys() & set(gap.LIMITED):  # scores of searches follow from the logits
                share = getattr(gap, name) / self.caps[name]
                is_counted = name in COUNTED
                largest[is_counted] = max(largest[is_counted], math.inf if math.isnan(share) else share)
                if is_counted:
                    doubt = max(doubt, estimate_doubt(gap, name, self.caps[name]))
        return Loss(largest[False], largest[True], doubt)

    def finish(self, sample: Sample, tables: Collection[str]) -> QuantizedWeights:
        """Return the best trial, its coarse codes rounded again by GPTQ where there are rows for it."""
        best = self.best
        coarse = {bits for bits, format in best.formats.items() if format.uses_gptq}
        own = [name for name, bits in best.bits.items() if bits in coarse and name not in tables]
        if not own:
            return best
        self.progress(f"{self.stage}: reading text for GPTQ")
        stage = f"{self.stage}: GPTQ"
        done = round_weights(best, self.shapes, sample(own), self.progress, stage)
        return replace(best, compensated=done)


def list_mixtures(trials: Trials, tables: Collection[str]) -> Iterator[dict[str, int]]:
    """Yield bits with one kind of weights more in twice as many each time, up to half of all weights.

    A kind is what layers have in common. Those come first that lose most by themselves for their size.
    """
    kinds: dict[str, list[str]] = {}
    bits = trials.begun.usual_bits
    for name in trials.begun.read:
        if name not in tables:
            kinds.setdefault(name_kind(name), []).append(name)
    losses = {}
    sizes = {}
    for kind, names in kinds.items():
        trials.progress(f"{trials.stage}: the error of {kind}")
        alone = replace(trials.begun, size=trials.best.size, bits=dict.fromkeys(names, bits))
        sizes[kind] = sum(math.prod(trials.shapes[name]) for name in names)
        losses[kind] = trials.measure(alone, trials.measures[0]).measured / sizes[kind]
    own = dict.fromkeys(trials.begun.read, bits) | dict.fromkeys(tables, 2 * bits)
    kept = []
    for kind in sorted(kinds, key=lambda kind: -losses[kind]):
        kept.append(kind)
        if sum(sizes[kind] for kind in kept) > sum(sizes.values()) / 2:
            return
        own = own | dict.fromkeys(kinds[kind], 2 * bits)
        yield own


def name_kind(weight: str) -> str:
    """Return the part that the names of one weight have in common in all layers: h.*.attn.c_proj.weight."""
    return re.sub(r"\.\d+\.", ".*.", weight)
