"""Writes convolutions of 3 x 3 as products in Winograd's domain, for which ONNX Runtime has no kernel.

Lavin and Gray, 2015 (arXiv 1509.09308), F(2 x 2, 3 x 3): a tile of 4 x 4 points becomes 2 x 2 results by 16
products where the convolution has 36. The points of a tile are those of one phase each of the picture: the
even or odd rows and columns of it.

N batch, C channels in, K channels out, H height, W width, R = H / 2 and S = W / 2 tiles, rounded up
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .build import Builder, replace_value
from .weights import ParameterRef, add_initializer, make_lazy_tensor

LEAST_CHANNELS = 256  # of both sides; fewer do not make up for the sums around the products
USUAL = {
    "auto_pad": "NOTSET",
    "dilations": [1, 1],
    "group": 1,
    "kernel_shape": [3, 3],
    "pads": [1, 1, 1, 1],
    "strides": [1, 1],
}
END = np.iinfo(np.int64).max
POINTS = range(4)  # of a tile, on each side
ROWS = 1  # the axis of (N, R, S, C)
COLUMNS = 2

Size: TypeAlias = "int | str"  # a number, or the name of one that is known when a graph runs


def multiply_in_winograds_domain(model: ir.Model) -> None:
    """Replace each convolution of 3 x 3 that has many channels.

    Those of an autoencoder are better left: its pictures are large, and tiles take four times their memory.
    """
    op = Builder(model.graph, None, "winograd")
    for node in list(model.graph):
        if is_suited(node):
            op.before = node
            op.metadata = node.metadata_props
            replace_value(node.outputs[0], write_convolution(op, node))
    RemoveUnusedNodesPass()(model)


def is_suited(node: ir.Node) -> bool:
    """Tell whether a node is a convolution that is quicker by Winograd's products."""
    if node.op_type != "Conv" or len(node.inputs) != 3 or node.inputs[1] is None:
        return False
    kernels = node.inputs[1].const_value
    if kernels is None or any(plain(node, name) != value for name, value in USUAL.items()):
        return False
    K, C, *size = kernels.shape.numpy()
    return size == [3, 3] and min(K, C) >= LEAST_CHANNELS


def plain(node: ir.Node, name: str) -> object:
    """Return an attribute's value as Python has it; what is left out has the usual one."""
    attribute = node.attributes.get(name)
    if attribute is None:
        return USUAL[name] if name != "pads" else [0, 0, 0, 0]
    value = attribute.value
    return list(value) if isinstance(value, list | tuple) else value


def write_convolution(op: Builder, conv: ir.Node) -> ir.Value:
    """Return the results (N, K, H, W) of a convolution of (N, C, H, W).

    All values have a shape: ONNX Runtime 1.31 gives a name to each size that it is not told, and opening a
    graph takes time that grows with the square of their number.
    """
    x, kernels, bias = conv.inputs
    assert x is not None
    assert kernels is not None
    assert kernels.shape is not None
    K, C = kernels.shape.numpy()[:2]
    N, R, S = name_sizes(conv)
    size = op("Shape", x, start=2, end=4, shape=[2])
    tiles = split_into_tiles(op, x, size, (N, R, S), C)
    column = None if bias is None else op("Unsqueeze", bias, [1], shape=[K, 1])
    # The product that gets the bias is the one that counts once in each of the four results of a tile.
    products = [
        [multiply(op, tiles[i][j], kernels, (i, j), column if i == j == 1 else None) for j in POINTS]
        for i in POINTS
    ]
    rows = [sum_points(op, [products[i][j] for i in POINTS]) for j in POINTS]
    results = [y for a in range(2) for y in sum_points(op, [rows[j][a] for j in POINTS])]
    joined = op("Concat", *results, axis=0, shape=[4 * K, multiply_sizes(N, R, S)])
    grid = op("Concat", [4 * K], op("Shape", tiles[0][0], start=0, end=3, shape=[3]), axis=0, shape=[4])
    split = op("Reshape", joined, grid, shape=[4 * K, N, R, S])
    batch_first = op("Transpose", split, perm=[1, 0, 2, 3], shape=[N, 4 * K, R, S])
    doubled = [N, K, multiply_sizes(2, R), multiply_sizes(2, S)]
    whole = op("DepthToSpace", batch_first, blocksize=2, mode="DCR", shape=doubled)
    return op("Slice", whole, [0, 0], size, [2, 3])  # of an odd size the last row or column is padding


def name_sizes(conv: ir.Node) -> list[Size]:
    """Return N, R and S of a convolution: numbers, or names that those of the same size share."""
    x = conv.inputs[0]
    assert x is not None
    given = [None] * 4 if x.shape is None else x.shape
    batch, _, height, width = (
        dim if isinstance(dim, int) else getattr(dim, "value", None) or f"{conv.name}.{axis}"
        for axis, dim in enumerate(given)
    )
    return [
        batch,
        *((side + 1) // 2 if isinstance(side, int) else f"({side} + 1)//2" for side in (height, width)),
    ]


def split_into_tiles(
    op: Builder, x: ir.Value, size: ir.Value, tiles: Sequence[Size], C: int
) -> list[list[ir.Value]]:
    """Return each point (N, R, S, C) of the tiles of (N, C, H, W), transformed; `size` is (H, W)."""
    N, R, S = tiles
    more = [add_one(R), add_one(S)]  # phases have a row and a column beyond the last tile's
    ends = op("Add", op("Mod", size, [2, 2], shape=[2]), [1, 1], shape=[2])
    pads = op("Concat", [0, 0, 1, 1, 0, 0], ends, axis=0, shape=[8])
    padded = op("Pad", x, pads, shape=[N, C, *(multiply_sizes(2, side) for side in more)])
    phases = op("SpaceToDepth", padded, blocksize=2, shape=[N, 4 * C, *more])
    channels_last = op("Transpose", phases, perm=[0, 2, 3, 1], shape=[N, *more, 4 * C])
    return [transform_points(op, row, COLUMNS, S) for row in transform_points(op, channels_last, ROWS, R)]


def transform_points(op: Builder, phases: ir.Value, axis: int, length: Size) -> list[ir.Value]:
    """Return the points of `length` tiles along an axis, of which even and odd ones lie side by side."""
    assert phases.shape is not None
    *_, channels = shape = list(phases.shape)
    shape[-1] = channels // 2
    even, odd = op.add("Split", phases, results=2, axis=-1, num_outputs=2, shape=shape).outputs
    shape[axis] = length
    first, third, second, fourth = (
        op("Slice", phase, [start], [end], [axis], shape=shape)
        for phase in (even, odd)
        for start, end in ((0, -1), (1, END))
    )
    return [
        op("Sub", first, third, shape=shape),
        op("Add", second, third, shape=shape),
        op("Sub", third, second, shape=shape),
        op("Sub", second, fourth, shape=shape),
    ]


def multiply(
    op: Builder, points: ir.Value, kernels: ir.Value, place: tuple[int, int], bias: ir.Value | None
) -> ir.Value:
    """Return the products (K, N R S) of kernels with the points (N, R, S, C) of tiles at a place.

    The kernels come first: so ONNX Runtime reads them where they lie in their file, and is as fast. Of what
    comes second it makes a packed copy when it opens a graph, which took 5 s for Stable Diffusion 1.5.
    """
    tensor = kernels.const_value
    assert tensor is not None
    assert points.shape is not None
    K, C = tensor.shape.numpy()[:2]
    stored = ParameterRef(ParameterRef.read(kernels).parameter, point=place)
    name = f"{stored.parameter}.winograd.{place[0]}{place[1]}"
    lazy = make_lazy_tensor(lambda: stored.of(tensor.numpy(), (K, C)), (K, C), np.dtype(np.float32), name)
    constant = add_initializer(op.graph, name, lazy)
    stored.write(constant)
    count = multiply_sizes(*points.shape[:3])
    flat = op("Reshape", points, [-1, C], shape=[count, C])
    return op("Gemm", constant, flat, *([] if bias is None else [bias]), transB=1, shape=[K, count])


def sum_points(op: Builder, points: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Return the two results along an axis of a tile's four products."""
    first, second, third, fourth = points
    shape = first.shape
    return (
        op("Add", first, op("Add", second, third, shape=shape), shape=shape),
        op("Sub", op("Sub", second, third, shape=shape), fourth, shape=shape),
    )


def multiply_sizes(*sizes: object) -> Size:
    """Return the product of numbers and names."""
    if all(isinstance(size, int) for size in sizes):
        return math.prod(sizes)  # type: ignore[arg-type]
    return "*".join(f"({size})" for size in sizes)


def add_one(size: Size) -> Size:
    return size + 1 if isinstance(size, int) else f"{size} + 1"
