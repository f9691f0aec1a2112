"""Reads the graphs of a folder that optimum wrote, in the forms that an import tries one by one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import InputError, PlanForgeError
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Source
from ..errors import CheckpointError, shorten_error
from ..options import Request
from .architectures import choose_task
from .checkpoint import ImportedCheckpoint
from .decoder import ImportedDecoder
from .encoder import ImportedEncoder
from .folder import WIDENED, Folder, has_weights, read_folder
from .translator import ImportedTranslator

log = logging.getLogger("planforge")

ALLOWED = ("fp32", "fp16", "int8", "int4")
GENERATES = ("ForCausalLM", "LMHeadModel")


def check_import(request: Request) -> None:
    """Refuse options that an imported model does not support."""
    if unknown := [name for name in request.precisions if name not in ALLOWED]:
        raise InputError(f"precision {unknown[0]!r} is not one of an imported model's: {', '.join(ALLOWED)}")
    if not request.verify and request.needs_shared_buffers:
        raise InputError("int8 and int4 of an imported model must be verified: leave out --no-verify")


def read_candidates(folder: Path, source: Source, request: Request) -> Iterator[ImportedCheckpoint]:
    """Yield a folder's graphs with a decoder's attention over shared buffers and, if that fails, without.

    Those that nobody verifies are without. `source` has the weights, which transformers can read.
    """
    found = read_folder(folder)
    compares = has_weights(source.folder)
    if request.verify:
        found.check_comparable(compares)
    if not compares:
        check_without_weights(source, request)
    if found.read.meta[WIDENED] and request.verify and not compares:
        log.warning(
            "%s computes in half precision: its constants and scales are kept, and the bundle is compared"
            " with what they give in fp32",
            found.model,
        )
    kind = choose_class(found)
    yield kind(source, found, request.max_batch, request.max_length, shared=request.verify)
    log.warning(
        "attention with a shared key-value buffer does not match this model, so its own attention is kept:"
        " the bundle is correct, but slower on a CPU"
    )
    yield kind(source, read_folder(folder), request.max_batch, request.max_length, shared=False)


def check_without_weights(source: Source, request: Request) -> None:
    """Refuse options that need weights if the source has none; warn that no model can be compared with."""
    if not any(source.folder.glob("*.onnx")):
        choose_task(source.folder)  # says why
    if request.needs_shared_buffers:
        raise InputError(
            f"int8 and int4 need the checkpoint's weights, which {source.folder} does not have: pass"
            " --source CHECKPOINT"
        )
    if request.verify:
        log.warning(
            "%s has no model.safetensors: the bundle is compared only with its graphs; pass --source"
            " CHECKPOINT to compare it with the model",
            source.folder,
        )


def choose_class(found: Folder) -> type[ImportedCheckpoint]:
    """Return the class that reads a folder's graphs: by their inputs, not by what config.json calls them."""
    if found.encoder is not None:
        return ImportedTranslator
    if any(str(value.name).startswith("past") for value in found.read.graph.inputs):
        return ImportedDecoder
    if found.architecture.endswith(GENERATES):
        raise CheckpointError(
            f"{found.model} has no cache, and {found.architecture} generates text; export it again with"
            " --task text-generation-with-past"
        )
    return ImportedEncoder


def only_shared_buffers_failed(checkpoint: Checkpoint, failed: Iterable[Artifact]) -> bool:
    """Tell whether an import's attention over shared buffers failed and the same graph without it passed."""
    decoders = {a.dialect for a in failed if a.keeps_cache and a.precision == "fp32"}
    return isinstance(checkpoint, ImportedCheckpoint) and decoders == {"ort"}


@contextlib.contextmanager
def refuse_damaged_graphs(folder: Path) -> Iterator[None]:
    """Raise a one-line error for anything that onnx_ir, its passes or ONNX Runtime raise of the graph."""
    try:
        yield
    except (PlanForgeError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"the graphs of {folder} cannot be imported ({type(error).__name__}:"
            f" {shorten_error(error):.300}); export them again with optimum-cli"
        ) from error
