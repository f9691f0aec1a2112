"""Rules about attention masks whose numbers fp16 cannot represent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..targets import Target
from .model import FORMS, LintModel, find_input, read_constant, type_of
from .rule import Hit, make_rule

HALF_MAX = float(np.finfo(np.float16).max)  # 65504
ROOM = 4096.0  # what a score may add to a mask before their sum is beyond fp16
DEPTH = 16  # nodes between a mask's number and the softmax
# What a mask is made with. A MatMul makes scores, and ends the way back.
MADE_WITH = frozenset({*FORMS, "Add", "Concat", "ConstantOfShape", "Gather", "Mul", "Slice", "Sub", "Where"})


@dataclass(frozen=True)
class Step:
    """A value on the way from a softmax to a mask's number."""

    value: ir.Value
    half: bool  # whether it, or what is computed of it on the way, is in fp16
    added: bool  # whether it is added to in fp16
    depth: int  # nodes to the softmax
    # 1, -1 where it is subtracted, 0 where it is multiplied by what nobody knows: a huge factor makes a
    # mask of minus itself, else it masks nothing
    sign: int = 1


@make_rule(
    "a mask's number that is -inf in fp16, or becomes so when it is added to a score",
    fix="mask with -30000: small enough for any softmax, and far from the end of fp16",
    severity="wrong",
    source="https://docs.nvidia.com/cuda/floating-point/index.html and computed in fp16",
)
def check_mask_outside_fp16(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("Softmax", "LogSoftmax", "Attention"):
        is_attention = node.op_type == "Attention"
        start = find_input(node, 3 if is_attention else 0)
        if start is not None:
            yield from judge(node, start, is_attention and is_half(find_input(node, 0)), target)


def judge(node: ir.Node, start: ir.Value, added: bool, target: Target) -> Iterator[Hit]:
    for step, number in find_constants(start, added):
        if number == -math.inf:
            if not is_guarded(node):
                yield Hit("a mask of -inf: a row that sees nothing becomes NaN", node, severity="warning")
        elif step.half and number < -HALF_MAX:
            yield Hit(f"a mask of {number:.6g} is -inf in fp16: a row that sees nothing becomes NaN", node)
        elif step.half and step.added and number < ROOM - HALF_MAX:
            what = f"a mask of {number:.6g} is added to scores in fp16, which ends at -65504: -inf, then NaN"
            yield Hit(what, node)
        elif not step.half and number < -HALF_MAX and target.older_than(11):  # which has no flag
            what = f"a mask of {number:.6g} is -inf if the builder's FP16 flag is set: NaN"
            yield Hit(what, node, severity="warning")


def find_constants(start: ir.Value, added: bool) -> Iterator[tuple[Step, float]]:
    """Yield the lowest number that each constant brings into a softmax's input."""
    waiting = [Step(start, is_half(start), added, 0)]
    seen = set()
    while waiting:
        step = waiting.pop()
        if id(step.value) in seen:
            continue
        seen.add(id(step.value))
        found = read_constant(step.value)
        if found is not None and found.size and found.dtype.kind in "fV":
            yield step, find_lowest(np.asarray(found, np.float64), step.sign)
            continue
        node = step.value.producer()
        if node is None or node.op_type not in MADE_WITH or step.depth == DEPTH:
            continue
        sums = node.op_type in ("Add", "Sub") and is_half(step.value)
        inputs = node.inputs[:1] if node.op_type in FORMS else node.inputs
        for index, value in enumerate(inputs):
            if value is not None and type_of(value) != ir.DataType.BOOL:
                half = step.half or is_half(value)
                sign = 0 if node.op_type == "Mul" else step.sign
                sign = -sign if node.op_type == "Sub" and index == 1 else sign
                waiting.append(Step(value, half, step.added or sums, step.depth + 1, sign))


def find_lowest(array: np.ndarray, sign: int) -> float:
    """Return the lowest number of a constant, times `sign`; if the sign is unknown, the worse one."""
    signed = sign * array if sign else -np.abs(array)
    return float(signed.min())


def is_half(value: ir.Value | None) -> bool:
    return type_of(value) == ir.DataType.FLOAT16


def is_guarded(node: ir.Node) -> bool:
    """Tell whether a graph looks for NaN behind a softmax, and replaces it."""
    return any(user.op_type == "IsNaN" for value in node.outputs for user, _ in value.uses())
