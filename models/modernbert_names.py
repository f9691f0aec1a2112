"""Maps the published weights and settings of ModernBERT to ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .attention import FULL, SLIDING
from .bert_names import ARCHITECTURE_HEADS, CHOICE, Rename, architecture
from .bert_names import rename_by as rename_bert
from .config_json import Json, read_count, refuse_unknown
from .rotary import Rotary

NAMES = {
    "embeddings.tok_embeddings": "words",
    "embeddings.norm": "embedding_norm",
    r"layers.(\d+).attn_norm": r"layers.\1.attention_norm",
    r"layers.(\d+).attn.Wqkv": r"layers.\1.attention.query_key_value",
    r"layers.(\d+).attn.Wo": r"layers.\1.attention.output",
    r"layers.(\d+).mlp.Wi": r"layers.\1.mlp.input",
    r"layers.(\d+).mlp.Wo": r"layers.\1.mlp.output",
    "final_norm": "norm",
}
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "local_attention", "norm_eps", "norm_bias", "attention_bias", "mlp_bias",
    "decoder_bias", "classifier_bias", "classifier_activation", "classifier_pooling", "tie_word_embeddings",
)  # fmt: skip
OTHERS = {
    "hidden_activation", "layer_types", "global_attn_every_n_layers", "rope_parameters", "rope_scaling",
    "global_rope_theta", "local_rope_theta",
}  # fmt: skip
# Of training, or of how transformers computes; position_embedding_type and layer_norm_eps stand in published
# files, but no code of ModernBERT reads them.
UNREAD = {
    "initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "classifier_dropout", "cls_token_id",
    "sep_token_id", "mask_token_id", "deterministic_flash_attn", "reference_compile", "sparse_prediction",
    "sparse_pred_ignore_index", "repad_logits_with_grad", "gradient_checkpointing",
    "position_embedding_type", "layer_norm_eps", "sentence_transformers",
    "sbert_ce_default_activation_function",
}  # fmt: skip
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}


def rename_by(config_json: Json) -> Rename:
    """Return the renaming of weights; config.json tells the task of the head."""
    head = find_head(config_json)
    table = dict(NAMES)
    if head is not None:
        table |= {
            "head.dense": f"heads.{head}.dense",
            "head.norm": f"heads.{head}.norm",
            "classifier": f"heads.{head}.decoder",
            "decoder": f"heads.{head}.decoder",
        }
    return rename_bert(table, {})


def find_head(config_json: Json) -> str | None:
    """Return the one head of a checkpoint, by its class; None where it has none."""
    named = architecture(config_json)
    return next((head for ending, head in ARCHITECTURE_HEADS.items() if named.endswith(ending)), None)


def read_settings(config_json: Json, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of a `ModernBertConfig` that a config.json and its weights describe.

    Raises:
        ValueError: a setting that is not known here, or a value that cannot be; names it.
    """
    config = {name: value for name, value in config_json.items() if value is not None}
    refuse_unknown(config, {*SAME, *OTHERS, *UNREAD})
    values = {name: config[name] for name in SAME if name in config}
    config = {"num_hidden_layers": 22, "global_attn_every_n_layers": 3, **config}
    every = read_count(config, "global_attn_every_n_layers")
    usual = [SLIDING if layer % every else FULL for layer in range(read_count(config, "num_hidden_layers"))]
    head = find_head(config)
    logits = shapes.get(f"heads.{head}.decoder.weight")
    if head is not None and f"heads.{head}.dense.weight" not in shapes:
        raise ValueError(f"config.json names {architecture(config)}, but the weights have no {head} head")
    return values | {
        "hidden_act": config.get("hidden_activation", "gelu"),
        "layer_types": tuple(config.get("layer_types", usual)),
        "rotary": read_rotary(config, FULL),
        "local_rotary": read_rotary(config, SLIDING),
        "heads": () if head is None else (head,),
        "chooses": architecture(config).endswith(CHOICE),
        "num_labels": 2 if logits is None else logits[0],
    }


def read_rotary(config: Json, kind: str) -> Rotary:
    """Return the rotation of one kind of layer: of transformers 5's rope_parameters, or of older names."""
    name, theta = THETAS[kind]
    given = (config.get("rope_parameters") or {}).get(kind) or config.get("rope_scaling") or {}
    settings = {"rope_theta": config.get(name, theta), **given}
    return Rotary.from_json(settings, config.get("max_position_embeddings", 8192))
