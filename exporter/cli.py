"""The `planforge` command: parse, call one function, print. Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.errors import InputError
from .bench_command import bench
from .console import Settings, errors, print_tables, running
from .run_command import run
from .run_options import BundleArgument, JsonOption

app = typer.Typer(
    help="Takes a transformer from PyTorch to the edge: export, build, verify, run, bench.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PRECISION_HELP = (
    "fp32, fp16, int8, int4, and with keys and values in int8 fp32-kv8, int8-kv8, int4-kv8; the first is what"
    " run takes."
)
SM_HELP = (
    "GPU architectures: sm75 (RTX 20), sm80 (A100), sm86 (RTX 30), sm89 (RTX 40), sm120 (RTX 50), sm121."
)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"planforge {version('planforge')}")
        raise typer.Exit


@app.callback()
def before_every_command(
    debug: Annotated[bool, typer.Option(help="Show tracebacks and debug messages.")] = False,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    Settings.debug = debug
    del show_version
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(message)s")
    level = logging.DEBUG if debug else logging.INFO if errors.is_terminal else logging.WARNING
    logging.getLogger("planforge").setLevel(level)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A demo, a folder in Hugging Face's layout, or a hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle's folder.", show_default=False)],
    precision: Annotated[
        str | None, typer.Option(help=PRECISION_HELP, show_default="fp32, and fp16 but for cpu")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="cpu (ONNX alone), rtx (a plan for RTX GPUs), tensorrt (for the GPU here).",
            show_default="cpu,rtx",
        ),
    ] = None,
    sm: Annotated[str | None, typer.Option(help=SM_HELP, show_default="all")] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="The largest batch.", show_default="8 of a decoder, 32 of an encoder")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Context in tokens.", show_default="the model's")
    ] = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            help="Of an encoder, beside its last hidden state and heads: hidden_states (of all layers),"
            " hidden_states.3, pooler_output. Of an encoder-decoder: cross_attentions.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare every graph with PyTorch.")] = True,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A prompt a line, to verify with.", show_default="built-in texts"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle at OUTPUT.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint to ONNX, build its plans, verify it, and write a bundle."""
    with running() as progress:
        from .inspection import summarize_bundle
        from .pipeline import export as export_bundle

        result = export_bundle(
            model,
            output,
            precision=names(precision) if precision else None,
            target=names(target) if target else None,
            sms=names(sm) if sm else None,
            max_batch=max_batch,
            max_length=max_length,
            outputs=names(outputs) if outputs else (),
            verify=verify,
            prompts=prompts,
            force=force,
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)


@app.command()
def build(
    bundle: BundleArgument,
    target: Annotated[str | None, typer.Option(help="rtx or tensorrt.", show_default="rtx")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Instead of a target: tensorrt-rtx or tensorrt.", show_default=False),
    ] = None,
    sm: Annotated[str | None, typer.Option(help=SM_HELP, show_default="all")] = None,
    maximum: Annotated[
        list[str] | None,
        typer.Option("--max", help="batch=N or length=N, below the graph's.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build a TensorRT plan from a bundle's graph and add it. Needs no torch, and for rtx no GPU."""
    with running() as progress:
        from .inspection import summarize_bundle
        from .plans import build as build_plan

        result = build_plan(
            bundle,
            target=target,
            engine=engine,
            sms=names(sm) if sm else None,
            limits=dict(limit(text) for text in maximum or []),
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
    as_json: JsonOption = False,
) -> None:
    """Compare every graph with PyTorch, or golden data where it is absent; exit 1 if one differs."""
    with running() as progress:
        from .inspection import verification_table
        from .verification.verify import verify as verify_bundle

        report = verify_bundle(bundle, source=source, backend=backend, prompts=prompts, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        print_tables(verification_table(report))
    if not report.passed:
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
        from .fitting import fit_head as fit
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
        typer.echo(json.dumps(result.to_json(), ensure_ascii=False))
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


def names(text: str) -> list[str]:
    """A comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def limit(text: str) -> tuple[str, int]:
    """NAME=N."""
    name, _, number = text.partition("=")
    if not number.isdecimal():
        raise InputError(f"--max {text!r} must be batch=N or length=N")
    return name, int(number)


def show(result: Any, as_json: bool) -> None:
    """Prints an inspection as JSON or as tables."""
    if as_json:
        typer.echo(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        print_tables(result.tables())


def main() -> None:
    """The console script."""
    app()
