"""Adds outputs for the likeliest tokens to a decoder's graph, so that only they leave the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.bundle.artifact import Artifact
from ..errors import BuildError

if TYPE_CHECKING:
    from onnx import ModelProto

MOST = 3840  # the largest K of TensorRT's TopK

# The largest is subtracted before the exponentials, so that none overflows. 6 is int32.
PICK = """candidates (float[rows, tokens] {logits})
  => (float[rows, {count}] candidate_logits, int32[rows, {count}] candidate_ids, float[rows, 1] log_sum)
  <int64[1] candidate_count = {{{count}}}, int64[1] candidate_zero = {{0}}, int64[1] candidate_one = {{1}},
   int64[1] candidate_axis = {{-1}}, int64[rows, {count}] candidate_places, float[rows, 1] candidate_largest,
   float[rows, tokens] candidate_below, float[rows, tokens] candidate_parts, float[rows, 1] candidate_sum,
   float[rows, 1] candidate_log>
{{
    candidate_logits, candidate_places = TopK <axis = -1> ({logits}, candidate_count)
    candidate_ids = Cast <to = 6> (candidate_places)
    candidate_largest = Slice (candidate_logits, candidate_zero, candidate_one, candidate_axis)
    candidate_below = Sub ({logits}, candidate_largest)
    candidate_parts = Exp (candidate_below)
    candidate_sum = ReduceSum (candidate_parts, candidate_axis)
    candidate_log = Log (candidate_sum)
    log_sum = Add (candidate_log, candidate_largest)
}}"""


def check_candidates(artifact: Artifact, count: int) -> None:
    """Refuse a number of candidates that the graph or TensorRT does not support."""
    vocabulary = artifact.output("logits").axes[-1]
    most = min(MOST, vocabulary) if isinstance(vocabulary, int) else MOST
    if not 1 <= count <= most:
        raise BuildError(
            f"--top-k {count} must be 1 to {most}: the model has {vocabulary} tokens, and TensorRT picks"
            f" {MOST} at most"
        )


def add_candidates(model: ModelProto, artifact: Artifact, count: int) -> None:
    """Add the outputs of `artifact.add_candidates(count)` to the graph that it describes."""
    from onnx import parser

    picking = parser.parse_graph(PICK.format(logits=artifact.output("logits").name, count=count))
    for node in picking.node:
        node.name = node.output[0]
    model.graph.node.extend(picking.node)
    model.graph.initializer.extend(picking.initializer)
    model.graph.value_info.extend(picking.value_info)
    model.graph.output.extend(picking.output)
