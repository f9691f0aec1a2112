"""The `planforge` command: parse, call one function, print. Results on stdout, everything else on stderr."""

from __future__ import annotations

import io
import logging
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ...runtime.commands.console import Settings, exit_codes, names, print_json, print_tables, running, show
from ...runtime.commands.doctor import doctor
from ...runtime.commands.run import run
from ...runtime.commands.run_options import BundleArgument, JsonOption
from ...runtime.commands.selftest import selftest
from ...runtime.errors import InputError, PlanForgeError
from ..processes import ending_with_children
from .bench import bench
from .export import SM_HELP, export, import_bundle
from .lint import lint

if TYPE_CHECKING:
    from ..verification.report import VerificationReport


class Commands(TyperGroup):
    """The commands; whatever one of them raises becomes one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with exit_codes(ctx):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Takes a transformer from PyTorch to the edge: export, build, verify, run, bench.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"planforge {version('planforge')}")
        raise typer.Exit


@app.callback()
def before_every_command(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say which engine runs, with how many threads, and why.")
    ] = False,
    debug: Annotated[bool, typer.Option(help="Show tracebacks and debug messages.")] = False,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    Settings.debug = debug
    del show_version
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(message)s")
    told = logging.INFO if verbose else logging.WARNING
    logging.getLogger("planforge").setLevel(logging.DEBUG if debug else told)
    logging.getLogger("onnxscript").setLevel(logging.DEBUG if debug else logging.ERROR)


app.command()(export)
app.command("import")(import_bundle)


@app.command()
def build(
    bundle: BundleArgument,
    target: Annotated[
        str | None,
        typer.Option(
            help="rtx, jetpack6.0, jetpack6.2, jetpack7.2, tensorrt11, tensorrt (the installed version), ...",
            show_default="rtx",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Instead of a target: tensorrt-rtx or tensorrt.", show_default=False),
    ] = None,
    sm: Annotated[str | None, typer.Option(help=SM_HELP, show_default="all")] = None,
    maximum: Annotated[
        list[str] | None,
        typer.Option("--max", help="batch=N,length=N: below the graph's.", show_default=False),
    ] = None,
    workspace: Annotated[
        int | None, typer.Option(help="MiB for TensorRT to work in.", min=1, show_default="all there is")
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="A file that makes the next build faster; not for rtx.", show_default=False),
    ] = None,
    strip: Annotated[
        bool, typer.Option("--strip", help="Leave the weights out; they come from the bundle's at load.")
    ] = False,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Pick the K likeliest tokens on the GPU: for greedy and up to this --top-k at less copying.",
            min=1,
            show_default=False,
        ),
    ] = None,
    compatible: Annotated[
        bool,
        typer.Option("--compatible", help="For later GPUs and versions too; not for rtx, nor on Jetson."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a TensorRT plan from a bundle's graph and add it. Needs no torch, and for rtx no GPU."""
    with running() as progress:
        from ..tensorrt.build import Options
        from ..tensorrt.plans import build as build_plan
        from .inspection import summarize_bundle

        result = build_plan(
            bundle,
            target=target,
            engine=engine,
            sms=names(sm) if sm else None,
            limits=dict(limit(text) for texts in maximum or [] for text in names(texts)),
            options=Options(
                workspace=None if workspace is None else workspace * 2**20,
                timing_cache=None if timing_cache is None else str(timing_cache.resolve()),
                strip=strip,
                compatible=compatible,
                candidates=top_k or 0,
            ),
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)


@app.command()
def verify(
    bundle: BundleArgument,
    source: Annotated[
        str | None, typer.Option(help="The checkpoint.", show_default="the recorded one")
    ] = None,
    backend: Annotated[str, typer.Option(help="The engine to check.")] = "ort-cpu",
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt a line.", show_default="built-in texts")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page for a browser.", show_default=False)
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML, for CI.", show_default=False)] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option("--limit", help="METRIC=VALUE, below the usual limit.", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A graph's id, such as decoder.ort.int8.", show_default="all")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Of an .onnx file: another one to compare it with.", show_default=False),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Of an .onnx file: a .npz with an array per input.", show_default="made up"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every graph with PyTorch, or golden data where it is absent; exit 1 if one differs.

    BUNDLE may also be an .onnx file of any model: ONNX Runtime is compared with the same graph node by node.
    """
    with running() as progress:
        from ..reports.tables import verification_table
        from ..verification.report import VerificationReport
        from ..verification.verify import verify as verify_bundle

        wanted = dict(metric_limit(text) for text in limits or [])
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
                progress=progress,
            )
        except PlanForgeError as error:  # CI must not find the files of an earlier run
            write_files(VerificationReport.of_error(bundle, error), bundle, report, junit)
            raise
        write_files(result, bundle, report, junit)
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(verification_table(result))
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def fit_head(
    bundle: BundleArgument,
    table: Annotated[Path, typer.Argument(help="Rows of text TAB label.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new bundle.", show_default=False)],
    features: Annotated[
        str,
        typer.Option(
            help="embedding, or averaged over the tokens: embeddings, second_to_last, last, sum_last_four,"
            " concat_last_four, sum_all."
        ),
    ] = "embedding",
    test_share: Annotated[float, typer.Option(help="Of the texts, held out to measure with.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle at OUTPUT.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a classifier on an encoder's features, and put it into the graph. Needs no torch."""
    with running() as progress:
        from ..fitting.fitting import fit_head as fit
        from .inspection import fit_tables

        result = fit(
            *(bundle, table, output),
            features=features,
            test_share=test_share,
            seed=seed,
            force=force,
            progress=progress,
        )
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(fit_tables(result))


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A bundle, an .onnx file or a .plan.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Show what a bundle, an .onnx file or a .plan holds."""
    with running():
        from .inspection import inspect as inspect_path

        result = inspect_path(path)
    show(result, as_json)


app.command()(run)
app.command()(bench)
app.command()(lint)
app.command()(doctor)
app.command()(selftest)


def limit(text: str) -> tuple[str, int]:
    """NAME=N."""
    name, _, number = text.partition("=")
    if not number.isdecimal():
        raise InputError(f"--max {text!r} must be batch=N or length=N")
    return name, int(number)


def metric_limit(text: str) -> tuple[str, float]:
    """METRIC=VALUE."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not 0 <= number < math.inf:
        raise InputError(f"--limit {text!r} must be METRIC=VALUE, as in max_error=0.001")
    return name, number


def check_files(report: Path | None, junit: Path | None) -> None:
    """What would fail after the verification fails before it."""
    from ..reports.output import check_writable

    if report is not None:
        from ..reports import html as html_report  # noqa: F401  (needs jinja2)

        check_writable(report)
    if junit is not None:
        check_writable(junit)
    if report is not None and junit is not None and report.resolve() == junit.resolve():
        raise InputError(f"--report and --junit are both {report}; give each its own file")


def write_files(result: VerificationReport, bundle: Path, report: Path | None, junit: Path | None) -> None:
    """Writes the page and the XML, where they are wanted."""
    from ..reports.output import write_whole

    if report is not None:
        from ..reports.html import Subject, html_report

        write_whole(report, html_report(result, Subject.of(bundle, result)))
    if junit is not None:
        from ..reports.junit import junit_xml

        write_whole(junit, junit_xml(result, bundle.resolve().name))


def main() -> None:
    """Runs the console script; SIGTERM is as clean as Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is written as an escape
        sys.stdout.reconfigure(errors="backslashreplace")
    with ending_with_children():
        app()
