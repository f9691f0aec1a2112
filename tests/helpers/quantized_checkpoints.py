"""Writes checkpoints with quantized weights, as the tools of each format do, by their formulas in numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file, save_file

from .random_checkpoints import GROUPED, write_tokenizer

Array = npt.NDArray[Any]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Codes:
    """A weight (N, K) as scale * (code - zero), with blocks of GROUP columns, or those of `groups` (K,)."""

    codes: Array
    scales: Array  # (N, K / GROUP)
    zeros: Array
    groups: Array  # (K,): the block of each column

    @property
    def values(self) -> Array:
        scales = self.scales.astype(np.float32)[:, self.groups]
        return np.asarray((self.codes.astype(np.float32) - self.zeros[:, self.groups]) * scales)


def quantize(weight: Array, bits: int, *, symmetric: bool, groups: Array | None = None) -> Codes:
    """Round a weight (N, K) to codes; scales are in fp16."""
    top = 2**bits - 1
    middle = 1 << (bits - 1)
    width = weight.shape[1]
    groups = np.arange(width) // GROUP if groups is None else groups
    scales = np.empty((len(weight), width // GROUP), np.float16)
    zeros = np.full(scales.shape, middle, np.int64)
    for group in range(width // GROUP):
        block = weight[:, groups == group]
        if symmetric:
            scales[:, group] = np.maximum(np.abs(block).max(1), 1e-4) / (middle - 1)
        else:
            scales[:, group] = np.maximum(block.max(1) - block.min(1), 1e-4) / top
            zeros[:, group] = np.clip(np.rint(-block.min(1) / scales[:, group].astype(np.float32)), 0, top)
    steps = weight / scales.astype(np.float32)[:, groups]
    codes = np.clip(np.rint(steps) + zeros[:, groups], 0, top).astype(np.int64)
    return Codes(codes, scales, zeros, groups)


def pack(codes: Array, bits: int) -> Array:
    """Return words of int32 (..., K * bits / 32), low bits first along the last axis."""
    each = 32 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    words = padded.astype(np.uint32).reshape(*padded.shape[:-1], -1, each)
    shifted = words << np.arange(0, 32, bits, dtype=np.uint32)
    return np.asarray(np.bitwise_or.reduce(shifted, axis=-1), np.uint32).view(np.int32)


def write_gptq(weight: Codes, bits: int, version: int) -> dict[str, Array]:
    stored = (weight.zeros - (version == 1)) & (2**bits - 1)
    return {
        "qweight": pack(weight.codes, bits).T,
        "qzeros": pack(stored.T, bits),
        "scales": weight.scales.T,
        "g_idx": weight.groups.astype(np.int32),
    }


def write_awq(weight: Codes) -> dict[str, Array]:
    def words(codes: Array) -> Array:
        return pack(codes.T.reshape(codes.shape[1], -1, 8)[..., AWQ_ORDER].reshape(codes.T.shape), 4)

    return {"qweight": words(weight.codes), "qzeros": words(weight.zeros), "scales": weight.scales.T}


def write_packed(weight: Codes, bits: int, symmetric: bool) -> dict[str, Array]:
    parts: dict[str, Array] = {
        "weight_packed": pack(weight.codes, bits),
        "weight_scale": weight.scales,
        "weight_shape": np.array(weight.codes.shape),
    }
    return parts if symmetric else {**parts, "weight_zero_point": pack(weight.zeros.T, bits).T}


def write_ordered(weight: Codes) -> dict[str, Array]:
    """Return a packed weight whose columns have groups of any order, as act-order leaves them."""
    return {**write_packed(weight, 4, symmetric=False), "weight_g_idx": weight.groups.astype(np.int32)}


def write_bytes(weight: Codes) -> dict[str, Array]:
    """Return int-quantized's parts: a byte with its sign for each number."""
    middle = np.repeat(weight.zeros, GROUP, axis=1)
    return {"weight": (weight.codes - middle).astype(np.int8), "weight_scale": weight.scales}


def compress(bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}},
    }


@dataclass
class Format:
    """A format: what config.json says, how a weight is rounded, and the tensors that stand for it."""

    settings: dict[str, Any]
    round: Callable[[Array], Codes]
    write: Callable[[Codes], dict[str, Array]]
    bits: int


def make_gptq(bits: int, version: int = 1, *, symmetric: bool = False, act_order: bool = False) -> Format:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order}
    settings |= {"sym": symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}

    def round(weight: Array) -> Codes:
        return shuffle_groups(weight) if act_order else quantize(weight, bits, symmetric=symmetric)

    return Format(settings, round, lambda weight: write_gptq(weight, bits, version), bits)


def shuffle_groups(weight: Array) -> Codes:
    """Round a weight to 4 bits, with blocks of columns that do not lie side by side."""
    groups = np.random.default_rng(weight.shape[1]).permutation(np.arange(weight.shape[1]) // GROUP)
    return quantize(weight, 4, symmetric=False, groups=groups)


def make_packed(bits: int, *, symmetric: bool) -> Format:
    settings = {**compress(bits), "format": "pack-quantized"}
    return Format(
        settings,
        lambda weight: quantize(weight, bits, symmetric=symmetric),
        lambda weight: write_packed(weight, bits, symmetric),
        bits,
    )


AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
}
FORMATS = {
    "gptq 4": make_gptq(4),
    "gptq 8": make_gptq(8),
    "gptq v2": make_gptq(4, 2),
    "gptq symmetric": make_gptq(4, symmetric=True),
    "gptq act-order": make_gptq(4, act_order=True),
    "awq": Format(AWQ, lambda weight: quantize(weight, 4, symmetric=False), write_awq, 4),
    "compressed 4": make_packed(4, symmetric=True),
    "compressed 4 with zero points": make_packed(4, symmetric=False),
    "compressed 8": make_packed(8, symmetric=True),
    "compressed act-order": Format(
        {**compress(4), "format": "pack-quantized"}, shuffle_groups, write_ordered, 4
    ),
    "compressed bytes": Format(
        {**compress(8), "format": "int-quantized"},
        lambda weight: quantize(weight, 8, symmetric=True),
        write_bytes,
        8,
    ),
}


def write_llama(folder: Path) -> None:
    """Write a checkpoint in floats, whose likeliest tokens differ clearly."""
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=False))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder)
    write_tokenizer("gpt_neox", folder)


def write_quantized(name: str, folder: Path) -> dict[str, Codes]:
    """Write a Llama quantized in a format, and return its codes by the names of modules."""
    return write_in_format(FORMATS[name], folder)


def write_in_format(format: Format, folder: Path) -> dict[str, Codes]:
    write_llama(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    found = {}
    for published in list(tensors):
        module = published.removesuffix(".weight")
        if not module.endswith(LINEARS):
            continue
        found[module] = format.round(tensors.pop(published).numpy())
        for part, array in format.write(found[module]).items():
            tensors[f"{module}.{part}"] = torch.from_numpy(np.ascontiguousarray(array))
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = format.settings
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return found


def write_floats(codes: dict[str, Codes], folder: Path) -> None:
    """Write the checkpoint in floats that codes stand for: what transformers would dequantize."""
    write_llama(folder)
    tensors = load_file(folder / "model.safetensors")
    for module, own in codes.items():
        tensors[f"{module}.weight"] = torch.from_numpy(own.values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_fp8(folder: Path, block: int | None) -> dict[str, Array]:
    """Write a Llama in fp8, with scales of blocks, or of rows; return the values by the names of modules."""
    write_llama(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    values = {}
    for published in list(tensors):
        module = published.removesuffix(".weight")
        if not module.endswith(LINEARS):
            continue
        weight = tensors[published].numpy()
        rows, columns = (block, block) if block else (1, weight.shape[1])
        shape = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        scales = np.random.default_rng(0).uniform(1e-3, 2e-3, shape).astype(np.float32)
        spread = scales.repeat(rows, 0).repeat(columns, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / spread).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        values[module] = codes.astype(np.float32) * spread
        tensors[published] = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
        tensors[f"{module}.{'weight_scale_inv' if block else 'weight_scale'}"] = torch.from_numpy(scales)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = (
        {"quant_method": "fp8", "weight_block_size": [block, block]}
        if block
        else {**compress(8, "float"), "format": "float-quantized"}
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return values
