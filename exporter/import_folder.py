"""A folder that optimum wrote -> a verified bundle."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..runtime.errors import InputError, PlanForgeError
from .checkpoints.source import Source, resolve_source
from .errors import CheckpointError, shorten_error
from .imported.folder import has_weights, read_folder
from .imported.optimum import choose_task, export_with_optimum
from .pipeline import ExportResult, write_bundle
from .providers import ImportedGraphs
from .request import Request, parse_request
from .tensorrt.plans import Progress

log = logging.getLogger("planforge")

TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.spm")
ALLOWED = ("fp32", "fp16", "int8", "int4")


def import_folder(
    folder: str | Path,
    output: str | Path,
    *,
    source: str | Path | Source | None = None,
    precision: Sequence[str] | None = None,
    target: Sequence[str] | None = None,
    sms: Sequence[str] | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    verify: bool | str = True,
    force: bool = False,
    prompts: str | Path | None = None,
    quantizer: str = "gptq",
    accept: Mapping[str, float] | None = None,
    progress: Progress = lambda _: None,
) -> ExportResult:
    """Make a bundle of what optimum-cli, or save_pretrained of an ORTModel, wrote.

    The graphs run through the same caches, precisions and checks as PlanForge's own. For the target cpu a
    decoder's attention becomes ONNX Runtime's over shared buffers; where it is of a form that is not known,
    or is not verified to compute the same, it stays as it is, and a warning says so.

    Args:
        folder: with model.onnx, or an encoder's and a decoder's, config.json and tokenizer files.
        output: the bundle's folder; must not exist unless `force`.
        source: the checkpoint, whose weights transformers reads for verification; by default `folder`. Where
            it has none, the bundle is compared with the folder's graphs as they are.
        precision: fp32, fp16, int8, int4; by default as in `export`, like target, sms, max_batch, verify,
            force, prompts, quantizer, accept and progress.
        max_length: context in tokens, at most the model's; by default that, of a decoder at most 4,096.

    Raises:
        PlanForgeError: CheckpointError, ExportError, OutputError, BuildError or VerificationError; nothing is
            left at `output` that was not there before.
    """
    request = parse_request(
        output=output,
        precision=precision,
        target=target,
        sms=sms,
        max_batch=max_batch,
        max_length=max_length,
        verify=verify,
        force=force,
        prompts=prompts,
        quantizer=quantizer,
        accept=accept,
    )
    check_import(request)
    at = Path(folder)
    if not at.is_dir():
        raise InputError(f"FOLDER {str(folder)!r} is not there; give what optimum wrote")
    origin = Source("folder", str(folder), at) if source is None else resolve_source(source)
    return import_graphs(at, origin, request, progress)


def check_import(request: Request) -> None:
    """Refuse what an imported model cannot have."""
    if unknown := [name for name in request.precisions if name not in ALLOWED]:
        raise InputError(f"an imported model can be {', '.join(ALLOWED)}, not {unknown[0]}")
    if not request.verify and request.needs_shared_buffers:
        raise InputError("int8 and int4 run in graphs that are taken only if verified: leave out --no-verify")


def import_graphs(folder: Path, source: Source, request: Request, progress: Progress) -> ExportResult:
    """Make a bundle of a folder's graphs, with choices that `check_import` has passed."""
    graphs = read_folder(folder)
    if not has_weights(source.folder):
        if not any(source.folder.glob("*.onnx")):
            choose_task(source.folder)  # says why
        if request.needs_shared_buffers:
            raise InputError(
                f"int8 and int4 are chosen with the checkpoint's weights, which {source.folder} has not: pass"
                " --source"
            )
        if request.verify:
            log.warning(
                "%s has no model.safetensors: the bundle is compared with its graphs alone, not with the"
                " model; --source CHECKPOINT does that",
                source.folder,
            )
    with refuse_damaged_graphs(folder):
        return write_bundle(ImportedGraphs(source, graphs, request, shared=request.verify), request, progress)


@contextmanager
def refuse_damaged_graphs(folder: Path) -> Iterator[None]:
    """Turn what onnx_ir, its passes and ONNX Runtime raise of a stranger's graph into one line."""
    try:
        yield
    except (PlanForgeError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"the graphs of {folder} cannot be taken over ({type(error).__name__}:"
            f" {shorten_error(error):.300}); export them again with optimum-cli"
        ) from error


def export_and_import(
    source: Source, request: Request, optimum_python: str | None, progress: Progress
) -> ExportResult:
    """Export a checkpoint with optimum, which `optimum_python` has, and make a bundle of it."""
    check_import(request)
    if not any(any(source.folder.glob(pattern)) for pattern in TOKENIZERS):
        raise CheckpointError(f"{source.folder} has no tokenizer: none of {', '.join(TOKENIZERS)}")
    progress("exporting with optimum")
    with tempfile.TemporaryDirectory(prefix="planforge-optimum-") as folder:
        graphs = Path(folder, "graphs")
        export_with_optimum(source.folder, graphs, optimum_python)
        return import_graphs(graphs, source, request, progress)
