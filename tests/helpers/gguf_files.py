"""Writes GGUF files of random models by llama.cpp's own package: names, rounding and layout are its."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from .random_checkpoints import TOKENIZER

SIZES: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 256},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"bos_token_id": 0, "eos_token_id": 0, "rms_norm_eps": 1e-5},
}
HEADS: dict[str, Any] = {"head_dim": 64, "pad_token_id": 0}
GEMMA: dict[str, Any] = {**HEADS, "query_pre_attn_scalar": 64, "sliding_window": 16}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, **HEADS),
    "gemma2": transformers.Gemma2Config(**SIZES, **GEMMA),
    "gemma3": transformers.Gemma3TextConfig(**SIZES | {"num_hidden_layers": 7}, **GEMMA),
    "phi3": transformers.Phi3Config(**SIZES, pad_token_id=0),
}
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
}
TYPES = {"F32": np.float32, "F16": np.float16}


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.08)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def permute(weight: Any, heads: int) -> Any:
    """Return rows of queries or keys as llama.cpp has them: halves of a head become neighbouring pairs."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(name: str, path: Path, kind: str) -> Any:
    """Write a random model with its matrices in a type, such as "Q4_0"; return the model."""
    model = make_model(name)
    config = model.config
    writer: Any = gguf.GGUFWriter(path, name)
    for theirs, key in KEYS.items():
        if (value := getattr(config, theirs, None)) is not None:
            writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    if name in ("qwen3", "gemma2", "gemma3"):
        writer.add_uint32(f"{name}.attention.key_length", config.head_dim)
    if name == "gemma2":
        writer.add_float32("gemma2.attn_logit_softcapping", config.attn_logit_softcapping)
        writer.add_float32("gemma2.final_logit_softcapping", config.final_logit_softcapping)
    parameters = config.rope_parameters
    theta = parameters.get("full_attention", parameters)["rope_theta"]
    writer.add_float32(f"{name}.rope.freq_base", theta)
    add_vocabulary(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), config.num_hidden_layers)
    for published, tensor in model.state_dict().items():
        if published == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(published, try_suffixes=(".weight", ".bias"))
        array = tensor.numpy().astype(np.float32)
        if name == "llama" and (".q_proj." in published or ".k_proj." in published):
            is_query = ".q_proj." in published
            array = permute(array, config.num_attention_heads if is_query else config.num_key_value_heads)
        if name.startswith("gemma") and published.endswith("norm.weight"):
            array = array + 1
        if array.ndim == 1:
            writer.add_tensor(own, array)
        elif kind in TYPES:
            writer.add_tensor(own, array.astype(TYPES[kind]))
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(own, gguf.quants.quantize(array, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_vocabulary(writer: Any) -> None:
    """Add the vocabulary of GPT-2's demo, of bytes."""
    written = json.loads(TOKENIZER.read_text("utf-8"))["model"]
    tokens = sorted(written["vocab"], key=written["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges(
        [" ".join(merge) if isinstance(merge, list) else merge for merge in written["merges"]]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
