"""PyTorch reference models, written once and exported in several ONNX dialects."""

from .attention import AttentionCache, GrowingCache, KeyValue, PaddedAttention, SourceAttention
from .bert import Bert, BertConfig
from .checkpoint import load_model, save_model
from .gpt2 import GPT2, GPT2Config
from .sentence import DenseConfig, SentenceConfig
from .transformer import Transformer, TransformerConfig

__all__ = [
    "GPT2",
    "AttentionCache",
    "Bert",
    "BertConfig",
    "DenseConfig",
    "GPT2Config",
    "GrowingCache",
    "KeyValue",
    "PaddedAttention",
    "SentenceConfig",
    "SourceAttention",
    "Transformer",
    "TransformerConfig",
    "load_model",
    "save_model",
]
