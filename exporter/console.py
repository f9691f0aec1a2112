"""What every command shares: stderr, progress, and errors in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..runtime.errors import PlanForgeError

FILE_WIDTH = 160  # columns of a table that goes into a file or a pipe
errors = Console(stderr=True, highlight=False, soft_wrap=True)
# Modules that an extra brings, and the extra's name.
EXTRAS = {
    **dict.fromkeys(("huggingface_hub", "onnx", "onnxscript", "safetensors", "torch"), "export"),
    **dict.fromkeys(("jinja2", "onnx_ir"), "verify"),
    **dict.fromkeys(("matplotlib", "sklearn"), "fit"),
}


class Settings:
    """What the options before the command say."""

    debug = False


@contextmanager
def running() -> Iterator[Callable[[str], None]]:
    """Shows progress on a terminal's stderr, and turns our errors into one line and exit code 1."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    stage = bar.add_task("", total=None)

    def progress(line: str) -> None:
        bar.update(stage, description=line)
        bar.start()

    try:
        yield progress
    except PlanForgeError as error:
        bar.stop()
        if Settings.debug:
            raise
        errors.print(Text("error: ", style="red").append(str(error), style="default"))
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        bar.stop()
        extra = EXTRAS.get(str(error.name))
        if Settings.debug or extra is None:
            raise
        errors.print(Text(f"error: this command needs {error.name}: pip install 'planforge[{extra}]'"))
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        bar.stop()
        errors.print("\ninterrupted; nothing was changed")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    finally:
        bar.stop()


def print_tables(tables: Sequence[RenderableType]) -> None:
    """Prints tables to stdout, as wide as the terminal, or wide enough for a file."""
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(*tables)


def show(result: Any, as_json: bool) -> None:
    """Prints an inspection as JSON or as tables."""
    if as_json:
        typer.echo(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        print_tables(result.tables())


def names(text: str) -> list[str]:
    """A comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]
