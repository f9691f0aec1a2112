"""What verification says of a sound checkpoint, in every precision that it can have."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planforge.exporter import VerificationReport, export, verify
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.exporter.errors import ExportError, VerificationError
from planforge.exporter.graphs import plan_artifacts
from planforge.exporter.precisions import PRECISIONS
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from .models import FAMILIES, write_control

PASSED = "passed"
LOSS = "loss"  # refused, as PyTorch loses about as much by this precision, and the message says so
FALSE_ALARM = "false alarm"
NO_BLOCKS = "quantizes weights in blocks of"  # widths that int8 and int4 cannot have
NOT_FINITE = "the PyTorch model itself is not finite"
TARGETS = ["cpu", "portable"]


def judge_control(number: int, work: Path) -> dict[str, Any]:
    """Export and verify the checkpoint of a number in a folder; return what it is and all verdicts."""
    began = time.process_time()
    checkpoint = work / f"control-{number}"
    control = write_control(number, checkpoint)
    precisions = list_precisions(checkpoint)
    bundle = work / f"bundle-{number}"
    try:
        export(checkpoint, bundle, precision=precisions, target=TARGETS, verify=False)
    except ExportError as error:
        if NO_BLOCKS not in str(error):
            raise
        precisions = [precision for precision in precisions if PRECISIONS[precision].weight_bits is None]
        export(checkpoint, bundle, precision=precisions, target=TARGETS, verify=False)
    try:
        report = verify(bundle)
        verdicts = {precision: judge_precision(report, precision) for precision in precisions}
        notes = list(report.notes)
    except VerificationError:  # of one precision, before any graph runs
        verdicts = {precision: judge_alone(bundle, precision) for precision in precisions}
        notes = []
    record = {**asdict(control), "verdicts": verdicts, "cpu_seconds": round(time.process_time() - began, 1)}
    return record | ({"notes": notes} if notes else {})


def list_precisions(folder: Path) -> list[str]:
    """Return the precisions that a checkpoint can be exported in."""
    checkpoint = Checkpoint(Source("folder", str(folder), folder))
    possible = ["fp32"]
    for precision in PRECISIONS:
        try:
            plan_artifacts(checkpoint, TARGETS, ["fp32", precision])
        except InputError:
            continue
        possible.append(precision)
    return list(dict.fromkeys(possible))


def judge_precision(report: VerificationReport, precision: str) -> dict[str, Any]:
    """Return the verdict about the graphs in a precision, with what failed and what it was told to be."""
    wrong = [comparison for comparison in report.comparisons if not comparison.passed]
    failed = [c for c in wrong if report.precisions.get(c.artifact) == precision]
    others = [c for c in wrong if c.artifact not in report.precisions]
    artifacts = {comparison.artifact for comparison in failed}
    if not failed and not others:
        return {"verdict": PASSED}
    failures = [f"{c.artifact}, {c.case}: {failure}" for c in (*failed, *others) for failure in c.failures]
    is_named = (
        not others and artifacts <= report.limited and all("PyTorch itself" in each for each in failures)
    )
    found = [str(mismatch) for mismatch in report.mismatches if mismatch.artifact in artifacts]
    return {"verdict": LOSS if is_named else FALSE_ALARM, "failures": failures + found}


def judge_alone(bundle: Path, precision: str) -> dict[str, Any]:
    """Return the verdict about a precision where another one keeps all from being verified."""
    graphs = [a.id for a in Bundle.open(bundle).manifest.artifacts if a.precision == precision]
    try:
        return judge_precision(verify(bundle, only=graphs), precision)
    except VerificationError as error:
        return {"verdict": LOSS if NOT_FINITE in str(error) else FALSE_ALARM, "failures": [str(error)]}


def format_table(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the verdicts by family and precision: how many passed, and how many were refused for a loss."""
    counts = Counter(
        (record["family"], precision, verdict["verdict"])
        for record in records
        for precision, verdict in record["verdicts"].items()
    )

    def count(family: str, precision: str) -> str:
        passed, lost, wrong = (counts[family, precision, v] for v in (PASSED, LOSS, FALSE_ALARM))
        if not passed + lost + wrong:
            return "–"
        words = f"{passed} of {passed + lost + wrong}"
        words += f", {lost} refused" if lost else ""
        return words + (f", {wrong} FALSE" if wrong else "")

    tried = [precision for precision in PRECISIONS if any(precision == key[1] for key in counts)]
    rows: list[Sequence[str]] = [["family", *tried], ["---"] * (len(tried) + 1)]
    rows += [[family, *(count(family, precision) for precision in tried)] for family in FAMILIES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
