"""Computes Attention in parts, rounding and showing each, which a single node would not do.

B batch, T new tokens, S cached and new tokens, H heads of queries, D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array
from ...runtime.backends.ort_program import open_plain_session, wrap_ort_errors
from ..passes.build import Builder
from ..passes.fp16_ranges import ATTENTION_PARTS

SCORES, MASKED_SCORES, WEIGHTS = ATTENTION_PARTS
RESULT = "result"
INPUTS = ("q", "k", "v", "mask")
FLOAT = ir.DataType.FLOAT
OPSET = 20  # any that has these operators


class AttentionParts:
    """The parts of Attention for these types of q, k, v and mask; products and softmax run in fp32."""

    def __init__(self, dtypes: Sequence[np.dtype[Any]], scale: float) -> None:
        types = [ir.DataType.from_numpy(dtype) for dtype in dtypes]
        inputs = [
            ir.Value(name=name, type=ir.TensorType(kind)) for name, kind in zip(INPUTS, types, strict=True)
        ]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name="attention")
        build = Builder(graph, None, "part")

        def round_result(part: str, result: ir.Value) -> ir.Value:
            """Make a result an output, in the type of q, and return it in fp32 with that rounding."""
            rounded = build("Cast", result, to=int(types[0]))
            rounded.name = part
            graph.outputs.append(rounded)
            return build("Cast", rounded, to=int(FLOAT))

        q, k, v, mask = (build("Cast", value, to=int(FLOAT)) for value in inputs)
        product = build("MatMul", q, build("Transpose", k, perm=[0, 1, 3, 2]))
        scores = round_result(SCORES, build("Mul", product, np.float32(scale)))
        scores = round_result(MASKED_SCORES, build("Add", scores, mask))
        # The softmax stays in fp32, as the fp16 pass has it.
        weights = round_result(WEIGHTS, build("Softmax", scores, axis=-1))
        round_result(RESULT, build("MatMul", weights, v))
        model = ir.to_proto(ir.Model(graph, ir_version=10))
        # The scores of a long context take hundreds of megabytes.
        serialized = model.SerializeToString()
        self.session: Any = open_plain_session(serialized, optimized=False, keeps_memory=False)

    def compute(self, *arrays: Array) -> dict[str, Array]:
        """Return the parts and the result, by their names.

        Args:
            arrays: q (B, H, T, D), k and v (B, H, S, D), and what is added to the scores (B, H, T, S).
        """
        names = [*ATTENTION_PARTS, RESULT]
        with wrap_ort_errors("Attention cannot be computed in parts"):
            results = self.session.run(names, dict(zip(INPUTS, arrays, strict=True)))
        return dict(zip(names, results, strict=True))
