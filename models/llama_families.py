"""The differences between the decoders of the Llama family: a row each, read from their config.json files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .attention import FULL, SLIDING
from .config_json import Json, read_count, read_positive, refuse_unknown
from .llama import LlamaConfig
from .rotary import Rotary
from .weights import join_weights

# Settings that are ours by the same name.
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "mlp_bias",
)  # fmt: skip
# Settings without which nothing else can be read.
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
# Settings of every family that have another name or another form here.
DERIVED = ("num_key_value_heads", "head_dim", "attention_bias", "layer_types", "use_sliding_window")
BESIDE_ROTARY = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
ROTARY = ("rope_parameters", "rope_scaling", "rope_local_base_freq", *BESIDE_ROTARY)
# Weights that have all experts of a mixture, (N, rows, columns): transformers 5's own names in memory.
STACKED = {
    ".experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".experts.down_proj": ("down_proj",),
}


@dataclass(frozen=True)
class LlamaFamily:
    """The differences between one model_type and Llama.

    Attributes:
        defaults: settings that its config.json may leave out, by their published names; None for those that
            are then not set.
        fixed: our settings that no config.json has.
        settings: published names of settings that have another name here.
        computed: our settings that follow from others.
        norms: published names of a block's RMSNorms, each with ours.
        fused: published names of weights of an MLP that hold several of ours, one below the other.
        norm_offset: what is added to the published weight of each RMSNorm.
        turns_parts: whether partial_rotary_factor counts in positions that are not stretched; in transformers
            most families ignore it there.
        weights: parts of published names that are others here.
        class_name: how its classes in transformers begin.
    """

    defaults: Json = field(default_factory=dict)
    fixed: Json = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[Json], dict[str, Any]] = lambda config: {}
    norms: Mapping[str, str] = field(
        default_factory=lambda: {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "mlp_norm",
        }
    )
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_offset: float = 0.0
    turns_parts: bool = False
    weights: Mapping[str, str] = field(default_factory=dict)
    class_name: str = "Llama"

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """Return a published weight as ours."""
        if self.norm_offset and name.endswith("norm.weight"):
            return tensor.to(torch.float32) + self.norm_offset
        return tensor

    def make_rotary(self, values: Json, context: int) -> Rotary:
        """Return the rotation that settings describe; by default, most families rotate whole heads."""
        rotary = Rotary.from_json(values, context)
        if rotary.rope_type == "default" and not self.turns_parts:
            return replace(rotary, partial_rotary_factor=1.0)
        if rotary.partial_rotary_factor != 1.0 and not self.turns_parts:
            raise ValueError(
                f"partial_rotary_factor={rotary.partial_rotary_factor} with rope_type={rotary.rope_type!r} is"
                " not supported: transformers cannot rotate parts of the heads of this model_type"
            )
        return rotary

    def list_parts(self, config: LlamaConfig, name: str) -> dict[str, int]:
        """Return our weights within a published one, one below the other, each with its rows."""
        for stacked, parts in STACKED.items():
            if name.endswith(stacked):
                stem = name.rpartition(".")[0]
                height = config.hidden_size if parts == ("down_proj",) else config.expert_size
                experts = range(config.num_experts)
                return {f"{stem}.{n}.{part}.weight": height for n in experts for part in parts}
        for fused, parts in self.fused.items():
            if f".{fused}." in name:
                return {name.replace(fused, part): config.intermediate_size for part in parts}
        return {}


GEMMA_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
GEMMA_SETTINGS = {
    "hidden_activation": "hidden_act",
    "final_logit_softcapping": "logits_softcap",
    "attn_logit_softcapping": "attention_softcap",
}


def scale_gemma(config: Json) -> dict[str, Any]:
    return {
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "attention_scale": read_positive(config, "query_pre_attn_scalar") ** -0.5,
    }


def scale_first_gemma(config: Json) -> dict[str, Any]:
    """Return the first Gemma's embedding scale; its "gelu" has always meant the approximation by tanh."""
    activation = config["hidden_act"]
    return {
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation,
    }


def scale_granite(config: Json) -> dict[str, Any]:
    return {"logits_scale": 1 / read_positive(config, "logits_scaling")}


def leave_unrotated(config: Json) -> dict[str, Any]:
    """Return SmolLM3's layers without positions: 0 in no_rope_layers, or one in each interval."""
    count = config["num_hidden_layers"]
    interval = read_count(config, "no_rope_layer_interval")
    rotated = config.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(count)])
    if not isinstance(rotated, list) or len(rotated) != count or set(rotated) - {0, 1}:
        raise ValueError(f"no_rope_layers={rotated!r:.60} must have 0 or 1 for each of the {count} layers")
    derived: dict[str, Any] = {"unrotated": tuple(layer for layer in range(count) if not rotated[layer])}
    if config.get("use_sliding_window") and "sliding_window" in config and "layer_types" not in config:
        derived["layer_types"] = tuple(FULL if rotated[layer] else SLIDING for layer in range(count))
    return derived


def leave_full_layers_unrotated(config: Json) -> dict[str, Any]:
    """Return EXAONE 4's layers without positions: those that see all tokens, where others see a window."""
    kinds = read_layer_types(config) if "sliding_window" in config else ()
    return {"unrotated": tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)}


def read_experts(config: Json) -> dict[str, Any]:
    """Return how many experts there are, by either of its names, and their size, which is an MLP's."""
    counts = [config[name] for name in EXPERT_COUNTS if name in config]
    return {"num_experts": counts[0], "expert_size": config["intermediate_size"]}


def read_qwen_experts(config: Json) -> dict[str, Any]:
    """Return the experts, and the layers without: those listed, and all but one of each interval."""
    interval = read_count(config, "decoder_sparse_step")
    listed = config.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ValueError(f"mlp_only_layers={listed!r:.60} must be a list of layers' numbers")
    layers = range(config["num_hidden_layers"])
    dense = tuple(n for n in layers if n in listed or (n + 1) % interval != 0)
    return {**read_experts(config), "expert_size": config["moe_intermediate_size"], "dense_layers": dense}


# Settings of mixtures of experts that say how they are trained; transformers writes one of two counts.
EXPERTS: Json = {"output_router_logits": False, "router_aux_loss_coef": 0.001, "num_local_experts": None}
EXPERT_COUNTS = ("num_local_experts", "num_experts")
EXPERT_SETTINGS = {"num_experts_per_tok": "experts_per_token", "norm_topk_prob": "normalizes_experts"}
# Norms behind attention and MLP alone.
NORMS_AFTER = {
    "post_attention_layernorm": "attention_output_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
OLMO2 = LlamaFamily(
    class_name="Olmo2",
    defaults={"rms_norm_eps": 1e-5},
    fixed={"norms": "after", "qk_norm": "projection"},
    norms=NORMS_AFTER,
)
GEMMA = LlamaFamily(
    class_name="Gemma2",
    defaults={
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    fixed={"norms": "both"},
    settings=GEMMA_SETTINGS,
    computed=scale_gemma,
    norms=GEMMA_NORMS,
    norm_offset=1.0,
)
MISTRAL = LlamaFamily(class_name="Mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096})
FAMILIES: dict[str, LlamaFamily] = {
    "llama": LlamaFamily(),
    "mistral": MISTRAL,
    "ministral": replace(MISTRAL, class_name="Ministral"),
    "qwen2": LlamaFamily(
        class_name="Qwen2",
        defaults={"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        fixed={"qkv_bias": True},
    ),
    "qwen3": LlamaFamily(
        class_name="Qwen3",
        defaults={
            "head_dim": 128,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        fixed={"qk_norm": "head"},
    ),
    "smollm3": LlamaFamily(
        class_name="SmolLM3",
        defaults={
            "tie_word_embeddings": True,
            "sliding_window": None,
            "use_sliding_window": False,
            "rope_theta": 2e6,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        computed=leave_unrotated,
    ),
    "gemma": LlamaFamily(
        class_name="Gemma",
        defaults={"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
        computed=scale_first_gemma,
        norm_offset=1.0,
    ),
    "gemma2": GEMMA,
    "gemma3_text": LlamaFamily(
        class_name="Gemma3",
        defaults={
            **GEMMA.defaults,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        fixed={"norms": "both", "qk_norm": "head"},
        settings=GEMMA_SETTINGS,
        computed=scale_gemma,
        norms=GEMMA_NORMS,
        norm_offset=1.0,
    ),
    "phi3": LlamaFamily(
        class_name="Phi3",
        turns_parts=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
        },
        fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    "olmo2": OLMO2,
    "olmo3": replace(
        OLMO2,
        class_name="Olmo3",
        defaults={
            **OLMO2.defaults,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
        },
    ),
    "exaone4": LlamaFamily(
        class_name="Exaone4",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        fixed={"norms": "after", "qk_norm": "head"},
        computed=leave_full_layers_unrotated,
        norms=NORMS_AFTER,
    ),
    "seed_oss": LlamaFamily(
        class_name="SeedOss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
        },
        settings={"attention_out_bias": "output_bias"},
    ),
    "mixtral": LlamaFamily(
        class_name="Mixtral",
        defaults={
            **EXPERTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "intermediate_size": 14336,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.0,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
        settings={"num_experts_per_tok": "experts_per_token"},
        computed=read_experts,
        weights={
            "block_sparse_moe.": "mlp.",
            ".w1.": ".gate_proj.",
            ".w3.": ".up_proj.",
            ".w2.": ".down_proj.",
        },
    ),
    "qwen3_moe": LlamaFamily(
        class_name="Qwen3Moe",
        defaults={
            **EXPERTS,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        fixed={"qk_norm": "head"},
        settings=EXPERT_SETTINGS,
        computed=read_qwen_experts,
    ),
    "olmoe": LlamaFamily(
        class_name="Olmoe",
        defaults={
            **EXPERTS,
            "rms_norm_eps": 1e-5,
            "intermediate_size": 2048,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        fixed={"qk_norm": "projection"},
        settings=EXPERT_SETTINGS,
        computed=read_experts,
    ),
    "granite": LlamaFamily(
        class_name="Granite",
        defaults={"logits_scaling": 1.0},
        settings={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention_scale",
        },
        computed=scale_granite,
    ),
}


def read_settings(config: Json) -> dict[str, Any]:
    """Return the fields of a `LlamaConfig` that a config.json describes.

    Raises:
        ValueError: a setting that is missing or not known here, or a value that cannot be; names it.
    """
    family = FAMILIES[str(config["model_type"])]
    merged = {**family.defaults, **config}
    config = {name: value for name, value in merged.items() if value is not None}
    refuse_unknown(config, {*SAME, *ROTARY, *family.settings, *family.defaults, *DERIVED})
    for name in REQUIRED:
        read_count(config, name)
    heads = config["num_attention_heads"]
    bias = config.get("attention_bias", False)
    derived = {
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", config["hidden_size"] // heads),
        "qkv_bias": bias,
        "output_bias": bias,
        "layer_types": read_layer_types(config),
        "window": config.get("sliding_window"),
    }
    values = {name: config[name] for name in SAME if name in config}
    values |= {ours: config[name] for name, ours in family.settings.items() if name in config}
    settings = derived | values | read_rotary(config) | dict(family.fixed) | family.computed(config)
    if SLIDING not in settings["layer_types"]:
        settings["window"] = None
    return settings


def read_layer_types(config: Json) -> tuple[str, ...]:
    """Return for each layer whether it sees a window; empty where none does."""
    given = tuple(str(kind) for kind in config.get("layer_types", ()))
    if given:
        return given
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ()
    layers = range(config["num_hidden_layers"])
    for name in ("_sliding_window_pattern", "sliding_window_pattern"):
        if name in config:
            pattern = read_count(config, name)
            return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in layers)
    first = config.get("max_window_layers", 0)
    return tuple(FULL if layer < first else SLIDING for layer in layers)


def read_rotary(config: Json) -> dict[str, Rotary]:
    """Return the rotations: of transformers 5's rope_parameters, or of the older names."""
    context = config["max_position_embeddings"]
    family = FAMILIES[str(config["model_type"])]
    given = config.get("rope_parameters", {})
    scaling = config.get("rope_scaling", {})  # goes before rope_parameters, as in transformers
    common = {name: config[name] for name in BESIDE_ROTARY if name in config}
    has_local = "rope_local_base_freq" in config
    is_by_kind = FULL in given or SLIDING in given
    if not has_local and (scaling or not is_by_kind):
        return {"rotary": family.make_rotary({**common, **(scaling or given)}, context)}
    by_kind = given if is_by_kind else {FULL: given, SLIDING: {}}
    if missing := {FULL, SLIDING} - by_kind.keys():
        raise ValueError(f"rope_parameters has no {missing.pop()}, only {', '.join(given)}")
    full = {**common, **by_kind[FULL], **scaling}
    sliding = {**common, **({"rope_theta": config["rope_local_base_freq"]} if has_local else {})}
    return {
        "rotary": family.make_rotary(full, context),
        "window_rotary": family.make_rotary({**sliding, **by_kind[SLIDING]}, context),
    }


def rename_by(config: Json) -> Callable[[str], str]:
    """Return the renaming of published weights, given without their prefix "model.", to ours."""
    family = FAMILIES[str(config["model_type"])]
    norms = family.norms
    pattern = re.compile(rf"(layers\.\d+)\.({'|'.join(norms)})\.weight")

    def rename(name: str) -> str:
        for theirs, ours in family.weights.items():
            name = name.replace(theirs, ours)
        return pattern.sub(lambda match: f"{match[1]}.{norms[match[2]]}.weight", name)

    return rename


def join_projections(weights: dict[str, Tensor], config_json: Json) -> None:
    """Join the weights of queries, keys and values, where they are published apart, one below the other."""
    join_weights(weights, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
