"""Writes a verification as JUnit XML, which CI systems show: a suite per graph, a test per comparison."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from ...runtime.apps.check.outcome import Comparison
from ..verification.report import VerificationReport
from .output import make_printable
from .tables import describe_verdict, group_by_artifact


def render_junit(report: VerificationReport, name: str) -> str:
    """Return the report of a bundle of this name as JUnit XML."""
    root = ElementTree.Element("testsuites", name=make_printable(name))
    for artifact, comparisons in group_by_artifact(report.comparisons).items():
        suite = ElementTree.SubElement(root, "testsuite", name=make_printable(artifact))
        mismatches = [str(mismatch) for mismatch in report.mismatches if mismatch.artifact == artifact]
        for comparison in comparisons:
            case = add_case(suite, artifact, f"{comparison.backend}: {comparison.case}")
            if not comparison.passed:
                add_failure(case, "; ".join(comparison.failures), [*comparison.failures, *mismatches])
            ElementTree.SubElement(case, "system-out").text = make_printable(list_numbers(comparison))
    if not report.comparisons:  # a document without any test would count as a success
        suite = ElementTree.SubElement(root, "testsuite", name=make_printable(name))
        add_failure(add_case(suite, name, "comparisons"), describe_verdict(report), [])
    for element in (root, *root.iter("testsuite")):
        element.set("tests", str(len(list(element.iter("testcase")))))
        element.set("failures", str(len(list(element.iter("failure")))))
        element.set("errors", "0")
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def add_case(suite: ElementTree.Element, artifact: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite, "testcase", classname=make_printable(artifact), name=make_printable(name)
    )


def add_failure(case: ElementTree.Element, message: str, lines: Iterable[str]) -> None:
    failure = ElementTree.SubElement(
        case, "failure", type="VerificationError", message=make_printable(message)
    )
    failure.text = make_printable("\n".join(lines))


def list_numbers(comparison: Comparison) -> str:
    """Return a line per metric, with its limit."""
    return "\n".join(
        f"{name}: {value}" + (f" (at most {comparison.limits[name]})" if name in comparison.limits else "")
        for name, value in comparison.metrics.items()
    )
