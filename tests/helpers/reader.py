"""What reading a graph says, and its modules beside PyTorch's, when a fault is in it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.levels import QUICK
from planforge.exporter.tasks.verifier import open_verifier
from planforge.exporter.verification.reading import add_modules, list_tensors_to_compare, make_row_reader
from planforge.exporter.verification.structure import compare_structure
from planforge.exporter.verification.verify import find_recorded_source, load_model_to_compare
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.bundle.bundle import Bundle

from .faults import Plant
from .graphs import damaged


def nothing(model: ir.Model) -> None:
    """Leave a graph as it is."""


class Reader:
    """A sound bundle, in whose copy faults are planted, and what its graphs are read against."""

    def __init__(
        self, folder: Path, copy: Path | None, rows: Callable[[Any, str], Any] | None = None
    ) -> None:
        self.copy = folder if copy is None else Path(shutil.copytree(folder, copy))
        self.bundle = Bundle.open(folder)
        source = find_recorded_source(self.bundle)
        assert source is not None
        self.model = load_model_to_compare(self.bundle, source)
        self.tensors = list_tensors_to_compare(self.bundle, self.model)
        texts = read_prompts(None, source.folder)
        self.verifier = open_verifier(self.bundle, self.model, texts, level=QUICK)
        self.rows = make_row_reader(self.verifier, self.model)
        if rows is not None:
            self.rows = functools.cache(functools.partial(rows, self.model))

    def read(self, artifact: str, plant: Plant = nothing) -> tuple[str, ...]:
        """What reading a graph of the copy says when a fault is in it."""
        return self.compare(artifact, plant).failures

    def compare(self, artifact: str, plant: Plant = nothing) -> Comparison:
        with damaged(self.copy, artifact, plant) as bundle:
            one = bundle.manifest.artifact(artifact)
            read = compare_structure(bundle, one, self.tensors, None, self.rows)
            return add_modules(read, replace(self.verifier, bundle=bundle), one, self.model)
