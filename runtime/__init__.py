"""Runs bundles: numpy, tokenizers and one engine; neither torch, transformers nor onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    BackendError,
    BackendUnavailableError,
    BatchError,
    BundleError,
    BundleNotFoundError,
    ClosedError,
    ContextLengthError,
    DataError,
    DeadlineError,
    InputError,
    IntegrityError,
    ManifestError,
    MemoryLimitError,
    PlanForgeError,
    QueueFullError,
    SchemaError,
    TokenizerError,
)
from .load import load

if TYPE_CHECKING:
    from .asynchronous.image_generator import AsyncImageGenerator
    from .asynchronous.text_encoder import AsyncTextEncoder
    from .asynchronous.text_generator import AsyncTextGenerator, AsyncTextStream
    from .asynchronous.translator import AsyncTranslator
    from .decoding.chunk import Chunk, FinishReason, TextStream, TopLogprob, Usage
    from .decoding.processors import LogitsProcessor
    from .encode.results import (
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
    from .encode.text_encoder import TextEncoder
    from .generate.generation import Generation, GenerationCandidate, Timings
    from .generate.row_reader import Prompt
    from .generate.score import Score
    from .generate.text_generator import TextGenerator
    from .generate.tools import ToolCall
    from .images.image_generator import ImageGenerator, Step
    from .images.image_text_encoder import ImageTextEncoder
    from .images.options import ImageOptions
    from .images.pictures import Picture
    from .options import (
        AnswerOptions,
        BatchGenerationOptions,
        BatchTranslationOptions,
        EmbedOptions,
        EncoderOptions,
        FeatureOptions,
        FillMaskOptions,
        GenerationOptions,
        Layers,
        LoadOptions,
        Pooling,
        ProgressOption,
        RankOptions,
        TranslationOptions,
        Truncation,
    )
    from .text.chat import Message
    from .text.reading import Item
    from .translate.results import Alignment, Candidate, Translation, TranslationTimings
    from .translate.translator import Translator
    from .words.word_vectors import Neighbour, WordVectors

__all__ = [
    "Alignment",
    "Answer",
    "AnswerOptions",
    "Answers",
    "AsyncImageGenerator",
    "AsyncTextEncoder",
    "AsyncTextGenerator",
    "AsyncTextStream",
    "AsyncTranslator",
    "BackendError",
    "BackendUnavailableError",
    "BatchError",
    "BatchGenerationOptions",
    "BatchTranslationOptions",
    "BundleError",
    "BundleNotFoundError",
    "Candidate",
    "Chunk",
    "Classification",
    "ClosedError",
    "ContextLengthError",
    "DataError",
    "DeadlineError",
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
    "ImageGenerator",
    "ImageOptions",
    "ImageTextEncoder",
    "InputError",
    "IntegrityError",
    "Item",
    "Layers",
    "LoadOptions",
    "LogitsProcessor",
    "ManifestError",
    "MemoryLimitError",
    "Message",
    "Neighbour",
    "NextSentence",
    "Picture",
    "PlanForgeError",
    "Pooling",
    "ProgressOption",
    "Prompt",
    "QueueFullError",
    "RankOptions",
    "Ranked",
    "SchemaError",
    "Score",
    "Step",
    "Tags",
    "TextEncoder",
    "TextGenerator",
    "TextStream",
    "Timings",
    "TokenizerError",
    "ToolCall",
    "TopLogprob",
    "Translation",
    "TranslationOptions",
    "TranslationTimings",
    "Translator",
    "Truncation",
    "Usage",
    "WordVectors",
    "load",
]

# Each task's module is imported when one of its names is asked for; load() takes what a bundle needs.
MODULES = {
    "AsyncImageGenerator": "asynchronous.image_generator",
    "AsyncTextEncoder": "asynchronous.text_encoder",
    **dict.fromkeys(("AsyncTextGenerator", "AsyncTextStream"), "asynchronous.text_generator"),
    "AsyncTranslator": "asynchronous.translator",
    "Item": "text.reading",
    "LogitsProcessor": "decoding.processors",
    "Message": "text.chat",
    "Prompt": "generate.row_reader",
    "Score": "generate.score",
    "TextGenerator": "generate.text_generator",
    "ToolCall": "generate.tools",
    "TextEncoder": "encode.text_encoder",
    "Translator": "translate.translator",
    **dict.fromkeys(("Chunk", "FinishReason", "TextStream", "TopLogprob", "Usage"), "decoding.chunk"),
    **dict.fromkeys(("Generation", "GenerationCandidate", "Timings"), "generate.generation"),
    **dict.fromkeys(("Alignment", "Candidate", "Translation", "TranslationTimings"), "translate.results"),
    **dict.fromkeys([name for name in __all__ if name.endswith("Options")], "options"),
    **dict.fromkeys(("Layers", "Pooling", "ProgressOption", "Truncation"), "options"),
    **dict.fromkeys(("ImageGenerator", "Step"), "images.image_generator"),
    "ImageOptions": "images.options",
    "ImageTextEncoder": "images.image_text_encoder",
    "Picture": "images.pictures",
    **dict.fromkeys(("Neighbour", "WordVectors"), "words.word_vectors"),
}

if not TYPE_CHECKING:  # a type checker would take every name that there isn't for one of these

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        module = importlib.import_module(f".{MODULES.get(name, 'encode.results')}", __name__)
        return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
