"""Tables of a verification's results: the columns and figures of all reports, and the terminal's table."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...runtime.apps.check.outcome import MORE_IS_BETTER, Comparison
from ..levels import describe_quick
from ..verification.fp32_nodes import Fp32Node
from .output import make_printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..verification.report import VerificationReport

NEAR = 0.8  # a figure of at least this share of its limit is marked
CHANGES = {"top1_changes"}  # shown as the share that did not change
COUNTS = {"rows", "settings", "texts", "weights"}
NOT_SHOWN = {"finite", "common_prefix_of"}


@dataclass(frozen=True)
class Column:
    """A column of a table of comparisons; the page's template explains its figures."""

    title: str
    metrics: tuple[str, ...]  # the metrics that it shows; a comparison has one of them
    percent: bool = False  # whether it is a share
    brief: bool = False  # whether a terminal shows it


COLUMNS = (
    Column("max error", ("max_error",), brief=True),
    Column("mean error", ("mean_error",)),
    Column("mean KL", ("mean_kl", "text_kl"), brief=True),
    Column("1 - cosine", ("cosine_gap",), brief=True),
    Column("mean 1 - cosine", ("mean_cosine_gap",)),
    Column("top 10 changes", ("rank_changes",), percent=True, brief=True),
    Column("Kendall's tau", ("kendall_tau",)),
    Column("rms error", ("rms_error",), brief=True),
    Column("path error", ("path_error",), brief=True),
    Column("top-1", ("top1_agreement", "top1_changes"), percent=True, brief=True),
    Column("probability error", ("probability_error",), brief=True),
    Column("label flips", ("label_flips",), brief=True),
    Column("label changes", ("label_changes",), percent=True),
    Column("top-5", ("top5_agreement",), percent=True),
    Column("flip margin", ("flip_margin",)),
    Column("same tokens", ("common_prefix",)),
    Column("perplexity", ("perplexity_change",), percent=True, brief=True),
    Column("score error", ("score_error",), brief=True),
    Column("compared", ("rows", "weights", "settings", "texts")),
)


@dataclass(frozen=True)
class Cell:
    """One figure of a comparison."""

    text: str = ""
    limit: str = ""  # what is allowed, as in "≤ 0.1", or ""
    share: float | None = None  # the figure in units of its limit; None where there is none
    state: str = ""  # "", "near" its limit, or "over" it


def choose_columns(comparisons: Sequence[Comparison]) -> list[Column]:
    """Return the columns that any comparison has a figure for; metrics without a column come last."""
    names = dict.fromkeys(name.rpartition(".")[2] for c in comparisons for name in c.metrics)
    known = {metric for column in COLUMNS for metric in column.metrics} | NOT_SHOWN
    others = [Column(name.replace("_", " "), (name,)) for name in names if name not in known]
    return [column for column in (*COLUMNS, *others) if not names.keys().isdisjoint(column.metrics)]


def make_cell(comparison: Comparison, column: Column, output: str | None = None) -> Cell:
    """Return the worst figure of a comparison's outputs, or the figure of a single output."""
    names = [
        name
        for name in comparison.metrics
        if name.rpartition(".")[2] in column.metrics and output in (None, name.rpartition(".")[0])
    ]
    if not names:
        return Cell()
    name = max(names, key=lambda name: rank_badness(comparison, name))
    value = comparison.metrics[name]
    limit = comparison.limits.get(name)
    metric = name.rpartition(".")[2]
    if metric == "common_prefix":
        return Cell(f"{value} of {comparison.metrics.get(f'{name}_of', '?')}")
    if metric in COUNTS:
        return Cell(pluralize(int(value or 0), metric.removesuffix("s")))
    text = format_value(value, column, metric)
    if limit is None:
        return Cell(text, state="over" if value is None else "")
    share = compute_share(name, value, limit)
    sign = "≥" if metric in CHANGES or metric in MORE_IS_BETTER else "≤"
    return Cell(text, f"{sign} {format_value(limit, column, metric)}", share, judge_share(share))


def judge_share(share: float) -> str:
    """Return the state of a figure with this share of its limit; NaN is over it."""
    if not share <= 1:
        return "over"
    return "near" if share >= NEAR else ""


def rank_badness(comparison: Comparison, name: str) -> tuple[bool, float, float]:
    """Return a sort key, largest for the worst: not finite, then nearest to its limit."""
    value = comparison.metrics[name]
    limit = comparison.limits.get(name)
    if value is None:
        return True, 0.0, 0.0
    is_better = name.rpartition(".")[2] in (*MORE_IS_BETTER, "common_prefix")
    size = -float(value) if is_better else float(value)
    return False, -1.0 if limit is None else compute_share(name, value, limit), size


def compute_share(name: str, value: float | None, limit: float) -> float:
    """Return a metric in units of its limit; for a share that should be large, the missing part of it."""
    if value is None or not math.isfinite(value):
        return math.inf
    if name.rpartition(".")[2] in MORE_IS_BETTER:
        value = 1 - value
        limit = 1 - limit
    if limit > 0:
        return value / limit
    return math.inf if value > limit else 0.0


def format_value(value: float | None, column: Column, metric: str) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    if metric in CHANGES:
        value = 1 - value
    return format_percent(value) if column.percent else format_figure(value)


def format_figure(value: float) -> str:
    """Format with three digits, as in 0.0123, 4.89e-6 or 3060."""
    text = f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].replace('+', '')}{m[2]}", text)


def format_percent(share: float) -> str:
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


def find_main_engine(comparisons: Sequence[Comparison]) -> str:
    """Return the engine of most comparisons."""
    return Counter(c.backend for c in comparisons).most_common(1)[0][0]


def describe_verdict(report: VerificationReport) -> str:
    """Return a line such as "passed: 44 comparisons with PyTorch", or "FAILED: 2 of 44 comparisons ..."."""
    comparisons = pluralize(len(report.comparisons), "comparison")
    if not report.passed:
        comparisons = f"{sum(not c.passed for c in report.comparisons)} of {comparisons}"
    verdict = "passed" if report.passed else "FAILED"
    return f"{verdict}{describe_quick(report.level)}: {comparisons} with {report.against}"


def pluralize(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Kept:
    """Nodes of one operator that stay in fp32 for the same reason."""

    op_type: str
    reason: str
    nodes: tuple[Fp32Node, ...]

    @property
    def largest(self) -> float:
        """Return the largest magnitude of their results."""
        return max(max(abs(node.low), abs(node.high)) for node in self.nodes)


def group_nodes_in_fp32(nodes: Iterable[Fp32Node]) -> list[Kept]:
    """Group nodes by reason and operator, without details that differ per node, in order of group size."""
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


def make_tables(report: VerificationReport) -> list[RenderableType]:
    """Make tables for a terminal of 100 columns: verdict, a line per case, and all faults in full."""
    table = make_comparison_table(describe_verdict(report), report.comparisons)
    details = collect_details(report)
    return [table, *(make_paragraphs(title, lines) for title, lines in details.items() if lines)]


def make_comparison_table(title: str, comparisons: Sequence[Comparison], *, by_engine: bool = False) -> Table:
    """Return a table with a line of the main figures of each case, by graph, or by graph and engine."""
    columns = [column for column in choose_columns(comparisons) if column.brief]
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("", overflow="fold", max_width=44)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    groups = list(group_by_artifact(comparisons).values())
    if by_engine:
        groups = [
            [c for c in own if c.backend == e]
            for own in groups
            for e in dict.fromkeys(c.backend for c in own)
        ]
    for own in groups:
        artifact = own[0].artifact
        engine = find_main_engine(own)
        table.add_row(Text(make_printable(f"{artifact} on {engine}"), style="bold"))
        for c in own:
            case = c.case if c.backend == engine else f"{c.case} ({c.backend})"
            cells = [make_cell(c, column) for column in columns]
            verdict = Text("passed") if c.passed else Text("FAILED", style="bold red")
            texts = [Text(cell.text, style=STYLES[cell.state]) for cell in cells]
            table.add_row(Padding(Text(make_printable(case)), (0, 0, 0, 2)), *texts, verdict)
    return table


STYLES = {"": "", "near": "yellow", "over": "bold red"}
RUN_PLANS = "graphs alone were compared; `planforge selftest BUNDLE` runs a plan, on a machine with its GPU"


def collect_details(report: VerificationReport) -> dict[str, list[str]]:
    """Return the details that a table has no room for, as lines by title."""
    kept = [describe_nodes_in_fp32(artifact, nodes) for artifact, nodes in report.fp32_nodes.items() if nodes]
    return {
        "how much was compared": [report.describe_level()] if report.level else [],
        "what failed": report.list_failures(),
        "where": report.list_locations(),
        "what stays in fp32": kept,
        f"plans: {report.plans}": [RUN_PLANS] if report.plans else [],
    }


def make_paragraphs(title: str, lines: Sequence[str]) -> RenderableType:
    """Return a titled table with a row for each line."""
    table = Table(title=Text(title), title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column("", overflow="fold")
    for line in lines:
        table.add_row(Text(make_printable(line)))
    return table
