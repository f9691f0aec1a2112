"""The artifact of a graph that picks its candidates."""

from __future__ import annotations

from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec


def artifact_of(vocabulary: int) -> Artifact:
    logits = TensorSpec("logits", "logits", "float32", (Axis("rows", 1, 1, 9), vocabulary))
    return Artifact("decoder", "inplace", "fp16", 18, "decoder.onnx", (), "right", (), (logits,))
