"""Runs bundles: numpy, tokenizers and one engine; neither torch, transformers nor onnx."""

from .errors import PlanForgeError
from .load import load
from .tasks.encoder_results import (
    Answer,
    Answers,
    Classification,
    Embedding,
    Entity,
    Features,
    Fill,
    FilledMask,
    NextSentence,
    Ranked,
    Tags,
)
from .tasks.text_encoder import TextEncoder
from .tasks.text_generator import Generation, Score, TextGenerator, Timings
from .tasks.translator import Alignment, Candidate, Translation, TranslationTimings, Translator

__all__ = [
    "Alignment",
    "Answer",
    "Answers",
    "Candidate",
    "Classification",
    "Embedding",
    "Entity",
    "Features",
    "Fill",
    "FilledMask",
    "Generation",
    "NextSentence",
    "PlanForgeError",
    "Ranked",
    "Score",
    "Tags",
    "TextEncoder",
    "TextGenerator",
    "Timings",
    "Translation",
    "TranslationTimings",
    "Translator",
    "load",
]
