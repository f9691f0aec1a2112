"""Runs bundles: numpy, tokenizers and one engine; neither torch, transformers nor onnx."""

from .errors import PlanForgeError
from .load import load
from .tasks.text_generator import Generation, Score, TextGenerator, Timings

__all__ = ["Generation", "PlanForgeError", "Score", "TextGenerator", "Timings", "load"]
