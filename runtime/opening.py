"""Opens a bundle's graphs: what every kind of model shares when it is opened."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from .backends.backend import Backend, LoadRequest, Program
from .bundle.artifact import rank_exactness
from .bundle.bundle import Bundle
from .bundle.json_reader import Reader
from .bundle.manifest import Artifact, Manifest
from .errors import BackendUnavailableError, BundleError, InputError, ManifestError, MemoryLimitError
from .memory_needs import MemoryNeed, count_weight_bytes, sum_memory
from .option_checks import check_options, check_whole
from .options import LoadOptions

log = logging.getLogger("planforge")

# What a call of each task needs beside weights.
NEEDS = {
    "text-generation": "a cache",
    "retrieval-generation": "a cache",
    "translation": "a cache",
    "text-encoding": "a text's activations",
    "image-generation": "a picture's activations",
    "image-text-encoding": "a batch's activations",
    "word-vectors": "a question's scores",
}

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
    if request.index is not None and manifest.retrieval is None:
        raise InputError(
            "index is for a model that reads neighbours of its text, and this one reads none; leave it out",
            option="index",
        )
    for name in ("index", "index_keys"):
        folder = getattr(request, name)
        if not isinstance(folder, str | Path | None):
            raise InputError(f"{name}={folder!r:.200} is not a str or Path, of a folder", option=name)
    if request.index_keys is not None and request.index is None:
        raise InputError("index_keys is for an index; give index too", option="index_keys")
    if not isinstance(request.cpu_nodes, bool):
        raise InputError(f"cpu_nodes={request.cpu_nodes!r} is not one of [True, False]")
    if request.prepared not in (True, False, "auto"):
        raise InputError(f"prepared={request.prepared!r} is not one of [True, False, 'auto']")


@contextmanager
def open_programs(engine: Backend, bundle: Bundle, *artifacts: Artifact) -> Iterator[list[Program]]:
    """Open graphs in other threads while the caller's block runs; the list is filled at its end."""
    programs: list[Program] = []
    with ThreadPoolExecutor(engine.openings, "planforge-open") as pool:
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
    reading = [artifact for artifact in artifacts if artifact.has_axis("tokens")]
    most = min(bundle.manifest.max_length, *(artifact.axis("tokens").max for artifact in reading))
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


def choose_artifacts(engine: Backend, bundle: Bundle, request: LoadRequest, *graphs: str) -> list[Artifact]:
    """Return what an engine opens of graphs that run together, in one precision.

    Under a memory limit and without a precision it is the default one, if a text of full length fits. Else it
    is the most exact of the verified precisions that fit. Where none fits, a shorter text may.
    """
    first = open_precision(engine, bundle, request.precision, graphs)
    limit = request.memory_limit
    if limit is None:
        return first
    others = list_others(engine, bundle, first, graphs)
    chosen = (
        first
        if request.precision is not None
        else choose_fitting(engine, bundle, request, [first, *others], limit)
    )
    if chosen is not first:
        log.warning(
            "%s is loaded in %s: %s needs %s; the limit of memory is %.1f MB",
            bundle.folder.name,
            chosen[0].precision,
            first[0].precision,
            sum_need(engine, bundle, request, first).describe(),
            limit / 1e6,
        )
    check_weights(engine, bundle, request, chosen, others)
    return chosen


def choose_fitting(
    engine: Backend, bundle: Bundle, request: LoadRequest, choices: Sequence[list[Artifact]], limit: int
) -> list[Artifact]:
    """Return the first of some choices if it fits, else the most exact one that fits."""
    fitting = [own for own in choices if sum_need(engine, bundle, request, own).total <= limit]
    fitting = fitting or [own for own in choices if weigh(engine, bundle, own) < limit]
    if not fitting or choices[0] in fitting:
        return choices[0]
    return min(fitting, key=lambda own: rank_exactness(own[0].precision))


def weigh(engine: Backend, bundle: Bundle, artifacts: Sequence[Artifact]) -> int:
    """Return the bytes that the weights of graphs take in an engine."""
    return count_weight_bytes(bundle.manifest, artifacts, engine.widens_half)


def open_precision(
    engine: Backend, bundle: Bundle, precision: str | None, graphs: Sequence[str]
) -> list[Artifact]:
    """Return what an engine opens of graphs in a precision, or in that of the first one."""
    first = engine.artifact(bundle, graphs[0], precision)
    return [first, *(engine.artifact(bundle, graph, first.precision) for graph in graphs[1:])]


def list_others(
    engine: Backend, bundle: Bundle, first: Sequence[Artifact], graphs: Sequence[str]
) -> list[list[Artifact]]:
    """Return what an engine opens in other precisions, verified ones unless the first is none either."""
    found = []
    for precision in dict.fromkeys(artifact.precision for artifact in bundle.manifest.artifacts):
        if engine.widens_half and precision == "fp16":  # of which the weights take no less
            continue
        try:
            own = open_precision(engine, bundle, precision, graphs)
        except (InputError, BundleError, BackendUnavailableError):  # not for this engine
            continue
        passed = all(artifact.passed or not other.passed for artifact, other in zip(own, first, strict=True))
        if passed and own[0].precision == precision != first[0].precision:
            found.append(own)
    return found


def sum_need(
    engine: Backend, bundle: Bundle, request: LoadRequest, artifacts: Sequence[Artifact]
) -> MemoryNeed:
    """Return what one text of full length needs: where several do not fit, smaller batches run."""
    manifest = bundle.manifest
    reading = [artifact for artifact in artifacts if artifact.has_axis("tokens")]
    most = min(manifest.max_length, *(artifact.axis("tokens").max for artifact in reading))
    length = min(request.max_length or most, most)
    return sum_memory(manifest, artifacts, 1, length, engine.widens_half)


def check_weights(
    engine: Backend,
    bundle: Bundle,
    request: LoadRequest,
    chosen: Sequence[Artifact],
    others: Sequence[Sequence[Artifact]],
) -> None:
    """Refuse a limit that leaves nothing beside the weights; each call checks what it needs itself."""
    limit = request.memory_limit
    weight_bytes = weigh(engine, bundle, chosen)
    if limit is None or weight_bytes < limit:
        return
    exactness = rank_exactness(chosen[0].precision)
    sizes = {
        own[0].precision: weigh(engine, bundle, own)
        for own in others
        if rank_exactness(own[0].precision) > exactness
    }
    fitting = [f"{precision} has {size / 1e6:.1f} MB" for precision, size in sizes.items() if size < limit]
    if fitting:
        hint = f"A precision of fewer bits needs less ({', '.join(fitting)})"
    elif sizes and (least := min(sizes.values())) < weight_bytes:
        hint = f"No other precision fits either: the smallest has {least / 1e6:.1f} MB"
    else:
        hint = "No other verified precision that runs here needs less"
    raise MemoryLimitError(
        f"more than {weight_bytes / 1e6:.1f} MB are needed: {weight_bytes / 1e6:.1f} MB of weights in"
        f" {chosen[0].precision} and {NEEDS[bundle.manifest.task]}; memory_limit is {limit / 1e6:.3g} MB."
        f" {hint}",
        needed=weight_bytes + 1,
        limit=limit,
    )
