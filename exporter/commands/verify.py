"""`planforge verify`: checks that every graph still computes the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.apps.commands.console import print_json, print_tables, show_stages
from ...runtime.apps.commands.run_options import BundleArgument, JsonOption, make_option
from ...runtime.errors import InputError, PlanForgeError
from .options import LEVELS_HELP, PromptsOption, parse_metrics

if TYPE_CHECKING:
    from ..verification.report import VerificationReport


def verify(
    bundle: BundleArgument,
    source: Annotated[str | None, make_option("The checkpoint.", show_default="the recorded one")] = None,
    backend: Annotated[str, make_option("The engine to check.", show_default=True)] = "ort-cpu",
    prompts: PromptsOption = None,
    report: Annotated[Path | None, make_option("Write an HTML report.")] = None,
    junit: Annotated[Path | None, make_option("Write JUnit XML, for CI.")] = None,
    limits: Annotated[
        list[str] | None, make_option("METRIC=VALUE: a limit below the usual one.", "--limit")
    ] = None,
    only: Annotated[
        list[str] | None, make_option("A graph's id, such as decoder.ort.int8.", show_default="all")
    ] = None,
    against: Annotated[Path | None, make_option("For an .onnx file: another to compare it with.")] = None,
    inputs: Annotated[
        Path | None, make_option("For an .onnx file: a .npz with an array per input.", show_default="random")
    ] = None,
    seed: Annotated[int, make_option("The seed of the batches of random shapes.", show_default=True)] = 0,
    level: Annotated[
        str, make_option(f"How much is compared: {LEVELS_HELP}", show_default=True)
    ] = "standard",
    as_json: JsonOption = False,
) -> None:
    """Compare every graph with PyTorch, or golden data where it is absent; exit 1 if one differs.

    BUNDLE may also be an .onnx file of any model: ONNX Runtime is compared with the same graph node by node.
    """
    with show_stages() as progress:
        from ..verification.report import VerificationReport
        from ..verification.verify import verify as verify_bundle

        wanted = parse_metrics(limits, "--limit")
        check_files(report, junit)
        try:
            result = verify_bundle(
                bundle,
                source=source,
                backend=backend,
                prompts=prompts,
                limits=wanted,
                only=only or (),
                against=against,
                inputs=inputs,
                seed=seed,
                level=level,
                progress=progress,
            )
        except PlanForgeError as error:  # CI must not find the files of an earlier run
            write_files(VerificationReport.of_error(bundle, error), bundle, report, junit)
            raise
        write_files(result, bundle, report, junit)
    print_result(result, as_json)
    if not result.passed:
        raise typer.Exit(1)


def print_result(result: VerificationReport, as_json: bool) -> None:
    """Print JSON, or the tables of every comparison."""
    if as_json:
        print_json(result.to_json())
        return
    from ..reports.tables import make_tables

    print_tables(make_tables(result))


def check_files(report: Path | None, junit: Path | None) -> None:
    """Refuse report files that could not be written after the verification, before it starts."""
    from ..reports.output import check_writable

    if report is not None:
        from ..reports import html as html_report  # noqa: F401  (needs jinja2)
    for path in (report, junit):
        if path is not None:
            check_writable(path)
    if report is not None and junit is not None and report.resolve() == junit.resolve():
        raise InputError(f"--report and --junit are both {report}; give each its own file")


def write_files(result: VerificationReport, bundle: Path, report: Path | None, junit: Path | None) -> None:
    """Write the HTML page and the XML file that were asked for."""
    from ..reports.output import write_whole

    if report is not None:
        from ..reports.html import Subject, render_html

        write_whole(report, render_html(result, Subject.of(bundle, result)))
    if junit is not None:
        from ..reports.junit import render_junit

        write_whole(junit, render_junit(result, bundle.resolve().name))
