"""A verification as one HTML page that needs nothing else: no script, no other file, no network."""

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

from ...runtime.bundle.bundle import Bundle
from ...runtime.diagnostics.metrics import Comparison
from ...runtime.errors import PlanForgeError
from ..verification.report import VerificationReport
from .charts import Histogram, histogram, line_charts
from .output import printable
from .tables import (
    COLUMNS,
    Cell,
    Column,
    Kept,
    cell_of,
    columns_of,
    counted,
    figure,
    grouped,
    kept_groups,
    main_engine,
    share_of,
    state_of,
)

TEMPLATE = Path(__file__).with_name("report.html")
LONGEST = 600  # characters of a prompt that are shown
SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})


@dataclass(frozen=True)
class Subject:
    """What was verified.

    Attributes:
        name: of the bundle's folder.
        facts: what to say of it, by label.
    """

    name: str
    facts: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path, report: VerificationReport) -> Subject:
        """A bundle, or an .onnx file, that was verified just now."""
        now = datetime.datetime.now(datetime.timezone.utc)
        if folder.is_file():
            used = {name: version_of(name) for name in ("planforge", "onnxruntime")}
            return cls(folder.name, {"verified with": versions(used), "date": f"{now:%Y-%m-%d %H:%M} UTC"})
        try:
            manifest = Bundle.open(folder).manifest
        except PlanForgeError:  # which is what the report says
            return cls(folder.resolve().name, {"date": f"{now:%Y-%m-%d %H:%M} UTC"})
        names = ["planforge", "onnxruntime", *(["torch"] if report.with_pytorch else [])]
        used = {name: version_of(name) for name in names}
        facts = {
            "model": f"{manifest.family}, {manifest.task}",
            "from": str(manifest.source.get("argument", "")),
            "export": manifest.export_id[:8],
            "exported with": versions(manifest.tools),
            "verified with": f"{versions(used)}, on {platform.system()} {platform.machine()}",
            "date": f"{now:%Y-%m-%d %H:%M} UTC",
        }
        return cls(folder.resolve().name, {label: fact for label, fact in facts.items() if fact})


def version_of(distribution: str) -> str:
    """As installed; of onnxruntime also under the name of its GPU package."""
    for name in (distribution, f"{distribution}-gpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "?"


def versions(tools: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in tools.items())


@dataclass(frozen=True)
class Row:
    """A comparison, or one output of it.

    Attributes:
        case: the situation, or the output.
        engine: where it is not that of most.
        cells: one per column.
        passed: the verdict.
        failures: in words.
    """

    case: str
    engine: str
    cells: tuple[Cell, ...]
    passed: bool = True
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nearest:
    """A graph's figure that leaves least room: its metric, in which case, and the share of its limit."""

    metric: str
    case: str
    cell: Cell


@dataclass(frozen=True)
class Graph:
    """An artifact's comparisons.

    Attributes:
        anchor: of its table in the page.
        name: its id.
        engine: of most comparisons.
        passed: whether all did.
        failed: how many did not.
        columns: with the limit of all their cells, or "" where cells have their own.
        rows: one per comparison.
        outputs: of comparisons with several outputs, a row for each.
        nearest: to its limit.
    """

    anchor: str
    name: str
    engine: str
    passed: bool
    failed: int
    columns: tuple[tuple[Column, str], ...]
    rows: tuple[Row, ...]
    outputs: tuple[Row, ...]
    nearest: Nearest | None


@dataclass(frozen=True)
class KeptInFp32:
    """What of one artifact stays in fp32."""

    artifact: str
    count: int
    picture: Histogram
    groups: tuple[Kept, ...]


@dataclass(frozen=True)
class Parting:
    """Where greedy text leaves PyTorch's; the same in several cases is told once."""

    artifact: str
    engine: str
    cases: tuple[str, ...]
    told: Mapping[str, Any]

    @property
    def explained(self) -> bool:
        """Whether rounding does."""
        return bool(self.told["margin"] <= self.told["allowed"])


@functools.cache
def page() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=shown,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"counted": counted, "figure": any_figure, "clipped": clipped, "signs": signs}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def html_report(report: VerificationReport, subject: Subject) -> str:
    """The page."""
    graphs = [
        graph_of(f"graph-{i}", name, comparisons)
        for i, (name, comparisons) in enumerate(grouped(report.comparisons).items(), 1)
    ]
    return page().render(
        report=report,
        subject=subject,
        sentence=sentence(report, graphs),
        graphs=graphs,
        charts=line_charts(report.comparisons),
        kept=[
            KeptInFp32(artifact, len(nodes), histogram(nodes), tuple(kept_groups(nodes)))
            for artifact, nodes in report.fp32_nodes.items()
            if nodes
        ],
        partings=partings(report.comparisons),
        columns=columns_of(report.comparisons),
    )


def shown(value: Any) -> Any:
    """What the template writes: text without control characters; escaping comes after it."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def sentence(report: VerificationReport, graphs: Sequence[Graph]) -> str:
    """The verdict in words."""
    against = report.against
    comparisons = counted(len(report.comparisons), "comparison")
    if not report.comparisons:
        return f"Nothing was compared with {against}."
    failed = sum(graph.failed for graph in graphs)
    if not failed:
        return f"{comparisons} of {counted(len(graphs), 'graph')} with {against}, all within their limits."
    wrong = sum(not graph.passed for graph in graphs)
    return (
        f"{failed} of {comparisons} with {against} went wrong, in {wrong} of {counted(len(graphs), 'graph')}."
    )


def graph_of(anchor: str, name: str, comparisons: Sequence[Comparison]) -> Graph:
    columns = columns_of(comparisons)
    engine = main_engine(comparisons)
    rows = tuple(
        Row(
            c.case,
            "" if c.backend == engine else c.backend,
            tuple(cell_of(c, column) for column in columns),
            c.passed,
            c.failures,
        )
        for c in comparisons
    )
    common = [common_limit([row.cells[i] for row in rows]) for i in range(len(columns))]
    return Graph(
        anchor=anchor,
        name=name,
        engine=engine,
        passed=all(c.passed for c in comparisons),
        failed=sum(not c.passed for c in comparisons),
        columns=tuple(zip(columns, common, strict=True)),
        rows=rows,
        outputs=tuple(row for c in comparisons for row in rows_of_outputs(c, columns)),
        nearest=nearest(comparisons),
    )


def common_limit(cells: Sequence[Cell]) -> str:
    """The limit of most of a column's figures, or ""."""
    limits = Counter(cell.limit for cell in cells if cell.text)
    return limits.most_common(1)[0][0] if limits else ""


def rows_of_outputs(comparison: Comparison, columns: Sequence[Column]) -> Iterator[Row]:
    """A row per output, where there are several."""
    outputs = dict.fromkeys(name.rpartition(".")[0] for name in comparison.metrics)
    if len(outputs) > 1:
        for output in outputs:
            cells = tuple(cell_of(comparison, column, output) for column in columns)
            yield Row(comparison.case, output, cells)


def nearest(comparisons: Sequence[Comparison]) -> Nearest | None:
    limited = [
        (share_of(c.metrics[n], c.limits[n]), n, c) for c in comparisons for n in c.limits if n in c.metrics
    ]
    if not limited:
        return None
    share, name, comparison = max(limited, key=lambda item: item[0])
    output, _, metric = name.rpartition(".")
    title = next((column.title for column in COLUMNS if metric in column.metrics), metric)
    text = (
        "not finite"
        if share == math.inf
        else f"{100 * share:.0f} %"
        if share < 10
        else f"{figure(share)} times"
    )
    return Nearest(
        f"{title} of {output}" if output else title, comparison.case, Cell(text, "", share, state_of(share))
    )


def partings(comparisons: Sequence[Comparison]) -> list[Parting]:
    found: dict[tuple[str, str, str], Parting] = {}
    for c in comparisons:
        if c.divergence is not None:
            key = c.artifact, c.backend, repr(sorted(c.divergence.items()))
            cases = (*found[key].cases, c.case) if key in found else (c.case,)
            found[key] = Parting(c.artifact, c.backend, cases, c.divergence)
    return sorted(found.values(), key=lambda parting: parting.explained)


def any_figure(value: float | None) -> str:
    return "not finite" if value is None else figure(value)


def clipped(text: str) -> str:
    """The end of a long text, which is what the next token follows."""
    return text if len(text) <= LONGEST else f"… {text[-LONGEST:]}"


def signs(token: str) -> str:
    """A token whose spaces can be seen."""
    return token.translate(SIGNS) or "(nothing)"
