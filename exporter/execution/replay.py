"""Runs a case through a graph node by node, to measure ranges and to search for a fault.

B batch, T tokens of a step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...runtime.apps.check.case import Case, CaseSet, Row, Text
from ...runtime.backends.backend import (
    Array,
    ArrayBuffer,
    Arrays,
    BoundGraph,
    Buffer,
    Buffers,
    Program,
    Shape,
)
from ...runtime.bundle.artifact import has_role
from ...runtime.bundle.manifest import Artifact, TensorSpec
from .node_executor import ExecutedProgram, NodeExecutor

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

Integers = npt.NDArray[np.int64]
Key = tuple[int, str]  # a step of a replay, and a value's name
PADDING = -1
COMPARED = 256  # tokens of a row; of a longer one only the last step is compared
# Runs PyTorch over a text, with keys and values rounded as a precision rounds them, or as they are.
Reading: TypeAlias = Callable[[Any, Any], object]
Choose: TypeAlias = "Callable[[int, Array], Array | None]"  # what to keep of a step's result


@dataclass(frozen=True)
class Step:
    """One run of the graph in a replay."""

    name: str  # "prefill", "decode", ...
    # (B, T) the position of each token in its row's text; `PADDING` for padding and tokens not compared.
    # Without any, (0, 0), the inputs are not texts, and all results are compared.
    positions: Integers
    rows: tuple[int, ...] | None = None  # of the texts, where not all of them run
    reads_fields: bool = False  # whether a row is a field, at position 0, and is compared as a whole

    @property
    def is_compared(self) -> bool:
        """Return whether any of its tokens is compared."""
        return not self.positions.size or bool((self.positions != PADDING).any())


@dataclass(frozen=True)
class Replay:
    """Texts of unequal length as a padded batch and, where there is a cache, a step on top of a past."""

    drive: Callable[[Program], None]  # the runtime's own code, running a program
    steps: tuple[Step, ...]  # the runs of the graph that `drive` makes, in their order
    # Runs PyTorch over each row's text alone; None for a row that is not compared.
    read: tuple[Reading | None, ...]
    states: frozenset[str] = frozenset()  # results that later steps read, of rows whose token is padding too

    def collect_values(
        self, model: ir.Model, artifact: Artifact, choose: Choose | None = None
    ) -> dict[Key, Array]:
        """Return every result of every node in every step that is compared, at the tokens.

        `choose` returns what else to keep of a step's result, or None to keep nothing of it.
        """
        found: dict[Key, Array] = {}

        def keep(node: ir.Node, name: str, array: Array) -> None:
            step = program.runs - 1
            if self.steps[step].is_compared:
                chosen = self.select_compared(step, name, array) if choose is None else choose(step, array)
                if chosen is not None:
                    found[step, name] = chosen

        program = ExecutedProgram(NodeExecutor(model, keep), artifact)
        self.drive(program)
        return found

    def collect_module_results(self, model: nn.Module, rounding: object = None) -> list[dict[str, Array]]:
        """Return the result (T, ...) of each of the PyTorch model's modules by its path, for each text.

        Those of a module that reads a text by one token at a time are joined. Keys and values are rounded
        here; whoever calls applies the rest of the rounding to the model.
        """
        from torch import Tensor
        from torch.nn.modules.module import register_module_forward_hook

        paths = {module: path for path, module in model.named_modules()}
        found: list[dict[str, Array]] = []
        reads_fields = any(step.reads_fields for step in self.steps)

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if module not in paths or not isinstance(output, Tensor) or len(output) != 1:
                return
            path = paths[module]
            array = output[0].detach().numpy().copy()
            before = found[-1].get(path)
            is_next = before is not None and array.ndim > 1 and array.shape == (1, *before.shape[1:])
            if before is not None and is_next and not reads_fields:
                array = np.concatenate([before, array])
            found[-1][path] = array

        hook = register_module_forward_hook(keep)
        try:
            for run in self.read:
                found.append({})
                if run is not None:
                    run(model, rounding)
        finally:
            hook.remove()
        return found

    def gather_results(self, step: int, results: Sequence[Mapping[str, Array]], path: str) -> Array | None:
        """Return a module's results at the tokens of a step, one below the other; None if a text has none."""
        rows = []
        own = self.steps[step].rows
        texts = results if own is None else [results[row] for row in own]
        for positions, found in zip(self.steps[step].positions, texts, strict=True):
            wanted = positions[positions != PADDING]
            if not wanted.size:
                continue
            array = found.get(path)
            if array is not None and self.steps[step].reads_fields:
                rows.append(array[None])
                continue
            if array is None or array.ndim < 2 or len(array) <= wanted.max():
                return None
            rows.append(array[wanted])
        # Of texts with sources of unequal length some results have other shapes.
        return np.concatenate(rows) if len({row.shape[1:] for row in rows}) == 1 else None

    def select_tokens(self, step: int, array: Array) -> Array | None:
        """Return a result (B, T, ...) or (B, H, T, ...) at the same tokens; None if it has another shape."""
        positions = self.steps[step].positions
        if self.steps[step].reads_fields:
            is_row = bool(array.ndim) and len(array) == len(positions)
            return array[positions[:, 0] != PADDING] if is_row else None
        B, T = positions.shape
        if array.ndim == 4 and (array.shape[0], array.shape[2]) == (B, T):
            array = array.swapaxes(1, 2)  # (B, T, H, ...)
        return array[positions != PADDING] if array.shape[:2] == (B, T) else None

    def select_compared(self, step: int, name: str, array: Array) -> Array:
        """Return what is compared of a result: without padding, but whole where later steps read it."""
        return array if name in self.states else self.remove_padding(step, array)

    def remove_padding(self, step: int, array: Array) -> Array:
        """Return a result at the tokens alone: results for padding are not read, and rounding changes them.

        Of one with another shape the rows are kept of which any token is compared.
        """
        tokens = self.select_tokens(step, array)
        if tokens is not None:
            return tokens
        compared = (self.steps[step].positions != PADDING).any(axis=1)
        return array[compared] if array.ndim and len(array) == len(compared) else array


def make_replay(
    artifact: Artifact,
    case_set: CaseSet,
    case: Case,
    drive: Callable[[Program, CaseSet, Case], None],
    read: Callable[[Row, Any, Any], object],
    row: int | None = None,
) -> Replay:
    """Return the replay of a case, or of one of its rows within the batch, whose padding matters to it.

    A run of the graph is known by the tokens that it reads, so the case is run once where nothing computes:
    each token says there which row's it is, and at which position. Of a long row the last step is compared
    alone. PyTorch reads what stands behind a repeated past by itself.

    Args:
        artifact: the graph.
        case_set: what the case reads.
        case: what is run.
        drive: runs a case on a program.
        read: runs PyTorch over what a row reads; of a rounding only keys and values are rounded there.
        row: the one that is compared; None for all.
    """
    if not has_role(artifact.inputs, "ids"):
        return make_field_replay(artifact, case_set, case, drive, read, row)
    coded, coded_case, length = code_tokens(case_set, case)
    recorder = RecordingProgram(artifact)
    drive(recorder, coded, coded_case)
    begins = [find_compared(case_set, each) for each in case.rows]
    if row is not None:
        begins = [begin if number == row else length for number, begin in enumerate(begins)]
    behind = [find_repeated(case_set.texts[each.text]) for each in case.rows]
    steps = [make_step(ids, case, length, begins, behind) for ids in recorder.runs]
    readings = [
        partial(read, each) if begin < length else None for begin, each in zip(begins, case.rows, strict=True)
    ]
    states = frozenset(spec.name for spec in artifact.outputs if spec.role.startswith("next_state."))
    return Replay(lambda program: drive(program, case_set, case), tuple(steps), tuple(readings), states)


def make_field_replay(
    artifact: Artifact,
    case_set: CaseSet,
    case: Case,
    drive: Callable[[Program, CaseSet, Case], None],
    read: Callable[[Row, Any, Any], object],
    row: int | None,
) -> Replay:
    """Return the replay of a case whose graph reads fields, such as latents, and no tokens.

    Of several steps the last is compared, as PyTorch reads one for each row.
    """
    last = replace(case, rows=tuple(replace(each, ends=each.ends[-1:]) for each in case.rows))
    is_compared = [row is None or number == row for number in range(len(last.rows))]
    positions = np.where(is_compared, 0, PADDING)[:, None]
    step = Step(f"run of {len(last.rows)} rows", positions, reads_fields=True)
    readings = [
        partial(read, each) if compared else None
        for each, compared in zip(last.rows, is_compared, strict=True)
    ]
    return Replay(lambda program: drive(program, case_set, last), (step,), tuple(readings))


def code_tokens(case_set: CaseSet, case: Case) -> tuple[CaseSet, Case, int]:
    """Return the set with a text per row whose tokens encode row and position, and the longest length."""
    length = max(len(text.tokens) for text in case_set.texts)
    texts = [
        replace(text, tokens=tuple(-1 - number * length - place for place in range(len(text.tokens))))
        for number, text in enumerate(case_set.texts[row.text] for row in case.rows)
    ]
    rows = tuple(replace(row, text=len(case_set.texts) + i) for i, row in enumerate(case.rows))
    coded = replace(case_set, texts=(*case_set.texts, *texts), answers={})
    return coded, replace(case, rows=rows), length


def find_compared(case_set: CaseSet, row: Row) -> int:
    """Return the first position of a row that is compared."""
    behind = find_repeated(case_set.texts[row.text])
    if row.ends[-1] - behind <= COMPARED:
        return behind
    return row.ends[-2] if len(row.ends) > 1 else row.ends[-1] - COMPARED


def find_repeated(text: Text) -> int:
    """Return how many of a text's tokens occur more than once."""
    return text.past if text.repeats > 1 else 0


def make_step(ids: Integers, case: Case, length: int, begins: Sequence[int], behind: Sequence[int]) -> Step:
    """Return a run of the graph, by the coded tokens (B, T) that it read."""
    codes = -1 - ids
    is_token = ids < 0
    owners = np.where(is_token, codes // length, 0)
    places = np.where(is_token, codes % length, PADDING)
    is_compared = is_token & (places >= np.array(begins)[owners])
    positions = np.where(is_compared, places - np.array(behind)[owners], PADDING)
    rows = tuple(range(len(case.rows)))
    if len(ids) != len(rows):
        rows = tuple(owners.max(axis=1, initial=0).tolist())
    furthest = np.unravel_index(places.argmax(), places.shape)
    ends = case.rows[owners[furthest]].ends
    number = sum(end <= places[furthest] for end in ends)
    name = "prefill" if number == 0 else "decode" if ends[number] - ends[number - 1] == 1 else "append"
    when = f", step {number}," if number > 1 else ""
    return Step(f"{'run' if case.runner == 'once' else name}{when} of {len(rows)} rows", positions, rows)


class RecordingProgram:
    """A program that computes nothing, and keeps the tokens that each run reads."""

    captures_steps = False

    def __init__(self, artifact: Artifact) -> None:
        self.specs = {spec.name: spec for spec in (*artifact.inputs, *artifact.outputs)}
        self.outputs = [spec.name for spec in artifact.outputs]
        self.ids = next(spec.name for spec in artifact.inputs if spec.role == "ids")
        self.runs: list[Integers] = []

    def allocate(self, name: str, shape: Shape) -> Buffer:
        return ArrayBuffer(np.zeros(shape, self.specs[name].dtype))

    def free_memory(self) -> int | None:
        return None

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        self.runs.append(np.array(inputs[self.ids], np.int64))
        sizes: dict[str, int] = {}
        shapes = {name: buffer.shape for name, buffer in buffers.items()}
        shapes |= {name: array.shape for name, array in inputs.items()}
        for name, shape in shapes.items():
            axes = zip(self.specs[name].axis_names(), shape, strict=True)
            sizes |= {str(axis): size for axis, size in axes}

        def make_result(spec: TensorSpec) -> Array:
            shape = [axis if isinstance(axis, int) else sizes[axis] for axis in spec.axis_names()]
            return np.zeros(shape, spec.dtype)

        names = self.outputs if outputs is None else outputs
        return {name: make_result(self.specs[name]) for name in names if name not in buffers}

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None, fixed: bool = False) -> BoundGraph:
        return partial(self.run, buffers=buffers, outputs=outputs)

    def close(self) -> None:
        pass


def cut_case(case: Case, step: int) -> Case:
    """Return a case up to one of its steps; of single steps behind a past, all but the last are the past."""
    rows = [replace(row, ends=row.ends[: step + 1]) for row in case.rows]
    widths = {b - a for row in case.rows for a, b in zip(row.ends, row.ends[1:], strict=False)}
    if case.shares_past and widths == {1}:
        rows = [replace(row, ends=row.ends[-2:]) for row in rows]
    return replace(case, rows=tuple(rows))


def count_positions(valid: npt.NDArray[np.bool_]) -> Integers:
    """Return the positions (B, T) of rows that begin with their first valid token."""
    return np.where(valid, valid.cumsum(axis=1) - 1, PADDING)
