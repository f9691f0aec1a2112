"""A folder that optimum wrote -> a verified bundle."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.bundle.manifest import Artifact
from ..runtime.errors import InputError
from .bundle.writer import check_output
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.source import Source, resolve_source
from .errors import CheckpointError, VerificationError
from .graphs import recipe_of, tensors_of
from .imported.checkpoint import ImportedCheckpoint
from .imported.decoder import ImportedDecoder
from .imported.encoder import ImportedEncoder
from .imported.folder import Folder, has_weights, read_folder
from .imported.optimum import choose_task, export_with_optimum
from .imported.translator import ImportedTranslator
from .pipeline import ExportResult, write_bundle
from .precisions import PRECISIONS
from .request import Request, check_choices, choose_targets_and_precisions
from .tensorrt.plans import Progress, silent

if TYPE_CHECKING:
    import onnx_ir as ir

log = logging.getLogger("planforge")

TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.spm")
GENERATES = ("ForCausalLM", "LMHeadModel")
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
    verify: bool = True,
    force: bool = False,
    prompts: str | Path | None = None,
    progress: Progress = silent,
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
            force, prompts and progress.
        max_length: context in tokens, at most the model's; by default that, of a decoder at most 4,096.

    Raises:
        PlanForgeError: CheckpointError, ExportError, OutputError, BuildError or VerificationError; nothing is
            left at `output` that was not there before.
    """
    output = Path(output)
    at = Path(folder)
    targets, precisions = choose_for_import(target, precision, sms, max_batch, verify)
    check_output(output, force)
    if not at.is_dir():
        raise InputError(f"FOLDER {str(folder)!r} is not there; give what optimum wrote")
    origin = Source("folder", str(folder), at) if source is None else resolve_source(source)
    texts = None if prompts is None else Path(prompts)
    request = Request(tuple(targets), tuple(precisions), sms, texts, verify, force)
    found = read_folder(at)
    with_weights = has_weights(origin.folder)
    if not with_weights and not any(origin.folder.glob("*.onnx")):
        choose_task(origin.folder)  # says why
    shareless = [name for name in precisions if "portable" in PRECISIONS[name].dialects]
    if shareless != precisions and not with_weights:
        raise InputError(
            f"int8 and int4 are chosen with the checkpoint's weights, which {origin.folder} has not: pass"
            " --source"
        )
    if verify and not with_weights:
        log.warning(
            "%s has no model.safetensors: the bundle is compared with its graphs alone, not with the model;"
            " --source CHECKPOINT does that",
            origin.folder,
        )
    kind = kind_of(found)
    checkpoint = kind(origin, found, max_batch, max_length, shared=verify)
    try:
        return write_bundle(checkpoint, output, request, partial(make_graphs, request), progress)
    except VerificationError as error:
        if "decoder.ort.fp32" not in error.failed or "decoder.portable.fp32" in error.failed:
            raise
        if shareless != precisions:
            raise VerificationError(
                f"{error}\n  int8 and int4 run in attention over shared buffers, which may not be the"
                " model's; fp32 and fp16 do without",
                error.failed,
            ) from error
        log.warning(
            "attention over shared buffers does not compute this model (a sliding window, perhaps), so it"
            " stays as optimum wrote it: the bundle is right, and slower on a CPU"
        )
        log.debug("%s", error)
    checkpoint = kind(origin, read_folder(at), max_batch, max_length, shared=False)
    return write_bundle(checkpoint, output, request, partial(make_graphs, request), progress)


def choose_for_import(
    target: Sequence[str] | None,
    precision: Sequence[str] | None,
    sms: Sequence[str] | None,
    max_batch: int | None,
    verify: bool,
) -> tuple[list[str], list[str]]:
    """Return the targets and precisions of an import.

    Raises:
        InputError: what an imported model cannot have.
    """
    targets, precisions = choose_targets_and_precisions(target, precision)
    if wrong := [name for name in precisions if name not in ALLOWED]:
        raise InputError(f"an imported model can be {', '.join(ALLOWED)}, not {wrong[0]}")
    check_choices(precisions, targets, sms, max_batch)
    if not verify and any("portable" not in PRECISIONS[name].dialects for name in precisions):
        raise InputError("int8 and int4 run in graphs that are taken only if verified: leave out --no-verify")
    return targets, precisions


def export_and_import(
    origin: Source, output: str | Path, optimum_python: str | None, **options: Any
) -> ExportResult:
    """Export a checkpoint with optimum, and make a bundle of it.

    Args:
        origin: the checkpoint.
        optimum_python: the python of an environment that has optimum-onnx; by default this one.
        options: those of `import_folder`.

    Raises:
        PlanForgeError: as `import_folder`; ExportError also where optimum is missing.
    """
    given = {name: options.get(name) for name in ("target", "precision", "sms", "max_batch")}
    choose_for_import(**given, verify=options.get("verify", True))
    check_output(Path(output), bool(options.get("force")))
    if not any(any(origin.folder.glob(pattern)) for pattern in TOKENIZERS):
        raise CheckpointError(f"{origin.folder} has no tokenizer: none of {', '.join(TOKENIZERS)}")
    options.get("progress", silent)("exporting with optimum")
    with tempfile.TemporaryDirectory(prefix="planforge-optimum-") as folder:
        graphs = Path(folder, "graphs")
        export_with_optimum(origin.folder, graphs, optimum_python)
        return import_folder(graphs, output, source=origin, **options)


def kind_of(found: Folder) -> type[ImportedCheckpoint]:
    """Return the class that reads a folder's graphs: by their inputs, not by what config.json calls them."""
    if found.encoder is not None:
        return ImportedTranslator
    names = {str(value.name) for value in found.read.graph.inputs}
    if not any(name.startswith("past") for name in names) and found.architecture.endswith(GENERATES):
        raise CheckpointError(
            f"{found.model} has no cache, and {found.architecture} generates text; export it again with"
            " --task text-generation-with-past"
        )
    return ImportedDecoder if any(name.startswith("past") for name in names) else ImportedEncoder


def make_graphs(
    request: Request, checkpoint: Checkpoint, artifacts: Sequence[Artifact], staging: Path, progress: Progress
) -> tuple[dict[str, ir.Model], Any]:
    """Return the graphs by their recipe's id, and the model in transformers, if anything needs it."""
    del staging
    assert isinstance(checkpoint, ImportedCheckpoint)
    recipes = {recipe_of(artifact) for artifact in artifacts}
    if not request.asks_the_model:
        return checkpoint.graphs(recipes, {}), None
    from .reference.transformers_reference import reference_model

    progress("reading the model to compare with")
    heads = () if checkpoint.encoder is None else checkpoint.encoder.heads
    model = reference_model(checkpoint.source.folder, checkpoint.task, heads)
    tensors = {name: tensor.numpy() for name, tensor in tensors_of(model).items()}
    return checkpoint.graphs(recipes, tensors), model
