"""`planforge diff`: what two bundles hold, and what was measured of each, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...runtime.apps.commands.console import print_json, print_tables, show_stages
from ...runtime.apps.commands.run_options import JsonOption, make_option
from .prove import exit_by_comparison

NO_PICTURES = (
    "no evidence: planforge prove measures models of text; planforge selftest BUNDLE compares a bundle's"
    " pictures with PyTorch's"
)


def diff(
    old: Annotated[Path, typer.Argument(help="A bundle.", show_default=False)],
    new: Annotated[
        Path | None,
        typer.Argument(
            help="The one that may take its place; left out to compare precisions or backends of OLD.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        make_option(
            "Precisions of OLD and NEW, such as fp16,int8; one name is for both.", show_default="all"
        ),
    ] = None,
    backend: Annotated[
        str | None,
        make_option(
            "Backends of OLD and NEW, such as ort-cpu,tensorrt-rtx; one name is for both.", show_default="all"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two bundles, or two precisions of one: sizes and evidence; exit 1 if the new one is worse.

    Exit 2 if they have no evidence on the same texts, or some that cannot be compared.

    Needs no torch. Times, memory and energy are shown and decide nothing.
    """
    with show_stages():
        from ...runtime.apps.proof.changes import pair_proofs
        from ..task_traits import TRAITS
        from .evidence_sides import open_sides
        from .evidence_tables import describe_side, make_bundle_table, make_pair_tables

        both = open_sides(old, new, precision, backend)
        pairs = pair_proofs(*(side.read_proofs() for side in both))
        sides = [describe_side(side) for side in both]
    if as_json:
        described = dict(zip(("old", "new"), sides, strict=True))
        print_json({**described, "compared": [pair.to_json() for pair in pairs]})
    else:
        commands = dict.fromkeys(side.make_command("FILE") for side in both)
        advice = "\n    ".join(["no evidence on the same texts; first:", *commands])
        if TRAITS[both[1].bundle.manifest.task].makes_images:
            advice = NO_PICTURES
        print_tables([make_bundle_table(*sides), *make_pair_tables(pairs, advice)])
    if not pairs:
        raise typer.Exit(2)
    exit_by_comparison(pairs)
