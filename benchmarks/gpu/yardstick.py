"""The least that a step needs by the model's shape: bytes to read, operations to do."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planforge.exporter.precisions import PRECISIONS

from ..case import Work

HALF = 16  # bits
UNREAD = ("wpe.", "embed_positions.", "encoder_attn.k_proj", "encoder_attn.v_proj")  # a row, or once a text


def step_bytes(checkpoint: Path, work: Work, precision: str = "fp16") -> int | None:
    """Return the bytes one decoding step reads: all weights, half the cache; None for an encoder.

    Biases are in fp16, and so is the cache unless the precision rounds it. Scales are not counted, nor that a
    table may keep more bits than the rest. A tied embedding counts once, as the output layer reads all of it,
    and of the keys and values of a translation's source their own size, not the weights that made them.
    """
    config = read_config(checkpoint)
    shapes = tensor_shapes(checkpoint)
    if config["model_type"] == "gpt2":
        read = shapes
        width = config["n_layer"] * config["n_embd"]
    elif config["model_type"] == "marian":
        read = {name: s for name, s in shapes.items() if name.startswith(("model.decoder.", "model.shared."))}
        width = config["decoder_layers"] * config["d_model"]
    else:
        return None
    kind = PRECISIONS[precision]
    bits = {2: kind.weight_bits or HALF}  # by the number of axes: of matrices
    kept = [s for name, s in read.items() if not any(part in name for part in UNREAD)]
    weights = sum(math.prod(shape) * bits.get(len(shape), HALF) for shape in kept)
    tokens = sum(len(prompt) + work.new_tokens // 2 for prompt in work.prompts)
    return (weights + 2 * int(width) * tokens * (kind.cache_bits or HALF)) // 8


def encoder_flops(checkpoint: Path, work: Work) -> int | None:
    """Return the operations of BERT's matrix products, multiplications and additions; None for decoders."""
    config = read_config(checkpoint)
    shapes = tensor_shapes(checkpoint)
    if config["model_type"] != "bert":
        return None
    weights = sum(math.prod(s) for name, s in shapes.items() if "encoder.layer." in name and len(s) == 2)
    scores = sum(len(prompt) ** 2 for prompt in work.prompts)
    attention = 2 * scores * config["hidden_size"] * config["num_hidden_layers"]  # of weights and of values
    return int(2 * (weights * sum(map(len, work.prompts)) + attention))


def read_config(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config


def tensor_shapes(checkpoint: Path) -> Mapping[str, list[int]]:
    """Return the shapes in model.safetensors, whose header lists them."""
    with (checkpoint / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
