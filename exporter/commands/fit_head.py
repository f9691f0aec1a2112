"""`planforge fit-head`: a classifier on an encoder's features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.apps.commands.console import print_json, print_tables, show_stages
from ...runtime.apps.commands.run_options import BundleArgument, JsonOption, make_option
from .options import ForceOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..fitting.fitting import FitResult


def fit_head(
    bundle: BundleArgument,
    table: Annotated[
        Path,
        typer.Argument(
            help="Columns text and label: .tsv, .csv, .jsonl, .ndjson or .parquet.", show_default=False
        ),
    ],
    output: Annotated[Path, make_option("The new bundle.", "--output", "-o")],
    features: Annotated[
        str | None,
        make_option(
            "embedding; cls, the first token's last state; or averaged over the tokens: embeddings,"
            " second_to_last, last, sum_last_four, concat_last_four, sum_all.",
            show_default="embedding; with --per-token last",
        ),
    ] = None,
    per_token: Annotated[
        bool,
        make_option(
            "Train a tagger: TABLE has the columns text and labels, a label for each word, both with spaces"
            " between.",
            "--per-token",
        ),
    ] = False,
    test_share: Annotated[
        float, make_option("The share of the texts held out for testing.", show_default=True)
    ] = 0.25,
    seed: Annotated[int, make_option("The seed of the train-test split.", show_default=True)] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a classifier on an encoder's features, and put it into the graph. Needs no torch."""
    with show_stages() as progress:
        from ..fitting.fitting import fit_head as fit

        result = fit(
            bundle,
            table,
            output,
            features=features,
            per_token=per_token,
            test_share=test_share,
            seed=seed,
            force=force,
            progress=progress,
        )
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(make_fit_tables(result))


def make_fit_tables(result: FitResult) -> list[RenderableType]:
    """Return a classifier's accuracy and confusion matrix."""
    from ...runtime.apps.commands.tables import FittingTable

    held_out = sum(map(sum, result.confusion))
    head = [
        ("accuracy", f"{result.accuracy:.4f} on {held_out} held-out {result.unit}"),
        ("fitted to", f"{result.training} {result.unit}, C {result.C:g}"),
        ("picture", str(result.picture)),
    ]
    rows = [(label, *map(str, counts)) for label, counts in zip(result.labels, result.confusion, strict=True)]
    return [
        FittingTable(str(result.bundle), ("", ""), head),
        FittingTable(f"held-out {result.unit}", ("true \\ predicted", *result.labels), rows),
    ]
