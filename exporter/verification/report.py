"""The verdict of a verification, and the part that an export keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.apps.check.files import PREFIX, Arrays, find_golden, name_damage, write_golden
from ...runtime.apps.check.judge import Limits
from ...runtime.apps.check.outcome import Comparison
from ...runtime.apps.check.selftest import load_golden
from ...runtime.bundle.artifact import computes_in_half
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Manifest
from ..bundle.names import name_by_content
from ..bundle.writer import list_file_entries
from ..errors import VerificationError
from ..levels import LEVELS
from ..limits import Accepted
from ..tasks.answer_cache import KEPT
from .bisect import FirstMismatch
from .fp32_nodes import Fp32Node

PARITY = "checks/parity-"  # how the name of the kept report begins


@dataclass(frozen=True)
class VerificationReport:
    """The result of comparing a bundle's graphs with a reference.

    Attributes:
        with_pytorch: False when only golden data was available.
        comparisons: one per artifact, engine and case.
        mismatches: of graphs that failed, the first node that is at fault, where one was found.
        fp32_nodes: of graphs in fp16, by artifact: what stays in fp32 and why.
        reference: what a graph was compared with, where it is neither of the usual two.
        precisions: of the graphs, by artifact; an .onnx file has none here.
        unexplained: of graphs that failed and have no mismatch, by artifact: why.
        limited: graphs that failed only where PyTorch itself, rounded to their precision, is as far off.
        notes: what is to be known of the model, in words.
        accepted: what a user lets precisions lose, by precision and metric.
        level: how much was compared with PyTorch; empty where golden data was.
        left_out: what that level does without, in words.
        answers_kept: whether PyTorch's answers are those of an earlier run.
        plans: "not run" where the bundle has plans; empty where it has none.
    """

    with_pytorch: bool
    comparisons: tuple[Comparison, ...]
    mismatches: tuple[FirstMismatch, ...] = ()
    fp32_nodes: Mapping[str, tuple[Fp32Node, ...]] = field(default_factory=dict)
    reference: str = ""
    unexplained: Mapping[str, str] = field(default_factory=dict)
    limited: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    accepted: Mapping[str, Accepted] = field(default_factory=dict)
    level: str = ""
    left_out: tuple[str, ...] = ()
    answers_kept: bool = False
    plans: str = ""
    precisions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_error(cls, path: Path, error: Exception) -> VerificationReport:
        """Return the report of a verification that could not be done: failed, with the reason."""
        failed = Comparison.from_error(path.resolve().name, "nothing", "verifying it at all", error)
        return cls(False, (failed,), reference="nothing")

    @property
    def against(self) -> str:
        """Return in words the reference that graphs were compared with."""
        return self.reference or ("PyTorch" if self.with_pytorch else "golden data, without PyTorch")

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    def failed_artifacts(self, manifest: Manifest) -> list[Artifact]:
        """Return the graphs that failed, in the manifest's order."""
        failed = {comparison.artifact for comparison in self.comparisons if not comparison.passed}
        return [artifact for artifact in manifest.artifacts if artifact.id in failed]

    def describe_level(self) -> str:
        """Return how much was compared, in words; empty where golden data determined it."""
        if not self.level:
            return ""
        left_out = f", without {'; '.join(self.left_out)}" if self.left_out else ""
        kept = f" PyTorch's answers were {KEPT}." if self.answers_kept else ""
        return f"Verified at the level {self.level}: {LEVELS[self.level].meaning}{left_out}.{kept}"

    def describe_effort(self) -> dict[str, Any]:
        """Return how much was compared, as JSON and manifests tell it."""
        effort: dict[str, Any] = {"level": self.level, "left_out": list(self.left_out)}
        return effort | ({"answers": KEPT} if self.answers_kept else {})

    def list_locations(self) -> list[str]:
        """Return the known facts about each graph that failed."""
        found = [str(mismatch) for mismatch in self.mismatches]
        return found + [f"{artifact}: {why}" for artifact, why in self.unexplained.items()]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `planforge verify --json`."""
        fields: dict[str, Any] = {
            "passed": self.passed,
            "with_pytorch": self.with_pytorch,
            "against": self.against,
            "comparisons": [c.to_json() for c in self.comparisons],
            "mismatches": [c.to_json() for c in self.mismatches],
            "unexplained": dict(self.unexplained),
            "fp32_nodes": {name: [n.to_json() for n in nodes] for name, nodes in self.fp32_nodes.items()},
        }
        if self.notes:
            fields["notes"] = list(self.notes)
        if self.level:
            fields |= self.describe_effort()
        if self.plans:
            fields["plans"] = self.plans
        return fields

    def list_failures(self) -> list[str]:
        """Return a line for each comparison that failed."""
        return [
            f"{c.artifact} on {c.backend}, {c.case}: {'; '.join(c.failures)}"
            for c in self.comparisons
            if not c.passed
        ]

    def list_failed_alone(self) -> frozenset[str]:
        """Return the graphs that fail with single texts too, not only in padded batches."""
        return frozenset(c.artifact for c in self.comparisons if not c.passed and not c.is_padded)

    def collect_gates(self) -> dict[str, dict[str, Any]]:
        """Return for each artifact the limits, and the worst value measured in any case."""
        gates: dict[str, dict[str, Any]] = {}
        for comparison in self.comparisons:
            gate = gates.setdefault(comparison.artifact, {"passed": True, "limits": {}, "measured": {}})
            gate["passed"] = gate["passed"] and comparison.passed
            gate["limits"] |= comparison.limits  # a beam search has others than a step
            for name in comparison.limits:
                values = [gate["measured"].get(name, 0.0), comparison.metrics[name]]
                gate["measured"][name] = None if None in values else max(values)
            for name, flips in comparison.metrics.items():
                if name.endswith(".label_flips"):  # of the case that has most
                    rows = comparison.metrics[f"{name.removesuffix('label_flips')}rows"]
                    known = gate.setdefault("flips", {}).get(name.rpartition(".")[0], [0, 0])
                    gate["flips"][name.rpartition(".")[0]] = max(known, [flips, rows])
            if self.level:
                gate |= self.describe_effort()
            accepted = self.accepted.get(self.precisions.get(comparison.artifact, ""))
            if accepted:
                gate["accepted"] = dict(accepted)
        return gates

    def raise_if_failed(self, advice: str = "") -> None:
        """Raise a VerificationError that lists every failure, and ends with advice for users."""
        if self.passed:
            return
        failed = frozenset(c.artifact for c in self.comparisons if not c.passed)
        is_loss = failed <= self.limited
        what = "the error of a precision is too large" if is_loss else "the export does not compute the model"
        lines = [f"{what}:", *self.list_failures(), *self.list_locations()]
        bad = {self.precisions[artifact] for artifact in failed if artifact in self.precisions}
        good = sorted(set(self.precisions.values()) - bad)
        if bad and good and failed <= self.list_failed_alone():
            lines.append(
                f"{', '.join(good)} passed: {', '.join(sorted(bad))} can be left out by --precision"
                f"{'' if any(map(computes_in_half, good)) else ', with --target cpu'}"
            )
        if advice:
            lines.append(advice)
        raise VerificationError("\n  ".join(lines), failed)


def keep_checks(
    folder: Path,
    manifest: Manifest,
    report: VerificationReport,
    golden: Arrays | None,
    limits: Mapping[str, Limits],
) -> Manifest:
    """Write golden data, if any, and parity.json below `folder`; return the manifest with each graph's gate.

    Whether PyTorch's answers were kept from an earlier run is left out: they are the same.
    """
    report = dataclasses.replace(report, answers_kept=False)
    (folder / "checks").mkdir(exist_ok=True)
    if golden is not None:
        stage_golden(folder, golden, limits)
    stage_parity(folder, report.to_json())
    gates = report.collect_gates()
    artifacts = tuple(dataclasses.replace(a, gate=gates[a.id]) for a in manifest.artifacts)
    explanations = tuple(dataclasses.replace(a, gate=gates.get(a.id, a.gate)) for a in manifest.explanations)
    return dataclasses.replace(manifest, artifacts=artifacts, explanations=explanations)


def stage_golden(folder: Path, golden: Arrays, limits: Mapping[str, Limits]) -> None:
    """Write golden data below a bundle's folder."""
    path = folder / f"{PREFIX.rstrip('-')}.npz"
    write_golden(path, golden, limits)
    name_by_content(path)


def stage_parity(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write the fields of a report below a bundle's folder."""
    path = folder / f"{PARITY.rstrip('-')}.json"
    path.write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    name_by_content(path)


def prune_checks(bundle: Bundle, pruned: Manifest, staging: Path) -> Manifest:
    """Stage a bundle's checks without the graphs that a pruned manifest lacks; return the manifest of both.

    PyTorch's answers are those of all graphs alike, so they stay; limits go with their precision, and
    comparisons with their graph.

    Raises:
        BundleError: golden data or the report is damaged, or of another version.
    """
    (staging / "checks").mkdir()
    rewritten = []
    golden = find_golden(bundle)
    if golden is not None:
        arrays, limits = load_golden(bundle)
        precisions = {artifact.precision for artifact in pruned.artifacts}
        needed = {precision: own for precision, own in limits.items() if precision in precisions}
        if needed != limits:
            rewritten.append(golden.relative_to(bundle.folder).as_posix())
            stage_golden(staging, arrays, needed)
    kept = {artifact.id for artifact in (*pruned.artifacts, *pruned.explanations)}
    gone = {a.id for a in (*bundle.manifest.artifacts, *bundle.manifest.explanations)} - kept
    for name in [name for name in bundle.manifest.files if gone and name.startswith(PARITY)]:
        with name_damage(bundle):
            fields = prune_fields(json.loads(bundle.path(name).read_text(encoding="utf-8")), gone)
        rewritten.append(name)
        stage_parity(staging, fields)
    files = {name: entry for name, entry in pruned.files.items() if name not in rewritten}
    return dataclasses.replace(pruned, files={**files, **list_file_entries(staging)})


def prune_fields(fields: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    """Return a report's fields without what they say of graphs that are gone."""
    pruned: dict[str, Any] = {}
    for name, value in fields.items():
        pruned[name] = value
        if isinstance(value, list):
            pruned[name] = [e for e in value if not isinstance(e, dict) or e.get("artifact") not in gone]
        elif isinstance(value, dict):
            pruned[name] = {key: part for key, part in value.items() if key not in gone}
    return pruned
