"""Compares every module of PyTorch's model with a graph, on the graph's own numbers.

A graph runs node by node. PyTorch runs over the same texts; a hook on each module whose result the graph has
compares what it gives with the graph's value, and passes the graph's value on. So errors do not add up, and
what lies between two such values is covered by the second. In float64 PyTorch says what is exact, in fp32
what rounding may do.

T tokens of a text, N rows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ...models.language_model import LanguageModel
from ...runtime.apps.check.case import Case, Row, Text
from ...runtime.backends.backend import Array
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import BackendError
from ..comparison.decoders import DecoderExaminer, DecoderReplay
from ..comparison.tasks import AnyExaminer
from ..execution.node_executor import NotFiniteError
from ..execution.replay import Replay, Step, make_replay
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..passes.weights import Stored
from ..reference.fitted_head import LinearHead
from ..reference.rounding import ExchangedWeights, round_to, use_one_thread
from ..tasks.encoder_answers import find_output
from ..tracing.modules import find_results_by_scope, read_results
from .attributes import describe_node
from .module_values import (
    Border,
    FloatExecutor,
    Integers,
    Kept,
    ModuleProgram,
    find_borders,
    find_factors,
    is_leaf,
)

ChooseReplay: TypeAlias = "Callable[[AnyExaminer, Artifact], Replay]"

aten = torch.ops.aten
READ_LITTLE = (aten.embedding, aten.index, aten.index_select, aten.new_zeros)  # of what they are given
ROUNDING = 2.0**-24  # of fp32, relative
# How many times what fp32 rounds in PyTorch a graph may be off: in the mean of squares' root, and at most.
MEAN_FACTOR = 16.0
MOST_FACTOR = 32.0
FEW = 30  # numbers, whose own rounding says little of what others' may be
PIECE_NUMBERS = 2**17  # of a weight that are in float64 at once: they fit a core's cache
SHORT = (12, 9)  # tokens of two texts
PAST_TOKENS = 8  # whose keys and values fill a context
PAST_READ = 512  # tokens at most, where a window sees so many
LONGEST = 2048  # tokens of a past
TABLE_ROWS = 4096  # of a table that are looked up at once
LOOKED_UP = 4.0  # roundings that a number of a table may be off: a product of a code and a step is one


def check_modules(examiner: AnyExaminer, artifact: Artifact, model: nn.Module) -> Iterator[str]:
    """Yield in words where a graph computes something else than the model's modules."""
    with use_one_thread(), torch.no_grad(), ExitStack() as stack:
        graph = load_graph(examiner.bundle.path(artifact.file)).graph
        is_half = any(v.dtype == ir.DataType.FLOAT16 for v in graph.initializers.values())
        stack.enter_context(store_weights(model, graph, artifact))
        replays: list[ChooseReplay] = [make_short_replay]
        if past := count_past(examiner, model):
            replays.append(partial(make_past_replay, past))
        for choose in replays:
            try:
                found = list(ModuleRun(examiner, artifact, model, choose).check(is_half))
            except (NotFiniteError, BackendError) as error:
                found = [str(error)]
            if found:
                yield from found
                return
        yield from check_tables(load_graph(examiner.bundle.path(artifact.file)), artifact, model)


def make_short_replay(examiner: AnyExaminer, artifact: Artifact) -> Replay:
    """Return a replay of little text, padded, and where there is a cache of a token more.

    Of a decoder's two texts PyTorch reads the shorter alone, for what it computes in float64 takes longest.
    """
    if not isinstance(examiner, DecoderExaminer):
        return examiner.make_replay(artifact)
    texts = tuple(Text(cut_tokens(examiner, length)) for length in SHORT)
    rows = tuple(Row(number, (length - 1, length)) for number, length in enumerate(SHORT))
    only = replace(examiner.expected, texts=texts, answers={})
    replay = make_replay(artifact, only, Case("short", artifact.graph, rows, ()), DecoderReplay(artifact))
    return replace(replay, read=(None, replay.read[1]))


def count_past(examiner: AnyExaminer, model: nn.Module) -> int:
    """Return how many tokens are read whose keys and values fill a context; 0 where none can be filled.

    That is the context of a model without a cache of its own, or with a window that sees too much.
    """
    if not isinstance(examiner, DecoderExaminer) or not isinstance(model, LanguageModel):
        return 0
    context = find_context(examiner)
    past = max(min(PAST_TOKENS, context // 4), *(window or 0 for window in model.config.windows))
    return past if past <= PAST_READ and 2 * past < context else 0


def find_context(examiner: AnyExaminer) -> int:
    return min(examiner.bundle.manifest.max_length, LONGEST)


def make_past_replay(past: int, examiner: AnyExaminer, artifact: Artifact) -> Replay:
    """Return a replay of some tokens behind a full context, whose keys and values are those of a few."""
    context = find_context(examiner)
    repeats = (context - 1) // past
    length = context - (repeats - 1) * past
    only = replace(
        examiner.expected, texts=(Text(cut_tokens(examiner, length), past=past, repeats=repeats),), answers={}
    )
    case = Case("full past", artifact.graph, (Row(0, (past, length)),), (), shares_past=True)
    replay = make_replay(artifact, only, case, DecoderReplay(artifact))
    read = np.arange(length)[None]
    steps = (Step("prefill", read[:, :past], (0,)), Step("tokens on a full past", read[:, past:], (0,)))
    assert len(replay.steps) == len(steps)
    return replace(replay, steps=steps)


def cut_tokens(examiner: AnyExaminer, length: int) -> tuple[int, ...]:
    """Return so many tokens of real text."""
    known = max((text.tokens for text in examiner.expected.texts), key=len)
    return (known * (length // len(known) + 1))[:length]


@contextmanager
def store_weights(model: nn.Module, graph: ir.Graph, artifact: Artifact) -> Iterator[None]:
    """Give a model the numbers that a graph stores, inside the context: codes, and weights in fp16."""
    named = dict(model.named_parameters(remove_duplicate=False))
    exchanged = ExchangedWeights(model)
    types = {Stored.read(value).parameter: value.dtype for value in graph.initializers.values()}
    is_half = ir.DataType.FLOAT16 in types.values()
    buffers: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for weight in read_weights(graph, artifact.quantization.get("rows", {})):
            if not all(name in named for name in weight.names):
                continue
            whole = weight.read(slice(None)).dequantize()
            if weight.rows is not None and weight.rows.smoothing is not None:
                whole = whole / weight.rows.smoothing
            parts = torch.split(torch.from_numpy(whole), [len(named[name]) for name in weight.names])
            for name, part in zip(weight.names, parts, strict=True):
                exchanged.put(named[name], part)
        for name, parameter in named.items() if is_half else ():
            if types.get(name) != ir.DataType.FLOAT:
                exchanged.put(parameter, round_to(torch.float16, parameter.data))
        for path, module in model.named_modules() if is_half else ():
            for name, table in module.named_buffers(recurse=False):
                kind = types.get(f"{path}.{name}", ir.DataType.FLOAT16 if name == "inv_freq" else None)
                if kind == ir.DataType.FLOAT16:
                    buffers.append((module, name, table))
                    setattr(module, name, round_to(torch.float16, table))
        yield
    finally:
        exchanged.put_back()
        for module, name, table in buffers:
            setattr(module, name, table)


class MisfitError(Exception):
    """A value that goes on in another size does not fit PyTorch's, or its module runs more than once."""

    def __init__(self, border: Border) -> None:
        super().__init__(border.value)
        self.border = border


@dataclass
class Pairs:
    """What PyTorch gave, and a graph, of one border at its tokens in all texts."""

    own: list[Array] = field(default_factory=list)
    got: list[Array] = field(default_factory=list)
    positions: list[Array] = field(default_factory=list)


class ModuleRun:
    """A replay through a graph and through PyTorch, which reads the graph's numbers."""

    def __init__(
        self, examiner: AnyExaminer, artifact: Artifact, model: nn.Module, choose: ChooseReplay
    ) -> None:
        self.artifact = artifact
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.left_out: set[str] = set()  # values that no module can be held to
        self.programs: list[ModuleProgram] = []  # the graph, and one that it runs with
        self.examiner = replace(examiner, open_other=self.open_program)
        self.replay = choose(self.examiner, artifact)

    def open_program(self, artifact: Artifact, steps: Sequence[Step] | None = None) -> ModuleProgram:
        """Open a graph of the bundle, and remember it."""
        graph = load_graph(self.examiner.bundle.path(artifact.file))
        results = read_results(graph) or find_results_by_scope(graph.graph, list(self.modules))
        known = {value: path for value, path in results.items() if value not in self.left_out}
        borders = [b for b in find_borders(graph.graph, known, self.modules) if b.value not in self.left_out]
        self.programs.append(ModuleProgram(graph, artifact, borders, steps))
        return self.programs[-1]

    def check(self, is_half: bool) -> Iterator[str]:
        """Yield the modules that give other numbers, in the order of the graph."""
        modes: list[AbstractContextManager[Any]] = [ComputeInFloat64(), nullcontext()]  # type: ignore[no-untyped-call]
        is_import = bool(self.examiner.bundle.manifest.source.get("exporter"))
        modes += [RoundNumbers(is_import)] if is_half else []
        while True:
            self.programs.clear()
            self.replay.drive(self.open_program(self.artifact, self.replay.steps))
            try:
                exact, *near = [self.run_model(mode) for mode in modes]
                break
            except MisfitError as misfit:
                self.left_out.add(misfit.border.value)
        told: set[str] = set()
        for border in (*self.programs[0].borders, *(border for border in exact if not border.path)):
            pairs = exact.get(border)
            if pairs is None or border.value in told:
                continue
            if fault := compare(pairs, [one[border] for one in near]):
                told.add(border.value)
                yield f"{describe_node(border.node)} gives {border.value!r}{border.describe()}, {fault}"

    def run_model(self, mode: AbstractContextManager[Any]) -> dict[Border, Pairs]:
        """Run PyTorch over each text with the graph's numbers; return what it has, and the graph."""
        found: dict[Border, Pairs] = {}
        for text, read in enumerate(self.replay.read):
            if read is None:
                continue
            hooks = Hooks(text, self.programs, found)
            with mode, hooks.on(self.modules):
                result = read(self.model, None)
            hooks.refuse_unread()
            for name, own in list_results(self.examiner, self.artifact, result).items():
                hooks.hold_output(name, own)
        return found


def list_results(examiner: AnyExaminer, artifact: Artifact, result: Any) -> dict[str, Tensor]:
    """Return what PyTorch gives of a graph's outputs (1, ...), by their names, from a reading of a text."""
    if isinstance(result, np.ndarray):  # logits (N, V)
        return {"logits": torch.from_numpy(result[-1:])}
    if isinstance(result, list):  # a source's keys and values
        names = [spec.name for spec in artifact.outputs]
        return dict(zip(names, (tensor for pair in result for tensor in pair), strict=True))
    first, second = result
    if isinstance(first, np.ndarray):  # a target's logits (T, V)
        return {"logits": torch.from_numpy(first[-1:])}
    head = LinearHead.load(examiner.bundle)
    return {
        spec.name: torch.from_numpy(np.asarray(find_output(spec.role, first, second, head))[None])
        for spec in artifact.outputs
    }


class Hooks:
    """Lets modules read and give a graph's numbers of one text, and notes their own."""

    def __init__(self, text: int, programs: Sequence[ModuleProgram], found: dict[Border, Pairs]) -> None:
        self.text = text
        self.programs = programs
        self.found = found
        self.done: dict[Border, tuple[Kept, int]] = {}  # and how many tokens of it a module has computed
        # By a module's class: what it gave, and what the graph has of it.
        self.given: dict[type, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def on(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch modules inside the context."""
        handles = []
        known = set()
        for program in self.programs:
            for border in program.borders:
                kept = program.list_kept(border.value, self.text)
                if kept is None:
                    continue
                self.done[border] = kept, 0
                hold = partial(self.hold, border)
                if border.is_result:
                    known.add(modules[border.path])
                    handles.append(
                        modules[border.path].register_forward_hook(partial(self.hold_result, hold))
                    )
                else:
                    handles.append(modules[border.path].register_forward_pre_hook(partial(hold_read, hold)))
        for module in modules.values():
            if module not in known and has_own_weights(module):
                handles.append(module.register_forward_hook(self.find_twin))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def refuse_unread(self) -> None:
        """Raise MisfitError for a value that went on in another size, and whose module did not run."""
        for border, (kept, done) in self.done.items():
            if border.is_scaled and kept.is_whole and done != len(kept.values):
                raise MisfitError(border)

    def hold_result(self, hold: Callable[[Any], Any], module: nn.Module, inputs: Any, output: Any) -> Any:
        result = hold(output)
        if result is not output:
            self.given.setdefault(type(module), []).append((output, result))
        return result

    def find_twin(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return a graph's numbers of another module that gives the same: it may have merged the two."""
        for own, result in self.given.get(type(module), ()):
            if isinstance(output, Tensor) and torch.equal(own, output):
                return result
        return output

    def hold(self, border: Border, own: Any) -> Any:
        """Note what PyTorch has, and return the graph's numbers where it has them of every token."""
        kept, begin = self.done[border]
        tokens = split_tokens(own, kept.values.shape[1:])
        end = begin + (0 if tokens is None else len(tokens))
        if not kept.is_whole:
            self.done[border] = kept, end
            self.note_some(border, kept, own, tokens, begin)
            return own
        if tokens is None or end > len(kept.values):
            if border.is_scaled or tokens is not None:
                raise MisfitError(border)
            return own
        self.done[border] = kept, end
        values = kept.values[begin:end]
        positions = kept.positions[begin:end]
        self.note(border, tokens, values, positions)
        if border.is_scaled:
            values = values * find_factors(positions).reshape(-1, *(1,) * (values.ndim - 1))
        new = torch.from_numpy(np.ascontiguousarray(values)).to(own.dtype)
        return (new if own.shape[1] == len(new) else new.transpose(0, 1))[None]

    def hold_output(self, name: str, own: Tensor) -> None:
        """Note what PyTorch has of an output of the graph."""
        program = self.programs[0]
        value = program.outputs.get(name)
        kept = program.list_kept(name, self.text)
        if value is None or kept is None:
            return
        border = Border(name, "", value)
        tokens = split_tokens(own, kept.values.shape[1:])
        if kept.is_whole and tokens is not None and len(tokens) == len(kept.values):
            self.note(border, tokens, kept.values, kept.positions)
        else:
            self.note_some(border, kept, own, tokens)

    def note_some(self, border: Border, kept: Kept, own: Any, tokens: Tensor | None, begin: int = 0) -> None:
        """Note numbers at some of the tokens from one on, or those of the last token, or of a whole text."""
        if tokens is not None and kept.positions.max() >= 0:
            inside = (kept.positions >= begin) & (kept.positions < begin + len(tokens))
            own = tokens[torch.from_numpy(kept.positions[inside] - begin)]
            self.note(border, own, kept.values[inside], kept.positions[inside])
        elif (
            isinstance(own, Tensor)
            and own.shape[-1:] == kept.values.shape[-1:]
            and own.ndim >= kept.values.ndim
        ):
            last = own.reshape(-1, *kept.values.shape[1:])[-1:]
            self.note(border, last, kept.values[-1:], kept.positions[-1:])

    def note(self, border: Border, own: Tensor, got: Array, positions: Integers) -> None:
        pairs = self.found.setdefault(border, Pairs())
        pairs.own.append(own.detach().numpy().astype(np.float64))
        pairs.got.append(got)
        pairs.positions.append(positions)


def hold_read(hold: Callable[[Any], Any], module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return (hold(inputs[0]), *inputs[1:]) if inputs else None


def has_own_weights(module: nn.Module) -> bool:
    return is_leaf(module) and next(module.parameters(), None) is not None


def split_tokens(own: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Return the tokens (T, ...) of one text's (1, T, ...) or (1, H, T, D); None of anything else."""
    if not isinstance(own, Tensor) or not own.is_floating_point() or own.ndim < 3 or len(own) != 1:
        return None
    is_plain = own.shape[2:] == shape
    is_swapped = own.ndim == 4 and (own.shape[1], own.shape[3]) == shape
    if is_plain == is_swapped:
        return None
    return own[0] if is_plain else own[0].transpose(0, 1)


def compare(exact: Pairs, near: Sequence[Pairs]) -> str:
    """Return in words how a graph's numbers differ from PyTorch's by more than rounding; "" if they agree."""
    want = np.concatenate(exact.own)
    got = np.concatenate(exact.got)
    groups = find_factors(np.concatenate(exact.positions))
    if not np.isfinite(got).all():
        return "which is not finite"
    error = np.abs(got - want)
    roundings = [np.abs(np.concatenate(one.own) - want) for one in near]
    for group in np.unique(groups):
        own = groups == group
        largest = np.abs(want[own]).max(initial=0.0)
        noise = max(ROUNDING * largest, *(one[own].max(initial=0.0) for one in roundings))
        mean = max(ROUNDING / 2 * measure_power(want[own]), *(measure_power(one[own]) for one in roundings))
        unsure = 1 + FEW / max(1, error[own].size)
        most = error[own].max(initial=0.0)
        if most > unsure * MOST_FACTOR * noise or measure_power(error[own]) > unsure * MEAN_FACTOR * mean:
            return f"off by {most:.3g} of {largest:.3g}, where fp32 rounds by {noise:.2g}"
    return ""


def measure_power(array: Array) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.square(array).mean())) if array.size else 0.0


def check_tables(graph: ir.Model, artifact: Artifact, model: nn.Module) -> Iterator[str]:
    """Yield the tables of words and segments some of whose rows are not PyTorch's, each looked up once."""
    modules = dict(model.named_modules())
    results = read_results(graph) or find_results_by_scope(graph.graph, list(modules))
    executor = FloatExecutor(graph)
    ids = {spec.name for spec in artifact.inputs if spec.role in ("ids", "segments")}
    for node in list(graph.graph):
        for value in node.outputs:
            module = modules.get(results.get(str(value.name), ""))
            if type(module) is not nn.Embedding:
                continue
            nodes, inputs = find_before(node)
            if len(inputs) != 1 or (given := inputs.pop()).name not in ids or given.dtype is None:
                continue
            size = module.num_embeddings
            wrong: list[int] = []
            for begin in range(0, size, TABLE_ROWS):
                rows = np.arange(begin, min(begin + TABLE_ROWS, size))
                values = {**executor.constants, given: rows[None].astype(given.dtype.numpy())}
                for before in nodes:
                    feeds = [None if one is None else values[one] for one in before.inputs]
                    values.update(zip(before.outputs, executor.run_node(before, feeds), strict=True))
                want = module(torch.from_numpy(rows)).numpy()
                if np.array_equal(values[value][0], want):
                    continue
                off = np.abs(values[value][0] - want)
                near = off <= LOOKED_UP * ROUNDING * np.abs(want)  # NaN is not
                wrong += rows[~near.all(axis=1)].tolist()
            if wrong:
                yield (
                    f"{describe_node(node)} gives {len(wrong)} of {size} rows of PyTorch's"
                    f" {results[str(value.name)]!r} otherwise, first that of {wrong[0]}"
                )


def find_before(node: ir.Node) -> tuple[list[ir.Node], set[ir.Value]]:
    """Return the nodes that a node's result comes from, itself the last, and the graph's inputs among it."""
    needed = {node}
    inputs: set[ir.Value] = set()
    waiting = [node]
    while waiting:
        for value in waiting.pop().inputs:
            before = None if value is None else value.producer()
            if before is not None and before not in needed:
                needed.add(before)
                waiting.append(before)
            elif value is not None and before is None and value.const_value is None:
                inputs.add(value)
    assert node.graph is not None
    return [one for one in node.graph if one in needed], inputs


class ComputeInFloat64(TorchDispatchMode):
    """Computes in float64 with a model whose weights stay in fp32."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of RoundResults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func.overloadpacket in READ_LITTLE:
            return tree_map(widen, func(*args, **(kwargs or {})))
        if func.overloadpacket in (aten.mm, aten.addmm):
            *bias, x, weight = args
            if weight.dtype == torch.float32:
                step = max(1, PIECE_NUMBERS // len(weight))
                product = torch.cat([x.double() @ part.double() for part in weight.split(step, dim=1)], dim=1)
                return product + bias[0].double() if bias else product
        args, kwargs = tree_map(widen, (args, kwargs or {}))
        return tree_map(widen, func(*args, **kwargs))


def widen(argument: Any) -> Any:
    """Return a tensor in fp32, or that type, in float64; anything else as it is."""
    if isinstance(argument, Tensor):
        return argument.double() if argument.dtype == torch.float32 else argument
    return torch.float64 if argument is torch.float32 else argument


class RoundNumbers(TorchDispatchMode):
    """Rounds single numbers that are added, or multiplied or divided by, to fp16, as graphs have them.

    `has_plain_gelu` tells whether those of GELU are among them, as in other exporters' graphs.
    """

    def __init__(self, has_plain_gelu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_plain_gelu = has_plain_gelu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.mul, aten.div, aten.add, aten.sub):
            args = tuple(map(round_number, args))
        if func.overloadpacket is aten.gelu and self.has_plain_gelu:
            x = args[0]
            if (kwargs or {}).get("approximate") == "tanh":
                inner = round_number(math.sqrt(2 / math.pi)) * (x + round_number(0.044715) * x**3)
                return x * 0.5 * (1 + torch.tanh(inner))
            return x * 0.5 * (1 + torch.erf(x / round_number(math.sqrt(2))))
        return func(*args, **(kwargs or {}))


def round_number(argument: Any) -> Any:
    if isinstance(argument, float):
        return float(np.float16(argument))
    is_number = isinstance(argument, Tensor) and argument.ndim == 0 and argument.is_floating_point()
    return argument.half().to(argument.dtype) if is_number else argument
