"""Writes the checkpoint that a GGUF file holds as a folder in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from .dequantize import CODES, Dequantized, keep
from .derived_folder import write_shards
from .gguf_file import GgufFile, read_gguf
from .gguf_names import ARCHITECTURES, FACTORS, read_config
from .gguf_tokenizer import make_settings, make_tokenizer
from .gguf_types import read_tensor
from .quantized_files import FileCodes

FLOATS = ("F32", "F16", "BF16")


def write_gguf_checkpoint(path: Path, out: Path) -> Dequantized:
    """Write a GGUF file's config, tokenizer, weights in floats, and the codes that are kept.

    Raises:
        ValueError: the file is cut or damaged, or of an architecture, a type or a vocabulary that is not
            read; names it, and says what to do.
    """
    try:
        file = read_gguf(path)
        config = read_config(file)
        tokenizer: Any = make_tokenizer(file)
    except (TypeError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{path} has metadata of another form than llama.cpp writes ({type(error).__name__}: {error})"
        ) from error
    done = Dequantized("llama.cpp")
    codes: dict[str, Tensor] = {}
    tokenizer.save(str(out / "tokenizer.json"))
    write_shards(list_weights(file, config, codes, done), out)
    if codes:
        save_file(codes, out / CODES, metadata={"format": "pt"})
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    if (turn := file.settings.get("tokenizer.ggml.eot_token_id")) is not None:
        generation["eos_token_id"] = sorted({generation.get("eos_token_id", turn), turn})
    for name, value in (
        ("config.json", config),
        ("tokenizer_config.json", make_settings(file)),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(value, indent=2), encoding="utf-8")
    return done


def list_weights(
    file: GgufFile, config: dict[str, Any], codes: dict[str, Tensor], done: Dequantized
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by transformers' names, and note the codes of those that are quantized."""
    architecture = ARCHITECTURES[file.architecture]
    for published, tensor in file.tensors.items():
        if published in FACTORS:
            continue
        name = architecture.rename(published)
        if name is None:
            raise ValueError(
                f"{file.path}: {published} is a tensor that {file.architecture} is not known to have; give"
                " the original model"
            )
        found = read_tensor(tensor)
        if architecture.turns_pairs and (".attn_q." in published or ".attn_k." in published):
            heads = "num_attention_heads" if ".attn_q." in published else "num_key_value_heads"
            found = found if isinstance(found, FileCodes) else found.reshape(tensor.shape)
            found = take_rows(found, list_halves(tensor.shape[0], int(config[heads])))
        if isinstance(found, FileCodes):
            values = found.dequantize()
            keep(codes, name, found)
            done.kept[found.bits] = done.kept.get(found.bits, 0) + 1
        else:
            values = found - 1 if architecture.adds_one and name.endswith("norm.weight") else found
            done.floats += tensor.type not in FLOATS
        yield name, torch.from_numpy(np.require(values.reshape(tensor.shape), requirements=("C", "W")))


def list_halves(rows: int, heads: int) -> Any:
    """Return the rows of queries or keys in the order of transformers, whose rotation turns halves."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def take_rows(found: Any, rows: Any) -> Any:
    """Return some rows of values or codes."""
    if not isinstance(found, FileCodes):
        return found[rows]
    return replace(found, codes=found.codes[rows], scales=found.scales[rows], zeros=found.zeros[rows])
