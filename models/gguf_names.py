"""What GGUF files call the settings and tensors of the architectures that are read, and transformers' names.

A new architecture is a row in `ARCHITECTURES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .gguf_file import GgufFile

# Settings of every architecture, and those of config.json.
SETTINGS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AROUND = {  # of norms behind attention and MLP too
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        model_type: of config.json.
        named: the class of transformers.
        settings: more of config.json, from the file's.
        in_layers: tensors that are called otherwise than in most.
        turns_pairs: whether rows of queries and keys lie as neighbouring pairs are turned, not as halves.
        adds_one: whether norms hold 1 + weight.
    """

    model_type: str
    named: str
    settings: Callable[[GgufFile], dict[str, Any]] = lambda file: {}
    in_layers: Mapping[str, str] = field(default_factory=dict)
    turns_pairs: bool = False
    adds_one: bool = False

    def rename(self, name: str) -> str | None:
        """Return transformers' name of a tensor; None where the file has one that is not known."""
        if match := LAYER.fullmatch(name):
            part = {**IN_LAYERS, **self.in_layers}.get(match[2])
            return None if part is None else f"model.layers.{match[1]}.{part}.{match[3]}"
        match = OUTSIDE.fullmatch(name)
        outside = None if match is None else TENSORS.get(match[1])
        return None if match is None or outside is None else f"{outside}.{match[2]}"


def read_gemma(file: GgufFile, layers_of_27b: int) -> dict[str, Any]:
    """Return how Gemma scales attention: by a head's size, in the largest by the width of a query."""
    heads = int(file.get("attention.head_count"))
    size = int(file.get("attention.key_length"))
    is_largest = file.get("block_count") == layers_of_27b
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(file.get("embedding_length")) // heads if is_largest else size,
        "sliding_window": file.get("attention.sliding_window"),
    }


def read_gemma2(file: GgufFile) -> dict[str, Any]:
    return read_gemma(file, 46) | {
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
    }


def read_gemma3(file: GgufFile) -> dict[str, Any]:
    layers = int(file.get("block_count"))
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    theta = float(file.get("rope.freq_base", 1e6))
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if file.get("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": file.get("rope.scaling.factor")}
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    parameters = {"full_attention": full, "sliding_attention": sliding}
    return read_gemma(file, 62) | {"layer_types": kinds, "rope_parameters": parameters}


def read_phi3(file: GgufFile) -> dict[str, Any]:
    """Return how Phi-3 turns positions, of which long contexts have factors in tensors."""
    head = int(file.get("embedding_length")) // int(file.get("attention.head_count"))
    turned = int(file.get("rope.dimension_count", head))
    found: dict[str, Any] = {
        "partial_rotary_factor": turned / head,
        "sliding_window": file.get("attention.sliding_window"),
        "original_max_position_embeddings": file.get(
            "rope.scaling.original_context_length", file.get("context_length")
        ),
    }
    factors = [file.tensors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long")]
    if all(factor is not None for factor in factors):
        short, long = (np.ascontiguousarray(f.data).view("<f4").reshape(-1).tolist() for f in factors if f)
        found["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": float(file.get("rope.freq_base", 10000.0)),
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": found["original_max_position_embeddings"],
            "partial_rotary_factor": found["partial_rotary_factor"],
        }
    return found


def read_llama(file: GgufFile) -> dict[str, Any]:
    """Return how Llama 3.1 and later turn positions: their factors lie in a tensor."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return {}
    stored = np.ascontiguousarray(tensor.data).view("<f4").reshape(-1)
    theta = float(file.get("rope.freq_base", 10000.0))
    parameters = {"rope_type": "llama3", "rope_theta": theta, "factor": float(stored.max()), **LLAMA3}
    if not np.allclose(stored, compute_llama3_factors(len(stored), parameters), rtol=1e-4):
        raise ValueError(f"{file.path}: rope_freqs.weight has factors of positions that are not Llama 3's")
    return {"rope_parameters": parameters}


def compute_llama3_factors(count: int, parameters: Mapping[str, Any]) -> Any:
    """Return by what Llama 3 divides each of its frequencies."""
    frequencies = parameters["rope_theta"] ** (-np.arange(count) / count)
    waves = 2 * np.pi / frequencies
    factor = parameters["factor"]
    low = parameters["low_freq_factor"]
    high = parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    return np.where(waves < original / high, 1.0, 1 / ((1 - smooth) / factor + smooth))


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", read_llama, turns_pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": Architecture(
        "gemma", "GemmaForCausalLM", lambda file: {"hidden_act": "gelu_pytorch_tanh"}, adds_one=True
    ),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", read_gemma2, AROUND, adds_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", read_gemma3, AROUND, adds_one=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", read_phi3, {"ffn_up": "mlp.gate_up_proj"}),
}


def read_config(file: GgufFile) -> dict[str, Any]:
    """Return a file's config.json.

    Raises:
        ValueError: an architecture that is not read, or a setting that is missing; names it.
    """
    if file.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} has the architecture {file.architecture!r}, and {', '.join(ARCHITECTURES)} are"
            " read; give the original model"
        )
    architecture = ARCHITECTURES[file.architecture]
    found = {theirs: file.get(name) for name, theirs in SETTINGS.items()}
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = found["num_attention_heads"]
    missing = [name for name, theirs in SETTINGS.items() if found[theirs] is None]
    if missing or any(isinstance(value, list) for value in found.values()):
        what = missing[0] if missing else "one value for all layers"
        raise ValueError(f"{file.path} has no setting {file.architecture}.{what}")
    head = file.get("attention.key_length")
    scaling = file.get("rope.scaling.type", "none")
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(file.get("rope.freq_base", 10000.0)),
    }
    if scaling == "linear":
        parameters |= {"rope_type": "linear", "factor": file.get("rope.scaling.factor")}
    elif scaling == "yarn":
        parameters |= {
            "rope_type": "yarn",
            "factor": file.get("rope.scaling.factor"),
            "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        }
    elif scaling not in ("none", "longrope"):
        raise ValueError(f"{file.path} scales positions by {scaling!r}, which is not read")
    tokens = file.settings.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"{file.path} has no vocabulary (tokenizer.ggml.tokens)")
    found |= {
        "model_type": architecture.model_type,
        "architectures": [architecture.named],
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
        "rope_parameters": parameters,
        **({} if head is None else {"head_dim": head}),
        **{
            f"{name}_token_id": file.settings[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if f"tokenizer.ggml.{key}_token_id" in file.settings
        },
    }
    if architecture.model_type == "llama" and "blk.0.attn_q.bias" in file.tensors:
        found["attention_bias"] = True
    return found | architecture.settings(file)
