"""The versions of TensorRT that graphs are exported and checked for; a new version is one more row."""

from __future__ import annotations

OPERATORS = "https://github.com/onnx/onnx-tensorrt/blob/{}/docs/operators.md"
CHANGELOG = "https://github.com/NVIDIA/TensorRT/blob/main/CHANGELOG.md"
OPSETS = "https://docs.nvidia.com/deeplearning/tensorrt/latest/reference/onnx-opset-guide.html"

Version = tuple[int, int]

# The lowest and highest opset, and where they are documented.
# ONNX 1.17, which TensorRT took up in 10.6, ends at opset 22; what came between is not documented.
TENSORRT_VERSIONS: dict[Version, tuple[tuple[int, int], str]] = {
    (8, 5): ((7, 17), OPERATORS.format("8.5-GA")),
    (8, 6): ((7, 17), OPERATORS.format("8.6-GA")),
    (10, 0): ((9, 20), OPERATORS.format("10.0-GA")),
    (10, 3): ((9, 20), OPERATORS.format("10.1-GA")),
    (10, 9): ((9, 22), CHANGELOG),
    (10, 13): ((9, 22), CHANGELOG),
    (10, 15): ((9, 24), OPERATORS.format("main")),
    (10, 16): ((9, 24), OPERATORS.format("main")),
    (11, 2): ((9, 25), OPSETS),
}
INPLACE_SINCE: Version = (10, 15)  # TensorScatter and Attention came with it
TYPED_SINCE: Version = (10, 0)  # networks whose types are the graph's, as quantized weights need them


def find_first_version(opset: int) -> Version:
    """Return the first TensorRT for which quantized weights of an opset's form are documented."""
    rows = TENSORRT_VERSIONS.items()
    return min(version for version, ((_, last), _) in rows if version >= TYPED_SINCE and last >= opset)
