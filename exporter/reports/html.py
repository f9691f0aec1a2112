"""Writes a verification report as one HTML page, which needs no script, other file or network."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ...runtime.apps.check.outcome import Comparison
from ...runtime.bundle.bundle import Bundle
from ...runtime.errors import PlanForgeError
from ..verification.report import VerificationReport
from . import tables
from .charts import draw_histogram, draw_line_charts
from .output import make_printable
from .tables import Cell, Column, format_figure, pluralize

TEMPLATE = Path(__file__).with_name("report.html")
LONGEST = 600  # characters of a prompt that are shown
SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})


@dataclass(frozen=True)
class Subject:
    """The bundle or file that was verified."""

    name: str  # the name of the bundle's folder
    facts: Mapping[str, str]  # what the page's head lists, by label

    @classmethod
    def of(cls, folder: Path, report: VerificationReport) -> Subject:
        """Return the facts of a bundle, or an .onnx file, that was verified just now."""
        date = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
        names = ["planforge", "onnxruntime", *(["torch"] if report.with_pytorch else [])]
        used = format_versions({name: find_version(name) for name in names})
        if folder.is_file():
            return cls(folder.name, {"verified with": used, "date": date})
        try:
            manifest = Bundle.open(folder).manifest
        except PlanForgeError:  # which the report shows
            return cls(folder.resolve().name, {"date": date})
        facts = {
            "model": f"{manifest.family}, {manifest.task}",
            "from": str(manifest.source.get("argument", "")),
            "export": manifest.export_id[:8],
            "exported with": format_versions(manifest.tools),
            "verified with": f"{used}, on {platform.system()} {platform.machine()}",
            "date": date,
        }
        return cls(folder.resolve().name, {label: fact for label, fact in facts.items() if fact})


def find_version(distribution: str) -> str:
    """Return a package's installed version; for onnxruntime it may be that of its GPU package."""
    for name in (distribution, f"{distribution}-gpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "?"


def format_versions(tools: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in tools.items())


@dataclass(frozen=True)
class Row:
    """A row for a comparison, or for one output of it."""

    case: str  # what was compared
    engine: str  # the engine, where it is not the graph's usual one; of an output's row, the output's name
    cells: tuple[Cell, ...]  # one per column
    passed: bool = True
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nearest:
    """The figure of a graph that is nearest to its limit: metric, case, and share of the limit."""

    metric: str
    case: str
    cell: Cell


@dataclass(frozen=True)
class Graph:
    """An artifact's comparisons."""

    anchor: str  # the HTML id of its table
    name: str  # the artifact's id
    engine: str  # of most comparisons
    failed: int  # how many did not pass
    columns: tuple[tuple[Column, str], ...]  # each with the limit of most of its cells, or ""
    rows: tuple[Row, ...]  # one per comparison
    outputs: tuple[Row, ...]  # one per output, of comparisons with several outputs
    nearest: Nearest | None  # the figure that is nearest to its limit


@dataclass(frozen=True)
class Parting:
    """The first difference of greedy text from PyTorch's; one that several cases share is listed once."""

    artifact: str
    engine: str
    cases: tuple[str, ...]
    told: Mapping[str, Any]

    @property
    def explained(self) -> bool:
        """Return whether rounding explains the difference."""
        return bool(self.told["margin"] <= self.told["allowed"])


@functools.cache
def load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=escape_controls,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "counted": pluralize,
        "figure": lambda value: "not finite" if value is None else format_figure(value),
        "clipped": clip,
        "signs": show_spaces,
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def render_html(report: VerificationReport, subject: Subject) -> str:
    """Return the page as HTML."""
    graphs = [
        make_graph(f"graph-{i}", name, comparisons)
        for i, (name, comparisons) in enumerate(tables.group_by_artifact(report.comparisons).items(), 1)
    ]
    return load_template().render(
        report=report,
        subject=subject,
        sentence=summarize(report, graphs),
        graphs=graphs,
        charts=draw_line_charts(report.comparisons, report.precisions),
        kept=[
            (artifact, len(nodes), draw_histogram(nodes), tables.group_nodes_in_fp32(nodes))
            for artifact, nodes in report.fp32_nodes.items()
            if nodes
        ],
        partings=find_partings(report.comparisons),
        columns=tables.choose_columns(report.comparisons),
    )


def escape_controls(value: Any) -> Any:
    """Replace control characters in text that the template writes; escaping comes after it."""
    return make_printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def summarize(report: VerificationReport, graphs: Sequence[Graph]) -> str:
    """Return the verdict as one sentence."""
    against = report.against
    comparisons = pluralize(len(report.comparisons), "comparison")
    if not report.comparisons:
        return f"Nothing was compared with {against}."
    failed = sum(graph.failed for graph in graphs)
    if not failed:
        passed = f"{comparisons} with {against}, all within their limits."
        return f"{passed} {report.describe_level()}".strip()
    wrong = ", ".join(graph.name for graph in graphs if graph.failed)
    return f"{failed} of {comparisons} with {against} went wrong, in {wrong}."


def make_graph(anchor: str, name: str, comparisons: Sequence[Comparison]) -> Graph:
    columns = tables.choose_columns(comparisons)
    engine = tables.find_main_engine(comparisons)
    rows = []
    for c in comparisons:
        cells = tuple(tables.make_cell(c, column) for column in columns)
        rows.append(Row(c.case, "" if c.backend == engine else c.backend, cells, c.passed, c.failures))
    common = [find_common_limit([row.cells[i] for row in rows]) for i in range(len(columns))]
    return Graph(
        anchor=anchor,
        name=name,
        engine=engine,
        failed=sum(not c.passed for c in comparisons),
        columns=tuple(zip(columns, common, strict=True)),
        rows=tuple(rows),
        outputs=tuple(row for c in comparisons for row in list_outputs(c, columns)),
        nearest=find_nearest(comparisons),
    )


def find_common_limit(cells: Sequence[Cell]) -> str:
    """Return the limit of most of a column's figures, or ""."""
    limits = Counter(cell.limit for cell in cells if cell.text)
    return limits.most_common(1)[0][0] if limits else ""


def list_outputs(comparison: Comparison, columns: Sequence[Column]) -> Iterator[Row]:
    """Yield a row per output, where there are several."""
    outputs = dict.fromkeys(name.rpartition(".")[0] for name in comparison.metrics)
    if len(outputs) > 1:
        for output in outputs:
            cells = tuple(tables.make_cell(comparison, column, output) for column in columns)
            yield Row(comparison.case, output, cells)


def find_nearest(comparisons: Sequence[Comparison]) -> Nearest | None:
    limited = [
        (tables.compute_share(n, c.metrics[n], c.limits[n]), n, c)
        for c in comparisons
        for n in c.limits
        if n in c.metrics
    ]
    if not limited:
        return None
    share, name, comparison = max(limited, key=lambda item: item[0])
    output, _, metric = name.rpartition(".")
    title = next((column.title for column in tables.COLUMNS if metric in column.metrics), metric)
    if share == math.inf:
        text = "not finite"
    elif share < 10:
        text = f"{100 * share:.0f} %"
    else:
        text = f"{format_figure(share)} times"
    cell = Cell(text, "", share, tables.judge_share(share))
    return Nearest(f"{title} of {output}" if output else title, comparison.case, cell)


def find_partings(comparisons: Sequence[Comparison]) -> list[Parting]:
    found: dict[tuple[str, str, str], Parting] = {}
    for c in comparisons:
        if c.divergence is not None:
            key = c.artifact, c.backend, repr(sorted(c.divergence.items()))
            cases = (*found[key].cases, c.case) if key in found else (c.case,)
            found[key] = Parting(c.artifact, c.backend, cases, c.divergence)
    return sorted(found.values(), key=lambda parting: parting.explained)


def clip(text: str) -> str:
    """Return the end of a long text, which the next token follows."""
    return text if len(text) <= LONGEST else f"… {text[-LONGEST:]}"


def show_spaces(token: str) -> str:
    """Return a token with visible signs for its spaces."""
    return token.translate(SIGNS) or "(nothing)"
