"""A checkpoint -> a verified bundle: by PlanForge's own graphs, or by optimum's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..runtime.errors import InputError
from ..runtime.suggest import did_you_mean
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.source import Source, resolve_source
from .import_folder import export_and_import
from .imported.optimum import has_reference_model, refuse_unknown_type
from .pipeline import ExportResult, write_bundle
from .providers import TracedGraphs
from .request import Request, parse_request
from .tensorrt.plans import Progress

EXPORTERS = ("auto", "planforge", "optimum")


def export(
    model: str | Path,
    output: str | Path,
    *,
    precision: Sequence[str] | None = None,
    target: Sequence[str] | None = None,
    sms: Sequence[str] | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    outputs: Sequence[str] = (),
    exporter: str = "auto",
    optimum_python: str | None = None,
    verify: bool | str = True,
    force: bool = False,
    prompts: str | Path | None = None,
    quantizer: str = "gptq",
    accept: Mapping[str, float] | None = None,
    progress: Progress = lambda _: None,
) -> ExportResult:
    """Export a checkpoint into a bundle, build its plans, and verify it against PyTorch.

    Args:
        model: a demo's name, a folder in Hugging Face's layout, or a hub id: "org/name[@revision]".
        output: the bundle's folder; must not exist unless `force`.
        precision: "fp32", "fp16", "int8", "int4", and with keys and values in int8 "fp32-kv8", "int8-kv8",
            "int4-kv8"; the first is `load`'s own choice. By default fp32, and fp16 where a target has it.
        target: "cpu", "rtx", ...; by default cpu and rtx, without a plan where tensorrt-rtx is missing.
        sms: GPU architectures to build plans for, such as "sm86"; by default all that the engine has.
        max_batch: the largest batch of plans and of a step; by default 8 for a decoder, 32 for an encoder.
        max_length: context in tokens; by default the model's, up to 4,096, or sentence-transformers' own.
        outputs: of an encoder "hidden_states" (of all layers), "hidden_states.3" (one, 0 being the
            embeddings), "pooler_output"; of an encoder-decoder "cross_attentions".
        exporter: "planforge", "optimum", or "auto": optimum for what has no reference model here.
        optimum_python: the python of an environment that has optimum-onnx; by default this one.
        verify: compare every graph with PyTorch, and keep nothing if one differs: "quick", a smoke test;
            "standard", or True, what the model's size allows; "full", every case; False compares nothing.
        force: replace the bundle that is at `output`; it stays as it is until the new one is whole.
        prompts: a file with one prompt per line to verify with, instead of the built-in ones.
        quantizer: "gptq" keeps products with real text close; "rtn" rounds to the nearest, in no time.
        accept: losses above the usual caps to let pass, such as {"top1_changes": 0.03}, of every precision
            but fp32, where PyTorch rounded the same way loses as much. The bundle keeps them.
        progress: called with a line as stages begin and go on; some are a `CountedLine`.

    Raises:
        PlanForgeError: SourceError, CheckpointError, OutputError, ExportError, BuildError, VerificationError.
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
    return export_source(resolve_source(model), request, exporter, outputs, optimum_python, progress)


def export_source(
    source: Source,
    request: Request,
    exporter: str,
    outputs: Sequence[str],
    optimum_python: str | None,
    progress: Progress,
) -> ExportResult:
    """Export a checkpoint that was found, natively or through optimum."""
    if choose_exporter(exporter, source.folder, outputs) == "optimum":
        return export_and_import(source, request, optimum_python, progress)
    checkpoint = Checkpoint(source, request.max_batch, request.max_length, tuple(outputs))
    return write_bundle(TracedGraphs(checkpoint, computes=request.needs_reference), request, progress)


def choose_exporter(exporter: str, folder: Path, outputs: Sequence[str]) -> str:
    """Return "planforge" or "optimum"; refuse an unknown exporter, and outputs that optimum cannot add."""
    if exporter not in EXPORTERS:
        hint = did_you_mean(exporter, EXPORTERS)
        raise InputError(f"exporter {exporter!r} is not one of {', '.join(EXPORTERS)}{hint}")
    if exporter == "auto":
        exporter = "planforge" if has_reference_model(folder) else "optimum"
        if exporter == "optimum":
            refuse_unknown_type(folder)
    if exporter == "optimum" and outputs:
        raise InputError(f"outputs {list(outputs)}: of a graph that optimum exports none can be chosen")
    return exporter
