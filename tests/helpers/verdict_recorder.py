"""A plugin of pytest that writes down every verdict of a run, to compare two versions of the judge.

    pytest -p tests.helpers.verdict_recorder --record-verdicts=FILE tests

FILE gets a line of JSON for each report that `verify` returned or `export` judged by: the test, whether it
passed, the graphs that failed, the nodes that were named, and those that reading the graph named. Words are
left out: they may differ. tests/verdicts/before.json has those of the whole suite at 722a2ec, which judged by
cases in code; controls_before.json has those of `make controls` there, as on a processor with AVX2 alone.
"""

from __future__ import annotations

import functools
import json
import os
import re
from typing import Any

import pytest

from planforge.exporter.verification import verify as verification
from planforge.exporter.verification.report import VerificationReport
from planforge.exporter.verification.structure import READING

NODE = re.compile(r"node '([^']+)'")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-verdicts", help="the file that gets a line for each verdict")


def pytest_configure(config: pytest.Config) -> None:
    """Let `verify` and an export's judge tell their reports; done before any test module is imported."""
    file = config.getoption("--record-verdicts")
    verify = verification.verify
    raise_if_failed = VerificationReport.raise_if_failed

    @functools.wraps(verify)
    def verify_and_record(*arguments: Any, **options: Any) -> VerificationReport:
        report = verify(*arguments, **options)
        record(file, "verify", report)
        return report

    @functools.wraps(raise_if_failed)
    def record_and_raise(report: VerificationReport, advice: str = "") -> None:
        record(file, "export", report)
        raise_if_failed(report, advice)

    verification.verify = verify_and_record
    VerificationReport.raise_if_failed = record_and_raise  # type: ignore[assignment,method-assign]


def record(file: str, judge: str, report: VerificationReport) -> None:
    """Append a report's verdict."""
    line = json.dumps({"test": name_test(), "judge": judge, **describe(report)}) + "\n"
    with open(file, "a", encoding="utf-8") as lines:  # one write, so that workers may share the file
        lines.write(line)


def name_test() -> str:
    """Return the id of the test that runs, without what another run may change."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def describe(report: VerificationReport) -> dict[str, Any]:
    """Return what two judges must agree on."""
    failed = [comparison for comparison in report.comparisons if not comparison.passed]
    read = [failure for one in failed if one.backend == READING for failure in one.failures]
    return {
        "passed": report.passed,
        "graphs": sorted({comparison.artifact for comparison in report.comparisons}),
        "failed": sorted({comparison.artifact for comparison in failed}),
        "nodes": sorted((one.artifact, one.node, one.op_type, one.module) for one in report.mismatches),
        "read": sorted({node for failure in read for node in NODE.findall(failure)}),
        "lost": sorted(report.limited),
    }
