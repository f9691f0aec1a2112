"""Reads weights that others quantized: the codes, scales and zero points of a checkpoint's files, exactly.

A weight (N, K) is scale * (code - zero), with a scale and a zero point for each block of b columns of a row.

GPTQ (Frantar and others, 2022), as AutoGPTQ and GPTQModel write it: qweight int32 (K * bits / 32, N), low
bits first along K; qzeros int32 (K / b, N * bits / 32); scales (K / b, N); g_idx (K,), each column's block
AWQ (Lin and others, 2023), its "gemm" layout: the same turned, (K, N / 8), eight columns of N in each word in
the order 0, 2, 4, 6, 1, 3, 5, 7
compressed-tensors (llm-compressor), "pack-quantized": weight_packed int32 (N, K * bits / 32), of codes plus
2^(bits - 1); "int-quantized": weight int8 (N, K)
fp8, with a scale for a tensor, a row, or 128 x 128 values: floats, which no integer code holds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Json = Mapping[str, Any]
Integers = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # which column of eight each place in a word holds
BITS = (4, 8)


@dataclass(frozen=True)
class FileCodes:
    """A weight (N, K) as its file has it.

    Attributes:
        codes: (N, K), from 0.
        scales: (N, K / b).
        zeros: (N, K / b), from 0.
        bits: of a code, 4 or 8.
        order: where the columns lie in the weight (K,), if blocks are not of neighbours; None if they are.
    """

    codes: Integers
    scales: Floats
    zeros: Integers
    bits: int
    order: npt.NDArray[np.int64] | None = None

    def dequantize(self) -> Floats:
        """Return the weight (N, K)."""
        blocks = self.codes.reshape(*self.scales.shape, -1).astype(np.float32)
        blocks -= self.zeros[..., None].astype(np.float32)
        blocks *= self.scales[..., None]
        values = blocks.reshape(self.codes.shape)
        if self.order is None:
            return values
        sorted_back = np.empty_like(values)
        sorted_back[:, self.order] = values
        return sorted_back


def unpack(words: npt.NDArray[np.int32], bits: int) -> Integers:
    """Return the codes (..., W * 32 / bits) of words (..., W), low bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    found = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return np.asarray(found.reshape(*words.shape[:-1], -1), np.uint8)


def to_floats(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(tensor.to(torch.float32).numpy())


def turn(array: npt.NDArray[Any]) -> Any:
    return np.ascontiguousarray(array.T)


def read_gptq(parts: Mapping[str, Tensor], bits: int, adds_one: bool, is_symmetric: bool) -> FileCodes:
    """Return a weight of GPTQ.

    `adds_one` says that qzeros hold the zero points less 1, which not every file says rightly. Those of
    symmetric codes are all the middle, which tells.
    """
    codes = unpack(turn(parts["qweight"].numpy()), bits)  # (N, K)
    scales = turn(to_floats(parts["scales"]))
    zeros = turn(unpack(parts["qzeros"].numpy(), bits))
    if is_symmetric:
        middle = 1 << (bits - 1)
        stored = set(np.unique(zeros).tolist())
        if stored not in ({middle}, {middle - 1}):
            raise ValueError(
                f"codes are symmetric by config.json (sym), and zero points are {sorted(stored)[:4]}"
            )
        adds_one = stored == {middle - 1}
    if adds_one:
        zeros = (zeros + np.uint8(1)) & np.uint8(2**bits - 1)  # of 8 bits 255 becomes 0, as AutoGPTQ has it
    count = scales.shape[1]
    width = codes.shape[1]
    if bits == 4:  # in 8 bits one is too little to tell
        check_zeros(codes, zeros)
    usual = np.arange(width) // (width // count)
    blocks = parts["g_idx"].numpy().astype(np.int64) if "g_idx" in parts else usual
    if np.array_equal(blocks, usual):
        return FileCodes(codes, scales, zeros, bits)
    order = np.argsort(blocks, kind="stable")
    if not np.array_equal(blocks[order], usual):
        raise ValueError(f"g_idx gives blocks of different sizes, from {np.bincount(blocks).min()} columns")
    return FileCodes(codes[:, order], scales, zeros, bits, order)


def check_zeros(codes: Integers, zeros: Integers) -> None:
    """Refuse zero points beside the middle of a weight's codes: the file stores them in another way."""
    off = float(codes.mean(dtype=np.float64) - zeros.mean(dtype=np.float64))
    if abs(off) > 0.5:
        raise ValueError(
            f"codes lie {abs(off):.1f} from their zero points on average, and those of a model lie around"
            " them: checkpoint_format (gptq stores zero points less 1, gptq_v2 as they are) does not say how"
            " they are stored; correct it"
        )


def read_awq(parts: Mapping[str, Tensor]) -> FileCodes:
    """Return a weight of AWQ's gemm layout."""

    def spread(words: Tensor) -> Integers:
        found = unpack(words.numpy(), 4)  # (., N), eight by eight in the words' order
        places = np.argsort(AWQ_ORDER)
        in_order = found.reshape(len(found), -1, 8)[..., places]
        return np.ascontiguousarray(in_order.reshape(len(found), -1).T)

    return FileCodes(spread(parts["qweight"]), turn(to_floats(parts["scales"])), spread(parts["qzeros"]), 4)


def read_packed(parts: Mapping[str, Tensor], bits: int) -> FileCodes:
    """Return a weight of compressed-tensors' pack-quantized."""
    shape = tuple(int(n) for n in parts["weight_shape"])
    codes = unpack(np.ascontiguousarray(parts["weight_packed"].numpy()), bits)[:, : shape[1]]
    scales = to_floats(parts["weight_scale"])
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    if "weight_zero_point" in parts:
        zeros = turn(unpack(turn(parts["weight_zero_point"].numpy()), bits))[: shape[0]]
    order = None
    if "weight_g_idx" in parts:
        order = np.argsort(parts["weight_g_idx"].numpy(), kind="stable")
        codes = codes[:, order]
    return FileCodes(np.ascontiguousarray(codes), scales, np.ascontiguousarray(zeros), bits, order)


def read_int8(parts: Mapping[str, Tensor]) -> FileCodes:
    """Return a weight of compressed-tensors' int-quantized in int8, with a scale of all, a row or a block."""
    codes = (parts["weight"].numpy().astype(np.int16) + 128).astype(np.uint8)
    scales = to_floats(parts["weight_scale"])
    scales = np.array(np.broadcast_to(scales.reshape(-1, scales.shape[-1]), (len(codes), scales.shape[-1])))
    zeros = np.full(scales.shape, 128, np.int16)
    if "weight_zero_point" in parts:
        zeros += parts["weight_zero_point"].numpy().astype(np.int16).reshape(-1, scales.shape[-1])
    return FileCodes(codes, scales, zeros.astype(np.uint8), 8)


def read_fp8(parts: Mapping[str, Tensor], block: Sequence[int] | None = None) -> Floats:
    """Return a weight (N, K) of fp8 with its scales, of the whole, of rows, or of blocks of it.

    `block` has a block's rows and columns; without it they follow from how many there are.
    """
    weight = to_floats(parts["weight"])
    scales = to_floats(parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"])
    if scales.size == 1:
        return weight * scales.reshape(())
    scales = scales.reshape(len(scales), -1)
    for axis, length in enumerate(weight.shape):
        count = scales.shape[axis]
        size = block[axis] if block is not None and 1 < count < length else -(-length // count)
        if -(-length // size) != count or (block is None and length % size):
            raise ValueError(f"{count} scales do not fit the {length} numbers of an axis")
        scales = scales.repeat(size, axis).take(range(length), axis)
    return weight * scales


@dataclass(frozen=True)
class Method:
    """How a checkpoint's weights are quantized, by its config.json.

    Attributes:
        name: the method.
        endings: of the tensors of one weight, the first of which every quantized one has.
        read: makes a weight of them, given by these endings.
    """

    name: str
    endings: tuple[str, ...]
    read: Callable[[Mapping[str, Tensor]], FileCodes | Floats]


GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_PARTS = ("qweight", "qzeros", "scales")
PACKED_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
INT8_PARTS = ("weight_scale", "weight", "weight_zero_point")
FP8_PARTS = ("weight_scale_inv", "weight")
SCALED_PARTS = ("weight_scale", "weight")
# What tools write beside a weight that no product reads: scales of activations, which are not rounded here.
UNREAD = ("input_scale", "output_scale", "k_scale", "v_scale", "activation_scale")
WAYS = {
    "bitsandbytes": "load it with transformers, model.dequantize(), save_pretrained(FOLDER), and export that",
    "mxfp4": "export the original model in bf16",
}
OTHERWISE = "export the original model, which this one was made from, with --precision int8 or int4"


def find_method(folder: Any, settings: Json) -> Method:
    """Return how the weights of a checkpoint are quantized.

    Args:
        folder: of the checkpoint, for messages.
        settings: `quantization_config` of its config.json.

    Raises:
        ValueError: a method, or settings of it, that are not read here; says what to do instead.
    """
    name = str(settings.get("quant_method", ""))
    refused = f"{folder}: the weights are quantized by {name or 'an unnamed method'}"
    way = WAYS.get(name, OTHERWISE)
    if name == "gptq":
        bits = settings.get("bits")
        if bits not in BITS:
            raise ValueError(f"{refused} in {bits} bits, and only 4 and 8 are read; {way}")
        # A name that begins with "-:" leaves modules in floats.
        if any(not str(module).startswith("-:") for module in settings.get("dynamic") or ()):
            raise ValueError(f"{refused} with mixed bits (dynamic), which is not read; {way}")
        form = settings.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise ValueError(f"{refused} in the format {form!r}, and only gptq and gptq_v2 are read; {way}")
        return Method(
            "GPTQ",
            GPTQ_PARTS,
            partial(read_gptq, bits=bits, adds_one=form == "gptq", is_symmetric=settings.get("sym") is True),
        )
    if name == "awq":
        version, bits = (
            str(settings.get("version", "gemm")).lower(),
            settings.get("bits", settings.get("w_bit")),
        )
        if version != "gemm" or bits != 4:
            raise ValueError(f"{refused} as {version} in {bits} bits, and only gemm in 4 is read; {way}")
        return Method("AWQ", AWQ_PARTS, read_awq)
    if name == "compressed-tensors":
        return find_compressed(refused, settings, way)
    if name in ("fp8", "fbgemm_fp8"):
        read = partial(read_fp8, block=read_block(settings.get("weight_block_size")))
        return Method("fp8", FP8_PARTS if name == "fp8" else SCALED_PARTS, read)
    raise ValueError(f"{refused}, which is not read: GPTQ, AWQ, compressed-tensors and fp8 are; {way}")


def read_block(given: Any) -> tuple[int, int] | None:
    """Return a block's rows and columns, as a config.json has them; None where it has none."""
    if not isinstance(given, list | tuple) or len(given) != 2:
        return None
    rows, columns = given
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise ValueError(f"a block of {given!r} is no pair of whole numbers")
    return rows, columns


def find_compressed(refused: str, settings: Json, way: str) -> Method:
    """Return how compressed-tensors quantized the weights; all groups of layers alike."""
    groups = settings.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") or {} for group in groups if isinstance(group, dict)]
    kinds = {(w.get("num_bits"), w.get("type", "int")) for w in weights}
    form = str(settings.get("format", ""))
    if len(kinds) != 1:
        raise ValueError(f"{refused} with mixed bits {sorted(map(str, kinds))}, which is not read; {way}")
    (bits, kind) = kinds.pop()
    inputs = [group.get("input_activations") or {} for group in groups]
    if any(kind == "int" and given for given in inputs) or any(
        given and not given.get("dynamic") for given in inputs
    ):
        raise ValueError(f"{refused} with activations that are rounded too, which is not read; {way}")
    if form == "pack-quantized" and kind == "int" and bits in BITS:
        return Method("compressed-tensors", PACKED_PARTS, partial(read_packed, bits=bits))
    if form == "int-quantized" and bits == 8:
        return Method("compressed-tensors", INT8_PARTS, read_int8)
    if form in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        block = read_block(weights[0].get("block_structure"))
        return Method("fp8", SCALED_PARTS, partial(read_fp8, block=block))
    raise ValueError(f"{refused} as {form} with {bits} bits of {kind}, which is not read; {way}")
