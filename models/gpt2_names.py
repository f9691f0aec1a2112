"""Maps the published weights and settings of GPT-2, GPT-1 and GPT-Neo to ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .attention import FULL, SLIDING
from .config_json import Json, read_count
from .weights import join_weights

# The published checkpoints keep each Linear's weight the other way round, as TensorFlow's Conv1D did,
CONV1D = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
# and carry the causal mask along as buffers.
MASK_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
# The settings of GPT-2 that GPT-1 or GPT-Neo have otherwise; no config.json has them.
RELATIVES: dict[str, Any] = {
    "norm_first": True,
    "qkv_bias": True,
    "attention_scale": None,
    "layer_types": (),
    "window": None,
}
EMBEDDINGS = {"tokens_embed.weight": "wte.weight", "positions_embed.weight": "wpe.weight"}  # GPT-1's
GPT1_GELU = "gelu_new"  # what GPT-1's config.json calls "gelu"
LOCAL = {"global": FULL, "local": SLIDING}
DEFAULT_PATTERN = [[["global", "local"], 12]]


def rename_gpt2(name: str) -> str | None:
    """Return our name of a weight of GPT-2 or GPT-1; None for a mask."""
    return None if MASK_BUFFERS.fullmatch(name) else EMBEDDINGS.get(name, name)


def rename_gpt_neo(name: str) -> str | None:
    """Return our name of a weight of GPT-Neo; None for a mask."""
    return rename_gpt2(name.replace("attn.attention.", "attn.").replace("attn.out_proj.", "attn.c_proj."))


def gpt2_weight(name: str, tensor: Tensor) -> Tensor:
    """Return a published weight as ours: (outputs, inputs)."""
    return tensor.T if CONV1D.fullmatch(name) else tensor


def join_qkv(weights: dict[str, Tensor], config_json: Json) -> None:
    """Join GPT-Neo's queries, keys and values, which have a weight each."""
    join_weights(weights, ("q_proj", "k_proj", "v_proj"), "c_attn")


def read_gpt1(config_json: Json, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return our settings of GPT-1, whose "gelu" has always meant the approximation by tanh."""
    activation = config_json.get("afn", "gelu")
    return {"norm_first": False, "activation_function": GPT1_GELU if activation == "gelu" else activation}


def read_gpt_neo(config_json: Json, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return our settings of GPT-Neo: scores are not scaled, and every second layer sees a window.

    Raises:
        ValueError: attention_types does not say what each layer sees.
    """
    layers = read_count({"num_layers": 24, **config_json}, "num_layers")
    kinds = expand_pattern(config_json.get("attention_types", DEFAULT_PATTERN), layers)
    return {
        "qkv_bias": False,
        "attention_scale": 1.0,
        "layer_types": kinds,
        "window": config_json.get("window_size", 256) if SLIDING in kinds else None,
    }


def expand_pattern(pattern: Any, layers: int) -> tuple[str, ...]:
    """Return what each layer sees by a pattern such as [[["global", "local"], 12]]."""
    kinds: list[str] = []
    try:
        for names, times in pattern:
            if type(times) is not int or times * len(names) > layers:
                break
            kinds += [LOCAL[name] for name in names] * times
    except (TypeError, ValueError, KeyError):
        kinds = []
    if len(kinds) != layers:
        raise ValueError(
            f"attention_types={pattern!r:.80} must say for each of {layers} layers whether it is global or"
            ' local, as [[["global", "local"], 12]] does for 24'
        )
    return tuple(kinds)
