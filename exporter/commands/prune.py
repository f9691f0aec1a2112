"""`planforge prune`: a bundle without the graphs and plans that a machine does not need."""

from __future__ import annotations

from typing import Annotated

from ...runtime.apps.commands.console import list_names, print_json, print_tables, show_stages
from ...runtime.apps.commands.run_options import BundleArgument, JsonOption, make_option


def prune(
    bundle: BundleArgument,
    keep: Annotated[
        str,
        make_option(
            "Precisions, targets and GPUs, separated by commas, such as int8,cpu or rtx,sm89. Without a"
            " precision all that the targets have stay; without a target all that the precisions are for;"
            " without a GPU the plans for all."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Remove the graphs, plans and weights that a machine does not need, and make the bundle smaller."""
    with show_stages() as progress:
        from ..pruning import prune as prune_bundle
        from .summary import make_prune_tables

        result = prune_bundle(bundle, keep=list_names(keep), progress=progress)
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(make_prune_tables(result))
