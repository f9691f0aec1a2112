"""Tables of a verification's results: the columns and figures of all reports, and the terminal's table."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...runtime.diagnostics.metrics import Comparison
from ..verification.fp32_nodes import Fp32Node
from .output import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..verification.report import VerificationReport

NEAR = 0.8  # a figure of at least this share of its limit is marked
CHANGES = {"top1_changes"}  # shown as the share that did not change
MORE_IS_BETTER = {"top1_agreement", "top5_agreement", "common_prefix"}
COUNTS = {"rows", "weights"}
NOT_SHOWN = {"finite", "common_prefix_of"}


@dataclass(frozen=True)
class Column:
    """A column of a table of comparisons."""

    title: str
    metrics: tuple[str, ...]  # the metrics that it shows; a comparison has one of them
    meaning: str = ""  # an explanation of the figure
    percent: bool = False  # whether it is a share
    brief: bool = False  # whether a terminal shows it


COLUMNS = (
    Column(
        "max error",
        ("max_error",),
        "The largest difference of two logits, or of two numbers of a vector, in units of the spread of"
        " the reference's.",
        brief=True,
    ),
    Column("mean error", ("mean_error",), "The mean difference, in the same units."),
    Column(
        "mean KL",
        ("mean_kl", "text_kl"),
        "Divergence of the reference's distribution over tokens or classes from the engine's, in nats,"
        " averaged over rows.",
        brief=True,
    ),
    Column(
        "1 - cosine",
        ("cosine_gap",),
        "One less the smallest cosine of a vector and its reference.",
        brief=True,
    ),
    Column(
        "mean 1 - cosine", ("mean_cosine_gap",), "One less the mean cosine, of the vectors of whole texts."
    ),
    Column(
        "top-1",
        ("top1_agreement", "top1_changes"),
        "Share of rows where the reference's likeliest token is the engine's too.",
        percent=True,
        brief=True,
    ),
    Column(
        "top-5",
        ("top5_agreement",),
        "Share of the reference's five likeliest tokens that are among the engine's five.",
        percent=True,
    ),
    Column(
        "flip margin",
        ("flip_margin",),
        "Where the likeliest token is another, by how many logits the reference preferred its own, at most:"
        " at 0.01 that is rounding, at 3 it is a bug.",
    ),
    Column(
        "same tokens",
        ("common_prefix",),
        "How many tokens the engine, free to choose, takes as the reference does before a row leaves.",
    ),
    Column(
        "perplexity",
        ("perplexity_change",),
        "How much worse the engine predicts real text; a gain counts as none.",
        percent=True,
        brief=True,
    ),
    Column(
        "score error",
        ("score_error",),
        "The largest difference of the scores that beam search and the reference give the same target.",
        brief=True,
    ),
    Column(
        "compared",
        ("rows", "weights"),
        "How many rows of logits or vectors; or how many weights, kept as floats, with the checkpoint's.",
    ),
)


@dataclass(frozen=True)
class Cell:
    """One figure of a comparison."""

    text: str = ""
    limit: str = ""  # what is allowed, as in "≤ 0.1", or ""
    share: float | None = None  # the figure in units of its limit; None where there is none
    state: str = ""  # "", "near" its limit, or "over" it


def columns_of(comparisons: Sequence[Comparison]) -> list[Column]:
    """Return the columns that any comparison has a figure for; metrics without a column come last."""
    names = dict.fromkeys(name.rpartition(".")[2] for c in comparisons for name in c.metrics)
    known = {metric for column in COLUMNS for metric in column.metrics} | NOT_SHOWN
    others = [Column(name.replace("_", " "), (name,)) for name in names if name not in known]
    return [column for column in (*COLUMNS, *others) if not names.keys().isdisjoint(column.metrics)]


def cell_of(comparison: Comparison, column: Column, output: str | None = None) -> Cell:
    """Return the worst figure of a comparison's outputs, or the figure of one output."""
    names = [
        name
        for name in comparison.metrics
        if name.rpartition(".")[2] in column.metrics and output in (None, name.rpartition(".")[0])
    ]
    if not names:
        return Cell()
    name = max(names, key=lambda name: badness(comparison, name))
    value = comparison.metrics[name]
    limit = comparison.limits.get(name)
    metric = name.rpartition(".")[2]
    if metric == "common_prefix":
        return Cell(f"{value} of {comparison.metrics.get(f'{name}_of', '?')}")
    if metric in COUNTS:
        return Cell(pluralize(int(value or 0), metric.removesuffix("s")))
    share = None if limit is None else share_of(value, limit)
    if value is None:
        state = "over"
    elif share is None:
        state = ""
    else:
        state = state_of(share)
    return Cell(format_value(value, column, metric), limit_text(limit, column, metric), share, state)


def state_of(share: float) -> str:
    """Return the state of a figure with this share of its limit; NaN is over it."""
    if not share <= 1:
        return "over"
    return "near" if share >= NEAR else ""


def badness(comparison: Comparison, name: str) -> tuple[bool, float, float]:
    """Return a sort key, largest for the worst: not finite, then nearest to its limit."""
    value = comparison.metrics[name]
    limit = comparison.limits.get(name)
    if value is None:
        return True, 0.0, 0.0
    size = -float(value) if name.rpartition(".")[2] in MORE_IS_BETTER else float(value)
    return False, -1.0 if limit is None else share_of(value, limit), size


def share_of(value: float | None, limit: float) -> float:
    if value is None or not math.isfinite(value):
        return math.inf
    if limit > 0:
        return value / limit
    return math.inf if value > limit else 0.0


def limit_text(limit: float | None, column: Column, metric: str) -> str:
    if limit is None:
        return ""
    return f"{'≥' if metric in CHANGES else '≤'} {format_value(limit, column, metric)}"


def format_value(value: float | None, column: Column, metric: str) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    if metric in CHANGES:
        value = 1 - value
    return percent(value) if column.percent else figure(value)


def figure(value: float) -> str:
    """Format with three digits, as in 0.0123, 4.89e-6 or 3060."""
    text = f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].replace('+', '')}{m[2]}", text)


def percent(share: float) -> str:
    """Format a share, as in 99.97 %; what only rounds to 100 % is shown as >99.99 %."""
    text = f"{100 * share:.2f}"
    if text == "100.00" and share < 1:
        text = ">99.99"
    if text == "0.00" and share > 0:
        text = "<0.01"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "\N{NO-BREAK SPACE}%"


def group_by_artifact(comparisons: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Group comparisons by artifact, in the order in which they come."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.artifact, []).append(comparison)
    return groups


def main_engine(comparisons: Sequence[Comparison]) -> str:
    """Return the engine of most comparisons."""
    return Counter(c.backend for c in comparisons).most_common(1)[0][0]


def verdict_of(report: VerificationReport) -> str:
    """Return a line such as "passed: 44 comparisons with PyTorch"."""
    against = report.against
    count = len(report.comparisons)
    return f"{'passed' if report.passed else 'FAILED'}: {pluralize(count, 'comparison')} with {against}"


def pluralize(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Kept:
    """Nodes of one operator that stay in fp32 for one reason."""

    op_type: str
    reason: str
    nodes: tuple[Fp32Node, ...]

    @property
    def largest(self) -> float:
        """The largest magnitude of their results."""
        return max(max(abs(node.low), abs(node.high)) for node in self.nodes)


def group_nodes_in_fp32(nodes: Iterable[Fp32Node]) -> list[Kept]:
    """Group nodes by reason and operator, without what differs per node; the largest groups come first."""
    groups: dict[tuple[str, str], list[Fp32Node]] = {}
    for node in nodes:
        groups.setdefault((node.op_type, node.group or node.reason), []).append(node)
    kept = []
    for (op_type, reason), members in groups.items():
        reached = [node.reached for node in members if node.reached is not None]
        if reached:
            reason = reason.replace("reaches", f"reaches {max(reached):.2g}", 1)
        kept.append(Kept(op_type, reason, tuple(members)))
    return sorted(kept, key=lambda group: -len(group.nodes))


def describe_nodes_in_fp32(artifact: str, nodes: Sequence[Fp32Node]) -> str:
    """Return a line such as "decoder.portable.fp16: 9 LayerNormalization (sums squares), 2 Add (...)"."""
    groups = [f"{len(group.nodes)} {group.op_type} ({group.reason})" for group in group_nodes_in_fp32(nodes)]
    return f"{artifact}: {', '.join(groups)}"


def verification_table(report: VerificationReport) -> list[RenderableType]:
    """Return tables for a terminal of 100 columns: verdict, a line per case, and what is wrong in full."""
    columns = [column for column in columns_of(report.comparisons) if column.brief]
    table = Table(title=Text(verdict_of(report)), title_justify="left", box=None, pad_edge=False)
    table.add_column("", overflow="fold", max_width=44)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for artifact, comparisons in group_by_artifact(report.comparisons).items():
        engine = main_engine(comparisons)
        table.add_row(Text(printable(f"{artifact} on {engine}"), style="bold"))
        for c in comparisons:
            case = c.case if c.backend == engine else f"{c.case} ({c.backend})"
            cells = [Text(cell.text, style=STYLES[cell.state]) for cell in (cell_of(c, x) for x in columns)]
            verdict = Text("passed") if c.passed else Text("FAILED", style="bold red")
            table.add_row(Padding(Text(printable(case)), (0, 0, 0, 2)), *cells, verdict)
    return [table, *(paragraphs(title, lines) for title, lines in collect_details(report).items() if lines)]


STYLES: Mapping[str, str] = {"": "", "near": "yellow", "over": "bold red"}


RUN_PLANS = "graphs alone were compared; `planforge selftest BUNDLE` runs a plan, on a machine with its GPU"


def collect_details(report: VerificationReport) -> dict[str, list[str]]:
    """Return the details that a table has no room for, as lines by title."""
    failures = [
        f"{c.artifact} on {c.backend}, {c.case}: {'; '.join(c.failures)}"
        for c in report.comparisons
        if not c.passed
    ]
    kept = [describe_nodes_in_fp32(artifact, nodes) for artifact, nodes in report.fp32_nodes.items() if nodes]
    return {
        "what failed": failures,
        "where": report.where(),
        "what stays in fp32": kept,
        f"plans: {report.plans}": [RUN_PLANS] if report.plans else [],
    }


def paragraphs(title: str, lines: Sequence[str]) -> RenderableType:
    """Return a titled table with a row for each line."""
    table = Table(title=Text(title), title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column("", overflow="fold")
    for line in lines:
        table.add_row(Text(printable(line)))
    return table
