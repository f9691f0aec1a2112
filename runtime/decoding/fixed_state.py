"""States of fixed size, which each step of a recurrent decoder replaces: the encoder gives the first ones.

B rows, K of them (beams) for each source, T tokens of this step, H width of a state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..backends.backend import Array, BoundGraph
from .cache_shapes import find_cache_shape
from .state import LOGITS, DecoderState


class FixedState(DecoderState):
    """States (B, 1, H). Each step reads one of two sets of buffers, and writes the other one.

    The graph reads one token of each row, so that several are as many steps. Rows whose token is padding keep
    their states.
    """

    def allocate(self, batch: int) -> None:
        self.reads = {spec.name: spec for spec in self.artifact.inputs if spec.role.startswith("state.")}
        self.writes = {
            name: self.artifact.output(f"next_{spec.role}").name for name, spec in self.reads.items()
        }
        self.names = [self.artifact.input(role).name for role in ("ids", "mask", "logit_rows")]
        self.ones = np.ones((batch, 1), np.int64)
        shapes = {name: find_cache_shape(spec, batch, 1) for name, spec in self.reads.items()}
        self.past, self.next = (
            {name: self.program.allocate(name, shape) for name, shape in shapes.items()} for _ in range(2)
        )
        self.began = False
        given = {name: buffer for name, buffer in self.context.buffers.items() if name in self.reads}
        # One row of each source begins where the encoder's states lie; several take a copy at the first step.
        # They are read there and never written: TensorRT's buffers are each one program's to write.
        self.reads_given = all(buffer.shape == shapes[name] for name, buffer in given.items())
        # By what is returned, and by which of the two sets is read.
        self.steps: dict[tuple[tuple[str, ...], bool], BoundGraph] = {}
        self.is_second = False

    def check_room(self, width: int) -> None:
        """Do nothing: a state has room for any number of tokens."""

    def step(
        self, ids: Array, valid: Array | None, logit_rows: Array, outputs: Sequence[str] = LOGITS
    ) -> dict[str, Array]:
        T = ids.shape[1]
        if T == 1:
            mask = self.ones if valid is None else valid.astype(np.int64)
            return self.step_token(ids, mask, logit_rows, outputs)
        mask = self.ones.repeat(T, axis=1) if valid is None else valid.astype(np.int64)
        results: list[dict[str, Array]] = []
        logits: dict[int, Array] = {}  # of the wanted rows
        for place in range(T):
            wanted = [int(row) for row in logit_rows if row % T == place]
            rows = np.array([row // T for row in wanted] or [0], np.int64)  # a graph gives one at least
            column = slice(place, place + 1)
            results.append(self.step_token(ids[:, column], mask[:, column], rows, outputs))
            if wanted and "logits" in outputs:
                logits |= zip(wanted, results[-1]["logits"], strict=True)
        # What is not logits has T as its third axis, as the attention over a source has.
        found = {
            name: np.concatenate([one[name] for one in results], axis=2)
            for name in outputs
            if name != "logits"
        }
        return {**found, "logits": np.stack([logits[int(row)] for row in logit_rows])} if logits else found

    def step_token(
        self, ids: Array, mask: Array, logit_rows: Array, outputs: Sequence[str]
    ) -> dict[str, Array]:
        """Run the graph over one token (B, 1) of each row, where its mask is 1."""
        ids_name, mask_name, rows_name = self.names
        inputs = {ids_name: ids, mask_name: mask, rows_name: logit_rows, **self.context.inputs}
        key = (tuple(outputs), self.is_second)
        if step := self.steps.get(key) if self.began else None:
            results = step(inputs)
        else:
            results = self.run_new(key, inputs, outputs, len(ids))
        self.past, self.next = self.next, self.past
        self.is_second = not self.is_second
        return results

    def run_new(
        self,
        key: tuple[tuple[str, ...], bool],
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        rows: int,
    ) -> dict[str, Array]:
        """Run the first step, which reads the encoder's states, or bind the graph for later ones too."""
        written = {self.writes[name]: buffer for name, buffer in self.next.items()}
        if self.began:
            buffers = {**self.context.buffers, **self.past, **written}
            self.steps[key] = self.program.bind(buffers, outputs, fixed=True)
            return self.steps[key](inputs)
        self.began = True
        if self.reads_given:
            return self.program.run(inputs, {**self.past, **self.context.buffers, **written}, outputs)
        buffers = {name: b for name, b in self.context.buffers.items() if name not in self.reads}
        return self.program.run({**inputs, **self.find_first(rows)}, {**buffers, **written}, outputs)

    def find_first(self, rows: int) -> dict[str, Array]:
        """Return the states that the first step reads: those of each row's source, zeros without any."""
        found = {}
        for name, buffer in self.past.items():
            given = self.context.buffers.get(name)
            first = buffer.numpy() if given is None else given.numpy()
            found[name] = first.repeat(rows // len(first), axis=0)
        return found

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        for buffer in self.past.values() if copies else ():
            rows, _, size = buffer.shape
            slots = buffer.view((rows, 1, 1, size))
            for source, target in copies:
                slots.copy_rows(source, target, 1)
