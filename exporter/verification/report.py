"""The verdict of a verification, and the golden data that later ones need no PyTorch for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import VerificationError
from .gate import Comparison
from .parity import Expectation, Sample

GOLDEN_STEPS = 3  # logits kept per sample: a row of GPT-2's has 200 KB


@dataclass(frozen=True)
class VerificationReport:
    """What was compared with what.

    Attributes:
        with_pytorch: False when only golden data was at hand.
        comparisons: one per artifact, engine and case.
    """

    with_pytorch: bool
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """The fields of `planforge verify --json`."""
        return {
            "passed": self.passed,
            "with_pytorch": self.with_pytorch,
            "comparisons": [c.to_json() for c in self.comparisons],
        }

    def gates(self) -> dict[str, dict[str, Any]]:
        """For each artifact: the limits, and the worst value that any case measured."""
        gates: dict[str, dict[str, Any]] = {}
        for comparison in self.comparisons:
            gate = gates.setdefault(
                comparison.artifact,
                {"passed": True, "limits": dict(comparison.limits), "measured": {}},
            )
            gate["passed"] = gate["passed"] and comparison.passed
            for name in comparison.limits:
                values = [gate["measured"].get(name, 0.0), comparison.metrics[name]]
                gate["measured"][name] = None if None in values else max(values)
        return gates

    def raise_if_failed(self) -> None:
        """Raises a VerificationError that lists every failure."""
        if not self.passed:
            lines = [
                f"  {c.artifact} on {c.backend}, {c.case}: {'; '.join(c.failures)}"
                for c in self.comparisons
                if not c.passed
            ]
            raise VerificationError("\n".join(["the export does not compute the model:", *lines]))


def write_golden(path: Path, expected: Expectation, limits: Mapping[str, Mapping[str, float]]) -> None:
    """Saves samples, tokens, logits and limits as a plain .npz."""
    arrays: dict[str, Any] = {
        "limits": np.array(json.dumps(limits)),
        "context.tokens": np.array(expected.context),
        "context.logits": expected.context_logits[-GOLDEN_STEPS:],
    }
    for i, sample in enumerate(expected.samples):
        thin = sample.thinned(GOLDEN_STEPS)
        arrays |= {
            f"sample.{i}.prompt": np.array(thin.prompt),
            f"sample.{i}.continuation": np.array(thin.continuation),
            f"sample.{i}.margins": np.array(thin.margins),
            f"sample.{i}.steps": np.array(thin.steps),
            f"sample.{i}.logits": thin.logits,
        }
    np.savez(path, **arrays)


def read_golden(path: Path) -> tuple[Expectation, dict[str, dict[str, float]]]:
    """What `write_golden` saved."""
    with np.load(path, allow_pickle=False) as file:
        count = sum(name.endswith(".prompt") for name in file.files)

        def integers(name: str) -> tuple[int, ...]:
            return tuple(int(number) for number in file[name])

        samples = tuple(
            Sample(
                prompt=integers(f"sample.{i}.prompt"),
                continuation=integers(f"sample.{i}.continuation"),
                margins=tuple(float(margin) for margin in file[f"sample.{i}.margins"]),
                steps=integers(f"sample.{i}.steps"),
                logits=file[f"sample.{i}.logits"],
            )
            for i in range(count)
        )
        expected = Expectation(samples, integers("context.tokens"), file["context.logits"])
        return expected, json.loads(str(file["limits"]))
