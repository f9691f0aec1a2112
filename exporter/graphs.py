"""Prepares the graphs of a bundle: their weights, and their entries in the manifest."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.backends.openvino_backend import explain_no_bf16
from ..runtime.backends.ort_program import import_onnxruntime
from ..runtime.backends.requirements import check_version
from ..runtime.bundle.artifact import IN_HALF
from ..runtime.bundle.manifest import Artifact, Manifest, TensorSpec
from ..runtime.errors import InputError
from .bundle.names import name_by_content
from .bundle.writer import list_file_entries
from .checkpoints.checkpoint import Checkpoint
from .precisions import BFLOAT16, PRECISIONS
from .targets import find_target
from .tracing.recipes import Recipe

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from .reference_model import ReferenceModel

log = logging.getLogger("planforge")


def trace_graphs(
    checkpoint: Checkpoint, recipe_ids: Sequence[str], model: ReferenceModel
) -> dict[str, ir.Model]:
    """Return graphs in fp32 with the model's weights, by the ids of their recipes."""
    from .tracing.trace import finish_trace, start_trace

    recipes = checkpoint.find_recipes(recipe_ids)
    with start_trace(checkpoint.source.folder, checkpoint.choices, recipes) as trace:
        graphs = finish_trace(trace)
    attach_weights(recipes, graphs, model)
    return graphs


def attach_weights(
    recipes: Mapping[str, Recipe], graphs: Mapping[str, ir.Model], model: ReferenceModel | None
) -> None:
    """Give traced graphs their weights and axes, and those for ONNX Runtime its operators as well."""
    from .passes.fusions import fuse_for_onnx_runtime
    from .passes.weights import attach_parameters, list_transposed
    from .tracing.graph_check import check_graph, name_axes

    tensors = {} if model is None else list_tensors(model)
    transposed: set[str] = set()
    for recipe in sorted(recipes.values(), key=lambda recipe: recipe.reference is not None):
        graph = graphs[recipe.id]
        explains = recipe.reference is not None
        attach_parameters(graph, tensors, transposed if explains else None)
        transposed |= list_transposed(graph)
        if recipe.dialect == "ort":
            fuse_for_onnx_runtime(graph)
        name_axes(graph, recipe.outputs, recipe.example)
        check_graph(graph, recipe.inputs, recipe.outputs)


def list_tensors(model: ReferenceModel) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, by all of their names."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    return tensors


def plan_artifacts(
    checkpoint: Checkpoint, targets: Sequence[str], precisions: Sequence[str]
) -> list[Artifact]:
    """Return the graphs that an export writes: each target's, in each precision that they can have.

    Their files get the end of their names, which is of their content, when they are written.
    """
    of_target = {name: checkpoint.list_recipes(name) for name in targets}
    for name, recipes in of_target.items():
        warn_of_head_size(checkpoint, name, recipes)
    everything = {recipe.id: recipe for recipes in of_target.values() for recipe in recipes}
    warn_of_experts(checkpoint, everything.values())
    wanted = {
        precision: {
            r.id for name, recipes in of_target.items() for r in recipes if takes(name, r, precision, recipes)
        }
        for precision in precisions
    }
    for precision, ids in wanted.items():
        check_precision(checkpoint, list(everything.values()), precision, ids)
    for name, recipes in of_target.items():
        for graph in dict.fromkeys(recipe.graph for recipe in recipes):
            same = [recipe for recipe in recipes if recipe.graph == graph]
            allowed = [p for p in PRECISIONS if any(takes(name, recipe, p, recipes) for recipe in same)]
            if not set(allowed) & set(precisions):
                alike = [half for p in precisions if (half := IN_HALF.get(p)) in allowed]
                raise InputError(
                    f"target {name!r} gets the {' or '.join(r.id for r in same)} graph, which can be"
                    f" {', '.join(allowed)}, not {', '.join(precisions)}"
                    f"{f'; did you mean to add {alike[0]}?' if alike else ''}"
                )
    return [
        make_artifact(
            recipe,
            precision,
            f"onnx/{recipe_id}.{precision}.onnx",
            f"onnx/weights.{PRECISIONS[precision].weights}.data",
        )
        for precision in precisions
        for recipe_id, recipe in everything.items()
        if recipe_id in wanted[precision]
    ]


def check_engine(artifacts: Sequence[Artifact]) -> None:
    """Refuse graphs that the ONNX Runtime here is too old to verify."""
    version = import_onnxruntime().__version__
    for artifact in artifacts:
        kind = PRECISIONS[artifact.precision]
        bits = {"bits": kind.weight_bits, "cache_bits": kind.cache_bits}
        to_be = {name: count for name, count in bits.items() if count}
        check_version(dataclasses.replace(artifact, quantization=to_be), version)
        if kind.engine and (reason := explain_no_bf16()):
            raise InputError(
                f"precision {artifact.precision!r} is compared with PyTorch where it runs, in {kind.engine}:"
                f" {reason}; leave it out, or export on another machine"
            )


def begin_manifest(
    checkpoint: Checkpoint, artifacts: Sequence[Artifact], staging: Path, output: Path
) -> Manifest:
    """Write the tokenizer's files, and return the manifest, which does not yet list the files to come."""
    (staging / "tokenizer").mkdir()
    written: dict[bytes, str] = {}  # a tokenizer that a source and its target share once
    for stem, data in checkpoint.tokenizer_files.items():
        if data not in written:
            written[data] = write_tokenizer_file(staging, f"{stem}.json", data)
    chat = {}
    if (template := checkpoint.chat_template) is not None:
        names = {}
        for key, stem in (("file", "chat_template"), ("tool_use", "chat_template-tool_use")):
            if key in template.contents:
                names[key] = write_tokenizer_file(staging, f"{stem}.jinja", template.contents[key])
        chat = {"chat_template": {**names, "tokens": template.tokens}}
    source = checkpoint.source.describe(output)
    if checkpoint.exporter:
        source["exporter"] = checkpoint.exporter
    return Manifest(
        family=checkpoint.family,
        task=checkpoint.task,
        export_id="",  # from `name_export`, when everything is written
        config=dataclasses.asdict(checkpoint.config),
        generation=checkpoint.generation,
        encoder=checkpoint.encoder,
        images=checkpoint.images,
        likeness=checkpoint.likeness,
        words=checkpoint.words,
        retrieval=checkpoint.retrieval,
        tokenizer={
            "files": [written[data] for data in checkpoint.tokenizer_files.values()],
            "kind": checkpoint.tokenizer_kind,
            "vocab_size": checkpoint.config.vocab_size,
            **chat,
        },
        files=list_file_entries(staging),
        artifacts=tuple(artifacts),
        explanations=plan_explanations(checkpoint, artifacts),
        source=source,
        tools={name: importlib.metadata.version(name) for name in ("planforge", "torch", "onnx")},
    )


def write_tokenizer_file(staging: Path, name: str, content: bytes) -> str:
    """Write a file next to the tokenizers; return its name in the bundle."""
    path = staging / "tokenizer" / name
    path.write_bytes(content)
    return name_by_content(path)[0].relative_to(staging).as_posix()


def plan_explanations(checkpoint: Checkpoint, artifacts: Sequence[Artifact]) -> tuple[Artifact, ...]:
    """Return the graphs that explain the model, which share the weights of those in fp32."""
    if not checkpoint.explanations:
        return ()
    data = next((a.data[0] for a in artifacts if PRECISIONS[a.precision].weights == "fp32"), None)
    if data is None:
        raise InputError("output 'explain' needs the weights of fp32 graphs; add fp32 to the precisions")
    return tuple(
        make_artifact(recipe, "fp32", f"onnx/{recipe.graph}.onnx", data)
        for recipe in checkpoint.explanations.values()
    )


def warn_of_head_size(checkpoint: Checkpoint, target: str, recipes: Sequence[Recipe]) -> None:
    """Warn of a target for ONNX Runtime whose decoder is in `portable` because of its head size."""
    if checkpoint.exporter or find_target(target).dialect != "ort":  # of other exporters' graphs it is said
        return
    if any(recipe.id == "decoder.ort" for recipe in recipes):
        return
    for recipe in recipes:
        if recipe.keeps_cache and recipe.dialect == "portable":
            cache = next(spec for spec in recipe.inputs if is_cache(spec))
            log.warning(
                "target %s gets the portable graph, as the head size is %s and ONNX Runtime's"
                " GroupQueryAttention needs a multiple of 8: each step copies the cache, which makes"
                " long texts slower, and int8, int4 and -kv8 are not possible",
                target,
                cache.axes[-1],
            )


def warn_of_experts(checkpoint: Checkpoint, recipes: Iterable[Recipe]) -> None:
    """Warn of graphs in which all experts of a mixture compute every token."""
    count = 0 if checkpoint.exporter else getattr(checkpoint.config, "num_experts", 0)
    for recipe in recipes:
        if count and not recipe.computes_sizes:
            log.warning(
                "%s computes all %d experts for every token, not the chosen ones alone, as engines for GPUs"
                " take no sizes that a graph computes; the graphs of target cpu compute the chosen ones",
                recipe.id,
                count,
            )


def takes(target: str, recipe: Recipe, precision: str, recipes: Sequence[Recipe]) -> bool:
    """Tell whether a target takes a recipe's graph in a precision, given all `recipes` that it gets."""
    taker = find_target(target)
    own = f"{recipe.graph}.{taker.find_dialect(recipe.keeps_cache, precision)}"
    if recipe.id != own and any(other.id == own for other in recipes):
        return False
    refused = recipe.dialect == taker.dialect and precision in taker.without
    return recipe.dialect in PRECISIONS[precision].dialects and not refused


def check_precision(
    checkpoint: Checkpoint, recipes: Sequence[Recipe], precision: str, wanted: Collection[str]
) -> None:
    """Refuse a precision that some graph of the model cannot have; `wanted` are the ids that can."""
    kind = PRECISIONS[precision]
    if kind.cache_bits and not checkpoint.traits.continues_texts:
        raise InputError(
            f"precision {precision!r} is for models that generate text; export {kind.weights!r}, as a"
            f" {checkpoint.task} model keeps no long cache"
        )
    if kind.rows is not None and not checkpoint.traits.encodes:
        weights_alone = next(n for n, own in PRECISIONS.items() if own.formats is kind.formats)
        raise InputError(
            f"precision {precision!r} rounds what products read, which is for encoders; export"
            f" {weights_alone!r}, as this is a {checkpoint.task} model"
        )
    if kind.engine and not checkpoint.traits.encodes:
        raise InputError(
            f"precision {precision!r} is what {kind.engine} rounds encoders to, and this is a"
            f" {checkpoint.task} model; {BFLOAT16}"
        )
    for graph in dict.fromkeys(recipe.graph for recipe in recipes):
        same = [recipe for recipe in recipes if recipe.graph == graph]
        if any(recipe.id in wanted for recipe in same):
            continue
        if any(recipe.dialect in kind.dialects for recipe in same):
            raise InputError(
                f"precision {precision!r} is in no graph of the targets that were named: their engine gains"
                " nothing by it. Leave it out, or add the target portable, or cuda for fp16"
            )
        why = f"its {graph} is exported as {', '.join(recipe.id for recipe in same)} only"
        way = f"add the target {'portable' if 'portable' in kind.dialects else 'cpu'}"
        if any(recipe.keeps_state for recipe in recipes):
            why += ", as a recurrent model's are"
            way = "export fp32 or fp16"
        elif kind.dialects == ("ort",) and f"{graph}.ort" not in checkpoint.recipes:
            heads = "its head size is not a multiple of 8, which ONNX Runtime's GroupQueryAttention needs"
            why += f", because {checkpoint.unshared or heads}"
            way = "export fp32"
        raise InputError(
            f"precision {precision!r} runs in graphs of {' and '.join(kind.dialects)}, and {why}."
            f" Leave it out, or {way}"
        )


def make_artifact(recipe: Recipe, precision: str, file: str, data: str) -> Artifact:
    """Return the artifact of a recipe's graph in a precision, with the names of its files."""
    dtype = PRECISIONS[precision].keeps_cache_in
    return Artifact(
        graph=recipe.graph,
        dialect=recipe.dialect,
        precision=precision,
        opset=recipe.opset,
        file=file,
        data=(data,),
        padding_side=recipe.padding_side,
        inputs=cast_caches(recipe.inputs, dtype),
        outputs=cast_caches(recipe.outputs, dtype),
        aliases=recipe.aliases,
        constraints=recipe.constraints,
        window=recipe.window,
        computes_sizes=recipe.computes_sizes,
    )


def describe_in_fp32(artifact: Artifact) -> Artifact:
    """Return the artifact of the same graph before any conversion, in fp32."""
    inputs = cast_caches(artifact.inputs, "float32")
    outputs = cast_caches(artifact.outputs, "float32")
    return dataclasses.replace(artifact, precision="fp32", inputs=inputs, outputs=outputs, quantization={})


def cast_caches(specs: Sequence[TensorSpec], dtype: str) -> tuple[TensorSpec, ...]:
    """Return inputs or outputs whose caches have the given type; values that a user reads keep theirs."""
    return tuple(dataclasses.replace(spec, dtype=dtype) if is_cache(spec) else spec for spec in specs)


def is_cache(spec: TensorSpec) -> bool:
    return spec.role.startswith(("past.", "present.", "cross.", "state.", "next_state."))
