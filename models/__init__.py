"""PyTorch reference models, written once and exported in several ONNX dialects."""

from .attention import AttentionCache, GrowingCache, KeyValue
from .checkpoint import load_model, save_model
from .gpt2 import GPT2, GPT2Config

__all__ = [
    "GPT2",
    "AttentionCache",
    "GPT2Config",
    "GrowingCache",
    "KeyValue",
    "load_model",
    "save_model",
]
