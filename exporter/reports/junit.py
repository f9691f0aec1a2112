"""Writes a verification as JUnit XML, which CI systems show: a suite per graph, a test per comparison."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from ...runtime.diagnostics.metrics import Comparison
from ..verification.report import VerificationReport
from .output import printable
from .tables import group_by_artifact, verdict_of


def junit_xml(report: VerificationReport, name: str) -> str:
    """Return a report as JUnit XML.

    Args:
        report: the comparisons and their verdict.
        name: the bundle's name.
    """
    root = ElementTree.Element("testsuites", name=printable(name))
    for artifact, comparisons in group_by_artifact(report.comparisons).items():
        suite = ElementTree.SubElement(root, "testsuite", name=printable(artifact))
        culprits = [str(culprit) for culprit in report.culprits if culprit.artifact == artifact]
        for comparison in comparisons:
            case = add_case(suite, artifact, f"{comparison.backend}: {comparison.case}")
            if not comparison.passed:
                add_failure(case, "; ".join(comparison.failures), [*comparison.failures, *culprits])
            ElementTree.SubElement(case, "system-out").text = printable(numbers_of(comparison))
    if not report.comparisons:  # a document without any test would count as a success
        suite = ElementTree.SubElement(root, "testsuite", name=printable(name))
        add_failure(add_case(suite, name, "comparisons"), verdict_of(report), [])
    for element in (root, *root.iter("testsuite")):
        element.set("tests", str(len(list(element.iter("testcase")))))
        element.set("failures", str(len(list(element.iter("failure")))))
        element.set("errors", "0")
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def add_case(suite: ElementTree.Element, artifact: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=printable(artifact), name=printable(name))


def add_failure(case: ElementTree.Element, message: str, lines: Iterable[str]) -> None:
    failure = ElementTree.SubElement(case, "failure", type="VerificationError", message=printable(message))
    failure.text = printable("\n".join(lines))


def numbers_of(comparison: Comparison) -> str:
    """Return a line per metric, with its limit."""
    return "\n".join(
        f"{name}: {value}" + (f" (at most {comparison.limits[name]})" if name in comparison.limits else "")
        for name, value in comparison.metrics.items()
    )
