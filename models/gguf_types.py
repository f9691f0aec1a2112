"""The types of GGUF's tensors: their values, and codes where integers of 4 or 8 bits hold them exactly.

A tensor has N rows of K columns, in blocks of 32 or 256; formulas are those of llama.cpp's ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .gguf_file import GgufTensor
from .quantized_files import FileCodes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def halves(data: Bytes) -> Floats:
    """Return fp16 numbers (..., n) of their bytes (..., 2 * n) in fp32."""
    return np.asarray(np.ascontiguousarray(data).view(np.float16), np.float32)


def cut(tensor: GgufTensor, size: int) -> Bytes:
    """Return the blocks (N, blocks, bytes) of a tensor."""
    return tensor.data.reshape(len(tensor.data), -1, size)


def nibbles(data: Bytes) -> Bytes:
    """Return the low halves of bytes, then the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def with_fifth_bits(codes: Bytes, bits: Bytes) -> Bytes:
    """Return codes (N, blocks, 32) with a fifth bit each, of 4 bytes (N, blocks, 4)."""
    words = np.ascontiguousarray(bits).view("<u4")
    fifth = (words >> np.arange(32, dtype=np.uint32)) & 1
    return np.asarray(codes | (fifth.astype(np.uint8) << 4))


def make_codes(codes: Bytes, scales: Floats, zero: int, bits: int) -> FileCodes:
    """Return codes (N, blocks, b) with scales (N, blocks), and one zero point for all."""
    rows = len(scales)
    return FileCodes(codes.reshape(rows, -1), scales, np.full(scales.shape, zero, np.uint8), bits)


def read_q4_0(tensor: GgufTensor) -> FileCodes:
    blocks = cut(tensor, 18)
    return make_codes(nibbles(blocks[..., 2:]), halves(blocks[..., :2])[..., 0], 8, 4)


def read_q5_0(tensor: GgufTensor) -> FileCodes:
    blocks = cut(tensor, 22)
    codes = with_fifth_bits(nibbles(blocks[..., 6:]), blocks[..., 2:6])
    return make_codes(codes, halves(blocks[..., :2])[..., 0], 16, 8)


def read_q8_0(tensor: GgufTensor) -> FileCodes:
    blocks = cut(tensor, 34)
    return make_codes(blocks[..., 2:] ^ np.uint8(128), halves(blocks[..., :2])[..., 0], 128, 8)


def read_q6_k(tensor: GgufTensor) -> FileCodes:
    """Return codes of 16 columns a block: 4 bits of each in `low`, 2 in `high`, a scale in int8."""
    blocks = cut(tensor, 210)
    rows, count = blocks.shape[:2]
    low = blocks[..., :128].reshape(rows, count, 2, 64)
    high = blocks[..., 128:192].reshape(rows, count, 2, 32)
    fours = np.stack([low & 15, low >> 4], -2).reshape(rows, count, 2, 4, 32)
    twos = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -2)
    scales = halves(blocks[..., 208:]) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    codes = (fours | (twos << 4)).reshape(rows, -1, 16)
    return make_codes(codes, np.asarray(scales.reshape(rows, -1), np.float32), 32, 8)


def read_q4_1(tensor: GgufTensor) -> Floats:
    blocks = cut(tensor, 20)
    return spread(nibbles(blocks[..., 4:]), halves(blocks[..., :2]), halves(blocks[..., 2:4]))


def read_q5_1(tensor: GgufTensor) -> Floats:
    blocks = cut(tensor, 24)
    codes = with_fifth_bits(nibbles(blocks[..., 8:]), blocks[..., 4:8])
    return spread(codes, halves(blocks[..., :2]), halves(blocks[..., 2:4]))


def spread(codes: Bytes, scales: Floats, offsets: Floats) -> Floats:
    """Return the values (N, K) of codes (N, blocks, b) with scales and offsets (N, blocks, 1)."""
    return np.asarray((codes * scales + offsets).reshape(len(codes), -1), np.float32)


def read_k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales and offsets (N, blocks * 8, 1) of 32 columns each; 12 bytes have 6 bits of each."""
    first, second, third = (blocks[..., 4 + 4 * part : 8 + 4 * part] for part in range(3))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], -1)
    offsets = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], -1)
    rows = len(blocks)
    return (
        (halves(blocks[..., :2]) * scales).reshape(rows, -1, 1),
        (-halves(blocks[..., 2:4]) * offsets).reshape(rows, -1, 1),
    )


def read_q4_k(tensor: GgufTensor) -> Floats:
    blocks = cut(tensor, 144)
    own = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([own & 15, own >> 4], -2).reshape(len(blocks), -1, 32)
    return spread(codes, *read_k_scales(blocks))


def read_q5_k(tensor: GgufTensor) -> Floats:
    blocks = cut(tensor, 176)
    rows, count = blocks.shape[:2]
    own = blocks[..., 48:].reshape(rows, count, 4, 32)
    high = blocks[..., 16:48].reshape(rows, count, 1, 32)
    fifth = (high >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = np.stack([own & 15, own >> 4], -2).reshape(rows, count, 8, 32) | (fifth << 4)
    return spread(codes.reshape(rows, -1, 32), *read_k_scales(blocks))


def read_floats(tensor: GgufTensor) -> Floats:
    data = np.ascontiguousarray(tensor.data)
    if tensor.type == "BF16":
        return np.asarray((data.view("<u2").astype(np.uint32) << 16).view(np.float32))
    return np.asarray(data.view("<f2" if tensor.type == "F16" else "<f4"), np.float32)


READERS: dict[str, Callable[[GgufTensor], FileCodes | Floats]] = {
    "F32": read_floats,
    "F16": read_floats,
    "BF16": read_floats,
    "Q4_0": read_q4_0,
    "Q4_1": read_q4_1,
    "Q5_0": read_q5_0,
    "Q5_1": read_q5_1,
    "Q8_0": read_q8_0,
    "Q4_K": read_q4_k,
    "Q5_K": read_q5_k,
    "Q6_K": read_q6_k,
}


def read_tensor(tensor: GgufTensor) -> FileCodes | Floats:
    """Return a tensor's codes (N, K), where integers of 4 or 8 bits hold it, or its values (N, K)."""
    return READERS[tensor.type](tensor)
