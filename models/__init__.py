"""PyTorch reference models, written once and exported in several ONNX dialects.

They load on first use, so that what only reads a checkpoint's JSON never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionCache, DynamicCache, KeyValue, PaddedAttention, SourceAttention
    from .bert import Bert, BertConfig
    from .checkpoint import load_model
    from .clip import Clip, ClipConfig
    from .encoder import Encoder, EncoderConfig
    from .gpt2 import GPT2, GPT2Config
    from .llama import Llama, LlamaConfig
    from .modernbert import ModernBert, ModernBertConfig
    from .saving import save_model
    from .sentence import DenseConfig, LayerNormConfig, NormalizeConfig, SentenceConfig
    from .stable_diffusion import StableDiffusion, StableDiffusionConfig
    from .transformer import Transformer, TransformerConfig

__all__ = [
    "GPT2",
    "AttentionCache",
    "Bert",
    "BertConfig",
    "Clip",
    "ClipConfig",
    "DenseConfig",
    "DynamicCache",
    "Encoder",
    "EncoderConfig",
    "GPT2Config",
    "KeyValue",
    "LayerNormConfig",
    "Llama",
    "LlamaConfig",
    "ModernBert",
    "ModernBertConfig",
    "NormalizeConfig",
    "PaddedAttention",
    "SentenceConfig",
    "SourceAttention",
    "StableDiffusion",
    "StableDiffusionConfig",
    "Transformer",
    "TransformerConfig",
    "load_model",
    "save_model",
]

_HOME = {
    "AttentionCache": ".attention",
    "Bert": ".bert",
    "BertConfig": ".bert",
    "Clip": ".clip",
    "ClipConfig": ".clip",
    "DenseConfig": ".sentence",
    "Encoder": ".encoder",
    "EncoderConfig": ".encoder",
    "GPT2": ".gpt2",
    "GPT2Config": ".gpt2",
    "DynamicCache": ".attention",
    "KeyValue": ".attention",
    "LayerNormConfig": ".sentence",
    "Llama": ".llama",
    "LlamaConfig": ".llama",
    "ModernBert": ".modernbert",
    "ModernBertConfig": ".modernbert",
    "NormalizeConfig": ".sentence",
    "PaddedAttention": ".attention",
    "SentenceConfig": ".sentence",
    "SourceAttention": ".attention",
    "StableDiffusion": ".stable_diffusion",
    "StableDiffusionConfig": ".stable_diffusion",
    "Transformer": ".transformer",
    "TransformerConfig": ".transformer",
    "load_model": ".checkpoint",
    "save_model": ".saving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
