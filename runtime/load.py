"""`load`: a bundle's folder in, a running model out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .bundle.bundle import Bundle
from .opening import make_load_request
from .tasks import find_class

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .encode.text_encoder import TextEncoder
    from .generate.text_generator import TextGenerator
    from .options import LoadOptions
    from .translate.translator import Translator


def load(bundle: str | Path, **options: Unpack[LoadOptions]) -> TextGenerator | TextEncoder | Translator:
    """Open a bundle and make it ready to run.

    Where you know what the bundle does, `TextGenerator.load`, `TextEncoder.load` and `Translator.load` take
    the same arguments and return their own class, as editors and type checkers then know.

    Args:
        bundle: the folder that `planforge export` wrote.
        **options: see `LoadOptions`.

    Returns:
        A `TextGenerator`, `TextEncoder` or `Translator`, by the bundle's task; a context manager. Its
        `backend` is the name of the engine that was taken.

    Raises:
        BundleError: the folder is no bundle, or a file is missing or has changed.
        BackendUnavailableError: the engine is not installed, no GPU is here, or no plan fits it; says what to
            install or to run.
        InputError: no such option, or one out of range.
        MemoryLimitError: the weights alone need more than memory_limit.

    Example:
        >>> with load("bundles/gpt2") as model:
        ...     print(model)
        TextGenerator(gpt2, decoder.ort.fp32, ort-cpu, 2 threads)
    """
    request = make_load_request(options)
    opened = Bundle.open(bundle)
    model: TextGenerator | TextEncoder | Translator = find_class(opened)._load(opened, request)
    return model
