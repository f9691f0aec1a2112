"""Reports of verifications, made by hand and read back from an export; and what their page says."""

from __future__ import annotations

import dataclasses
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from planforge.exporter.reports.html import Subject
from planforge.exporter.verification.bisect import FirstMismatch
from planforge.exporter.verification.fp32_nodes import Fp32Node
from planforge.exporter.verification.report import VerificationReport
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.bundle.bundle import Bundle

SUBJECT = Subject("my-model", {"model": "gpt2, text-generation", "date": "2026-01-02 03:04 UTC"})
LIMITS = {"max_error": 0.1, "mean_kl": 0.001}
KEPT = (
    *(
        Fp32Node(f"norm_{i}", "LayerNormalization", f"h.{i}.ln_1", "sums squares", -5.0, 6.5)
        for i in range(9)
    ),
    *(Fp32Node(f"softmax_{i}", "Softmax", f"h.{i}.attn", "sums exponentials", 0.0, 1.0) for i in range(4)),
    Fp32Node("add_1", "Add", "h.1", "reaches 9.8e+04", -98000.0, 3.0, "reaches", 9.8e4),
    Fp32Node("add_2", "Add", "h.2", "reaches 1.1e+05", -110000.0, 3.0, "reaches", 1.1e5),
    Fp32Node(
        node="product",
        op_type="MatMul",
        module="h.2.mlp",
        reason="reaches 4e+04, so scaled by 2^-1",
        low=-9.0,
        high=40000.0,
        group="reaches, so scaled by 2^-1",
        reached=4e4,
    ),
)


def comparison(artifact: str = "decoder.ort.int8", case: str = "full context", **changes: Any) -> Comparison:
    metrics = {"max_error": 0.05, "mean_kl": 1e-4, "top1_agreement": 0.996, "finite": True, "rows": 40}
    healthy = Comparison(artifact=artifact, backend="ort-cpu", case=case, metrics=metrics, limits=LIMITS)
    return dataclasses.replace(healthy, **changes)


def failed_report(text: str = "h.1.attn") -> VerificationReport:
    """A report with everything that one can have; `text` stands wherever a bundle's own text does."""
    divergence = {
        **{"prompt": text, "common": text, "common_tokens": 2, "want": text, "got": " the"},
        **{"margin": 3.0, "allowed": 0.01},
    }
    comparisons = (
        comparison(text, errors=(0.01, 0.02, 0.04)),
        comparison(text, text, backend=text, metrics={f"{text}.max_error": 0.09}, limits={}),
        comparison(
            "decoder.ort.fp16",
            "greedy",
            metrics={"max_error": None, "mean_kl": 0.5, "top1_agreement": 0.5, "finite": False, "rows": 40},
            failures=("NaN or infinity in the results", text),
            errors=(0.01, math.nan, 0.3),
            divergence=divergence,
        ),
    )
    mismatch = FirstMismatch(
        artifact="decoder.ort.fp16",
        step="prefill",
        node=text,
        op_type=text,
        value=text,
        module=text,
        layer=1,
        dtype="float16",
        range=(-70000.0, math.inf),
        expected=(-2.5, 3.25),
        error=17.5,
        allowed=0.02,
        reference=text,
    )
    kept = (*KEPT, Fp32Node(text, text, text, text, -1.0, 2.0))
    precisions = {"decoder.ort.fp16": "fp16"}
    return VerificationReport(
        True, comparisons, (mismatch,), {"decoder.ort.fp16": kept}, precisions=precisions
    )


def passed_report() -> VerificationReport:
    return VerificationReport(True, (comparison(), comparison(case="real text")))


def demo_report(bundle: Path) -> VerificationReport:
    """What the export of a bundle found."""
    (path,) = (bundle / "checks").glob("parity-*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    comparisons = []
    for fields in found["comparisons"]:
        del fields["passed"]
        fields["errors"] = tuple(math.nan if e is None else e for e in fields.get("errors", ()))
        comparisons.append(Comparison(**{**fields, "failures": tuple(fields["failures"])}))
    kept = {name: tuple(Fp32Node(**node) for node in nodes) for name, nodes in found["fp32_nodes"].items()}
    precisions = {artifact.id: artifact.precision for artifact in Bundle.open(bundle).manifest.artifacts}
    return VerificationReport(
        found["with_pytorch"], tuple(comparisons), fp32_nodes=kept, precisions=precisions
    )


class Page(HTMLParser):
    """A page's tags with the names of their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, *(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
