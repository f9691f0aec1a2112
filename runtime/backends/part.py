"""Runs one graph in batches that it takes, of a model that keeps no cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..bundle.manifest import Artifact
from ..memory_budget import MemoryBudget
from .backend import Array, GraphRunner, Program


class Part(GraphRunner):
    """An opened graph, whose inputs and outputs are named by their roles; B is the first axis of all.

    A GPU captures a UNet for each size that comes again, as the steps of a picture do.
    """

    def __init__(self, program: Program, artifact: Artifact, budget: MemoryBudget | None = None) -> None:
        super().__init__(program, artifact, budget)
        self.step = program.bind({}, fixed=True)

    def run(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of inputs (B, ...), both by role; more rows than fit run in several batches."""
        most = self.artifact.axis("batch").max
        count = len(next(iter(values.values())))
        batches = [
            self.run_batch({role: array[begin : begin + most] for role, array in values.items()})
            for begin in range(0, count, most)
        ]
        if len(batches) == 1:
            return batches[0]
        return {role: np.concatenate([batch[role] for batch in batches]) for role in batches[0]}

    def run_batch(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of a batch that fits."""
        given = {spec.name: values[spec.role] for spec in self.artifact.inputs}
        with self.turn():
            results = self.step(given)
        return {spec.role: results[spec.name] for spec in self.artifact.outputs}
