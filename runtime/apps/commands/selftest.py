"""`planforge selftest`: whether an engine on this machine still computes a bundle's model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from .console import print_json, print_lines, print_tables, show_stages
from .run_options import BackendOption, BundleArgument, DeviceOption, JsonOption, PrecisionOption

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import RenderableType

    from ...bundle.manifest import Manifest
    from ..check.outcome import Comparison
    from ..check.selftest import SelftestResult


def selftest(
    bundle: BundleArgument,
    backend: BackendOption = "auto",
    precision: PrecisionOption = None,
    device: DeviceOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare this machine's engine with PyTorch's answers, kept at export; exit 1 if one differs.

    Texts to ids and back, chats, logits, greedy tokens, embeddings. Every file is hashed first. Needs neither
    torch nor onnx.
    """
    with show_stages() as progress:
        from ...bundle.bundle import Bundle
        from ..check.selftest import selftest as test

        result = test(bundle, backend, precision, device, progress)
        manifest = Bundle.open(bundle).manifest
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(tabulate_selftest(bundle.resolve().name, result))
        lines = [*list_remarks(result), *describe_untested(bundle, manifest, result)]
        print_lines(["", *lines] if lines else [])
    if not result.passed:
        raise typer.Exit(1)


def tabulate_selftest(name: str, result: SelftestResult) -> list[RenderableType]:
    """Return the verdict, and a table for each graph: a row for each comparison, with its closest metric."""
    from .tables import FittingTable

    verdict = "passed" if result.passed else "FAILED"
    columns = ("case", "closest metric", "measured", "limit", "tokens", "result")
    title = f"{verdict}: {name} on {result.backend} against PyTorch's answers, {result.seconds:.1f} s"
    tables: list[RenderableType] = [Text(title, style="bold")]
    if result.texts:
        rows = [make_text_row(comparison) for comparison in result.texts]
        tables.append(FittingTable(result.texts[0].artifact, ["case", "compared", "result"], rows))
    for artifact in result.artifacts:
        rows = [make_row(comparison) for comparison in result.comparisons if comparison.artifact == artifact]
        has_tokens = any(row[4] for row in rows)
        shown = [index for index, column in enumerate(columns) if column != "tokens" or has_tokens]
        cells = [[row[index] for index in shown] for row in rows]
        tables.append(FittingTable(artifact, [columns[index] for index in shown], cells))
    return tables


def make_text_row(comparison: Comparison) -> list[str]:
    """Return the row of a comparison of texts: how many of what were compared."""
    ((unit, count),) = comparison.metrics.items()
    return [comparison.case, f"{count} {unit}", "passed" if comparison.passed else "FAILED"]


def make_row(comparison: Comparison) -> list[str]:
    """Return a comparison's row, with the metric that has come closest to its limit."""
    metrics = comparison.metrics
    limits = comparison.limits
    name = max(limits, key=lambda metric: divide_by_limit(metrics[metric], limits[metric]))
    value = metrics[name]
    tokens = metrics.get("common_prefix")
    return [
        comparison.case,
        name,
        "not finite" if value is None else f"{value:.3g}",
        f"{limits[name]:.3g}",
        "" if tokens is None else f"{tokens} of {metrics['common_prefix_of']}",
        "passed" if comparison.passed else "FAILED",
    ]


def describe_untested(bundle: Path, manifest: Manifest, result: SelftestResult) -> Iterator[str]:
    """Yield what was tested, and the precisions that were left out with the command that tests one."""
    import shlex

    every = dict.fromkeys(artifact.precision for artifact in manifest.artifacts)
    tested = {manifest.artifact(name).precision for name in result.artifacts}
    others = [precision for precision in every if precision not in tested]
    if others:
        yield (
            f"tested: {', '.join(sorted(tested))}; left out: {', '.join(others)}"
            f" (planforge selftest {shlex.quote(str(bundle))} --precision {others[0]})"
        )


def divide_by_limit(value: float | None, limit: float) -> float:
    """Return a metric in units of its limit; infinity where it is not finite."""
    if value is None:
        return math.inf
    if limit:
        return value / limit
    return math.inf if value else 0.0


def list_remarks(result: SelftestResult) -> Iterator[str]:
    """Yield what failed, what was another token by rounding alone, and what was not compared."""
    if not result.comparisons:
        yield "nothing was compared, which is no pass"
    for comparison in (*result.texts, *result.comparisons):
        where = f"{comparison.artifact}, {comparison.case}"
        yield from (f"FAILED: {where}: {failure}" for failure in comparison.failures)
        if comparison.passed and (flip := comparison.divergence):
            yield (
                f"rounding: {where}: behind {flip['common_tokens']} tokens {flip['got']!r} instead of"
                f" {flip['want']!r}, by a margin of {flip['margin']:.3g} (at most {flip['allowed']:.3g} is"
                " rounding)"
            )
    yield from (f"{name}: {placement}" for name, placement in result.nodes.items())
    for skipped in result.skipped:
        yield f"skipped: {skipped.artifact}, {skipped.what}: {skipped.reason}"
