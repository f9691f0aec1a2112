"""`planforge selftest`: whether an engine on this machine still computes a bundle's model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import typer

from .console import print_json, print_lines, print_tables, running
from .run_options import BackendOption, BundleArgument, DeviceOption, JsonOption, PrecisionOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ..diagnostics.metrics import Comparison
    from ..diagnostics.selftest import SelftestResult


def selftest(
    bundle: BundleArgument,
    backend: BackendOption = "auto",
    precision: PrecisionOption = None,
    device: DeviceOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare this machine's engine with PyTorch's answers, kept at export; exit 1 if one differs.

    Logits, greedy tokens, embeddings. Every file is hashed first. Needs neither torch nor onnx.
    """
    with running() as progress:
        from ..diagnostics.selftest import selftest as test

        result = test(bundle, backend, precision, device, progress)
    if as_json:
        print_json(result.to_json())
    else:
        print_tables([selftest_table(bundle.resolve().name, result)])
        print_lines(remarks(result))
    if not result.passed:
        raise typer.Exit(1)


def selftest_table(name: str, result: SelftestResult) -> RenderableType:
    """Return a table with a row for each comparison, with the metric that is nearest to its limit."""
    from .tables import table

    verdict = "passed" if result.passed else "FAILED"
    title = f"{verdict}: {name} on {result.backend} against PyTorch's answers, {result.seconds:.1f} s"
    columns = ("graph", "case", "nearest to its limit", "measured", "allowed", "same tokens", "verdict")
    return table(title, columns, [row_of(comparison) for comparison in result.comparisons])


def row_of(comparison: Comparison) -> list[str]:
    metrics = comparison.metrics
    limits = comparison.limits
    name = max(limits, key=lambda each: share_of(metrics[each], limits[each]))
    value = metrics[name]
    tokens = metrics.get("common_prefix")
    return [
        comparison.artifact,
        comparison.case,
        name,
        "not finite" if value is None else f"{value:.3g}",
        f"{limits[name]:.3g}",
        "" if tokens is None else f"{tokens} of {metrics['common_prefix_of']}",
        "passed" if comparison.passed else "FAILED",
    ]


def share_of(value: float | None, limit: float) -> float:
    """Return a metric in units of its limit; infinity where it is not finite."""
    if value is None:
        return math.inf
    if limit:
        return value / limit
    return math.inf if value else 0.0


def remarks(result: SelftestResult) -> Iterator[str]:
    """Yield what failed, what was another token by rounding alone, and what was not compared."""
    if not result.comparisons:
        yield "nothing was compared, which is no pass"
    for comparison in result.comparisons:
        where = f"{comparison.artifact}, {comparison.case}"
        yield from (f"FAILED: {where}: {failure}" for failure in comparison.failures)
        if comparison.passed and (flip := comparison.divergence):
            yield (
                f"rounding: {where}: behind {flip['common_tokens']} tokens {flip['got']!r} instead of"
                f" {flip['want']!r}, by a margin of {flip['margin']:.3g} (at most {flip['allowed']:.3g} is"
                " rounding)"
            )
    for each in result.skipped:
        yield f"skipped: {each.artifact}, {each.what}: {each.reason}"
