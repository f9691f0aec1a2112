"""Compares every module of PyTorch's model with a graph, on the graph's own values.

A graph runs node by node, and PyTorch reads the same texts. A hook on each module whose result the graph has
compares both and passes the graph's value on, so errors do not add up, and nodes between two such values are
covered by the second. PyTorch's float64 results count as exact, and its fp32 shows the effect of rounding.

T tokens of a text, N rows
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ...models.experts import Experts
from ...models.language_model import LanguageModel
from ...runtime.apps.check.case import Case, Row, Text
from ...runtime.backends.backend import Array
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.cache_shapes import PREFILL_CHUNK
from ...runtime.errors import BackendError
from ..execution.replay import Replay, Step
from ..memory import give_back_mapped_pages
from ..passes.weight_files import load_graph
from ..task_traits import TRAITS
from ..tasks.encoder_answers import find_output
from ..tasks.fitted_head import LinearHead
from ..tasks.float64 import ComputeInFloat64, RoundConstants
from ..tasks.rounding import use_one_thread
from ..tasks.verifier import Verifier
from ..tracing.modules import find_module_results
from .attributes import LOOKUPS, blame, describe_node
from .module_values import Border, FloatExecutor, Integers, Kept, ModuleProgram, find_borders, find_factors
from .module_weights import find_hindrance, read_stored, store_weights

Counts: TypeAlias = dict[str, int]

log = logging.getLogger("planforge")

ROUNDING = 2.0**-24  # of fp32, relative
# A graph's allowed error, in units of fp32's rounding in PyTorch: as root mean square, and at most.
MEAN_FACTOR = 16.0
MAX_FACTOR = 32.0
FEW = 30  # values, too few to tell the rounding of others
SHORT = (12, 9)  # tokens of two texts
PAST_TOKENS = 8  # whose keys and values fill a context
LONGEST = 2048  # tokens of a past
TABLE_ROWS = 4096  # of a table that are looked up at once
LOOKED_UP = 4.0  # roundings that a value of a table may be off: a product of a code and a step is one


def check_modules(verifier: Verifier, artifact: Artifact, model: nn.Module) -> tuple[list[str], Counts]:
    """Return where a graph differs from the model's modules, and how many values were compared or not.

    Nothing of a graph whose integers PyTorch cannot be given: those that another exporter made of several
    weights, and weights that are stored in two forms.
    """
    stored = read_stored(verifier.bundle, artifact, model)
    is_import = bool(verifier.bundle.manifest.source.get("exporter"))
    if why := find_hindrance(model, stored.weights, is_import):
        log.warning("%s: its modules are not compared with PyTorch's one by one, as %s", artifact.id, why)
        return [], {"modules": 0}
    run = ModuleRun(verifier, artifact, model)
    with use_one_thread(), torch.no_grad(), store_weights(model, stored):
        for choose in (make_short_replay, make_past_replay):
            replay = choose(run.verifier, artifact, model)
            try:
                found = [] if replay is None else list(run.check(replay))
            except BackendError as error:
                found = [str(error)]
            if found:
                return found, run.counts
        return list(check_tables(run.load(artifact), model)), run.counts


def make_short_replay(verifier: Verifier, artifact: Artifact, model: nn.Module) -> Replay:
    """Return a replay of short padded texts and, where there is a cache, of one more token."""
    traits = TRAITS[verifier.bundle.manifest.task]
    if not traits.continues_texts or traits.reads_neighbours:  # whose rows are never padded
        return verifier.make_replay(artifact)
    texts = [Text(cut_tokens(verifier, length)) for length in SHORT]
    rows = [Row(number, (length - 1, length)) for number, length in enumerate(SHORT)]
    replay = replay_texts(verifier, artifact, texts, Case("short", artifact.graph, tuple(rows), ()))
    return replace(replay, read=(None, replay.read[1]))  # the shorter text alone, as float64 is slow


def make_past_replay(verifier: Verifier, artifact: Artifact, model: nn.Module) -> Replay | None:
    """Return a replay of some tokens after a full context, filled with the keys and values of a few.

    Return None for a model without a cache of its own, or with a window that sees too much.
    """
    if not isinstance(model, LanguageModel):
        return None
    context = min(verifier.bundle.manifest.max_length, LONGEST)
    least = max(min(PAST_TOKENS, context // 4), *(window or 0 for window in model.config.windows))
    heads = {model.config.cache_sizes[1], getattr(model.config, "num_attention_heads", 0)}
    tokens = range(least, min(PREFILL_CHUNK, (context - 1) // 2) + 1)  # each read in one run of the graph
    # As many tokens as heads would leave open which of two axes is which.
    past = next((n for n in tokens if not heads & {n, (context - 1) % n + 1}), None)
    if past is None:
        return None
    repeats = (context - 1) // past
    length = context - (repeats - 1) * past
    text = Text(cut_tokens(verifier, length), past=past, repeats=repeats)
    case = Case("full past", artifact.graph, (Row(0, (past, length)),), (), shares_past=True)
    replay = replay_texts(verifier, artifact, [text], case)
    read = np.arange(length)[None]
    steps = (Step("prefill", read[:, :past], (0,)), Step("tokens on a full past", read[:, past:], (0,)))
    return replace(replay, steps=steps)


def cut_tokens(verifier: Verifier, length: int) -> tuple[int, ...]:
    """Return so many tokens of real text."""
    known = max((text.tokens for text in verifier.expected.texts), key=len)
    return (known * (length // len(known) + 1))[:length]


def replay_texts(verifier: Verifier, artifact: Artifact, texts: Sequence[Text], case: Case) -> Replay:
    only = replace(verifier.expected, texts=tuple(texts), answers={})
    return replace(verifier, expected=only).replay(artifact, case)


class MisfitError(Exception):
    """A value whose size does not fit PyTorch's, or whose module runs more than once."""

    def __init__(self, border: Border) -> None:
        super().__init__(border.value)
        self.border = border


@dataclass
class Pairs:
    """The values of PyTorch and of a graph at one border, for its tokens in all texts."""

    own: list[Array] = field(default_factory=list)
    got: list[Array] = field(default_factory=list)
    positions: list[Integers] = field(default_factory=list)


class ModuleRun:
    """A graph, and PyTorch running on the graph's values."""

    def __init__(self, verifier: Verifier, artifact: Artifact, model: nn.Module) -> None:
        self.artifact = artifact
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.executors: dict[str, FloatExecutor] = {}  # of the bundle's files
        self.left_out: set[str] = set()  # values that are not compared with a module's
        # Experts read rows of any text, so that their mixture's result is compared, and their weights.
        self.routed = tuple(
            f"{path}.experts." for path, module in self.modules.items() if isinstance(module, Experts)
        )
        self.counts: Counts = {"modules": 0, "modules_left_out": 0}  # of values, over all replays
        self.programs: list[ModuleProgram] = []  # the graph, and one that it runs with
        self.verifier = replace(verifier, open_other=self.open_program)

    def open_program(self, artifact: Artifact, steps: Sequence[Step] | None = None) -> ModuleProgram:
        """Open a graph of the bundle, and remember it."""
        executor = self.load(artifact)
        results = find_module_results(executor.model, list(self.modules))
        known = {value: path for value, path in results.items() if value not in self.left_out}
        borders = find_borders(executor.graph, known, self.modules)
        borders = [border for border in borders if border.value not in self.left_out]
        borders = [border for border in borders if not border.path.startswith(self.routed)]
        self.programs.append(ModuleProgram(executor, artifact, borders, steps))
        return self.programs[-1]

    def load(self, artifact: Artifact) -> FloatExecutor:
        """Return the executor of a graph of the bundle, made once for all replays."""
        if artifact.file not in self.executors:
            graph = load_graph(self.verifier.bundle.path(artifact.file))
            self.executors[artifact.file] = FloatExecutor(graph)
        return self.executors[artifact.file]

    def check(self, replay: Replay) -> Iterator[str]:
        """Yield the modules that give other values, in the order of the graph."""
        modes: list[AbstractContextManager[Any]] = [ComputeInFloat64(), nullcontext()]
        if self.artifact.is_half:
            modes.append(RoundConstants(bool(self.verifier.bundle.manifest.source.get("exporter"))))
        self.left_out.clear()
        misfits: set[str] = set()  # of this graph, not of one that it runs with
        while True:
            self.programs.clear()
            give_back_mapped_pages()  # of the model
            replay.drive(self.open_program(self.artifact, replay.steps))
            try:
                exact, *near = [self.run_model(replay, mode) for mode in modes]
                break
            except MisfitError as misfit:
                self.left_out.add(misfit.border.value)
                misfits |= {misfit.border.value} & self.programs[0].names
        compared = {border.value for border in exact}
        own = {border.value for border in self.programs[0].borders} | misfits
        self.counts["modules"] += len(compared)
        self.counts["modules_left_out"] += len(own - compared)
        told: set[str] = set()
        for border in (*self.programs[0].borders, *(border for border in exact if not border.path)):
            if border not in exact or border.value in told:
                continue
            if fault := compare(exact[border], [pairs[border] for pairs in near]):
                told.add(border.value)
                words = f"{describe_node(border.node)} gives {border.value!r}{border.describe()}, {fault}"
                yield blame(border.node, words)

    def run_model(self, replay: Replay, mode: AbstractContextManager[Any]) -> dict[Border, Pairs]:
        """Run PyTorch over each text with the graph's values; return the values of both."""
        found: dict[Border, Pairs] = defaultdict(Pairs)
        give_back_mapped_pages()  # of the graph, whose values are kept; else both count at once
        for text, read in enumerate(replay.read):
            if read is None:
                continue
            hooks = Hooks(text, self.programs, found)
            with mode, hooks.on(self.modules):
                result = read(self.model, None)
            for name, own in self.list_results(result).items():
                hooks.hold_output(name, own)
        return dict(found)

    def list_results(self, result: Any) -> Mapping[str, Any]:
        """Return PyTorch's values of the graph's outputs (1, ...), by name, for a text that was read."""
        names = [spec.name for spec in self.artifact.outputs]
        if isinstance(result, list):  # what an encoder gives of a source
            return dict(zip(names, result, strict=True))
        if isinstance(result, Mapping):  # a part's of a model of pictures
            return result
        first, second = (result, {}) if isinstance(result, np.ndarray) else result
        if isinstance(first, np.ndarray):  # logits (N, V)
            return {"logits": first[-1:]}
        head = LinearHead.load(self.verifier.bundle)
        outputs = self.artifact.outputs
        return {spec.name: find_output(spec.role, first, second, head)[None] for spec in outputs}


class Hooks:
    """Hooks that give modules a graph's values of one text, and record the modules' own."""

    def __init__(self, text: int, programs: Sequence[ModuleProgram], found: dict[Border, Pairs]) -> None:
        self.text = text
        self.programs = programs
        self.found = found
        self.done: dict[Border, tuple[Kept, int]] = {}  # and how many tokens of it a module has computed
        # By a module's class: what it gave, and what the graph has of it.
        self.given: dict[type, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    @contextmanager
    def on(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch modules inside the context; raise MisfitError for one that should have run and did not."""
        for program in self.programs:
            for border in program.borders:
                if (kept := program.list_kept(border.value, self.text)) is not None:
                    self.done[border] = kept, 0
        handles = []
        for border in self.done:
            module = modules[border.path]
            if border.is_result:
                handles.append(module.register_forward_hook(partial(self.hold_result, border)))
            else:
                handles.append(module.register_forward_pre_hook(partial(self.hold_read, border)))
        known = {modules[border.path] for border in self.done if border.is_result}
        handles += [m.register_forward_hook(self.find_twin) for m in modules.values() if m not in known]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for border, (kept, done) in self.done.items():
            if border.is_scaled and kept.is_whole and done != len(kept.values):
                raise MisfitError(border)

    def hold_read(self, border: Border, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        return (self.hold(border, inputs[0]), *inputs[1:]) if inputs else None

    def hold_result(self, border: Border, module: nn.Module, inputs: Any, output: Any) -> Any:
        result = self.hold(border, output)
        if border.is_scaled and result is not output:
            self.given[type(module)].append((output, result))
        return result

    def find_twin(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return a graph's values of another module with the same result, as it may have merged both."""
        given = self.given.get(type(module), ()) if isinstance(output, Tensor) else ()
        return next((result for own, result in given if torch.equal(own, output)), output)

    def hold(self, border: Border, own: Any) -> Any:
        """Record PyTorch's value, and return the graph's where it has one for every token."""
        kept, begin = self.done[border]
        tokens = split_tokens(own, kept.values.shape[1:])
        end = begin + (0 if tokens is None else len(tokens))
        if kept.is_whole and (tokens is None or end > len(kept.values)):
            if border.is_scaled or tokens is not None:
                raise MisfitError(border)
            return own
        self.done[border] = kept, end
        if not kept.is_whole or tokens is None:
            self.note_some(border, kept, own, begin)
            return own
        values = kept.values[begin:end]
        positions = kept.positions[begin:end]
        self.note(border, tokens, values, positions)
        if border.is_scaled:
            values = values * find_factors(positions).reshape(-1, *(1,) * (values.ndim - 1))
        new = torch.from_numpy(np.ascontiguousarray(values)).to(own.dtype)
        return (new if own.shape[1] == len(new) else new.transpose(0, 1))[None]

    def hold_output(self, name: str, own: Any) -> None:
        """Record PyTorch's value of an output of the graph."""
        program = self.programs[0]
        kept = program.list_kept(name, self.text)
        if kept is not None and name in program.outputs:
            self.note_some(Border(name, "", program.outputs[name]), kept, torch.as_tensor(own), 0)

    def note_some(self, border: Border, kept: Kept, own: Any, begin: int) -> None:
        """Record values at some of the tokens from one on, or those of the last token, or of a whole text."""
        tokens = split_tokens(own, kept.values.shape[1:])
        if tokens is not None and kept.positions.max() >= 0:
            inside = (kept.positions >= begin) & (kept.positions < begin + len(tokens))
            positions = kept.positions[inside]
            self.note(border, tokens[torch.from_numpy(positions - begin)], kept.values[inside], positions)
            return
        shape = kept.values.shape[1:]
        if isinstance(own, Tensor) and own.ndim == len(shape) + 1 and own.shape[1:] == shape:
            self.note(border, own[-1:], kept.values[-1:], kept.positions[-1:])

    def note(self, border: Border, own: Tensor, got: Array, positions: Integers) -> None:
        pairs = self.found[border]
        pairs.own.append(own.detach().numpy().astype(np.float64))
        pairs.got.append(got)
        pairs.positions.append(positions)


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
    """Return in words how a graph's values differ from PyTorch's by more than rounding; "" if they agree."""
    want = np.concatenate(exact.own)
    got = np.concatenate(exact.got)
    if not np.isfinite(got).all():
        return "which is not finite"
    if not np.isfinite(want).all():
        return "where PyTorch's is not finite"
    errors = np.abs(got - want)
    rounded = [np.concatenate(pairs.own) for pairs in near]
    roundings = [np.abs(one - want) for one in rounded if np.isfinite(one).all()]
    factors = find_factors(np.concatenate(exact.positions))
    for group in [factors == factor for factor in np.unique(factors)]:
        error = errors[group]
        largest = np.abs(want[group]).max(initial=0.0)
        noise = max(ROUNDING * largest, *(one[group].max(initial=0.0) for one in roundings))
        mean = max(
            ROUNDING / 2 * measure_power(want[group]), *(measure_power(one[group]) for one in roundings)
        )
        unsure = 1 + FEW / max(1, error.size)
        most = error.max(initial=0.0)
        if not (most <= unsure * MAX_FACTOR * noise and measure_power(error) <= unsure * MEAN_FACTOR * mean):
            return f"off by {most:.3g} of {largest:.3g}, where fp32 rounds by {noise:.2g}"
    return ""


def measure_power(array: Array) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.square(array).mean())) if array.size else 0.0


def check_tables(executor: FloatExecutor, model: nn.Module) -> Iterator[str]:
    """Yield the lookups of words and segments whose rows differ from PyTorch's."""
    modules = dict(model.named_modules())
    executor.exchange = lambda name, array: array
    results = find_module_results(executor.model, list(modules))
    for node in executor.graph:
        path = results.get(str(node.outputs[0].name), "")
        module = modules.get(path)
        ids = node.inputs[1] if node.op_type in LOOKUPS and type(module) is nn.Embedding else None
        if ids is None or ids.dtype is None or not isinstance(module, nn.Embedding):
            continue
        wrong: list[int] = []
        for begin in range(0, module.num_embeddings, TABLE_ROWS):
            rows = np.arange(begin, min(begin + TABLE_ROWS, module.num_embeddings))
            values = {**executor.constants, ids: rows.astype(ids.dtype.numpy())}
            feeds = [None if value is None else values.get(value) for value in node.inputs]
            if feeds[0] is None:  # a part of a table, which is chosen before
                break
            want = module(torch.from_numpy(rows)).numpy()
            (got,) = executor.run_node(node, feeds)
            if not np.array_equal(got, want):
                near = np.abs(got - want) <= LOOKED_UP * ROUNDING * np.abs(want)  # NaN is not
                wrong += rows[~near.all(axis=1)].tolist()
        if wrong:
            yield blame(
                node,
                f"{describe_node(node)} gives {len(wrong)} of {module.num_embeddings} rows of PyTorch's"
                f" {path!r} otherwise, first that of {wrong[0]}",
            )
