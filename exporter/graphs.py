"""Traced graphs -> weights -> precisions -> ONNX files, and one weights file for all that can share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ..runtime.bundle.manifest import Artifact, TensorSpec
from ..runtime.errors import InputError
from .checkpoints.checkpoint import Checkpoint
from .precisions import PRECISIONS
from .targets import find_target
from .tracing.recipes import Recipe

HEADS = "its head size is no multiple of 8, which ONNX Runtime's GroupQueryAttention needs"

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from .reference.model import ReferenceModel


def attach_weights(
    checkpoint: Checkpoint, graphs: Mapping[str, ir.Model], model: ReferenceModel | None
) -> None:
    """Give traced graphs their weights and the recipe's axes; those for ONNX Runtime its operators too."""
    from .passes.fusions import FuseForOnnxRuntime
    from .passes.weights import AttachWeights
    from .tracing.graph_check import check_graph, name_axes

    tensors = {} if model is None else tensors_of(model)
    for recipe_id, graph in graphs.items():
        recipe = checkpoint.recipes[recipe_id]
        AttachWeights(tensors)(graph)
        if recipe.dialect == "ort":
            FuseForOnnxRuntime()(graph)
        name_axes(graph, recipe.constraints)
        check_graph(graph, recipe.inputs, recipe.outputs)


def tensors_of(model: ReferenceModel) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, by all of their names."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    return tensors


def plan_artifacts(
    checkpoint: Checkpoint, targets: Sequence[str], precisions: Sequence[str]
) -> list[Artifact]:
    """Return the graphs that an export writes: each target's, in each precision that their dialects can have.

    Raises:
        InputError: a target would get no graph, or a precision none of them; says what to change.
    """
    of_target = {name: [checkpoint.recipes[r] for r in checkpoint.list_recipes(name)] for name in targets}
    everything = list({recipe.id: recipe for recipes in of_target.values() for recipe in recipes}.values())
    wanted = {
        precision: {
            r.id for name, recipes in of_target.items() for r in recipes if may_be(r, precision, name)
        }
        for precision in precisions
    }
    for precision, ids in wanted.items():
        check_precision(checkpoint, everything, precision, ids)
    for name, recipes in of_target.items():
        for recipe in recipes:
            if not any(may_be(recipe, p, name) for p in precisions):
                allowed = [p for p in PRECISIONS if may_be(recipe, p, name)]
                raise InputError(
                    f"target {name!r} gets the {recipe.id} graph, which can be {', '.join(allowed)}, not"
                    f" {', '.join(precisions)}"
                )
    return [
        artifact_of(
            recipe,
            precision,
            f"onnx/{checkpoint.file(f'{recipe.id}.{precision}', 'onnx')}",
            f"onnx/{checkpoint.file(f'weights.{PRECISIONS[precision].weights}', 'data')}",
        )
        for precision in precisions
        for recipe in everything
        if recipe.id in wanted[precision]
    ]


def may_be(recipe: Recipe, precision: str, target: str) -> bool:
    """Tell whether a target takes a recipe's graph in a precision."""
    taker = find_target(target)
    refused = recipe.dialect == taker.dialect and precision in taker.without
    return recipe.dialect in PRECISIONS[precision].dialects and not refused


def check_precision(
    checkpoint: Checkpoint, recipes: Sequence[Recipe], precision: str, wanted: Collection[str]
) -> None:
    """Refuse a precision that some graph of the model cannot have.

    Args:
        recipes: the recipes of all targets.
        wanted: the ids of those that some target takes in this precision.

    Raises:
        InputError: says why, and what can be.
    """
    kind = PRECISIONS[precision]
    if kind.cache_bits and checkpoint.task != "text-generation":
        raise InputError(
            f"precision {precision!r} is for models that generate text; export {kind.weights!r}, as a"
            f" {checkpoint.task} model keeps no long cache"
        )
    for graph in dict.fromkeys(recipe.graph for recipe in recipes):
        if any(recipe.graph == graph and recipe.id in wanted for recipe in recipes):
            continue
        if any(recipe.graph == graph and recipe.dialect in kind.dialects for recipe in recipes):
            raise InputError(
                f"precision {precision!r} is in no graph of the targets that were named: their engine gains"
                " nothing by it. Leave it out, or add the target portable, or cuda for fp16"
            )
        why = f"its {graph} is exported as {', '.join(r.id for r in recipes if r.graph == graph)} only"
        way = f"add the target {'portable' if 'portable' in kind.dialects else 'cpu'}"
        if kind.dialects == ("ort",) and f"{graph}.ort" not in checkpoint.recipes:
            why += f", because {checkpoint.unshared or HEADS}"
            way = "export fp32"
        raise InputError(
            f"precision {precision!r} runs in graphs of {' and '.join(kind.dialects)}, and {why}."
            f" Leave it out, or {way}"
        )


def artifact_of(recipe: Recipe, precision: str, file: str, data: str) -> Artifact:
    """Return the artifact of a recipe's graph in a precision, with the names of its files."""
    recipe = set_cache_type(recipe, precision)
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


def set_cache_type(recipe: Recipe, precision: str) -> Recipe:
    """Return the recipe with its caches in the precision's type; outputs that a user reads stay fp32."""
    dtype: str | None = None
    if PRECISIONS[precision].cache_bits:
        dtype = "int8"
    elif precision == "fp16":
        dtype = "float16"

    def cast(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(dataclasses.replace(s, dtype=dtype) if dtype and is_cache(s) else s for s in specs)

    return dataclasses.replace(recipe, inputs=cast(recipe.inputs), outputs=cast(recipe.outputs))


def recipe_of(artifact: Artifact) -> str:
    """Return the id of the recipe that an artifact's graph was traced by."""
    return f"{artifact.graph}.{artifact.dialect}"


def in_fp32(artifact: Artifact) -> Artifact:
    """Return the artifact of the same graph before any conversion."""
    inputs, outputs = (
        tuple(dataclasses.replace(s, dtype="float32") if is_cache(s) else s for s in specs)
        for specs in (artifact.inputs, artifact.outputs)
    )
    return dataclasses.replace(artifact, precision="fp32", inputs=inputs, outputs=outputs, quantization={})


def is_cache(spec: TensorSpec) -> bool:
    return spec.role.startswith(("past.", "present.", "cross."))
