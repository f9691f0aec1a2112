"""`planforge diff`: what two bundles hold, and what was measured of each, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...runtime.apps.commands.console import print_json, print_tables, show_stages
from ...runtime.apps.commands.run_options import JsonOption
from .prove import exit_by_comparison

NO_EVIDENCE = "no evidence on the same texts: planforge prove BUNDLE --data FILE, for each of the two"
NO_PICTURES = (
    "no evidence: planforge prove measures models of text; planforge selftest BUNDLE compares a bundle's"
    " pictures with PyTorch's"
)


def diff(
    old: Annotated[Path, typer.Argument(help="A bundle.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="The one that may take its place.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Compare two bundles: sizes, precisions and evidence; exit 1 if the new one is worse on the same texts.

    Exit 2 if they have no evidence on the same texts, or some that cannot be compared.

    Needs no torch. Times, memory and energy are shown and decide nothing.
    """
    with show_stages():
        from ...runtime.apps.proof.changes import pair_proofs
        from ...runtime.apps.proof.evidence import read_evidence
        from ...runtime.bundle.bundle import Bundle
        from ..task_traits import TRAITS
        from .evidence_tables import describe_bundle, make_bundle_table, make_pair_tables

        bundles = [Bundle.open(folder) for folder in (old, new)]
        pairs = pair_proofs(*map(read_evidence, bundles))
        advice = NO_PICTURES if TRAITS[bundles[1].manifest.task].makes_images else NO_EVIDENCE
        sides = [describe_bundle(bundle) for bundle in bundles]
    if as_json:
        both = dict(zip(("old", "new"), sides, strict=True))
        print_json({**both, "compared": [pair.to_json() for pair in pairs]})
    else:
        print_tables([make_bundle_table(*sides), *make_pair_tables(pairs, advice)])
    if not pairs:
        raise typer.Exit(2)
    exit_by_comparison(pairs)
