"""PyTorch reference models, written once and exported in several ONNX dialects.

They load on first use, so that what only reads a checkpoint's JSON never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionCache, DynamicCache, KeyValue, PaddedAttention, SourceAttention
    from .bert import Bert, BertConfig
    from .causal_encoder import CausalEncoder, CausalEncoderConfig
    from .checkpoint import load_model
    from .clip import Clip, ClipConfig
    from .encoder import Encoder, EncoderConfig
    from .gpt2 import GPT2, GPT2Config
    from .llama import Llama, LlamaConfig
    from .modernbert import ModernBert, ModernBertConfig
    from .recurrent import Recurrent, RecurrentConfig
    from .retro import Retro
    from .retro_config import RetroConfig
    from .saving import save_model
    from .sentence import DenseConfig, LayerNormConfig, NormalizeConfig, SentenceConfig
    from .stable_diffusion import StableDiffusion, StableDiffusionConfig
    from .transformer import Transformer, TransformerConfig
    from .word_vectors import WordVectors, WordVectorsConfig, save_word_vectors

__all__ = [
    "GPT2",
    "AttentionCache",
    "Bert",
    "BertConfig",
    "CausalEncoder",
    "CausalEncoderConfig",
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
    "Recurrent",
    "RecurrentConfig",
    "Retro",
    "RetroConfig",
    "SentenceConfig",
    "SourceAttention",
    "StableDiffusion",
    "StableDiffusionConfig",
    "Transformer",
    "TransformerConfig",
    "WordVectors",
    "WordVectorsConfig",
    "load_model",
    "save_model",
    "save_word_vectors",
]

_HOME = {
    "AttentionCache": ".attention",
    "Bert": ".bert",
    "BertConfig": ".bert",
    "CausalEncoder": ".causal_encoder",
    "CausalEncoderConfig": ".causal_encoder",
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
    "Recurrent": ".recurrent",
    "RecurrentConfig": ".recurrent",
    "Retro": ".retro",
    "RetroConfig": ".retro_config",
    "SentenceConfig": ".sentence",
    "SourceAttention": ".attention",
    "StableDiffusion": ".stable_diffusion",
    "StableDiffusionConfig": ".stable_diffusion",
    "Transformer": ".transformer",
    "TransformerConfig": ".transformer",
    "WordVectors": ".word_vectors",
    "WordVectorsConfig": ".word_vectors",
    "load_model": ".checkpoint",
    "save_model": ".saving",
    "save_word_vectors": ".word_vectors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
