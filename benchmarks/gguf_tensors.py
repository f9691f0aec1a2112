"""The weights of a checkpoint by the names that GGUF files have for them, as llama.cpp reads them.

The names are those of gguf's own tables of GPT-2, Llama and Qwen2. The vocabulary's table is stored once:
where there is no output.weight llama.cpp takes it for the output layer too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import head_size

Json = Mapping[str, Any]

GPT2 = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}
GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
LLAMA = {"token_embd": "embed_tokens", "output_norm": "norm"}
LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensors(checkpoint: Path, config: Json) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a checkpoint's weights by gguf's names, fp32, matrices as (outputs, inputs)."""
    from safetensors import safe_open

    gpt2 = config["model_type"] == "gpt2"
    layers = range(config["n_layer"] if gpt2 else config["num_hidden_layers"])
    names = {theirs: ours for ours, theirs in (GPT2 if gpt2 else LLAMA).items()}
    for layer in layers:
        for ours, theirs in (GPT2_BLOCK if gpt2 else LLAMA_BLOCK).items():
            names[f"{'h' if gpt2 else 'layers'}.{layer}.{theirs}"] = f"blk.{layer}.{ours}"
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is not a dict
            module, _, part = name.removeprefix("transformer.").removeprefix("model.").rpartition(".")
            array = weights.get_tensor(name).float().numpy()  # by torch: numpy has no bfloat16
            if gpt2 and module.startswith("h.") and array.ndim == 2:
                array = np.ascontiguousarray(array.T)  # GPT-2's are (inputs, outputs)
            if config["model_type"] == "llama" and module.endswith(("q_proj", "k_proj")):
                array = interleave_halves(array, head_size(config))
            yield f"{names[module]}.{part}", array
    if (factors := rotary_factors(config)) is not None:
        yield "rope_freqs.weight", factors


def interleave_halves(rows: np.ndarray, size: int) -> np.ndarray:
    """Order each head's rows as llama.cpp's Llama turns them: neighbours, where transformers turns halves."""
    halves = rows.reshape(-1, 2, size // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def rotary_factors(config: Json) -> np.ndarray | None:
    """Return the divisors of Llama 3's rotary frequencies; None where all stay the same.

    Raises:
        ValueError: positions are stretched in another way, which is not written here.
    """
    rotary = config.get("rope_parameters", {"rope_type": "default"})
    if rotary["rope_type"] == "default":
        return None
    if rotary["rope_type"] != "llama3":
        raise ValueError(
            f"rope_type={rotary['rope_type']!r} is not written to GGUF here: default and llama3 are"
        )
    size = head_size(config)
    frequencies = rotary["rope_theta"] ** (-np.arange(0, size, 2) / size)
    turns = rotary["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low = rotary["low_freq_factor"]
    high = rotary["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1 of the high frequencies, 0 of the low
    factors: np.ndarray = 1 / (kept + (1 - kept) / rotary["factor"])
    return factors.astype(np.float32)
