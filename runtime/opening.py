"""Opens a bundle's graphs: what every kind of model shares when it is opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from .backends.backend import Backend, LoadRequest, Program
from .bundle.bundle import Bundle
from .bundle.json_reader import Reader
from .bundle.manifest import Artifact, Manifest
from .errors import InputError, ManifestError, MemoryLimitError
from .option_checks import check_options, check_whole
from .options import LoadOptions

# Parsing a tokenizer holds Python's lock for 80 ms, which ONNX Runtime needs until it begins to pack weights.
PREFETCH_DELAY = 0.03  # seconds


def make_load_request(options: LoadOptions) -> LoadRequest:
    """Return what a caller of `load` asks for; refuse an option that there is not."""
    check_options(options, LoadOptions)
    return LoadRequest(**options)


def check_load_request(request: LoadRequest, manifest: Manifest) -> None:
    """Refuse numbers out of range, before anything is opened."""
    context = manifest.max_length
    least = 2 if manifest.encoder is None else min(8, context)  # a pair has three special tokens
    ranges = {
        "threads": (1, os.cpu_count() or 1, "this machine's cores"),
        "max_length": (least, context, "the model's context"),
        "memory_limit": (1, sys.maxsize, "bytes"),
        "device": (0, 1023, "the GPU's number"),
    }
    for name, (low, high, what) in ranges.items():
        check_whole(name, getattr(request, name), low, high, optional=True, what=what)
    if not isinstance(request.cpu_nodes, bool):
        raise InputError(f"cpu_nodes={request.cpu_nodes!r} is not one of [True, False]")
    if request.prepared not in (True, False, "auto"):
        raise InputError(f"prepared={request.prepared!r} is not one of [True, False, 'auto']")


@contextmanager
def open_programs(engine: Backend, bundle: Bundle, *artifacts: Artifact) -> Iterator[list[Program]]:
    """Open graphs in another thread while the caller's block runs; the list is filled at its end."""
    programs: list[Program] = []
    with ThreadPoolExecutor(1, "planforge-open") as pool:
        opened = [pool.submit(engine.open, bundle, artifact) for artifact in artifacts]
        wait(opened, PREFETCH_DELAY)
        try:
            yield programs
            programs += [one.result() for one in opened]
        except BaseException:
            for one in opened:
                if one.exception() is None:
                    one.result().close()
            raise


def choose_length(bundle: Bundle, asked: int | None, *artifacts: Artifact) -> int:
    """Return the context in tokens: what was asked for, else all that the model and these graphs take."""
    most = min(bundle.manifest.max_length, *(artifact.axis("tokens").max for artifact in artifacts))
    if asked is not None and asked > most:
        raise InputError(
            f"max_length={asked} is more than the {most} that the plan was built for; leave it out, or build"
            " the plan again with a larger --max length=N"
        )
    return asked or most


def list_tokenizer_files(manifest: Manifest, count: int) -> tuple[str, ...]:
    """Return the tokenizers' files, of which a task needs `count`."""
    names = Reader(manifest.tokenizer, "tokenizer").list_of("files", str)
    if len(names) != count:
        raise ManifestError(f"tokenizer.files has {len(names)} files, {manifest.task} needs {count}")
    return names


def check_weights(weight_bytes: int, memory_limit: int | None) -> None:
    """Refuse a limit that leaves nothing for a cache; each call checks what its own cache needs."""
    if memory_limit is not None and weight_bytes >= memory_limit:
        raise MemoryLimitError(
            f"more than {weight_bytes / 1e6:.1f} MB are needed: {weight_bytes / 1e6:.1f} MB of weights and a"
            f" cache; memory_limit is {memory_limit / 1e6:.3g} MB. A precision of fewer bits needs less",
            needed=weight_bytes + 1,
            limit=memory_limit,
        )
