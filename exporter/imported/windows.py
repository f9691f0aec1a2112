"""Sliding windows of an imported decoder: measured on its masks, and counted in tokens.

B batch, T tokens of this step, S tokens that they attend to, L the context's length
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...models.masked import MASKED
from ...runtime.backends.backend import Array
from ..errors import ExportError
from ..passes.build import Builder
from .attention import Attention
from .distances import compute_biases

# By layer: how many tokens are seen, the token itself included; None means all.
Windows = Sequence[int | None]


def measure_windows(model: ir.Model, found: Sequence[Attention], length: int) -> list[int | None]:
    """Return each layer's window; None where all tokens of a context of `length` L are seen.

    Raises:
        ExportError: the bias of the scores is not a mask, or hides tokens that no window hides.
    """
    return [measure_window(bias, length) for bias in compute_biases(model, found, length)]


def measure_window(bias: Array, length: int) -> int | None:
    """Return how many tokens the last token of a context sees, by the bias (1, H, 1, L) of its scores."""
    visible = bias > MASKED / 2
    if bias[visible].any():
        raise ExportError("the attention bias is more than a mask, which is not supported")
    seen = int(visible[0, 0, 0].sum())
    if seen == 0 or not visible[..., -seen:].all() or visible.sum() != visible.shape[1] * seen:
        raise ExportError("the attention mask is not a sliding window, the only kind supported")
    return None if seen == length else seen


def count_windows_in_tokens(model: ir.Model, found: Sequence[Attention], windows: Windows) -> None:
    """Replace masks with a window by masks that count a row's tokens.

    A traced mask counts columns, of which some between two tokens may be masked.
    """
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    mask = inputs.get("attention_mask")
    if mask is None or not any(windows):
        return
    op = Builder(graph, graph[0], "windows")
    total = op("Shape", mask, start=1, end=2)  # (1,)
    tokens = op("Shape", inputs["input_ids"], start=1, end=2)
    counted = op("CumSum", mask, np.array(1))  # (B, S)
    own = op("Slice", counted, op("Sub", total, tokens), total, [1])  # (B, T)
    behind = op("Sub", op("Unsqueeze", own, [2]), op("Unsqueeze", counted, [1]))  # (B, T, S)
    counts = op("Cast", op("Unsqueeze", mask, [1]), to=ir.DataType.BOOL)  # (B, 1, S)
    seen = op("And", counts, op("GreaterOrEqual", behind, 0))
    made: dict[int, ir.Value] = {}
    for attention, window in zip(found, windows, strict=True):
        if window is None or len(attention.biases) != 1:
            continue
        if window not in made:
            near = op("And", seen, op("Less", behind, window))
            made[window] = op("Unsqueeze", op("Where", near, 0.0, MASKED), [1])  # (B, 1, T, S)
        for use in list(attention.biases[0].uses()):
            if use.node.op_type == "Add":
                use.node.replace_input_with(use.idx, made[window])
    common.RemoveUnusedNodesPass()(model)
