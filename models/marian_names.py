"""Maps MarianMT's published names and settings to ours, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .transformer import TransformerConfig

# Published -> ours; # is a layer's number, and the rest (".weight", ".bias") stays.
ENCODER = {
    "#.self_attn.q_proj": "#.attention.query",
    "#.self_attn.k_proj": "#.attention.key",
    "#.self_attn.v_proj": "#.attention.value",
    "#.self_attn.out_proj": "#.attention.output",
    "#.self_attn_layer_norm": "#.attention_residual.norm",
    "#.fc1": "#.feed_forward.inner",
    "#.fc2": "#.feed_forward.output",
    "#.final_layer_norm": "#.feed_forward_residual.norm",
}
DECODER = ENCODER | {
    "#.encoder_attn.q_proj": "#.cross_attention.query",
    "#.encoder_attn.k_proj": "#.cross_attention.key",
    "#.encoder_attn.v_proj": "#.cross_attention.value",
    "#.encoder_attn.out_proj": "#.cross_attention.output",
    "#.encoder_attn_layer_norm": "#.cross_attention_residual.norm",
}
NAMES = {
    **{f"encoder.layers.{published}": f"encoder.layers.{ours}" for published, ours in ENCODER.items()},
    **{f"decoder.layers.{published}": f"decoder.layers.{ours}" for published, ours in DECODER.items()},
    "encoder.embed_positions": "source.positions",
    "decoder.embed_positions": "target.positions",
    "encoder.embed_tokens": "source.words",
    "decoder.embed_tokens": "target.words",
    "lm_head": "output",
}
STAND_INS = {"shared.weight": "source.words.weight"}  # tied files have nothing else
LAYER = re.compile(r"(?<=layers\.)\d+")
LOGITS_BIAS = "final_logits_bias"  # (1, V); ours is (V,)
# Published setting -> ours, and its value where config.json does not say.
SETTINGS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("source_vocab_size", 58101),
    "d_model": ("d_model", 1024),
    "encoder_layers": ("encoder_layers", 12),
    "decoder_layers": ("decoder_layers", 12),
    "encoder_attention_heads": ("encoder_heads", 16),
    "decoder_attention_heads": ("decoder_heads", 16),
    "encoder_ffn_dim": ("encoder_ffn", 4096),
    "decoder_ffn_dim": ("decoder_ffn", 4096),
    "max_position_embeddings": ("max_positions", 1024),
    "activation_function": ("activation", "gelu"),
    "scale_embedding": ("scale_embedding", False),
    "share_encoder_decoder_embeddings": ("share_embeddings", True),
    "tie_word_embeddings": ("tie_word_embeddings", True),
}
FIXED = {
    "positions": "concatenated",
    "norm_first": False,
    "residual_from_norm": False,
    "final_norms": False,
    "layer_norm_eps": 1e-5,
    "share_layers": False,
    "bias": True,
    "target_positions": True,
}


def rename(name: str) -> str:
    """Return our name of a published one, which is given without "model."."""
    if name == LOGITS_BIAS:
        return "output.bias"
    return translate_name(name, NAMES)


def translate_to_marian(name: str) -> str:
    """Return the published name of our name, the reverse of `rename`."""
    if name == "output.bias":
        return LOGITS_BIAS
    published = translate_name(name, {ours: theirs for theirs, ours in NAMES.items()})
    return published if published.startswith("lm_head") else f"model.{published}"


def translate_name(name: str, table: Mapping[str, str]) -> str:
    stem, _, ending = name.rpartition(".")
    number = LAYER.search(stem)
    other = table.get(LAYER.sub("#", stem), stem)
    return f"{other.replace('#', number[0]) if number else other}.{ending}"


def settings(config_json: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return our settings of a config.json; the weights tell whether they are shared, and have a bias."""
    values = {ours: config_json.get(name, default) for name, (ours, default) in SETTINGS.items()}
    shared = values["share_embeddings"]
    target = None if shared else config_json.get("decoder_vocab_size")
    if not values["tie_word_embeddings"] and {"source.words.weight", "target.words.weight"} <= set(shapes):
        shared = False  # what transformers 5 takes that setting for
    return {
        **FIXED,
        **values,
        "share_embeddings": shared,
        "target_vocab_size": values["source_vocab_size"] if target is None else target,
        "output_bias": "output.bias" in shapes,
    }


def config_json_of(config: TransformerConfig) -> dict[str, Any]:
    """Return a Transformer's config.json as MarianMT's; its token ids are in generation_config.json.

    Raises:
        ValueError: names the settings that MarianMT does not have.
    """
    if other := {
        name: getattr(config, name) for name, value in FIXED.items() if getattr(config, name) != value
    }:
        raise ValueError(f"MarianMT has {FIXED}; this model has {other}")
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        **{name: getattr(config, ours) for name, (ours, _) in SETTINGS.items()},
        "decoder_vocab_size": config.target_vocab_size,
        "pad_token_id": None,
    }
