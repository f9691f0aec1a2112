"""`planforge fit-head`: a classifier on an encoder's features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...runtime.apps.commands.console import print_json, print_tables, show_stages
from ...runtime.apps.commands.run_options import BundleArgument, JsonOption, make_option
from .options import ForceOption


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
        str,
        make_option(
            "embedding, or averaged over the tokens: embeddings, second_to_last, last, sum_last_four,"
            " concat_last_four, sum_all.",
            show_default=True,
        ),
    ] = "embedding",
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
        from .summary import make_fit_tables

        result = fit(
            bundle,
            table,
            output,
            features=features,
            test_share=test_share,
            seed=seed,
            force=force,
            progress=progress,
        )
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(make_fit_tables(result))
