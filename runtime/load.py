"""The one door: a bundle's folder in, a running model out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .backends.backend import Backend, Program
from .backends.ladder import open_on
from .backends.threads import Threads
from .bundle.bundle import Bundle
from .bundle.json_reader import Reader
from .bundle.manifest import Artifact, Manifest
from .errors import InputError, ManifestError, MemoryLimitError
from .memory_budget import MemoryBudget
from .text.tokenizer import Tokenizer, read

# Each task's own modules are imported when a bundle needs them: a third of the time of importing all.
if TYPE_CHECKING:
    from .tasks.closing import Closing
    from .tasks.text_encoder import TextEncoder
    from .tasks.text_generator import TextGenerator
    from .tasks.translator import Translator


M = TypeVar("M", bound="Closing")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller of `load` asks for; the fields are its arguments.

    Attributes:
        model_class: the class whose `load` was called; None: `planforge.runtime.load` was.
    """

    backend: str = "auto"
    precision: str | None = None
    threads: int | None = None
    max_length: int | None = None
    memory_limit: int | None = None
    verify: bool = False
    device: int = 0
    model_class: type[Closing] | None = None

    def class_for(self, usual: type[M]) -> type[M]:
        """Return the class to make: `usual`, or the subclass of it whose `load` was called."""
        if self.model_class is not None and issubclass(self.model_class, usual):
            return self.model_class
        return usual

    def check(self, manifest: Manifest) -> None:
        """Refuse numbers out of range, before anything is opened."""
        context = manifest.max_length
        check_whole("threads", self.threads, 1, os.cpu_count() or 1, "this machine's cores")
        least = 2 if manifest.encoder is None else min(8, context)  # a pair has three special tokens
        check_whole("max_length", self.max_length, least, context, "the model's context")
        check_whole(
            "memory_limit", self.memory_limit, 1, sys.maxsize, "bytes; more than there are is no limit"
        )
        check_whole("device", self.device, 0, 1023, "the GPU's number")


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
    """Opens a bundle and makes it ready to run.

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
    request = Request(
        backend=backend,
        precision=precision,
        threads=threads,
        max_length=max_length,
        memory_limit=memory_limit,
        verify=verify,
        device=device,
    )
    return load_model(bundle, request)


def load_model(folder: str | Path, request: Request) -> TextGenerator | TextEncoder | Translator:
    """Opens a bundle as was asked for; see `load`.

    Raises:
        InputError: also where the bundle is for another class than the one whose `load` was called.
    """
    bundle = Bundle.open(folder)
    task = bundle.manifest.task
    if task not in OPENERS:
        raise ManifestError(f"{bundle.folder} is for {task!r}, which this version does not run")
    check_class(request.model_class, bundle)
    request.check(bundle.manifest)
    engine, model = open_on(
        request.backend,
        bundle,
        lambda engine: OPENERS[task](bundle, engine, request),
        request.precision,
        request.threads,
        request.verify,
        request.device,
        request.max_length,
    )
    model.backend = engine.name
    model.family = bundle.manifest.family
    threads = getattr(engine, "threads", None)  # engines on a GPU have none
    model.threads = threads.count if isinstance(threads, Threads) else None
    return model


def check_class(model_class: type[Closing] | None, bundle: Bundle) -> None:
    """Refuses a bundle that another class than `model_class` runs, and names that one."""
    if model_class is None:
        return
    right = CLASS_NAMES[bundle.manifest.task]
    if right not in [base.__name__ for base in model_class.__mro__]:
        raise InputError(
            f"{bundle.folder} is a bundle for {bundle.manifest.task}, which {model_class.__name__} does not"
            f" do; open it with {right}.load, or with load()"
        )


def open_generator(bundle: Bundle, engine: Backend, request: Request) -> TextGenerator:
    from .decoding.decoder import Decoder
    from .tasks.text_generator import TextGenerator
    from .text.chat import Chat

    manifest = bundle.manifest
    assert manifest.generation is not None  # the manifest of what is no encoder has it
    artifact = engine.artifact(bundle, "decoder", request.precision)
    max_length = length_of(bundle, request.max_length, artifact)
    check_weights(bytes_of(manifest, artifact), request.memory_limit)
    with opening(engine, bundle, artifact) as programs:
        tokenizer = Tokenizer.from_file(bundle.path(tokenizer_files(manifest, 1)[0]))
        chat = Chat.of(bundle)
    weight_bytes = bytes_of(manifest, artifact)
    decoder = Decoder(programs[0], artifact, MemoryBudget(request.memory_limit, weight_bytes))
    return request.class_for(TextGenerator)(
        decoder,
        tokenizer,
        manifest.generation,
        max_length=max_length,
        chat=chat,
    )


def open_encoder(bundle: Bundle, engine: Backend, request: Request) -> TextEncoder:
    from .encoding.encoder import Encoder, check_manifest, check_memory
    from .tasks.text_encoder import TextEncoder

    manifest = bundle.manifest
    if manifest.encoder is None:
        raise ManifestError(f"{bundle.folder}: the manifest of an encoder has no 'encoder'")
    artifact = engine.artifact(bundle, "encoder", request.precision)
    check_manifest(manifest.artifact(artifact.id), manifest.encoder, manifest.config)
    max_length = length_of(bundle, request.max_length, artifact)
    defaults = replace(manifest.encoder, max_length=max_length)
    check_memory(bytes_of(manifest, artifact), manifest.config, max_length, request.memory_limit)
    with opening(engine, bundle, artifact) as programs:
        tokenizer = Tokenizer.from_file(bundle.path(tokenizer_files(manifest, 1)[0]))
    budget = MemoryBudget(request.memory_limit, bytes_of(manifest, artifact))
    encoder = Encoder(programs[0], artifact, defaults.tokens["pad"], budget, manifest.config)
    return request.class_for(TextEncoder)(encoder, tokenizer, defaults)


def open_translator(bundle: Bundle, engine: Backend, request: Request) -> Translator:
    from .decoding.decoder import Decoder
    from .decoding.source import SourceEncoder, cross_pairs
    from .tasks.translator import Translator

    manifest = bundle.manifest
    defaults = manifest.generation
    if defaults is None or None in (defaults.decoder_start, defaults.source_eos):
        raise ManifestError(f"{bundle.folder}: a translation's generation needs decoder_start and source_eos")
    decoder = engine.artifact(bundle, "decoder", request.precision)
    encoder = engine.artifact(bundle, "encoder", decoder.precision)
    max_length = length_of(bundle, request.max_length, decoder, encoder)
    if encoder.data != decoder.data:
        raise ManifestError(
            f"{bundle.folder}: {encoder.id} and {decoder.id} come from different exports: their weights are"
            f" {', '.join(encoder.data)} and {', '.join(decoder.data)}"
        )
    cross_pairs(encoder, decoder)
    weight_bytes = bytes_of(manifest, encoder, decoder)
    check_weights(weight_bytes, request.memory_limit)
    with opening(engine, bundle, encoder, decoder) as programs:
        tokenizers = translation_tokenizers(bundle)
    return request.class_for(Translator)(
        SourceEncoder(programs[0], encoder, decoder),
        Decoder(programs[1], decoder, MemoryBudget(request.memory_limit, weight_bytes)),
        tokenizers,
        defaults,
        max_length=max_length,
    )


def translation_tokenizers(bundle: Bundle) -> tuple[Tokenizer, Tokenizer]:
    """The source's tokenizer and the target's."""
    from .text.kinds import open_tokenizer

    manifest = bundle.manifest
    kind = Reader(manifest.tokenizer, "tokenizer").get("kind", str)
    config = Reader(manifest.config, "config")
    names = tokenizer_files(manifest, 2)
    opened = {}
    for name, side in zip(names, ("source", "target"), strict=True):
        if name not in opened:  # some models have one for both
            path = bundle.path(name)
            opened[name] = open_tokenizer(read(path), str(path), kind, config.get(f"{side}_vocab_size", int))
    return opened[names[0]], opened[names[1]]


@contextmanager
def opening(engine: Backend, bundle: Bundle, *artifacts: Artifact) -> Iterator[list[Program]]:
    """Opens graphs in a thread of their own, beside what the caller does; the list is filled at the end."""
    programs: list[Program] = []
    with ThreadPoolExecutor(1, "planforge-open") as pool:
        opened = [pool.submit(engine.open, bundle, artifact) for artifact in artifacts]
        try:
            yield programs
            programs += [one.result() for one in opened]
        except BaseException:
            for one in opened:
                if one.exception() is None:
                    one.result().close()
            raise


OPENERS: dict[str, Callable[[Bundle, Backend, Request], TextGenerator | TextEncoder | Translator]] = {
    "text-generation": open_generator,
    "text-encoding": open_encoder,
    "translation": open_translator,
}
CLASS_NAMES = {
    "text-generation": "TextGenerator",
    "text-encoding": "TextEncoder",
    "translation": "Translator",
}


def length_of(bundle: Bundle, asked: int | None, *artifacts: Artifact) -> int:
    """The context in tokens: what was asked for, else all that the model and these graphs take.

    Raises:
        InputError: a plan takes less than was asked for.
    """
    most = min(bundle.manifest.max_length, *(artifact.axis("tokens").max for artifact in artifacts))
    if asked is not None and asked > most:
        raise InputError(
            f"max_length={asked} is more than the {most} that the plan was built for; leave it out, or build"
            " the plan again with a larger --max length=N"
        )
    return asked or most


def tokenizer_files(manifest: Manifest, count: int) -> tuple[str, ...]:
    """The tokenizers, of which a task needs `count`."""
    names = Reader(manifest.tokenizer, "tokenizer").list_of("files", str)
    if len(names) != count:
        raise ManifestError(f"tokenizer.files has {len(names)} files, {manifest.task} needs {count}")
    return names


def bytes_of(manifest: Manifest, *artifacts: Artifact) -> int:
    """The size of the weights, each file once."""
    return sum(manifest.files[name].bytes for name in {name for a in artifacts for name in a.data})


def check_weights(weight_bytes: int, memory_limit: int | None) -> None:
    """Refuses a limit that leaves nothing for a cache; a call adds up the rest when it knows it."""
    if memory_limit is not None and weight_bytes >= memory_limit:
        raise MemoryLimitError(
            f"more than {weight_bytes / 1e6:.1f} MB are needed: {weight_bytes / 1e6:.1f} MB of weights and a"
            f" cache; memory_limit is {memory_limit / 1e6:.3g} MB. A precision of fewer bits needs less",
            needed=weight_bytes + 1,
            limit=memory_limit,
        )


def check_whole(name: str, value: int | None, low: int, high: int, what: str) -> None:
    """Refuses what is neither None nor a whole number in a range."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InputError(f"{name}={value!r} must be None or a whole number from {low} to {high} ({what})")
