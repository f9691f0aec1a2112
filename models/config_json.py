"""Reads single settings of a config.json, and refuses unknown ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

Json = Mapping[str, Any]

# Settings that say nothing of what a model computes, or that are read elsewhere.
HARMLESS = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout",
    "residual_dropout", "pretraining_tp",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "_name_or_path", "auto_map",
    "attn_implementation", "_attn_implementation", "cache_implementation", "return_dict", "output_attentions",
    "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "id2label",
    "label2id", "problem_type", "max_window_layers", "_sliding_window_pattern", "sliding_window_pattern",
    "tokenizer_class", "num_labels", "transformers.js_config", "unsloth_fixed", "unsloth_version",
    "max_sequence_length", "loss_type", "torchscript", "neftune_noise_alpha", "model_max_length",
    "name_or_path", "task_specific_params",
}  # fmt: skip
# Settings of published checkpoints that say nothing as long as they have this value.
HARMLESS_AS = {"is_causal": True, "is_llama_config": True, "full_attn_mod": 1, "interpolate_factor": 1}
OFF: tuple[object, ...] = (False, "", [], {})  # what an unknown setting may be


def read_count(config: Json, name: str) -> int:
    """Return a setting that is an integer of at least 1; an error names it."""
    if name not in config:
        raise ValueError(f"config.json has no {name}")
    value = config[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")
    return value


def read_positive(config: Json, name: str) -> float:
    """Return a setting that serves as a divisor, so must be positive; an error names it."""
    value: Any = config.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a number above 0")
    return float(value)


def refuse_unknown(config: Json, known: Collection[str]) -> None:
    """Raise a ValueError that names the settings of a config.json that no code here reads."""
    harmless = HARMLESS_AS | {"sliding_window_size": config.get("sliding_window")}  # Gemma 2 has it twice
    unknown = [
        name
        for name, value in config.items()
        if name not in known
        and name not in HARMLESS
        and not name.startswith("_")
        and (value != harmless[name] if name in harmless else value not in OFF)
    ]
    if unknown:
        settings = ", ".join(f"{name}={config[name]!r:.60}" for name in unknown)
        raise ValueError(
            f"config.json sets {settings}, which is not known for {config['model_type']}; remove a"
            " setting that does not change the model's results"
        )
