"""What `verify` tells a user of a fault in one graph of a bundle, and whether it names it rightly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from planforge.exporter import VerificationReport, verify
from planforge.exporter.verification.structure import READING
from planforge.exporter.verification.verify import find_recorded_source
from planforge.runtime.bundle.bundle import Bundle

from .fault_table import Row
from .faults import Fault
from .graphs import damaged

MISSED = "missed"
NO_NAME = "no name"


@dataclass(frozen=True)
class Verdict:
    """What verify said of a graph with a fault.

    Attributes:
        graph: the family and the graph's id.
        fault: in words.
        precision: of the graph.
        caught_by: the first failure; MISSED where there is none.
        named: the module and operator that a user is told; NO_NAME where nothing is.
        is_right: whether that is where the fault is.
    """

    graph: str
    fault: str
    precision: str
    caught_by: str
    named: str
    is_right: bool

    @property
    def is_caught(self) -> bool:
        return self.caught_by != MISSED

    def describe_name(self) -> str:
        return self.named if self.is_right or self.named == NO_NAME else f"{self.named}: WRONG"


class PlantedBundle:
    """A copy of a sound bundle, in one graph of which is a fault for a while."""

    def __init__(self, family: str, folder: Path, copy: Path) -> None:
        self.family = family
        source = find_recorded_source(Bundle.open(folder))
        assert source is not None
        self.source = source.origin or source.folder
        self.folder = Path(shutil.copytree(folder, copy))
        self.manifest = Bundle.open(self.folder).manifest

    @contextmanager
    def damaged(self, artifact_id: str, fault: Fault) -> Iterator[None]:
        with damaged(self.folder, artifact_id, fault.plant):
            yield

    def verify(self, *artifact_ids: str) -> VerificationReport:
        return verify(self.folder, source=self.source, only=artifact_ids)

    def judge(self, artifact_id: str, fault: Fault) -> Verdict:
        """Return what verify says of a graph with a fault."""
        with self.damaged(artifact_id, fault):
            report = self.verify(artifact_id)
        return self.read_verdict(report, artifact_id, fault)

    def read_verdict(self, report: VerificationReport, artifact_id: str, fault: Fault) -> Verdict:
        failed = [c for c in report.comparisons if not c.passed and c.artifact == artifact_id]
        read = [failure for c in failed if c.backend == READING for failure in c.failures]
        mismatches = [mismatch for mismatch in report.mismatches if mismatch.artifact == artifact_id]
        if mismatches:  # the one node that a user is told; what was read does not make up for a wrong one
            (mismatch,) = mismatches
            named = f"{mismatch.op_type} of {mismatch.module or 'no module'}"
            is_right = mismatch.module == fault.module and mismatch.op_type in fault.op_types
        elif read:
            named = "the one that was read"
            is_right = is_named(read[0], fault)
        else:
            named = NO_NAME
            is_right = False
        first = f"{failed[0].case}: {failed[0].failures[0]}" if failed else MISSED
        precision = self.manifest.artifact(artifact_id).precision
        return Verdict(f"{self.family} {artifact_id}", fault.name, precision, first, named, is_right)


def is_named(failure: str, fault: Fault) -> bool:
    """Tell whether what was read of a graph names a fault's module, or its node where it is in none."""
    if fault.module:
        return f" of {fault.module} " in f"{failure} "
    return any(f"({op_type})" in failure for op_type in fault.op_types)


def sum_up(verdicts: list[Verdict]) -> list[Row]:
    """Return how many faults were planted, caught and named rightly, by precision and in all."""
    precisions = list(dict.fromkeys(verdict.precision for verdict in verdicts))
    groups = {p: [verdict for verdict in verdicts if verdict.precision == p] for p in precisions}
    imported = [verdict for verdict in verdicts if verdict.graph.startswith("imported")]
    groups |= {"of these imported": imported, "all": verdicts}
    return [
        (name, *(str(n) for n in (len(own), sum(v.is_caught for v in own), sum(v.is_right for v in own))))
        for name, own in groups.items()
    ]


@contextmanager
def keep_answers(cache: Path) -> Iterator[None]:
    """Let verify keep what PyTorch answers, as it does for users: each fault asks the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANFORGE_CACHE", str(cache))
        patch.setenv("PLANFORGE_ANSWERS_MB", "500")
        yield
