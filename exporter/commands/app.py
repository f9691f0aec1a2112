"""The `planforge` command: every command of the exporter and of the runtime, and the options before each."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ...runtime.apps.commands.batch import batch
from ...runtime.apps.commands.console import Settings, end_with_exit_code
from ...runtime.apps.commands.doctor import doctor
from ...runtime.apps.commands.explain import explain
from ...runtime.apps.commands.index import index
from ...runtime.apps.commands.prepare import prepare
from ...runtime.apps.commands.run import run
from ...runtime.apps.commands.selftest import selftest
from ...runtime.apps.commands.serve import serve
from ...runtime.errors import InputError
from ..processes import end_children_on_signals
from .bench import bench
from .build import build
from .diff import diff
from .export import export, import_bundle
from .fit_head import fit_head
from .inspect import inspect
from .lint import lint
from .package import package
from .prove import prove
from .prune import prune
from .verify import verify

SEVERAL = re.compile(r"commas|[a-z0-9],[a-z]")  # in the help of an option that takes several names


class Command(TyperCommand):
    """A command that refuses an option which is given twice and holds one value: the last would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = list(args)
        options = typed[: typed.index("--")] if "--" in typed else typed  # what is behind it is a text
        Settings.as_json = "--json" in options and any("--json" in param.opts for param in self.params)
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # for a shell that completes the line
            return rest
        _, _, given = self.make_parser(ctx).parse_args(args=typed)
        for param, count in Counter(given).items():
            is_switch = getattr(param, "is_flag", False) and not param.secondary_opts
            if param.param_type_name == "option" and count > 1 and not (param.multiple or is_switch):
                several = (
                    ", several names separated by commas"
                    if SEVERAL.search(str(getattr(param, "help", "")))
                    else ""
                )
                raise InputError(f"{param.opts[0]} is given {count} times; give it once{several}")
        return rest


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
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")] = False,
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


COMMANDS: dict[str, Callable[..., None]] = {
    "export": export,
    "import": import_bundle,
    "build": build,
    "verify": verify,
    "run": run,
    "explain": explain,
    "index": index,
    "serve": serve,
    "batch": batch,
    "fit-head": fit_head,
    "inspect": inspect,
    "bench": bench,
    "prove": prove,
    "diff": diff,
    "prepare": prepare,
    "lint": lint,
    "package": package,
    "prune": prune,
    "doctor": doctor,
    "selftest": selftest,
}
for name, function in COMMANDS.items():
    app.command(name, cls=Command)(function)


def main() -> None:
    """Run the console script; SIGTERM ends it as cleanly as Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is written as an escape
        sys.stdout.reconfigure(errors="backslashreplace")
    # PyTorch, once it is imported, lets its threads sleep while they wait for one another: spinning, next to
    # other work on two cores, they took four times the processor's time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with end_children_on_signals():
        app()
