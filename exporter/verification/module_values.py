"""Runs a graph node by node in fp32, and keeps its values for PyTorch's modules, token by token.

B batch, T tokens of a run, N chosen rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...runtime.backends.backend import Array, Arrays, Buffers
from ...runtime.bundle.manifest import Artifact
from ..execution.node_executor import MOVES, ExecutedProgram, WideExecutor
from ..execution.replay import PADDING, Step, count_positions
from ..passes.kv_cache import KEY_SCALE
from ..passes.static_rows import find_source
from ..passes.weights import ParameterRef
from ..tracing.modules import find_module

if TYPE_CHECKING:
    from torch import nn

Integers = npt.NDArray[np.int64]
Exchange: TypeAlias = Callable[[str, Array], Array]
# Factors of modules' results for a text's first tokens: small ones show epsilons, large ones soft caps.
# A decoder's tokens see none behind them, so the small ones stay small. All other tokens are as they are.
FACTORS = np.array([0.01, 0.01, 0.01, 1, 1, 1, 2, 2, 2, 1], np.float32)
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
CACHE_SETTINGS = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")


@dataclass(frozen=True)
class Border:
    """A value of a graph that is a module's result or its input."""

    value: str
    path: str  # the module's; "" for an output of the graph
    node: ir.Node  # gives the value
    is_result: bool = True
    is_scaled: bool = False  # whether it goes on times `FACTORS`

    def describe(self) -> str:
        """Return in words the module that the value belongs to in PyTorch."""
        if not self.path:
            return ""
        return f" of PyTorch's {self.path!r}" if self.is_result else f", which {self.path!r} reads"


@dataclass(frozen=True)
class Kept:
    """The values kept for some tokens of a text."""

    positions: Integers  # (N,) of the text; a single -1 for what is of the whole text
    values: Array  # (N, ...)
    is_whole: bool  # whether the graph has it of every token


def find_borders(
    graph: ir.Graph, results: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> list[Border]:
    """Return the results of a model's modules, and the inputs of those without parts, in graph order."""
    nodes: dict[str, list[ir.Node]] = {}
    found: list[tuple[int, Border]] = []
    order = {node: number for number, node in enumerate(graph)}
    for node, number in order.items():
        nodes.setdefault(find_module(node), []).append(node)
        for value in node.outputs:
            path = results.get(str(value.name), "")
            if path in modules and path and not gives_more(modules[path]):
                scaled = is_leaf(modules[path]) and not value.is_graph_output()
                found.append((number, Border(str(value.name), path, node, is_scaled=scaled)))
    for path, own in nodes.items():
        read = find_read(own) if path in modules and path and is_leaf(modules[path]) else None
        if read is not None and str(read.name) not in results:
            giver = find_giver(read)
            found.append((order[giver], Border(str(read.name), path, giver, is_result=False)))
    return [border for _, border in sorted(found, key=lambda pair: pair[0])]


def find_giver(value: ir.Value) -> ir.Node:
    """Return the node that computes a value, skipping nodes outside of modules that only move it."""
    node = value.producer()
    assert node is not None
    before = None if node.inputs[0] is None else node.inputs[0].producer()
    moves = node.op_type in MOVES and not find_module(node) and before is not None
    return find_giver(before.outputs[0]) if moves and before is not None else node


def gives_more(module: nn.Module) -> bool:
    """Tell whether a module scales its rows, which graphs of older versions of transformers do after it."""
    from torch import nn

    return isinstance(module, nn.Embedding) and type(module) is not nn.Embedding


def is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def find_read(nodes: Sequence[ir.Node]) -> ir.Value | None:
    """Return the one value of floats that a module's nodes read and do not compute.

    None where they compute with another module's parameters too, as a GELU with the bias before it.
    """
    given = {value for node in nodes for value in node.outputs}
    read = {value for node in nodes for value in node.inputs if value is not None} - given
    constants = [value for value in read if value.const_value is not None]
    names = [ParameterRef.read(value).parameter for value in constants]
    others = [name for name in names if "." in name and not name.startswith(f"{find_module(nodes[0])}.")]
    computed = read.difference(constants)
    value = find_source(computed.pop()) if len(computed) == 1 and not others else None
    is_float = value is not None and value.dtype in FLOATS and value.producer() is not None
    return value if is_float else None


class FloatExecutor(WideExecutor):
    """Computes in fp32 whatever types a graph stores, and rounds only weights to integers.

    `exchange` is shown each result by its name, and returns what goes on in its place.
    """

    def __init__(self, model: ir.Model, exchange: Exchange = lambda name, array: array) -> None:
        for node in model.graph:
            keep_floats(node)
        super().__init__(model)
        self.model = model
        self.exchange = exchange

    def run_node(self, node: ir.Node, feeds: list[Array | None]) -> list[Array]:
        results = zip(node.outputs, self.compute(node, feeds), strict=True)
        return [self.exchange(str(value.name), result) for value, result in results]

    def check(self, node: ir.Node, name: str, array: Array, feeds: Sequence[Array | None]) -> None:
        """Let infinities pass, as nodes may ignore them; modules' inputs and results are compared."""

    def compute(self, node: ir.Node, feeds: list[Array | None]) -> list[Array]:
        codes = feeds[0] if node.op_type == "DequantizeLinear" else None
        is_exact = codes is not None and codes.dtype == np.float64  # from a QuantizeLinear, as below
        if not is_exact and node.op_type not in ("QuantizeLinear", "MatMulIntegerToFloat"):
            return super().run_node(node, feeds)
        wide: list[Any] = [
            0.0 if feed is None else np.asarray(feed, np.float64) for feed in (*feeds, None, None, None)
        ]
        if node.op_type == "QuantizeLinear":
            x, step, zero = wide[:3]
            has_rows = np.ndim(step) > 0  # a step for each
            return [x / step[:, None] + zero[:, None] if has_rows else x / step + zero]
        if is_exact:
            x, step, zero = wide[:3]
            return [((x - zero) * step).astype(np.float32)]
        rows, columns, row_step, column_step, row_zero, column_zero, bias = wide[:7]
        product = ((rows - row_zero) * row_step) @ ((columns - column_zero) * column_step)
        return [(product + bias).astype(np.float32)]


def keep_floats(node: ir.Node) -> None:
    """Make a node round neither its product's inputs nor keys and values."""
    node.attributes.pop("accuracy_level", None)
    if node.op_type == "GroupQueryAttention" and len(node.inputs) > KEY_SCALE + 1:
        for place in (KEY_SCALE, KEY_SCALE + 1):
            node.replace_input_with(place, None)
        for name in CACHE_SETTINGS:
            node.attributes.pop(name, None)
        for value in (*node.inputs[3:5], *node.outputs[1:]):
            if value is not None:
                value.type = ir.TensorType(ir.DataType.FLOAT)


class ModuleProgram(ExecutedProgram):
    """A program that runs a graph for the runtime's own code, and keeps its borders and outputs.

    Args:
        executor: runs the graph.
        artifact: of the graph.
        borders: what to keep.
        steps: the runs that will be made; for a graph other than the checked one they are not known, and
            all rows of its mask are texts.
    """

    def __init__(
        self,
        executor: FloatExecutor,
        artifact: Artifact,
        borders: Sequence[Border],
        steps: Sequence[Step] | None,
    ) -> None:
        super().__init__(executor, artifact)
        executor.exchange = self.exchange
        self.borders = borders
        self.scaled = {border.value for border in borders if border.is_scaled}
        self.outputs = {
            str(v.name): node for v in executor.graph.outputs if (node := v.producer()) is not None
        }
        self.names = {border.value for border in borders} | self.outputs.keys()
        self.dtypes = {n: "float32" if d in ("float16", "int8") else d for n, d in self.dtypes.items()}
        self.steps = steps
        self.roles = {spec.role: spec.name for spec in artifact.inputs}
        self.reads_neighbours = artifact.reads_neighbours
        self.kept: dict[tuple[str, int], list[Kept]] = {}  # by value and text

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        if self.steps is not None:
            self.step = self.steps[self.runs]
        else:
            self.step = Step("", count_positions(self.find_valid(inputs)))
        rows = inputs.get(self.roles.get("logit_rows", ""))
        self.chosen = None if rows is None else np.asarray(rows)
        self.chooses_all = (  # then a pass that gathers the chosen rows earlier leaves all tokens, row by row
            rows is not None
            and self.reads_neighbours
            and np.array_equal(rows, np.arange(self.step.positions.size))
        )
        return super().run(inputs, buffers, outputs)

    def find_valid(self, inputs: Arrays) -> npt.NDArray[np.bool_]:
        """Return which tokens (B, T) of a run are no padding, by its mask or its lengths."""
        if "mask" in self.roles:
            return np.asarray(inputs[self.roles["mask"]] > 0)
        if "neighbours" in self.roles:  # modules compute those that are padding too
            return np.ones_like(inputs[self.roles["neighbours"]], bool)
        width = inputs[self.roles["ids"]].shape[1]
        return np.arange(width) < inputs[self.roles["lengths"]][:, None]

    def exchange(self, name: str, array: Array) -> Array:
        """Keep a result, and return the value that replaces it."""
        if name not in self.names or array.dtype.kind != "f":
            return array
        self.keep(name, array)
        return self.scale(array) if name in self.scaled else array

    def keep(self, name: str, array: Array) -> None:
        """Keep a result at the tokens of each text."""
        positions = self.step.positions
        texts = range(len(positions)) if self.step.rows is None else self.step.rows
        tokens = self.move(array)
        for row, text in enumerate(texts):
            own = positions[row][positions[row] != PADDING]
            if tokens is not None:
                kept = Kept(own, tokens[row][positions[row] != PADDING], True)
            elif self.chosen is not None and array.ndim and len(array) == len(self.chosen):
                mine = self.chosen // positions.shape[1] == row
                places = positions[row][self.chosen[mine] % positions.shape[1]]
                kept = Kept(places, array[mine], False)
            elif array.ndim and len(array) == len(positions):
                kept = Kept(np.array([-1]), array[row : row + 1], False)
            else:
                continue
            self.kept.setdefault((name, text), []).append(kept)

    def move(self, array: Array) -> Array | None:
        """Return a result as (B, T, ...), also where it has all tokens one below the other; else None."""
        shape = self.step.positions.shape
        if self.chooses_all and array.ndim == 2 and len(array) == self.step.positions.size:
            return array.reshape(*shape, *array.shape[1:])
        return move_tokens(array, shape)

    def scale(self, array: Array) -> Array:
        """Return a result with its tokens multiplied by `FACTORS`; anything else as it is."""
        moved = self.move(array)
        if moved is None:
            return array
        factors = find_factors(self.step.positions)
        scaled = moved * factors.reshape(*factors.shape, *(1,) * (moved.ndim - 2))
        if array.ndim == 2:
            return scaled.reshape(array.shape)
        return scaled if moved is array else np.ascontiguousarray(scaled.swapaxes(1, 2))

    def list_kept(self, name: str, text: int) -> Kept | None:
        """Return the values kept of a graph's value for a text in all runs."""
        parts = self.kept.get((name, text), [])
        if len({(part.is_whole, part.values.shape[1:]) for part in parts}) > 1:
            parts = parts[-1:]
        if not parts:
            return None
        positions = np.concatenate([part.positions for part in parts])
        return Kept(positions, np.concatenate([part.values for part in parts]), parts[0].is_whole)


def move_tokens(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return a result as (B, T, ...), also one (B, H, T, D); None if it is neither, or ambiguous."""
    B, T = shape
    if array.ndim == 4 and (len(array), array.shape[2]) == (B, T):
        return None if array.shape[1] == T > 1 else array.swapaxes(1, 2)
    return array if array.ndim > 2 and array.shape[:2] == (B, T) else None


def find_factors(positions: Integers) -> Array:
    """Return the factors for tokens at some positions; 1 for padding and whole texts."""
    factors: Array = FACTORS[np.minimum(positions, len(FACTORS) - 1)]  # the last one is padding's as well
    return factors
