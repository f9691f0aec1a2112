"""Computes the lengths of axes that are named by how they follow from others, as "past + tokens"."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def compute_length(name: int | str | None, lengths: Mapping[str, int]) -> int | None:
    """Return the length of an axis whose name is an expression of others; None if it is no such."""
    if not isinstance(name, str):
        return None
    try:
        return compute_node(ast.parse(name, mode="eval").body, lengths)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
        return None


def compute_node(node: ast.expr, lengths: Mapping[str, int]) -> int:
    """Return the value of a part of a name; raise KeyError if it is something else."""
    if isinstance(node, ast.Name):
        return lengths[node.id]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](compute_node(node.left, lengths), compute_node(node.right, lengths))
    raise KeyError(type(node).__name__)
