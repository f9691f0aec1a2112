"""`planforge lint`: tells before a long build what a target will refuse in a graph, or get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...runtime.apps.commands.console import print_json, print_tables, show_stages, split_names
from ...runtime.apps.commands.run_options import JsonOption, make_option


def lint(
    model: Annotated[
        Path | None, typer.Argument(help="An .onnx file, or a bundle's folder.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        make_option(
            "The targets to check for, such as tensorrt10.3,jetpack6.2,rtx,cpu.",
            show_default="the bundle's own; for a file, all",
        ),
    ] = None,
    as_json: JsonOption = False,
    rules: Annotated[bool, make_option("List targets and rules with sources.", "--rules")] = False,
) -> None:
    """Say what will fail or be wrong on a target, and how to fix it. Reads no weights, needs no torch."""
    with show_stages():
        from ...runtime.apps.commands.tables import FittingTable
        from ...runtime.errors import InputError
        from ..linting.all_rules import list_targets_and_rules
        from ..linting.lint import lint as check

        if rules:
            sections = list_targets_and_rules()
            if as_json:
                print_json({title: name_cells(columns, rows) for title, columns, rows in sections}, indent=1)
            else:
                print_tables([FittingTable(*section) for section in sections])
            return
        if model is None:
            raise InputError("lint needs an .onnx file or a bundle's folder; --rules lists what it looks for")
        report = check(model, split_names("--target", target) or ())
        if as_json:
            print_json(report.to_json(), indent=1)
        else:
            print_tables(report.tables())
        if not report.passed:
            raise typer.Exit(1)


def name_cells(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return rows as mappings from their columns' names, which have "_" for spaces, to cells."""
    names = [column.replace(" ", "_") for column in columns]
    return [dict(zip(names, row, strict=True)) for row in rows]
