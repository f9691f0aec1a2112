"""Traces one recipe into an ONNX graph without weights; runs as a child process of its own.

Only config.json is read. The weights are graph inputs while the graph is traced and simplified, so
nothing can be folded, merged or dropped because of their values, and no process holds them twice.
"""

from __future__ import annotations

import logging
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .child import command_of
from .errors import ExportError
from .recipes import Limits, Recipe, recipes_for

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..models import GPT2


def start_trace(checkpoint: Path, dialect: str, limits: Limits, out: Path) -> subprocess.Popen[str]:
    """Starts tracing in a child process; `finish_trace` waits for it."""
    command = [*command_of(__name__), str(checkpoint.resolve()), dialect]
    command += [str(limits.max_batch), str(limits.max_length), str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish_trace(process: subprocess.Popen[str], out: Path) -> ir.Model:
    """The traced graph, with its weights still among the inputs."""
    import onnx_ir as ir

    _, errors = process.communicate()
    if process.returncode != 0:
        last = errors.strip().splitlines()[-1] if errors.strip() else "no message"
        raise ExportError(f"tracing failed (exit {process.returncode}): {last}")
    return ir.load(out)


def trace(model: GPT2, recipe: Recipe) -> ir.Model:
    """Runs torch.export over the recipe's module and simplifies the ONNX graph."""
    import torch

    module = recipe.module(model).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.onnx warns of its own internals
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            module,
            example_inputs(recipe),
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=recipe.opset,
            dynamic_shapes=dynamic_shapes(recipe),
            input_names=[spec.name for spec in recipe.inputs],
            output_names=[spec.name for spec in recipe.outputs],
        )
    assert program is not None
    graph_model = program.model
    weights_become_inputs(graph_model)
    simplify(graph_model)
    return graph_model


def example_inputs(recipe: Recipe) -> tuple[Any, ...]:
    """Tensors of the recipe's example lengths; torch.export reads only their shapes and types."""
    import torch

    def zeros(spec: Any) -> Any:
        shape = [recipe.example.get(axis, axis) for axis in spec.axis_names()]
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype))

    return tuple(zeros(spec) for spec in recipe.inputs)


def dynamic_shapes(recipe: Recipe) -> tuple[Any, ...]:
    """torch.export's dynamic_shapes: an axis name for each dynamic axis of each input."""
    per_input = [
        {i: name for i, name in enumerate(spec.axis_names()) if isinstance(name, str)}
        for spec in recipe.inputs
    ]
    caches = tuple(
        shape for spec, shape in zip(recipe.inputs, per_input, strict=True) if spec.role.startswith("past.")
    )
    return (*per_input[: len(per_input) - len(caches)], caches)


def weights_become_inputs(model: ir.Model) -> None:
    """Turns the module's parameters from initializers into inputs, under the reference model's names."""
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if name.startswith("model."):
            del graph.initializers[name]
            value.const_value = None
            value.name = name.removeprefix("model.")
            graph.inputs.append(value)


def simplify(model: ir.Model) -> None:
    """Folds the shape arithmetic that tracing leaves behind, and drops what only debugging needs."""
    import onnx_ir.passes.common as common
    import onnxscript.optimizer

    onnxscript.optimizer.optimize_ir(model)
    common.ClearMetadataAndDocStringPass()(model)


def main(arguments: list[str]) -> None:
    """The child process: FOLDER DIALECT MAX_BATCH MAX_LENGTH OUT.onnx."""
    import onnx_ir as ir
    import torch

    from ..models.checkpoint import config_from_json, family_of, read_json

    folder, dialect, max_batch, max_length, out = arguments
    config_json = read_json(Path(folder) / "config.json")
    family, config = family_of(config_json), config_from_json(config_json)
    recipe = recipes_for(family.name, config, Limits(int(max_batch), int(max_length)))[dialect]
    with torch.device("meta"):
        model = family.model(config)
    model = model.to_empty(device="cpu").requires_grad_(False)  # untouched pages take no memory
    if config.tie_word_embeddings:
        model.lm_head.weight = model.wte.weight
    ir.save(trace(model, recipe), out)
