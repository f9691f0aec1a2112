"""`planforge inspect`: shows the content of a bundle, an .onnx file or a .plan, and the layers of plans.

Also that of folders that are searched: stores of vectors, and indexes of texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...runtime.apps.commands.console import show, show_stages
from ...runtime.apps.commands.run_options import JsonOption, make_option
from ...runtime.errors import InputError


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="A bundle, a checkpoint, a store of vectors, an index of texts, an .onnx file or a .plan.",
            show_default=False,
        ),
    ],
    layers: Annotated[
        bool,
        make_option(
            "Show the layers of plans, or the nodes of an .onnx file, with PyTorch's modules.", "--layers"
        ),
    ] = False,
    time: Annotated[
        bool, make_option("Run the plans and measure each of --layers; where the plan's GPU is.", "--time")
    ] = False,
    plot: Annotated[
        Path | None, make_option(r"Draw the --time of modules to a picture file; needs planforge\[plot].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a bundle, a store of vectors, an index of texts, an .onnx file or a .plan holds."""
    if time and not layers:
        raise InputError("--time measures the layers of plans: add --layers")
    if plot is not None and not time:
        raise InputError("--plot draws what --layers --time measures: add them")
    with show_stages():
        if layers:
            from .layers import inspect_layers

            result = inspect_layers(path, time, plot)
        else:
            from .inspection import inspect as inspect_path

            result = inspect_path(path)
    show(result, as_json)
