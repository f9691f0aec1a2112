"""Has a row for each task that a bundle may be for: where the class of its models is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import InputError, ManifestError

if TYPE_CHECKING:
    from .bundle.bundle import Bundle


class Task(NamedTuple):
    """The class of a task's models, which implements `Model`, and its module in the runtime."""

    module: str
    class_name: str


PICTURES = "image-generation"
LIKENESS = "image-text-encoding"
WORDS = "word-vectors"
RETRIEVAL = "retrieval-generation"
# What models do that read no texts, or pictures too, and the arguments of `planforge run` that do it.
USES = {
    PICTURES: ("makes pictures", '"a red three" -o picture.png'),
    LIKENESS: ("compares a picture with texts", '--image picture.png "a cat" "a dog"'),
    WORDS: ("finds words that mean alike", "king"),
}
TASKS = {
    "text-generation": Task("generate.text_generator", "TextGenerator"),
    "text-encoding": Task("encode.text_encoder", "TextEncoder"),
    RETRIEVAL: Task("generate.retrieval_generator", "RetrievalGenerator"),
    "translation": Task("translate.translator", "Translator"),
    PICTURES: Task("images.image_generator", "ImageGenerator"),
    LIKENESS: Task("images.image_text_encoder", "ImageTextEncoder"),
    WORDS: Task("words.word_vectors", "WordVectors"),
}


def find_task(bundle: Bundle) -> Task:
    """Return the row of a bundle's task; refuse a task of a later version."""
    task = bundle.manifest.task
    if task not in TASKS:
        raise ManifestError(f"{bundle.folder} is for {task!r}, which this version does not run")
    return TASKS[task]


def refuse_others(bundle: Bundle, what: str) -> None:
    """Refuse a bundle of pictures or words, for what is there for models of text alone; say what it does."""
    if bundle.manifest.task in USES:
        import shlex  # a quicker start without it

        does, arguments = USES[bundle.manifest.task]
        name = shlex.quote(str(bundle.folder))
        raise InputError(
            f"{what} is for models of text, and {bundle.folder} {does}: `planforge run {name} {arguments}`"
            f" does, and `planforge selftest {name}` compares it with PyTorch"
        )


def find_class(bundle: Bundle) -> Any:
    """Return the class that runs a bundle; imports its module alone: a third of the time of all."""
    task = find_task(bundle)
    return getattr(importlib.import_module(f".{task.module}", __package__), task.class_name)
