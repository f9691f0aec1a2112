"""Compares quantized weights with the checkpoint's, within what the quantizer itself may move them.

The scales follow from the checkpoint alone: they are chosen before anything is rounded, with and without
GPTQ. A value that is rounded to the nearest is off by half a step at most. GPTQ moves values further, to
keep products close: each value of a row by what makes up for the errors of those before it, so none has a
bound of its own. Their products have. With H = x^T x, damped, and H = F D F^T, as `passes.gptq` factorizes
it, the errors e of a weight's row lose e^T H e = sum D_k (F^T e)_k^2 in the products with x, and (F^T e)_k is
just what rounding value k left: half a step at most. D_k is at most H_kk. So the products lose at most

    sum H_kk (step_k / 2)^2

which is three times what rounding to the nearest loses. A value beyond the range of its integers is off by
what is beyond as well. That is for the texts that GPTQ was fitted to; on others a row may lose more. In the
int4 of gpt2-demo and llama-demo, rows lose up to 0.21 of the bound on their own texts, and up to 1.03 on
others, program code and random letters, where the middle row of the weight loses at least a twelfth of that.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block, M rows of activations
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...runtime.backends.backend import Array, Arrays
from ..number_formats import SMALLEST_FP8, find_unit
from ..passes.quantized_weight import QuantizedWeight, StoredWeight, cut_rows
from .attributes import blame, describe_node

PIECE_NUMBERS = 2**21  # of a weight that are looked at together; they take a few times so many floats
# Relative: a scale is a quotient in fp32; with a smoothing it is that of products in fp32.
SCALE_OFF = 1e-6
MIN_SCALE = 2.0**-142  # below it fp32 has no digits left; blocks of zeros have so small a one
# Steps beyond half of one: a value has at most 128 of them, and fp32 keeps 24 binary digits of it.
ROUNDED = 128 * 2.0**-22
MOVED = 0.01  # GPTQ moves more values than this share; fewer were moved by somebody else
LIMIT = 4.0  # times the bound: a whole step each instead of half of one
# Beyond the bound itself, a row may lose so many times what the middle row of its weight loses.
OUTSTANDING = 20.0

# Errors, steps, and how many steps are beyond the range of the codes, each (n, K).
Piece = tuple[Array, Array, Array]
Rows = Callable[[str], "Array | None"]  # gives what a weight's product reads of real text (M, K), by its name


@dataclass
class Faults:
    """The faults in a weight's scales and values."""

    scales: int = 0
    all_scales: int = 0
    first_scale: str = ""
    moved: int = 0  # values that are more than half a step off
    furthest: float = 0.0  # in steps
    first_row: int | None = None


def check_quantized_weights(
    stored: Iterable[StoredWeight], tensors: Arrays, rows: Rows, is_ours: bool
) -> Iterator[str]:
    """Yield the faults of each quantized weight of a graph, or "".

    Args:
        stored: as the graph's nodes read them; those that lie in one place of a file are looked at once.
        tensors: the checkpoint's.
        rows: gives what a weight's product reads.
        is_ours: whether all weights must be the checkpoint's; another exporter may have folded some.
    """
    by_place: dict[object, StoredWeight] = {}
    for weight in stored:
        place = (weight.node.op_type, locate(weight.codes), locate(weight.scale))
        by_place.setdefault(place, weight)
    for weight in by_place.values():
        words = f"weight {'+'.join(weight.names)!r} of {describe_node(weight.node)}"
        if not all(name in tensors for name in weight.names):
            yield blame(weight.node, f"{words} is not a tensor of the checkpoint") if is_ours else ""
            continue
        parts = [np.asarray(tensors[name], np.float32) for name in weight.names]
        expected = parts[0] if len(parts) == 1 else np.concatenate(parts)
        fault = check_weight(weight, expected, rows)
        yield blame(weight.node, f"{words} {fault}") if fault else ""


def locate(value: ir.Value) -> object:
    """Return the place of a constant in its file, or the constant itself."""
    tensor = value.const_value
    return (tensor.location, tensor.offset, tensor.length) if isinstance(tensor, ir.ExternalTensor) else value


def check_weight(weight: StoredWeight, expected: Array, rows: Rows) -> str:
    """Return the faults of a weight that should be `expected` (N, K); "" if there are none."""
    if expected.shape != weight.shape:
        return f"is {weight.shape}, the checkpoint's is {expected.shape}"
    smoothing = None if weight.rows is None else weight.rows.smoothing
    if smoothing is not None and not (smoothing > 0).all():  # NaN is not
        return "has a smoothing that is not above 0"
    if not np.isfinite(expected).all():
        return "has NaN or infinity in the checkpoint itself"
    if weight.is_kept:
        return check_kept(weight, expected)
    if fault := check_unit(weight, expected):
        return fault
    faults = Faults()
    for piece, found, own in list_pieces(weight, expected):
        find_faults(weight, piece.start, found, own, faults)
    if faults.scales:
        return (
            f"has {faults.scales} of {faults.all_scales} scales that do not follow from the checkpoint:"
            f" {faults.first_scale}"
        )
    if not faults.moved:
        return ""
    assert faults.first_row is not None
    total = expected.size
    x = rows(weight.names[0]) if weight.may_be_gptq and faults.moved > MOVED * total else None
    if x is None:
        return (
            f"is not the checkpoint's: {faults.moved} of {total} values are more than half a step off, up to"
            f" {faults.furthest:.3g} steps, first in row {faults.first_row}"
        )
    x = x if smoothing is None else x / smoothing
    x = np.asarray(x, np.float32)
    return describe_excess(measure_precision_errors(list_errors(weight, expected), x, weight.format.damping))


def check_kept(weight: StoredWeight, expected: Array) -> str:
    """Return in words how a weight differs from what the checkpoint's codes stand for; "" where it does not.

    Both are the same products of the same numbers, so that each value is equal to the last bit.
    """
    for rows in cut_rows(weight.shape, PIECE_NUMBERS):
        differs = weight.read(rows).dequantize() != expected[rows]
        if differs.any():
            row, column = np.argwhere(differs)[0]
            return (
                f"is not the checkpoint's, whose codes it should keep: {int(differs.sum())} values of rows"
                f" {rows.start} to {rows.stop - 1} differ, first in row {rows.start + row}, column {column}"
            )
    return ""


def check_unit(weight: StoredWeight, expected: Array) -> str:
    """Return in words why all scales' unit does not follow from the checkpoint; "" where it does."""
    if weight.unit is None or weight.unit.const_value is None:
        return ""
    unit = float(weight.unit.const_value.numpy())
    scales = weight.format.list_scales(np.abs(expected).max().reshape(1, 1, 1))
    low = find_unit(scales.min())
    high = find_unit(scales.max())
    return "" if low <= unit <= high else f"has a unit of {unit:g}, which is not from {low:g} to {high:g}"


def list_pieces(weight: StoredWeight, expected: Array) -> Iterator[tuple[slice, QuantizedWeight, Array]]:
    """Yield some stored rows at a time, with the values (n, K / b, b) that they should stand for."""
    smoothing = None if weight.rows is None else weight.rows.smoothing
    for rows in cut_rows(weight.shape, PIECE_NUMBERS):
        found = weight.read(rows)
        own = np.asarray(expected[rows], np.float32)
        own = own if smoothing is None else own * smoothing
        yield rows, found, own.reshape(*found.scale.shape, -1)


def find_faults(
    weight: StoredWeight, first: int, found: QuantizedWeight, blocks: Array, faults: Faults
) -> None:
    """Add the faults of rows from `first` on, which should be `blocks` (n, K / b, b)."""
    allowed = find_scales(weight, blocks)
    wrong = ~is_any(found.scale, allowed)
    if wrong.any() and not faults.scales:
        row, block = np.argwhere(wrong)[0]
        faults.first_scale = (
            f"block {block} of row {first + row} has {found.scale[row, block]:.6g}, not"
            f" {allowed[0][row, block]:.6g}"
        )
    faults.scales += int(wrong.sum())
    faults.all_scales += wrong.size
    format = weight.format
    whole = measure_steps(found, blocks)
    codes = found.codes.astype(np.float32)
    off = (whole - codes) / format.measure_gaps(whole)
    far = ~(np.abs(off) <= 0.5 + ROUNDED)  # NaN is not
    far &= ~((codes == format.top) & (off > 0)) & ~((codes == format.low) & (off < 0))  # beyond the range
    if far.any():
        if faults.first_row is None:
            faults.first_row = first + int(np.argwhere(far)[0][0])
        faults.moved += int(far.sum())
        faults.furthest = max(faults.furthest, float(np.abs(off[far]).max()))


def measure_steps(found: QuantizedWeight, blocks: Array) -> Array:
    """Return the expected values (n, K) of some rows, in steps."""
    with np.errstate(all="ignore"):  # a scale may be NaN or 0
        return np.asarray((blocks / found.scale[..., None]).reshape(found.codes.shape))


def is_any(scale: Array, allowed: Sequence[Array]) -> npt.NDArray[np.bool_]:
    """Tell which scales (n, K / b) are among those that the quantizer chooses from."""
    right = np.zeros(scale.shape, bool)
    for own in allowed:
        right |= np.abs(scale - own) <= SCALE_OFF * np.abs(own) + MIN_SCALE  # NaN is not
    return right


def find_scales(weight: StoredWeight, blocks: Array) -> Sequence[Array]:
    """Return the scales (n, K / b) that a quantizer may choose for blocks (n, K / b, b)."""
    if weight.rows is not None:
        rows = blocks.reshape(len(blocks), -1)
        formats = (weight.format, replace(weight.format, pair_top=None))  # earlier versions had no pairs
        return [format.find_row_scales(rows) for format in formats]
    scales = list(weight.format.list_scales(blocks))
    unit = None if weight.unit is None else weight.unit.const_value
    return scales if unit is None else [np.maximum(scale, unit.numpy() * SMALLEST_FP8) for scale in scales]


def list_errors(weight: StoredWeight, expected: Array) -> Iterator[Piece]:
    """Yield the errors of a weight, its steps, and how far expected values exceed its codes."""
    format = weight.format
    for _, found, blocks in list_pieces(weight, expected):
        signed = np.repeat(found.scale, found.size, axis=1)
        whole = measure_steps(found, blocks)
        codes = found.codes.astype(np.float32)
        gaps = format.measure_gaps(codes)  # what is rounded to a code lies in no wider one
        beyond = np.maximum(np.maximum(whole - format.top, format.low - whole), 0) / gaps
        yield (whole - codes) * signed, np.abs(signed) * gaps, beyond


def measure_precision_errors(pieces: Iterable[Piece], x: Array, damping: float) -> Array:
    """Return the loss of each row (N,) in products with x (M, K), as a share of its bound."""
    power = np.einsum("mk,mk->k", x, x)
    power += damping * power.mean() + np.finfo(np.float32).tiny
    shares = []
    for errors, steps, beyond in pieces:
        lost = np.square(errors @ x.T).sum(axis=1)
        bound = np.square(steps * (0.5 + beyond)) @ power
        shares.append(lost / np.maximum(bound, np.finfo(np.float32).tiny))  # a row of zeros loses nothing
    return np.concatenate(shares)


def describe_excess(shares: Array) -> str:
    """Return in words the rows that lose more than GPTQ can; "" if none does."""
    middle = float(np.median(shares))
    many = shares > min(LIMIT, max(1.0, OUTSTANDING * middle))
    if not many.any():
        return ""
    return (
        f"loses up to {shares.max():.3g} times in products with real text what GPTQ can lose, where its"
        f" middle row loses {middle:.2g}: too much in {int(many.sum())} of {len(shares)} rows, first in"
        f" row {int(np.argmax(many))}"
    )
