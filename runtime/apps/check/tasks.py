"""Has a row for each task: how an open model becomes what cases run on, and what its own methods answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...bundle.manifest import Manifest
from .answers import Limits, compare_generator, compare_translator
from .decoder import DecoderEngine
from .encoder import EncoderEngine
from .files import Arrays
from .image_text import LikenessEngine
from .images import ImageEngine
from .judge import Engine
from .outcome import Comparison
from .retrieval import RetrievalEngine
from .translator import TranslatorEngine
from .words import WordsEngine


@dataclass(frozen=True)
class Task:
    """What selftest needs of a task.

    Attributes:
        open: returns the engine of a model that was loaded.
        compare_texts: lets the model's own methods answer texts; None where cases say it all.
    """

    open: Callable[[Any], Engine]
    compare_texts: Callable[[Any, Manifest, Arrays, Limits], list[Comparison]] | None = None


TASKS = {
    "text-generation": Task(
        lambda model: DecoderEngine(model.decoder, lambda: (model.tokenizer, model.tokenizer)),
        compare_generator,
    ),
    "retrieval-generation": Task(lambda model: RetrievalEngine(model.decoder)),
    "text-encoding": Task(lambda model: EncoderEngine(model.encoder)),
    "translation": Task(
        lambda model: TranslatorEngine(
            model.encoder, model.decoder, lambda: (model.source_tokenizer, model.target_tokenizer)
        ),
        compare_translator,
    ),
    "image-generation": Task(lambda model: ImageEngine(model.open_parts(), model.defaults)),
    "image-text-encoding": Task(lambda model: LikenessEngine(model.parts, model.defaults)),
    "word-vectors": Task(lambda model: WordsEngine({model.artifact.graph: model.part})),
}
