"""Drives a little real text through a graph node by node, to measure ranges and to search for a fault.

B batch, T tokens of a step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...runtime.backends.backend import Array, Program
from ...runtime.bundle.manifest import Artifact
from .node_executor import ExecutedProgram

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

    from ..reference.rounding import Rounding

Integers = npt.NDArray[np.int64]
Key = tuple[int, str]  # a step of a trial, and a value's name
PADDING = -1
# Runs PyTorch over a text, with keys and values rounded as a precision rounds them, or as they are.
Reading: TypeAlias = "Callable[[Any, Rounding | None], object]"
Choose: TypeAlias = "Callable[[int, Array], Array | None]"  # what to keep of a step's result


@dataclass(frozen=True)
class Step:
    """One run of the graph."""

    name: str  # "prefill", "decode", ...
    # (B, T) which token of its row's text stands there; `PADDING` where none does that is compared.
    # Without any, (0, 0), what runs is no text, and all is compared.
    positions: Integers
    rows: tuple[int, ...] | None = None  # of the texts, where not all of them run

    @property
    def is_compared(self) -> bool:
        """Whether any of its tokens is."""
        return not self.positions.size or bool((self.positions != PADDING).any())


@dataclass(frozen=True)
class Trial:
    """Unequal texts as a padded batch, and where there is a cache a step on top of a past."""

    drive: Callable[[Program], None]  # the runtime's own code, running a program
    steps: tuple[Step, ...]  # the runs of the graph that `drive` makes, in their order
    # Runs PyTorch over each row's text alone; None for a row that is not compared.
    read: tuple[Reading | None, ...]

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
                chosen = (choose or self.remove_padding)(step, array)
                if chosen is not None:
                    found[step, name] = chosen

        program = ExecutedProgram(model, artifact, keep)
        self.drive(program)
        return found

    def collect_module_results(
        self, model: nn.Module, rounding: Rounding | None = None
    ) -> list[dict[str, Array]]:
        """Return what each module of PyTorch's model gives, (T, ...) by its path, for each text.

        Keys and values are rounded here; whoever calls applies the rest of the rounding to the model.
        """
        from torch import Tensor
        from torch.nn.modules.module import register_module_forward_hook

        paths = {module: path for path, module in model.named_modules()}
        found: list[dict[str, Array]] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if module in paths and isinstance(output, Tensor) and len(output) == 1:
                found[-1][paths[module]] = output[0].detach().numpy().copy()

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
            if array is None or array.ndim < 2 or len(array) <= wanted.max():
                return None
            rows.append(array[wanted])
        return np.concatenate(rows) if rows else None

    def select_tokens(self, step: int, array: Array) -> Array | None:
        """Return a result (B, T, ...) or (B, H, T, ...) at the same tokens; None if it has another shape."""
        positions = self.steps[step].positions
        B, T = positions.shape
        if array.ndim == 4 and (array.shape[0], array.shape[2]) == (B, T):
            array = array.swapaxes(1, 2)  # (B, T, H, ...)
        return array[positions != PADDING] if array.shape[:2] == (B, T) else None

    def remove_padding(self, step: int, array: Array) -> Array:
        """Return a result at the tokens: nobody reads what a graph makes of padding, and rounding changes it.

        Of one with another shape the rows are kept of which any token is compared.
        """
        tokens = self.select_tokens(step, array)
        if tokens is not None:
            return tokens
        compared = (self.steps[step].positions != PADDING).any(axis=1)
        return array[compared] if array.ndim and len(array) == len(compared) else array


def count_positions(valid: npt.NDArray[np.bool_]) -> Integers:
    """Return the positions (B, T) of rows that begin with their first valid token."""
    return np.where(valid, valid.cumsum(axis=1) - 1, PADDING)
