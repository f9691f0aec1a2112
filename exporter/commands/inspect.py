"""`planforge inspect`: shows the content of a bundle, an .onnx file or a .plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...runtime.apps.commands.console import show, show_stages
from ...runtime.apps.commands.run_options import JsonOption


def inspect(
    path: Annotated[Path, typer.Argument(help="A bundle, an .onnx file or a .plan.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Show what a bundle, an .onnx file or a .plan holds."""
    with show_stages():
        from .inspection import inspect as inspect_path

        result = inspect_path(path)
    show(result, as_json)
