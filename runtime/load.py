"""`load`: a bundle's folder in, a running model out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .bundle.bundle import Bundle
from .errors import ManifestError
from .opening import LoadRequest

if TYPE_CHECKING:
    from .encode.text_encoder import TextEncoder
    from .generate.text_generator import TextGenerator
    from .translate.translator import Translator


def load(
    bundle: str | Path,
    *,
    backend: str = "auto",
    precision: str | None = None,
    threads: int | None = None,
    max_length: int | None = None,
    memory_limit: int | None = None,
    verify: bool = False,
    device: int = 0,
) -> TextGenerator | TextEncoder | Translator:
    """Open a bundle and make it ready to run.

    Where you know what the bundle does, `TextGenerator.load`, `TextEncoder.load` and `Translator.load` take
    the same arguments and return their own class, as editors and type checkers then know.

    Args:
        bundle: the folder that `planforge export` wrote.
        backend: "tensorrt-rtx" and "tensorrt" run the bundle's plan on an NVIDIA GPU, "ort-cuda" its graph in
            ONNX Runtime there, and "ort-cpu" on the CPU; "auto" takes the first of these that works here, and
            a log line says why not a better one.
        precision: of the graph to run; by default what `planforge bench --set-default` recorded, else on a
            GPU fp16 where it was found to be right, on a CPU the first that was given at export.
        threads: cores to use; by default OMP_NUM_THREADS, else the physical cores that this process and its
            cgroup may use.
        max_length: context in tokens (a prompt with its answer); by default, and at most, the bundle's.
        memory_limit: bytes for weights, and the caches, or batches and outputs that are read ahead, of all
            calls that run at one time. A call that needs more is refused beforehand, and several texts run in
            smaller batches where that helps; one that would fit alone waits until others are done, for ten
            minutes at most, and is then refused. An encoder's outputs count while it computes, not while an
            iterator's caller has the turn. Python, the engine and the tokenizer, 70 to 110 MB, don't count.
        verify: compare the hash of files above 256 MiB too (smaller ones always are).
        device: the GPU's number; a warning says when no GPU is used though it is not 0.

    Returns:
        A `TextGenerator`, `TextEncoder` or `Translator`, by the bundle's task; a context manager. Its
        `backend` is the name of the engine that was taken.

    Raises:
        BundleError: the folder is no bundle, or a file is missing or has changed.
        BackendUnavailableError: the engine is not installed, no GPU is here, or no plan fits it; says what to
            install or to run.
        InputError: an argument out of range.
        MemoryLimitError: the weights alone, or with an encoder's batch, need more than memory_limit.

    Example:
        >>> with load("bundles/gpt2") as model:
        ...     print(model)
        TextGenerator(gpt2, decoder.ort.fp32, ort-cpu, 2 threads)
    """
    request = LoadRequest(
        backend=backend,
        precision=precision,
        threads=threads,
        max_length=max_length,
        memory_limit=memory_limit,
        verify=verify,
        device=device,
    )
    opened = Bundle.open(bundle)
    return class_for(opened)._load(opened, request)


def class_for(bundle: Bundle) -> type[TextGenerator] | type[TextEncoder] | type[Translator]:
    """Return the class that runs a bundle.

    Only its module is imported: a third of the time of importing all.

    Raises:
        ManifestError: the bundle is for a task that this version does not run.
    """
    match bundle.manifest.task:
        case "text-generation":
            from .generate.text_generator import TextGenerator

            return TextGenerator
        case "text-encoding":
            from .encode.text_encoder import TextEncoder

            return TextEncoder
        case "translation":
            from .translate.translator import Translator

            return Translator
        case task:
            raise ManifestError(f"{bundle.folder} is for {task!r}, which this version does not run")
