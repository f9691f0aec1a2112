"""Traces recipes into ONNX graphs without weights, each in a child process, whose `main` is here too.

Only config.json and the names of the weights are read from the checkpoint. The weights are graph inputs
while the graph is traced and simplified, so nothing can be folded, merged or dropped because of their
values, and no process holds them twice.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...runtime.errors import PlanForgeError
from ..errors import ExportError, make_named_error
from ..processes import kill_running, leave_cores, make_command, start_child
from .modules import keep_only_modules, record_modules
from .recipes import Recipe, TraceOptions, make_all_recipes
from .recipes.recipe import find_alike

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

    from ...models.families import Model

    Trace: TypeAlias = Mapping[str, Future[ir.Model]]  # graphs to come, by their recipe's id


@contextlib.contextmanager
def start_trace(checkpoint: Path, choices: TraceOptions, recipes: Mapping[str, Recipe]) -> Iterator[Trace]:
    """Trace recipes, equal ones once, in child processes while the block runs.

    The children end with the block; PyTorch leaves each of them a core until then.
    """
    if not recipes:
        yield {}
        return
    first = find_alike(recipes)
    alone = list(dict.fromkeys(first.values()))
    children: list[subprocess.Popen[str]] = []
    with (
        tempfile.TemporaryDirectory(prefix="planforge-trace-") as folder,
        ThreadPoolExecutor(len(alone)) as pool,
        leave_cores(len(alone)),
    ):
        try:
            traced = {}
            for recipe in alone:
                out = Path(folder, recipe)
                children.append(start_tracer(checkpoint, recipe, choices, out))
                traced[recipe] = pool.submit(read_traced, children[-1], out)
            yield {recipe: traced[other] for recipe, other in first.items()}
        finally:
            kill_running(children)  # the pool waits for its threads, which reap them


def finish_trace(
    trace: Trace, count: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, ir.Model]:
    """Return the traced graphs, with their weights still among the inputs, or raise what a child raised.

    `count` is told how many are done, and of how many.
    """
    waiting = set(trace.values())
    count(0, len(waiting))
    for number, done in enumerate(as_completed(waiting), 1):
        done.result()  # the first that fails leaves the block of `start_trace`
        count(number, len(waiting))
    graphs: dict[str, ir.Model] = {}
    for recipe, traced in trace.items():
        graph = traced.result()
        graphs[recipe] = graph.clone() if graph in graphs.values() else graph
    return graphs


def start_tracer(checkpoint: Path, recipe: str, choices: TraceOptions, out: Path) -> subprocess.Popen[str]:
    """Start tracing one recipe in a child process; `read_traced` waits for it."""
    command = [*make_command(__name__), str(checkpoint.resolve()), recipe]
    command += [str(choices.max_batch), str(choices.max_length), ",".join(choices.outputs), str(out)]
    # PyTorch makes a folder for compiled kernels, of which tracing has none.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(out.with_suffix(".inductor")), **os.environ}
    return start_child(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def read_traced(process: subprocess.Popen[str], out: Path) -> ir.Model:
    """Return the graph that a child process has written to `out`; raise what the child raised."""
    import onnx_ir as ir

    _, errors = process.communicate()
    if (said := locate_error_file(out)).is_file():
        error = json.loads(said.read_text(encoding="utf-8"))
        said.unlink()
        raise make_named_error(error["error"], error["message"])
    if process.returncode != 0:
        last = errors.strip().splitlines()[-1] if errors.strip() else "no message"
        raise ExportError(f"tracing failed (exit {process.returncode}): {last}")
    return ir.load(out)


def trace(model: Model, recipe: Recipe) -> ir.Model:
    """Run torch.export over the recipe's module, and simplify the ONNX graph."""
    import torch
    import torch._dynamo.config

    from .decompositions import rename_instead_of_decomposing
    from .experts import name_part_lengths

    assert recipe.module is not None
    module = recipe.module(model).eval()
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        # Keeping results of operations on fake tensors costs more than it saves where shapes are symbols.
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        rename_instead_of_decomposing(),
    ):
        warnings.simplefilter("ignore")  # torch.onnx warns of its own internals
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            module,
            make_example_inputs(recipe),
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=recipe.opset,
            dynamic_shapes=list_dynamic_shapes(recipe, module),
            input_names=[spec.name for spec in recipe.inputs],
            output_names=[spec.name for spec in recipe.outputs],
        )
    assert program is not None
    import onnxscript.optimizer  # after torch.onnx, which keeps its warnings away

    turn_weights_into_inputs(program.model)
    name_part_lengths(program.model.graph)
    record_modules(program.model)
    with try_patterns_at_their_first_node():
        onnxscript.optimizer.optimize_ir(program.model)  # folds the shape arithmetic of tracing
    keep_only_modules(program.model)
    return program.model


@contextlib.contextmanager
def try_patterns_at_their_first_node() -> Iterator[None]:
    """Let onnxscript try a pattern with several ends only at nodes of its first end's operator.

    Else it lists all of a graph's nodes at each of them: 15 seconds instead of 2.5 for 16 layers of a Llama.
    """
    from onnxscript.rewriter import MatchResult
    from onnxscript.rewriter.pattern import SimplePatternMatcher

    matcher: Any = SimplePatternMatcher
    match = matcher.match

    def match_first(self: Any, model: Any, graph: Any, node: ir.Node, **options: Any) -> Any:
        first = self.pattern.output_nodes[0].op_identifier()
        if first is not None and first != node.op_identifier():
            return MatchResult().fail("Another operator.")
        return match(self, model, graph, node, **options)

    matcher.match = match_first
    try:
        yield
    finally:
        matcher.match = match


def make_example_inputs(recipe: Recipe) -> tuple[Any, ...]:
    """Return tensors of the recipe's example lengths; torch.export reads only their shapes and types."""
    import torch

    def zeros(spec: Any) -> Any:
        shape = [recipe.example.get(axis, axis) for axis in spec.axis_names()]
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype))

    return tuple(zeros(spec) for spec in recipe.inputs)


def list_dynamic_shapes(recipe: Recipe, module: nn.Module) -> tuple[Any, ...]:
    """Return torch.export's dynamic_shapes: an axis name for each dynamic axis of each input.

    The inputs that the module takes as *args are a tuple of their own.
    """
    per_input = [
        {i: name for i, name in enumerate(spec.axis_names()) if isinstance(name, str)}
        for spec in recipe.inputs
    ]
    parameters = inspect.signature(module.forward).parameters.values()
    single = sum(parameter.kind is not parameter.VAR_POSITIONAL for parameter in parameters)
    rest = (tuple(per_input[single:]),) if per_input[single:] else ()
    return (*per_input[:single], *rest)


def turn_weights_into_inputs(model: ir.Model) -> None:
    """Turn the module's parameters from initializers into inputs, under the reference model's names."""
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if name.startswith("model."):
            del graph.initializers[name]
            if value.uses():  # not those of a part that is not in this graph, such as a pooler
                value.const_value = None
                value.name = name.removeprefix("model.")
                graph.inputs.append(value)


def locate_error_file(out: Path) -> Path:
    """Return the file in which a child reports an error, instead of writing its graph."""
    return out.with_name(f"{out.name}.error")


def main(arguments: list[str]) -> None:
    """Run the child process: FOLDER RECIPE MAX_BATCH MAX_LENGTH OUTPUTS OUT.onnx."""
    gc.set_threshold(100_000)  # else looking for cycles in millions of objects takes a fifth of the time
    try:
        write_trace(*arguments)
    except PlanForgeError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
        locate_error_file(Path(arguments[-1])).write_text(json.dumps(answer), encoding="utf-8")


def write_trace(folder: str, recipe_id: str, max_batch: str, max_length: str, outputs: str, out: str) -> None:
    """Trace one recipe's graph of a checkpoint, and write it to a file; the arguments are a command's."""
    import onnx_ir as ir

    from ...models.checkpoint import describe, empty_model, limit_context

    description = describe(Path(folder))
    names = tuple(filter(None, outputs.split(",")))
    choices = TraceOptions(int(max_batch), int(max_length), names, bool(description.adapters))
    recipes, explanations = make_all_recipes(description.task, description.config, choices)
    recipe = {**recipes, **explanations}[recipe_id]
    model = empty_model(description).to_empty(device="cpu").requires_grad_(False)  # untouched: no memory
    model.tie_weights()
    limit_context(model, choices.max_length)
    ir.save(trace(model, recipe), out)
