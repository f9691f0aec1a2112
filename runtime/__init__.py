"""Runs bundles: numpy, tokenizers and one engine; neither torch, transformers nor onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    BackendError,
    BackendUnavailableError,
    BundleError,
    BundleNotFoundError,
    ClosedError,
    ContextLengthError,
    InputError,
    IntegrityError,
    ManifestError,
    MemoryLimitError,
    PlanForgeError,
    TokenizerError,
)
from .load import load
from .selftest import SelftestResult, selftest

if TYPE_CHECKING:
    from .decoding.processors import LogitsProcessor
    from .options import (
        AnswerOptions,
        BatchGenerationOptions,
        EmbedOptions,
        EncoderOptions,
        FeatureOptions,
        FillMaskOptions,
        GenerationOptions,
        Layers,
        Pooling,
        ProgressOption,
        RankOptions,
        TranslationOptions,
        Truncation,
    )
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
    from .tasks.generation import Generation, GenerationCandidate, Timings
    from .tasks.prompts import Prompt
    from .tasks.reading import Item
    from .tasks.score import Score
    from .tasks.text_encoder import TextEncoder
    from .tasks.text_generator import TextGenerator
    from .tasks.translations import Alignment, Candidate, Translation, TranslationTimings
    from .tasks.translator import Translator
    from .text.chat import Message

__all__ = [
    "Alignment",
    "Answer",
    "AnswerOptions",
    "Answers",
    "BackendError",
    "BackendUnavailableError",
    "BatchGenerationOptions",
    "BundleError",
    "BundleNotFoundError",
    "Candidate",
    "Chunk",
    "Classification",
    "ClosedError",
    "ContextLengthError",
    "EmbedOptions",
    "Embedding",
    "EncoderOptions",
    "Entity",
    "FeatureOptions",
    "Features",
    "Fill",
    "FillMaskOptions",
    "FilledMask",
    "FinishReason",
    "Generation",
    "GenerationCandidate",
    "GenerationOptions",
    "InputError",
    "IntegrityError",
    "Item",
    "Layers",
    "LogitsProcessor",
    "ManifestError",
    "MemoryLimitError",
    "Message",
    "NextSentence",
    "PlanForgeError",
    "Pooling",
    "ProgressOption",
    "Prompt",
    "RankOptions",
    "Ranked",
    "Score",
    "SelftestResult",
    "Tags",
    "TextEncoder",
    "TextGenerator",
    "TextStream",
    "Timings",
    "TokenizerError",
    "TopLogprob",
    "Translation",
    "TranslationOptions",
    "TranslationTimings",
    "Translator",
    "Truncation",
    "Usage",
    "load",
    "selftest",
]

# Each task's module is imported when one of its names is asked for; load() takes what a bundle needs.
MODULES = {
    "Item": "tasks.reading",
    "LogitsProcessor": "decoding.processors",
    "Message": "text.chat",
    "Prompt": "tasks.prompts",
    "Score": "tasks.score",
    "TextGenerator": "tasks.text_generator",
    "TextEncoder": "tasks.text_encoder",
    "Translator": "tasks.translator",
    **dict.fromkeys(("Chunk", "FinishReason", "TextStream", "TopLogprob", "Usage"), "tasks.chunk"),
    **dict.fromkeys(("Generation", "GenerationCandidate", "Timings"), "tasks.generation"),
    **dict.fromkeys(("Alignment", "Candidate", "Translation", "TranslationTimings"), "tasks.translations"),
    **dict.fromkeys([name for name in __all__ if name.endswith("Options")], "options"),
    **dict.fromkeys(("Layers", "Pooling", "ProgressOption", "Truncation"), "options"),
}

if not TYPE_CHECKING:  # a type checker would take every name that there isn't for one of these

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        module = importlib.import_module(f".{MODULES.get(name, 'tasks.encoder_results')}", __name__)
        return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
