"""Holds weights in int8 and int4 to the checkpoint's, within what the quantizer itself may move them.

The scales follow from the checkpoint alone: they are chosen before anything is rounded, with and without
GPTQ. A number that is rounded to the nearest is off by half a step at most. GPTQ moves numbers further, to
keep products close: `gptq_bound` says how far.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block, M rows of activations
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...runtime.backends.backend import Array, Arrays
from ..passes.int8_encoder import COLUMNS, UNSMOOTHING
from ..passes.int8_rows import TOP
from ..passes.quantize import CLIPS, WEIGHT, find_extremes, find_range
from .attributes import describe_node
from .gptq_bound import Piece, describe_excess, measure_losses

PIECE_NUMBERS = 2**21  # of a weight that are looked at together; they take a few times so many floats
# Relative: a scale is a quotient in fp32; with a smoothing it is that of products in fp32.
SCALE_OFF = 1e-6
LEAST_SCALE = 2.0**-142  # below it fp32 has no digits left; blocks of zeros have so small a one
# Steps beyond half of one: a number has at most 128 of them, and fp32 keeps 24 binary digits of it.
ROUNDED = 128 * 2.0**-22
MOVED = 0.01  # GPTQ moves more numbers than this share; fewer were moved by somebody else

Rows = Callable[[str], "Array | None"]  # gives what a weight's product reads of real text (M, K), by its name


@dataclass(frozen=True)
class WholeNumbers:
    """A weight (N, K) that a node reads as whole numbers and scales."""

    node: ir.Node
    names: tuple[str, ...]  # of the parameters whose rows it has, one below the other
    bits: int
    columns: int  # K
    read_codes: Callable[[slice], npt.NDArray[np.int16]]  # gives some rows (n, K)
    scale: Array  # (N, K / b)
    may_be_gptq: bool
    smoothing: Array | None = None  # (K,): the numbers are those of the parameters times it

    def list_pieces(self) -> Iterator[slice]:
        """Yield slices of rows that are small enough to be looked at."""
        step = max(1, PIECE_NUMBERS // self.columns)
        for first in range(0, len(self.scale), step):
            yield slice(first, min(first + step, len(self.scale)))

    def read_meant(self, rows: slice, meant: Array) -> Array:
        """Return what the numbers of some rows (n, K) stand for, of the parameters (N, K)."""
        own = np.asarray(meant[rows], np.float32)
        return own if self.smoothing is None else own * self.smoothing

    def describe_row(self, row: int) -> str:
        """Return a row's number in words, in the parameter that it belongs to, if there are several."""
        return f"row {row}"


@dataclass
class Faults:
    """What is wrong with a weight's scales and numbers."""

    scales: int = 0
    first_scale: str = ""
    moved: int = 0  # numbers that are more than half a step off
    furthest: float = 0.0  # in steps
    first_row: int | None = None


def check_whole_numbers(
    graph: ir.Graph, tensors: Arrays, products: Mapping[str, object], rows: Rows, is_ours: bool
) -> Iterator[str]:
    """Yield what is wrong with each weight in whole numbers, or "".

    Args:
        tensors: the checkpoint's.
        products: the manifest's entries of an encoder's products, by their weights' names joined with "+".
        rows: gives what a weight's product reads.
        is_ours: whether all weights must be the checkpoint's; another exporter may have folded some.
    """
    for weight in list_whole_numbers(graph, products):
        words = f"weight {'+'.join(weight.names)!r} of {describe_node(weight.node)}"
        if not all(name in tensors for name in weight.names):
            yield f"{words} is no tensor of the checkpoint" if is_ours else ""
            continue
        parts = [np.asarray(tensors[name], np.float32) for name in weight.names]
        meant = parts[0] if len(parts) == 1 else np.concatenate(parts)
        fault = check_weight(weight, meant, rows)
        yield f"{words} {fault}" if fault else ""


def list_whole_numbers(graph: ir.Graph, products: Mapping[str, object]) -> list[WholeNumbers]:
    """Return the weights of a graph in int8 and int4; those that lie in one place of a file once."""
    joined = {names.split("+")[0]: tuple(names.split("+")) for names in products}
    found: dict[tuple[object, ...], WholeNumbers] = {}
    for node in graph:
        if WEIGHT in node.metadata_props:
            places = (0, 2) if node.op_type == "GatherBlockQuantized" else (1, 2)
            read = read_blocks
        elif node.op_type == "MatMulIntegerToFloat":
            places = (1, 3)
            read = read_columns
        else:
            continue
        integers, scale = (get_constant(node.inputs[place]) for place in places)
        key = (node.op_type == "GatherBlockQuantized", locate(integers), locate(scale))
        if key not in found:
            found[key] = read(graph, node, integers, scale, joined)
    tables = {weight.names for weight in found.values() if weight.node.op_type == "GatherBlockQuantized"}
    return [keep_table(weight) if weight.names in tables else weight for weight in found.values()]


def keep_table(weight: WholeNumbers) -> WholeNumbers:
    """Return a product by a table of words, which is rounded as the table is: never by GPTQ."""
    return WholeNumbers(**{**vars(weight), "may_be_gptq": False})


def get_constant(value: ir.Value | None) -> ir.TensorProtocol:
    assert value is not None and value.const_value is not None
    return value.const_value


def locate(tensor: ir.TensorProtocol) -> object:
    """Return where a constant lies: its place in a file, or itself."""
    if isinstance(tensor, ir.ExternalTensor):
        return tensor.location, tensor.offset, tensor.length
    return id(tensor)


def read_blocks(
    graph: ir.Graph,
    node: ir.Node,
    integers: ir.TensorProtocol,
    scale: ir.TensorProtocol,
    joined: Mapping[str, tuple[str, ...]],
) -> WholeNumbers:
    """Return the weight of a MatMulNBits or a GatherBlockQuantized."""
    bits = node.attributes["bits"].as_int()
    size = node.attributes["block_size"].as_int()
    codes = integers.numpy()
    codes = codes.reshape(len(codes), -1)
    columns = codes.shape[1] * 8 // bits

    def read_codes(rows: slice) -> npt.NDArray[np.int16]:
        some = codes[rows]
        if bits == 4:  # the first of two is the low half
            some = np.stack([some & 15, some >> 4], axis=-1).reshape(len(some), columns)
        centred: npt.NDArray[np.int16] = some.astype(np.int16) - np.int16(1 << (bits - 1))
        return centred

    is_table = node.op_type == "GatherBlockQuantized"
    return WholeNumbers(
        node=node,
        names=(node.metadata_props[WEIGHT],),
        bits=bits,
        columns=columns,
        read_codes=read_codes,
        scale=scale.numpy().reshape(len(codes), columns // size),
        may_be_gptq=bits == 4 and not is_table,
    )


def read_columns(
    graph: ir.Graph,
    node: ir.Node,
    integers: ir.TensorProtocol,
    scale: ir.TensorProtocol,
    joined: Mapping[str, tuple[str, ...]],
) -> WholeNumbers:
    """Return the weights of an encoder's product, whose rows are the columns of a constant (K, N)."""
    value = node.inputs[1]
    name = str(value.name if value is not None else "").partition(COLUMNS)[0]
    unsmoothing = graph.initializers.get(name + UNSMOOTHING)
    constant = None if unsmoothing is None else unsmoothing.const_value
    codes = integers.numpy().T
    return WholeNumbers(
        node=node,
        names=joined.get(name, (name,)),
        bits=8,
        columns=codes.shape[1],
        read_codes=lambda rows: codes[rows].astype(np.int16),
        scale=scale.numpy().reshape(len(codes), 1),
        may_be_gptq=True,
        smoothing=None if constant is None else np.asarray(1 / constant.numpy(), np.float32),
    )


def check_weight(weight: WholeNumbers, meant: Array, rows: Rows) -> str:
    """Return what is wrong with a weight that should be `meant` (N, K); "" if nothing is."""
    if meant.shape != (len(weight.scale), weight.columns):
        return f"is {(len(weight.scale), weight.columns)}, the checkpoint's is {meant.shape}"
    if weight.smoothing is not None and not (weight.smoothing > 0).all():  # NaN is not
        return "has a smoothing that is not above 0"
    if not np.isfinite(meant).all():
        return "holds NaN or infinity in the checkpoint itself"
    faults = Faults()
    for piece in weight.list_pieces():
        find_faults(weight, piece, weight.read_meant(piece, meant), faults)
    if faults.scales:
        return (
            f"has {faults.scales} of {weight.scale.size} scales that do not follow from the checkpoint:"
            f" {faults.first_scale}"
        )
    if not faults.moved:
        return ""
    assert faults.first_row is not None
    total = len(weight.scale) * weight.columns
    x = rows(weight.names[0]) if weight.may_be_gptq and faults.moved > MOVED * total else None
    if x is None:
        return (
            f"is not the checkpoint's: {faults.moved} of {total} numbers are more than half a step off, up to"
            f" {faults.furthest:.3g} steps, first in {weight.describe_row(faults.first_row)}"
        )
    x = x if weight.smoothing is None else x / weight.smoothing
    shares = measure_losses(list_errors(weight, meant), np.asarray(x, np.float32))
    return describe_excess(shares, weight.describe_row)


def find_faults(weight: WholeNumbers, piece: slice, meant: Array, faults: Faults) -> None:
    """Add what is wrong in some rows, which should be `meant` (n, K)."""
    scale = weight.scale[piece]
    blocks = meant.reshape(*scale.shape, -1)
    wrong = find_wrong_scales(weight, scale, blocks)
    if wrong.any():
        row, block = np.argwhere(wrong)[0]
        if not faults.scales:
            usual = find_scales(weight, blocks)[0]
            faults.first_scale = (
                f"block {block} of {weight.describe_row(piece.start + int(row))} has"
                f" {scale[row, block]:.6g}, not {usual[row, block]:.6g}"
            )
        faults.scales += int(wrong.sum())
    codes, off = measure_steps(weight, piece, scale, blocks)
    far = ~(np.abs(off) <= 0.5 + ROUNDED)  # NaN is not
    far &= ~is_clipped(weight, codes, off)
    if far.any():
        if faults.first_row is None:
            faults.first_row = piece.start + int(np.argwhere(far)[0][0])
        faults.moved += int(far.sum())
        faults.furthest = max(faults.furthest, float(np.abs(off[far]).max()))


def measure_steps(
    weight: WholeNumbers, piece: slice, scale: Array, blocks: Array
) -> tuple[npt.NDArray[np.int16], Array]:
    """Return the integers of some rows (n, K), and how many steps the meant numbers are above them."""
    codes = weight.read_codes(piece)
    with np.errstate(all="ignore"):  # a scale may be NaN or 0
        steps = (blocks / scale[..., None]).reshape(codes.shape)
    return codes, steps - codes


def is_clipped(weight: WholeNumbers, codes: npt.NDArray[np.int16], off: Array) -> npt.NDArray[np.bool_]:
    """Tell which integers are the last of their range, with what they stand for beyond."""
    low, top = find_range(weight.bits)
    clipped: npt.NDArray[np.bool_] = ((codes == top) & (off > 0)) | ((codes == low) & (off < 0))
    return clipped


def find_wrong_scales(weight: WholeNumbers, scale: Array, blocks: Array) -> npt.NDArray[np.bool_]:
    """Tell which scales (n, K / b) are none of those that the quantizer chooses from."""
    right = np.zeros(scale.shape, bool)
    for allowed in find_scales(weight, blocks):
        right |= np.abs(scale - allowed) <= SCALE_OFF * np.abs(allowed) + LEAST_SCALE  # NaN is not
    return ~right


def find_scales(weight: WholeNumbers, blocks: Array) -> Sequence[Array]:
    """Return the scales (n, K / b) that a quantizer may choose for blocks (n, K / b, b)."""
    if weight.node.op_type == "MatMulIntegerToFloat":
        return [np.maximum(np.abs(blocks).max(axis=-1), 1e-12) / TOP]
    _, top = find_range(weight.bits)
    largest = find_extremes(blocks)
    if weight.bits == 4:  # the extreme itself becomes -8
        largest = -largest * (top / (top + 1))
    return [largest * np.float32(clip / top) for clip in CLIPS[weight.bits]]


def list_errors(weight: WholeNumbers, meant: Array) -> Iterator[Piece]:
    """Yield the errors of a weight, its steps, and how far what is meant is beyond its integers."""
    low, top = find_range(weight.bits)
    for piece in weight.list_pieces():
        own = weight.read_meant(piece, meant)
        scale = weight.scale[piece]
        blocks = own.reshape(*scale.shape, -1)
        codes, off = measure_steps(weight, piece, scale, blocks)
        steps = np.repeat(np.abs(scale), weight.columns // scale.shape[1], axis=1)
        signed = np.repeat(scale, weight.columns // scale.shape[1], axis=1)
        whole = off + codes
        beyond = np.maximum(np.maximum(whole - top, low - whole), 0)
        yield off * signed, steps, beyond
