"""Publishes decoders of the Llama family: config.json and weights as `llama_families` reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from .attention import FULL, SLIDING
from .llama import Llama, LlamaConfig
from .llama_families import EXPERT_COUNTS, FAMILIES, SAME
from .rotary import Rotary

# A row that publishes several matrices as one is read, but not written.
SAVED_TYPES = tuple(model_type for model_type, row in FAMILIES.items() if not row.fused)
# Published settings that follow from ours, the reverse of `LlamaFamily.computed`.
COMPUTED: Mapping[str, Callable[[LlamaConfig], Any]] = {
    "logits_scaling": lambda config: 1 / config.logits_scale,
    "no_rope_layers": lambda config: [
        int(layer not in config.unrotated) for layer in range(config.num_hidden_layers)
    ],
    "query_pre_attn_scalar": lambda config: round((config.attention_scale or config.head_dim**-0.5) ** -2),
    "use_sliding_window": lambda config: config.window is not None,
    **dict.fromkeys(EXPERT_COUNTS, lambda config: config.num_experts),
    "moe_intermediate_size": lambda config: config.expert_size,
    "mlp_only_layers": lambda config: list(config.dense_layers),
}
ORIGINAL = "original_max_position_embeddings"
FACTORS = ("factor",)
# What transformers requires of each rope_type, beside rope_type and rope_theta.
REQUIRED_ROTARY: Mapping[str, tuple[str, ...]] = {
    "linear": FACTORS,
    "dynamic": FACTORS,
    "yarn": (*FACTORS, ORIGINAL),
    "llama3": (*FACTORS, ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
NO_TOKENS = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}  # else they are the published model's
ONE_WINDOW = ("mistral",)  # all layers see the window, or none: layer_types is not read


def describe_llama(model: Llama, model_type: str) -> dict[str, Any]:
    """Return config.json's settings; those that a model_type lacks are left out, which reading them shows."""
    config = model.config
    row = FAMILIES[model_type]
    values = {name: getattr(config, name) for name in (*SAME, "num_key_value_heads", "head_dim")}
    values["attention_bias"] = config.output_bias if "qkv_bias" in row.fixed else config.qkv_bias
    if config.layer_types and model_type not in ONE_WINDOW:
        values["layer_types"] = list(config.layer_types)
    if "sliding_window" in row.defaults or config.window is not None:
        values["sliding_window"] = config.window
    values |= {published: getattr(config, ours) for published, ours in row.settings.items()}
    values |= {name: compute(config) for name, compute in COMPUTED.items() if name in row.defaults}
    return {
        "architectures": [f"{row.class_name}ForCausalLM"],
        **NO_TOKENS,
        **values,
        "rope_parameters": describe_rotary(config),
    }


def describe_rotary(config: LlamaConfig) -> dict[str, Any]:
    """Return rope_parameters: the rotation of all layers, or those of each kind of layer."""
    if config.window_rotary is None:
        return list_settings(config.rotary, config.context)
    kinds = {FULL: config.rotary, SLIDING: config.window_rotary}
    return {kind: list_settings(rotary, config.context) for kind, rotary in kinds.items()}


def list_settings(rotary: Rotary, context: int) -> dict[str, Any]:
    """Return a rotation's settings that differ from the defaults, and those that are required."""
    default = asdict(Rotary(original_max_position_embeddings=context))
    required = {"rope_type", "rope_theta", *REQUIRED_ROTARY.get(rotary.rope_type, ())}
    complete = replace(
        rotary, original_max_position_embeddings=rotary.original_max_position_embeddings or context
    )
    own = {
        name: value for name, value in asdict(complete).items() if name in required or value != default[name]
    }
    if rotary.rope_type == "default":
        own.pop(ORIGINAL, None)
    return own


def publish_llama(model: Llama, model_type: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by their published names: queries, keys and values apart, norms without their offset."""
    row = FAMILIES[model_type]
    norms = {ours: published for published, ours in row.norms.items()}
    block_norm = re.compile(rf"(layers\.\d+)\.({'|'.join(norms)})\.weight")
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if row.norm_offset and name.endswith("norm.weight"):
            tensor = tensor - row.norm_offset
        published = block_norm.sub(lambda match: f"{match[1]}.{norms[match[2]]}.weight", name)
        if ".mlp." in name:
            for theirs, ours in row.weights.items():
                published = published.replace(ours, theirs)
        if not name.startswith("lm_head."):
            published = f"model.{published}"
        if ".qkv_proj." not in name:
            found[published] = tensor
            continue
        parts = torch.split(tensor, list(model.config.qkv_sizes))
        for part, rows in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            found[published.replace("qkv_proj", part)] = rows.clone()
    return found
