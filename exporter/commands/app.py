"""The `planforge` command: every command of the exporter and of the runtime, and the options before each."""

from __future__ import annotations

import io
import logging
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...runtime.commands.batch import batch
from ...runtime.commands.console import Settings, end_with_exit_code
from ...runtime.commands.doctor import doctor
from ...runtime.commands.explain import explain
from ...runtime.commands.prepare import prepare
from ...runtime.commands.run import run
from ...runtime.commands.selftest import selftest
from ...runtime.commands.serve import serve
from ..processes import end_children_on_signals
from .bench import bench
from .build import build
from .export import export, import_bundle
from .fit_head import fit_head
from .inspect import inspect
from .lint import lint
from .package import package
from .verify import verify


class Commands(TyperGroup):
    """The commands; whatever one of them raises becomes one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with end_with_exit_code(ctx):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Takes a transformer from PyTorch to the edge: export, build, verify, run, serve, batch, bench.",
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
app.command()(build)
app.command()(verify)
app.command()(run)
app.command()(explain)
app.command()(serve)
app.command()(batch)
app.command()(fit_head)
app.command()(inspect)
app.command()(bench)
app.command()(prepare)
app.command()(lint)
app.command()(package)
app.command()(doctor)
app.command()(selftest)


def main() -> None:
    """Run the console script; SIGTERM ends it as cleanly as Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is written as an escape
        sys.stdout.reconfigure(errors="backslashreplace")
    # PyTorch, once it is imported, lets its threads sleep while they wait for one another: spinning, beside
    # other work on two cores, they took four times the processor's time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with end_children_on_signals():
        app()
