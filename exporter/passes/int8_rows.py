"""Products of int8 activations and weights, and how to choose them.

A linear y = x W + b becomes, for x of M rows (tokens) and K columns and W (K, N):

    x' = x / s                     only where smoothing pays; s (K,) moves into W' = s W
    q  = uint8(x' / step + zero)   zero is one constant; step is one, or (M, 1) from the row's largest value
    y  = step * (q @ Wq * scale) + b

So no text changes with the batch it runs in, and columns with outliers cost the others nothing. One constant
step is faster: nothing is searched for in a row, and the product itself multiplies by it and adds the bias.
Rows that a LayerNorm wrote are alike enough for it; those behind a GELU often are not. Weights are rounded
with GPTQ on calibration rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..number_formats import FP8, PLAN_INT8, ROW_INT8, NumberFormat
from .gptq import round_weight
from .neighbours import find_below
from .quantized_weight import QuantizedWeight
from .weights import Weight, find_weight

Array = npt.NDArray[np.float32]

ALPHAS = (0.5, 0.6, 0.7, 0.8)  # how much of a column's range moves from activations into weights
CONSTANT_ALPHAS = (0.7, 0.8, 0.9)  # the same for one constant step, which no row with an outlier may widen
# A constant step saves time: it may lose so many times what steps by row lose. Queries, keys and values may
# lose more, because attention averages over tokens: in all-MiniLM-L6-v2 their constant steps cost no cosine.
CONSTANT_WORTH = 1.5
ATTENTION_WORTH = 2.5
HEADROOM = 1.25  # of a constant step: rows that calibrated nothing may reach so much further
WORTH = 0.8  # smoothing costs a product over x: only where it leaves less than this share of the error
ONE_SIDED = 0.25  # below this share of the largest value, negative values get only the room they need
TINY = 1e-6
ROW_FORMATS = {format.name: format for format in (PLAN_INT8, FP8)}  # of rows that plans read


@dataclass(frozen=True)
class RowRule:
    """The rule by which a row's values become uint8."""

    zero: int  # what 0 becomes
    floor: float  # a row's largest value counts as at least this much
    absolute: bool  # the largest magnitude decides, instead of the largest value
    step: float | None = None  # of every row, instead of one from its largest value

    @property
    def top(self) -> int:
        """Return the uint8 code of a row's largest value, counted from `zero`."""
        return 127 if self.absolute else 255 - self.zero

    @classmethod
    def from_json(cls, rule: Mapping[str, Any]) -> RowRule:
        """Return the rule that a manifest's entry of a product has."""
        return cls(rule["zero"], rule["floor"], rule["absolute"], rule.get("step"))

    @staticmethod
    def of(x: Array) -> RowRule:
        """Return the rule for rows like x (M, K)."""
        low = -min(float(x.min()), 0.0)
        largest = x.max(axis=1)
        if low >= ONE_SIDED * float(largest.max()):
            return RowRule(128, TINY, True)
        zero = round(255 * low / (float(np.median(largest)) + low))
        if zero > 128:  # as a rule rows reach further down than up
            return RowRule(128, TINY, True)
        # A row whose values all are small must still reach down to `low`.
        return RowRule(zero, low * (255 - zero) / zero if zero else TINY, False)

    @staticmethod
    def of_all(x: Array) -> RowRule:
        """Return the rule with one step for all rows like x (M, K)."""
        low = -min(float(x.min()), 0.0) * HEADROOM
        high = max(float(x.max()), TINY) * HEADROOM
        if low >= ONE_SIDED * high:
            return RowRule(128, TINY, True, max(low, high) / 127)
        step = (low + high) / 255
        return RowRule(round(low / step), TINY, False, step)

    def round_rows(self, x: Array) -> Array:
        """Return x (M, K) after its rounding."""
        step: Array | float | None = self.step
        if step is None:
            largest = (np.abs(x) if self.absolute else x).max(axis=1, keepdims=True)
            step = np.maximum(largest, self.floor) / self.top
        rounded = np.clip(np.rint(x / step) + self.zero, 0, 255) - self.zero
        return np.asarray(rounded * step, np.float32)


@dataclass(frozen=True)
class StaticRule:
    """The rule of plans: one step for all rows, and 0 stays 0."""

    step: float  # which fp16 holds
    clip: float  # the share of the largest magnitude in real text that becomes the top code
    format: str  # the name of the codes' number format
    zero: ClassVar[int] = 0

    @staticmethod
    def of(x: Array, format: NumberFormat, clip: float) -> StaticRule:
        """Return the rule for rows like x (M, K)."""
        largest = max(float(np.abs(x).max()), TINY)
        step = format.round_scales(np.asarray(largest * clip / format.top, np.float32))
        return StaticRule(float(step), clip, format.name)

    def round_rows(self, x: Array) -> Array:
        """Return x (M, K) after its rounding."""
        step = np.float32(self.step)
        return np.asarray(ROW_FORMATS[self.format].round(x / step).astype(np.float32) * step)


def read_rule(rule: Mapping[str, Any]) -> RowRule | StaticRule:
    """Return the rule that a manifest's entry of a product has."""
    if "format" in rule:
        return StaticRule(rule["step"], rule["clip"], rule["format"])
    return RowRule.from_json(rule)


@dataclass(frozen=True)
class RowProduct:
    """One weight, or several that read the same rows, in int8 or fp8."""

    smoothing: Array | None  # s (K,)
    rule: RowRule | StaticRule  # of the rows
    weight: QuantizedWeight  # (N, K), with a scale for each row
    error: float | None = None  # about the share of its results' squares that it loses, on held-out rows
    # All weights that read the same rows, where each is stored by itself: they decide the smoothing together.
    together: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the choice and its cost, as the manifest has them."""
        value = {**vars(self.rule), "smoothed": self.smoothing is not None, "error": self.error}
        return {**value, "together": list(self.together)} if self.together else value

    def round_rows(self, x: Array) -> Array:
        """Return x (M, K) with the product's rounding of rows."""
        rounded = self.rule.round_rows(divide(x, self.smoothing))
        return rounded if self.smoothing is None else rounded * self.smoothing

    def compensate(self, x: Array, weight: Array) -> RowProduct:
        """Return the product with its weight (K, N) rounded by GPTQ, for rows like x (M, K)."""
        rows = divide(x, self.smoothing)
        return replace(self, weight=round_product(weight, self.smoothing, self.rule, rows).weight)

    def dequantize(self) -> Array:
        """Return the weight (N, K) in float32, with the smoothing undone."""
        return divide(self.weight.dequantize(), self.smoothing)


def choose_product(x: Array, weight: Array, worth: float = CONSTANT_WORTH) -> RowProduct:
    """Return the int8 form of `weight` (K, N) whose products with rows like x (M, K) are close, and fast.

    Steps and smoothings are fitted on the first half of the rows and judged on the other: on other texts. A
    constant step may lose `worth` times what steps by row lose. Weights are rounded to the nearest.
    """
    fit, held = np.array_split(x, 2)
    exact = held @ weight
    largest = max(float(np.square(exact).sum()), TINY)

    def measure_error(alpha: float | None, find_rule: Callable[[Array], RowRule]) -> float:
        """Return the share of the results' squares that a smoothing and a rule lose."""
        s = np.ones(len(weight), np.float32) if alpha is None else compute_smoothing(fit, weight, alpha)
        # GPTQ roughly halves the weights' error: half the error of the nearest stands in for it.
        scaled = weight * s[:, None]
        scale = compute_column_scales(scaled)
        nearly = (scaled + ROW_INT8.round(scaled / scale) * scale) / 2
        rounded = find_rule(fit / s).round_rows(held / s)
        return float(np.square(rounded @ nearly - exact).sum()) / largest

    plain = measure_error(None, RowRule.of)
    error, alpha = min((measure_error(alpha, RowRule.of), alpha) for alpha in ALPHAS)
    smoothing = None
    if error < plain * WORTH:
        smoothing = compute_smoothing(x, weight, alpha)
    else:
        error = plain
    find_rule = RowRule.of
    constant_error, alpha = min((measure_error(alpha, RowRule.of_all), alpha) for alpha in CONSTANT_ALPHAS)
    if constant_error < error * worth:
        error = constant_error
        smoothing = compute_smoothing(x, weight, alpha)
        find_rule = RowRule.of_all
    product = round_product(weight, smoothing, find_rule(divide(x, smoothing)))
    return replace(product, error=error)


def round_product(
    weight: Array, smoothing: Array | None, rule: RowRule | StaticRule, rows: Array | None = None
) -> RowProduct:
    """Return the form of `weight` (K, N) in codes, with GPTQ where smoothed rows (M, K) are given."""
    format = ROW_FORMATS[rule.format] if isinstance(rule, StaticRule) else ROW_INT8
    scaled = weight if smoothing is None else weight * smoothing[:, None]
    scale = compute_column_scales(scaled, format)[:, None]
    return RowProduct(smoothing, rule, round_weight(scaled.T, scale, format, rows))


def divide(x: Array, smoothing: Array | None) -> Array:
    """Return rows x (M, K) divided by a smoothing (K,), as a product rounds them."""
    return x if smoothing is None else x / smoothing


def compute_smoothing(x: Array, weight: Array, alpha: float) -> Array:
    """Return s = max|x|^alpha / max|w|^(1 - alpha) of each column, with a geometric mean of 1.

    Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for LLMs", 2022.
    """
    logs = alpha * np.log(np.maximum(np.abs(x).max(axis=0), 1e-5))
    logs -= (1 - alpha) * np.log(np.maximum(np.abs(weight).max(axis=1), 1e-5))
    return np.asarray(np.exp(logs - logs.mean()), np.float32)


def compute_column_scales(weight: Array, format: NumberFormat = ROW_INT8) -> Array:
    """Return the scale (N,) of each column of a weight (K, N)."""
    return format.find_row_scales(weight.T)[:, 0]


@dataclass(frozen=True)
class Linears:
    """The MatMuls that multiply one value (B, T, K) by constants, such as query, key and value."""

    matmuls: tuple[ir.Node, ...]
    weights: tuple[Weight, ...]

    @property
    def read(self) -> ir.Value:
        """Return the value that is multiplied now, which a pass may have replaced since it was found."""
        value = self.matmuls[0].inputs[0]
        assert value is not None
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters' names."""
        return tuple(weight.name for weight in self.weights)

    @property
    def width(self) -> int:
        """Return N, the width of all results side by side."""
        return sum(weight.rows for weight in self.weights)

    def join_weights(self) -> npt.NDArray[np.float32]:
        """Return all columns (K, N), float32."""
        return np.concatenate([weight.array().T for weight in self.weights], axis=1)


def find_linears(graph: ir.Graph) -> list[Linears]:
    """Return the linears that can become int8; those without tokens as rows (a pooler's) are too small."""
    found: dict[ir.Value, list[tuple[ir.Node, Weight]]] = {}
    for node in graph:
        read = node.inputs[0] if node.op_type == "MatMul" else None
        weight = find_weight(node)
        if weight is not None and read is not None and read.shape is not None and len(read.shape) == 3:
            found.setdefault(read, []).append((node, weight))
    return [
        Linears(tuple(node for node, _ in both), tuple(weight for _, weight in both))
        for both in found.values()
    ]


def find_attention_products(graph: ir.Graph) -> set[ir.Node]:
    """Return the products with constants that compute attention's queries, keys and values."""
    contexts = [
        context
        for node in graph
        if node.op_type == "Softmax"
        for context in find_below(node.outputs[0], "MatMul")
        if find_weight(context) is None
    ]
    found = set()
    seen = set()
    waiting: list[ir.Node | None] = [*contexts]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if find_weight(node) is not None:
            found.add(node)
        else:
            waiting += [value.producer() for value in node.inputs if value is not None]
    return found
