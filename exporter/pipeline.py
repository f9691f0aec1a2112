"""Checkpoint -> ONNX -> plan -> verified bundle."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.bundle.bundle import Bundle
from ..runtime.bundle.manifest import Artifact, Manifest, TensorSpec
from ..runtime.errors import InputError
from .bundle_writer import check_output, file_entries, install, staging_folder, write_manifest
from .checkpoint import Checkpoint
from .errors import CheckpointError, ExportError
from .plans import Progress, build_plans, default_targets, silent
from .prompts import read_prompts
from .recipes import Recipe
from .source import resolve_source
from .targets import engine_installed, target_named
from .tensorrt.build import ENGINES, checked_target

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from ..models.checkpoint import Model
    from .verification.report import VerificationReport

PRECISIONS = ("fp32", "fp16")


@dataclass(frozen=True)
class ExportResult:
    """A finished export.

    Attributes:
        bundle: the folder.
        manifest: what is in it.
        report: how it was verified; None with verify=False.
    """

    bundle: Path
    manifest: Manifest
    report: VerificationReport | None


def export(
    model: str | Path,
    output: str | Path,
    *,
    precision: Sequence[str] = PRECISIONS,
    target: Sequence[str] | None = None,
    sms: Sequence[str] | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    outputs: Sequence[str] = (),
    verify: bool = True,
    force: bool = False,
    prompts: str | Path | None = None,
    progress: Progress = silent,
) -> ExportResult:
    """Exports a checkpoint into a bundle, builds its plans, and verifies it against PyTorch.

    Args:
        model: a demo's name, a folder in Hugging Face's layout, or a hub id.
        output: the bundle's folder; must not exist unless `force`.
        precision: "fp32", "fp16"; the first is what `load` runs unless told otherwise.
        target: "cpu", "rtx", ...; by default cpu and rtx, without a plan where tensorrt-rtx is missing.
        sms: GPU architectures to build plans for, such as "sm86"; by default all that the engine has.
        max_batch: the largest of plans and of a step; by default 8 of a decoder, 32 of an encoder.
        max_length: context in tokens, at most the model's; by default that, or where
            sentence-transformers cuts its texts.
        outputs: of an encoder, beside its last hidden state and heads: "hidden_states" (of all layers),
            "hidden_states.3" (one, 0 being the embeddings), "pooler_output"; of an encoder-decoder
            "cross_attentions".
        verify: compare every graph with PyTorch, and keep nothing if one differs.
        force: replace the bundle that is at `output`; it stays whole until the new one is.
        prompts: a file with a prompt a line to verify with, instead of the built-in ones.
        progress: called with a line when a stage begins.

    Raises:
        PlanForgeError: SourceError, CheckpointError, OutputError, ExportError, BuildError or
            VerificationError; nothing is left at `output` that was not there before.
    """
    output = Path(output)
    precision = list(dict.fromkeys(precision))
    targets = default_targets() if target is None else list(dict.fromkeys(target))
    if target is None and "fp16" not in precision:
        targets = ["cpu"]  # plans are built from fp16
    check_choices(precision, targets, sms, max_batch)
    check_output(output, force)
    checkpoint = Checkpoint(resolve_source(model), max_batch, max_length, tuple(outputs))
    texts = read_prompts(None if prompts is None else Path(prompts), checkpoint.source.folder)
    with staging_folder(output) as staging:
        graphs, reference = trace(checkpoint, targets, staging, progress)
        progress("writing ONNX files")
        artifacts = write_graphs(checkpoint, graphs, reference, precision, staging)
        manifest = first_manifest(checkpoint, artifacts, staging, output)
        with ThreadPoolExecutor(1) as pool:  # plans are built by a child, beside the verification
            plans = pool.submit(build_plans, staging, manifest, targets, sms, None, progress)
            found = verified(staging, manifest, reference, texts, progress) if verify else (manifest, None)
            manifest, report = found
        manifest = dataclasses.replace(manifest, plans=tuple(plans.result()), files=file_entries(staging))
        progress("committing the bundle")
        install(staging, manifest, output)
    return ExportResult(output, manifest, report)


def check_choices(
    precision: Sequence[str], targets: Sequence[str], sms: Sequence[str] | None, max_batch: int | None
) -> None:
    """Refuses what cannot be done before any work is."""
    if not precision or not set(precision) <= set(PRECISIONS):
        raise InputError(f"precision={list(precision)} must name one or more of {', '.join(PRECISIONS)}")
    for name in targets:
        engine = target_named(name).engine
        if engine is None:
            continue
        if engine_installed(engine) or targets != default_targets():
            checked_target(engine, sms or ENGINES[engine].sms)
        if "fp16" not in precision:
            raise InputError(f"target {name!r} builds its plan from fp16; add fp16 to the precisions")
    if max_batch is not None and max_batch < 1:
        raise InputError(f"max_batch={max_batch} must be at least 1")


def trace(
    checkpoint: Checkpoint, targets: Sequence[str], staging: Path, progress: Progress
) -> tuple[dict[str, ir.Model], Model]:
    """Traces every target's graphs in a child process each, while the weights are read here.

    Returns:
        The graphs by their recipe's id, and the model.
    """
    from ..models import load_model
    from .onnx_export import finish_trace, start_trace

    recipes = list(dict.fromkeys(recipe for name in targets for recipe in checkpoint.recipes_for(name)))
    progress(f"tracing {', '.join(recipes)}")
    paths = {recipe: staging / f"{recipe}.traced" for recipe in recipes}
    with contextlib.ExitStack() as stack:
        children = {}
        for recipe, path in paths.items():
            child = stack.enter_context(
                start_trace(checkpoint.source.folder, recipe, checkpoint.choices, path)
            )
            stack.callback(child.kill)  # before the context waits for it; nothing if it has ended
            children[recipe] = child
        try:
            model = load_model(checkpoint.source.folder)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        graphs = {recipe: finish_trace(children[recipe], path) for recipe, path in paths.items()}
    for path in paths.values():
        path.unlink()
    return graphs, model


def write_graphs(
    checkpoint: Checkpoint,
    graphs: Mapping[str, ir.Model],
    model: Model,
    precisions: Sequence[str],
    staging: Path,
) -> list[Artifact]:
    """Gives the traced graphs their weights, converts them, and writes them with one weights file each."""
    from .graph_check import check_graph, name_axes
    from .passes.fp16 import ConvertToFp16
    from .passes.weights import AttachWeights, save_with_shared_weights

    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    for recipe_id, graph in graphs.items():
        AttachWeights(tensors)(graph)
        recipe = checkpoint.recipes[recipe_id]
        name_axes(graph, recipe.constraints)
        check_graph(graph, recipe.inputs, recipe.outputs)
    (staging / "onnx").mkdir()
    artifacts = []
    for precision in precisions:
        data = checkpoint.file(f"weights.{precision}", "data")
        models = {}
        for recipe_id, graph in graphs.items():
            recipe = checkpoint.recipes[recipe_id]
            converted = graph.clone()
            if precision == "fp16":
                try:
                    ConvertToFp16([s.name for s in recipe.outputs if not is_cache(s)])(converted)
                except ValueError as error:
                    raise ExportError(f"{recipe.id} cannot be made fp16: {error}") from error
                recipe = in_fp16(recipe)
                check_graph(converted, recipe.inputs, recipe.outputs)
            name = checkpoint.file(f"{recipe.id}.{precision}", "onnx")
            models[name] = converted
            artifacts.append(artifact_of(recipe, precision, f"onnx/{name}", f"onnx/{data}"))
        save_with_shared_weights(models, staging / "onnx", data)
    return artifacts


def in_fp16(recipe: Recipe) -> Recipe:
    """The recipe with its caches in fp16; what a user reads stays fp32."""

    def half(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(dataclasses.replace(s, dtype="float16") if is_cache(s) else s for s in specs)

    return dataclasses.replace(recipe, inputs=half(recipe.inputs), outputs=half(recipe.outputs))


def is_cache(spec: TensorSpec) -> bool:
    return spec.role.startswith(("past.", "present.", "cross."))


def artifact_of(recipe: Recipe, precision: str, file: str, data: str) -> Artifact:
    return Artifact(
        graph=recipe.graph,
        dialect=recipe.dialect,
        precision=precision,
        opset=recipe.opset,
        file=file,
        data=(data,),
        padding_side=recipe.padding_side,
        inputs=recipe.inputs,
        outputs=recipe.outputs,
        aliases=recipe.aliases,
        constraints=recipe.constraints,
    )


def first_manifest(
    checkpoint: Checkpoint, artifacts: Sequence[Artifact], staging: Path, output: Path
) -> Manifest:
    """Makes the staged files a bundle, so that building and verifying open them as any reader would."""
    (staging / "tokenizer").mkdir()
    tokenizers = {
        checkpoint.file(f"tokenizer/{stem}", "json"): d for stem, d in checkpoint.tokenizer_files.items()
    }
    for name, data in tokenizers.items():
        (staging / name).write_bytes(data)
    manifest = Manifest(
        family=checkpoint.family,
        task=checkpoint.task,
        export_id=checkpoint.export_id,
        config=dataclasses.asdict(checkpoint.config),
        generation=checkpoint.generation,
        encoder=checkpoint.encoder,
        tokenizer={
            "files": list(tokenizers),
            "kind": checkpoint.tokenizer_kind,
            "vocab_size": checkpoint.config.vocab_size,
        },
        files=file_entries(staging),
        artifacts=tuple(artifacts),
        source={
            "argument": checkpoint.source.recorded(output),
            "kind": checkpoint.source.kind,
            "sha256": checkpoint.source.sha256(),
        },
        tools={name: importlib.metadata.version(name) for name in ("planforge", "torch", "onnx")},
    )
    write_manifest(staging, manifest)
    return manifest


def verified(
    staging: Path,
    manifest: Manifest,
    model: Model,
    prompts: Sequence[str],
    progress: Progress,
) -> tuple[Manifest, VerificationReport]:
    """Compares every staged graph with PyTorch; adds the gates, golden.npz and parity.json.

    Raises:
        VerificationError: a graph does not compute the model.
    """
    from .verification.report import keep_checks
    from .verification.verify import examine

    report, golden, limits = examine(Bundle(staging, manifest), model, prompts, progress)
    report.raise_if_failed()
    return keep_checks(staging, manifest, report, golden, limits), report
