"""The one door: a bundle's folder in, a running model out."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .backends.ladder import choose_artifact, choose_backend
from .bundle.bundle import Bundle
from .decoding.decoder import Decoder
from .encoding.encoder import Encoder, check_manifest, check_memory
from .errors import InputError, ManifestError
from .tasks.text_encoder import TextEncoder
from .tasks.text_generator import TextGenerator
from .text.tokenizer import Tokenizer


def load(
    bundle: str | Path,
    backend: str = "auto",
    precision: str | None = None,
    threads: int | None = None,
    max_length: int | None = None,
    memory_limit: int | None = None,
    verify: bool = False,
) -> Any:  # so that `model: TextEncoder = load(...)` needs no cast; which one, the bundle decides
    """Opens a bundle and makes it ready to run.

    Args:
        bundle: the folder that `planforge export` wrote.
        backend: "auto" takes the best engine that works here; "ort-cpu" is ONNX Runtime on the CPU.
        precision: of the graph to run; by default the first that was given at export.
        threads: cores to use; by default all that this process may use.
        max_length: context in tokens (a prompt with its answer); by default, and at most, the bundle's.
        memory_limit: bytes for weights and cache, or weights and a batch; more is refused beforehand.
        verify: compare the hash of files above 256 MiB too (smaller ones always are).

    Returns:
        A `TextGenerator` or `TextEncoder`, by the bundle's task; a context manager with close().

    Raises:
        BundleError: the folder is no bundle, or a file is missing or has changed.
        BackendUnavailableError: the engine is not installed; names the extra.
        InputError: an argument out of range.

    Example:
        >>> with load("bundles/gpt2") as model:
        ...     print(model.generate("Hello", max_new_tokens=40).text)
    """
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    context = manifest.max_length
    check_whole("threads", threads, 1, os.cpu_count() or 1, "this machine's cores")
    least = 2 if manifest.encoder is None else min(8, context)  # a pair has three special tokens
    check_whole("max_length", max_length, least, context, "the model's context")
    check_whole("memory_limit", memory_limit, 1, sys.maxsize, "bytes")
    graphs = {"text-generation": "decoder", "text-encoding": "encoder"}
    if manifest.task not in graphs:
        raise ManifestError(f"{opened.folder} is for {manifest.task!r}, which this version does not run")
    engine = choose_backend(backend, opened, threads, verify)
    artifact = choose_artifact(opened, graphs[manifest.task], precision)
    tokenizer = Tokenizer.from_file(opened.path(str(manifest.tokenizer["files"][0])))
    weight_bytes = sum(manifest.files[name].bytes for name in artifact.data)
    if manifest.encoder is not None:
        defaults = replace(manifest.encoder, max_length=max_length or context)
        check_manifest(artifact, defaults, manifest.config)
        check_memory(weight_bytes, manifest.config, defaults.max_length, memory_limit)
        encoder = Encoder(engine.open(opened, artifact), artifact, defaults.tokens["pad"])
        return TextEncoder(encoder, tokenizer, defaults)
    assert manifest.generation is not None  # a manifest has one of the two
    return TextGenerator(
        Decoder(engine.open(opened, artifact), artifact),
        tokenizer,
        manifest.generation,
        max_length=max_length or context,
        memory_limit=memory_limit,
        weight_bytes=weight_bytes,
    )


def check_whole(name: str, value: int | None, low: int, high: int, what: str) -> None:
    """Refuses what is neither None nor a whole number in a range."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InputError(f"{name}={value!r} must be None or a whole number from {low} to {high} ({what})")
