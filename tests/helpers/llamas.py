"""Random checkpoints of the Llama family, written by transformers: each differs where its papers do."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from planforge.exporter.calibration.calibration import Calibration
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source, find_demo
from planforge.exporter.exporting import stage_graphs
from planforge.exporter.graphs import begin_manifest, make_artifact, trace_graphs
from planforge.exporter.reference_model import load_our_model

from .beams import search_beams

WINDOW = 6
NEW = 14  # tokens of an answer
SIZES: dict[str, Any] = {
    "vocab_size": 2048,  # gpt2-demo's tokenizer
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.0, 2.0, 2.0],
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
OLMO3 = {"full_attention": {**YARN, "rope_theta": 5e5}, "sliding_attention": {**PLAIN, "rope_theta": 5e5}}
# Names of transformers' classes without "ForCausalLM" or "Config", with settings beside `SIZES`.
LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, linear": ("Llama", {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 2.0}}),
    "llama, dynamic": ("Llama", {"rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": 4.0}}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "ministral": ("Ministral", {"sliding_window": WINDOW, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma 2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 3": ("Gemma3", {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}),
    "phi-3": ("Phi3", {"sliding_window": WINDOW, "rms_norm_eps": 1e-6}),  # Mistral's graph, fused weights
    "phi-4-mini": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "olmo 2": ("Olmo2", {}),
    "olmo 3": ("Olmo3", {"sliding_window": WINDOW, "layer_types": MIXED, "rope_parameters": OLMO3}),
    "exaone 4": ("Exaone4", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "exaone 4, no windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": WINDOW}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 80,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 32,
        },
    ),
    "qwen3-moe, one in two": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "decoder_sparse_step": 2},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
}


# Two layers of each kind, for exports: tracing takes most of one.
SHALLOW: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma 3": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo 3": {"layer_types": ["sliding_attention", "full_attention"]},
    "exaone 4": {"layer_types": ["sliding_attention", "full_attention"]},
}


# Their attention has what others have not: none, windows, caps, two rotations, partial ones.
INPLACE = ("llama 2", "mistral", "gemma 2", "gemma 3", "phi-4-mini")


def list_dialects(name: str) -> list[str]:
    """Return the dialects that a checkpoint of `LLAMAS` is tested in: `inplace` where attention differs."""
    return ["ort", "portable", *(["inplace"] if name in INPLACE else [])]


def shallow_llama(folder: Path, name: str, **changes: Any) -> Any:
    """Write a checkpoint of two layers as `tiny_llama` does."""
    return tiny_llama(folder, name, num_hidden_layers=2, **SHALLOW.get(name, {}), **changes)


def tiny_llama(folder: Path, name: str, **changes: Any) -> Any:
    """Write a checkpoint of `LLAMAS` with gpt2-demo's tokenizer, and return transformers' model of it."""
    kind, settings = LLAMAS[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    config = config_class(**{**SIZES, **settings, **changes})
    transformers.set_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    tied = model.get_input_embeddings().weight if config.tie_word_embeddings else None
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases, which are all alike at first
                spread = 0.02 if own.endswith("bias") else 0.2  # larger ones would drown what a token says
                parameter.add_(torch.randn_like(parameter) * spread)
            elif parameter is not tied:  # else a token's likeliest successor is itself
                parameter.mul_(4)
    model.save_pretrained(folder)
    for file in find_demo("gpt2-demo").glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return model


def write_dialects(
    folder: Path,
    bundle: Path,
    dialects: Sequence[str],
    precision: str = "fp32",
    calibration: Calibration | None = None,
) -> None:
    """Write a checkpoint's bundle with a graph of each dialect, unverified."""
    checkpoint = Checkpoint(Source("folder", str(folder), folder))
    recipes = {r.id: r for r in checkpoint.recipes.values() if r.dialect in dialects}
    graphs = trace_graphs(checkpoint, list(recipes), load_our_model(folder, checkpoint.choices.max_length))
    artifacts = [
        make_artifact(r, precision, f"onnx/{r.id}.onnx", "onnx/weights.data") for r in recipes.values()
    ]
    bundle.mkdir()
    manifest = begin_manifest(checkpoint, artifacts, bundle, bundle)
    stage_graphs(bundle, manifest, graphs, calibration or Calibration(), lambda _: None)


class Reference:
    """A checkpoint in transformers, which answers each question once."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.continue_greedily = functools.cache(self._continue_greedily)
        self.compute_logits = functools.cache(self._compute_logits)
        self.search_beams = functools.cache(self._search_beams)

    def _continue_greedily(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        ids = torch.tensor([tokens])
        how: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return tuple(out[0, len(tokens) :].tolist())

    def _compute_logits(self, tokens: tuple[int, ...]) -> Any:
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].numpy()

    def _search_beams(self, tokens: tuple[int, ...]) -> Any:
        return search_beams(self.model, tokens, num_beams=3, n_best=3, max_new_tokens=NEW, ignore_eos=True)
