"""Runs bundles: numpy, tokenizers and one engine; neither torch, transformers nor onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import PlanForgeError
from .load import load
from .selftest import SelftestResult, selftest

if TYPE_CHECKING:
    from .decoding.processors import LogitsProcessor
    from .options import GenerationOptions
    from .tasks.chunk import Chunk, FinishReason, TextStream, TopLogprob, Usage
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
    from .tasks.generation import Generation, Timings
    from .tasks.prompts import Prompt
    from .tasks.score import Score
    from .tasks.text_encoder import TextEncoder
    from .tasks.text_generator import TextGenerator
    from .tasks.translator import Alignment, Candidate, Translation, TranslationTimings, Translator

__all__ = [
    "Alignment",
    "Answer",
    "Answers",
    "Candidate",
    "Chunk",
    "Classification",
    "Embedding",
    "Entity",
    "Features",
    "Fill",
    "FilledMask",
    "FinishReason",
    "Generation",
    "GenerationOptions",
    "LogitsProcessor",
    "NextSentence",
    "PlanForgeError",
    "Prompt",
    "Ranked",
    "Score",
    "SelftestResult",
    "Tags",
    "TextEncoder",
    "TextGenerator",
    "TextStream",
    "Timings",
    "TopLogprob",
    "Translation",
    "TranslationTimings",
    "Translator",
    "Usage",
    "load",
    "selftest",
]

# Each task's module is imported when one of its names is asked for; load() takes what a bundle needs.
MODULES = {
    "LogitsProcessor": "decoding.processors",
    "GenerationOptions": "options",
    "Prompt": "tasks.prompts",
    **dict.fromkeys(("Chunk", "FinishReason", "TextStream", "TopLogprob", "Usage"), "tasks.chunk"),
    **dict.fromkeys(("Generation", "Timings"), "tasks.generation"),
    "Score": "tasks.score",
    "TextGenerator": "tasks.text_generator",
    **dict.fromkeys(
        ("Translator", "Translation", "TranslationTimings", "Candidate", "Alignment"), "tasks.translator"
    ),
    "TextEncoder": "tasks.text_encoder",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f".{MODULES.get(name, 'tasks.encoder_results')}", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
