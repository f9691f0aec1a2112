"""A bundle in which faults are planted."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.calibration.repeat import read_calibration
from planforge.exporter.execution.replay import Replay
from planforge.exporter.graphs import describe_in_fp32
from planforge.exporter.levels import FULL, Level
from planforge.exporter.limits import Gaps
from planforge.exporter.passes.weights import LazyMapping
from planforge.exporter.tasks.verifier import open_verifier
from planforge.exporter.tracing.modules import read_results
from planforge.exporter.verification.bisect import (
    FirstMismatch,
    Tolerances,
    find_first_mismatch,
    make_module_tolerances,
    make_node_tolerances,
)
from planforge.exporter.verification.precision_errors import adopt_stored_weights
from planforge.exporter.verification.reading import (
    add_modules,
    compute_scales_to_compare,
    list_tensors_to_compare,
    make_row_reader,
)
from planforge.exporter.verification.structure import compare_structure
from planforge.exporter.verification.verify import find_recorded_source
from planforge.models import load_model
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact

from .faults import Fault
from .graphs import damaged

SHORT = 200  # characters of each text to search with, where whole ones decide nothing


class Ground:
    """A healthy bundle, what PyTorch says of it, and what its nodes are held against."""

    def __init__(self, folder: Path, copy: Path, level: Level = FULL) -> None:
        self.bundle = Bundle.open(folder)
        self.copy = Path(shutil.copytree(folder, copy))
        source = find_recorded_source(self.bundle)
        assert source is not None
        self.model = load_model(source.folder)
        texts = read_prompts(None, source.folder)
        has_quantized_cache = any("cache_bits" in a.quantization for a in self.bundle.manifest.artifacts)
        if not has_quantized_cache:  # its scales are compared with those of 500 tokens or more
            texts = [text[:SHORT] for text in texts]
        self.verifier = open_verifier(self.bundle, self.model, texts, level=level)
        self.tensors = list_tensors_to_compare(self.bundle, self.model)
        self.scales = compute_scales_to_compare(self.verifier, self.model)
        self.rows = make_row_reader(self.verifier, self.model)
        artifacts = {artifact.id: artifact for artifact in self.bundle.manifest.artifacts}
        read = LazyMapping(artifacts, self.compare_structure)  # few graphs' weights are asked for
        calibration = read_calibration(self.bundle, self.model)
        self.calibration = adopt_stored_weights(calibration, self.bundle, read)
        self.gaps = functools.cache(self._gaps)
        self.limits = functools.cache(self._limits)
        self.sound_references = functools.cache(
            lambda name: self.make_references(self.bundle.manifest.artifact(name))
        )

    def read(self, artifact: Artifact, bundle: Bundle | None = None) -> Comparison:
        """What reading finds in a graph, of the sound bundle unless another is given."""
        bundle = bundle or self.bundle
        verifier = dataclasses.replace(self.verifier, bundle=bundle)
        return add_modules(self.compare_structure(artifact, bundle), verifier, artifact, self.model)

    def compare_structure(self, artifact: Artifact, bundle: Bundle | None = None) -> Comparison:
        """What reading finds, without a run of PyTorch's modules."""
        return compare_structure(bundle or self.bundle, artifact, self.tensors, self.scales, self.rows)

    def _gaps(self, precision: str) -> Gaps:
        """What rounding does to the model in PyTorch."""
        rounding = self.calibration.make_rounding(precision)
        return {} if rounding is None else self.verifier.measure_gaps(self.model, rounding)

    def _limits(self, precision: str) -> dict[str, float]:
        return self.verifier.choose_limits(precision, self.gaps(precision))

    def make_references(self, artifact: Artifact, replay: Replay | None = None) -> list[Tolerances]:
        """What a graph's nodes are held against, run as the runtime runs them now."""
        replay = replay or self.verifier.make_replay(artifact)
        full_id = f"{artifact.recipe_id}.fp32"
        own, full = (
            ir.load(self.bundle.path(self.bundle.manifest.artifact(name).file))
            for name in (artifact.id, full_id)
        )
        rounding = self.calibration.make_rounding(artifact.precision)
        return [
            make_node_tolerances(replay, artifact, full, describe_in_fp32(artifact), own),
            make_module_tolerances(replay, self.model, rounding, read_results(own)),
        ]

    @contextmanager
    def damaged(self, artifact_id: str, fault: Fault) -> Iterator[Bundle]:
        """The copy with a fault in one graph, for a while."""
        with damaged(self.copy, artifact_id, fault.plant) as bundle:
            yield bundle

    def examined(
        self, bundle: Bundle, artifact: Artifact, references: list[Tolerances] | None = None
    ) -> tuple[list[Comparison], FirstMismatch | None]:
        """The comparisons of a graph of a bundle like this one that fail, and the node at fault."""
        verifier = dataclasses.replace(self.verifier, bundle=bundle)
        comparisons = [
            self.read(artifact, bundle),
            *verifier.compare(artifact, self.limits(artifact.precision)),
        ]
        replay = verifier.make_replay(artifact)
        graph = ir.load(bundle.path(artifact.file))
        mismatch = find_first_mismatch(
            graph, artifact, replay, references or self.sound_references(artifact.id)
        )
        for comparison in comparisons:
            if mismatch is None and comparison.location is not None:
                location_replay = verifier.make_location_replay(artifact, comparison.location)
                own = self.make_references(artifact, location_replay)
                mismatch = find_first_mismatch(graph, artifact, location_replay, own)
        return [comparison for comparison in comparisons if not comparison.passed], mismatch
