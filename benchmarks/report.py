"""Reports the results as Markdown, as a plot, in docs/benchmark.md and, the best rows, in the README."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .alike import abbreviate
from .comparison import PLANFORGE, Result, Row, alone, comparisons, measured_in_a_row, number
from .measure import TIMES, value_of

Suite = Mapping[str, Any]  # "environment", "cases" by their names, and "left_out"

BEGIN = "<!-- benchmarks: begin -->"
END = "<!-- benchmarks: end -->"
# The cases that the README shows; docs/benchmark.md shows all.
BEST = (
    "decode-fp32-b1",
    "decode-8bit-b1",
    "decode-fp32-b8",
    "prompt-fp32",
    "encode-bert-mixed",
    "translate-b8",
)
# The tables of docs/benchmark.md: the headings of the groups of cases.
HEADINGS = {
    **dict.fromkeys(("decode", "prompt", "start"), "GPT-2 124M"),
    **{"encode": "Encoders", "translate": "MarianMT shape", "llama": "Qwen2.5 0.5B's shape"},
    **{"imported": "Graphs exported by optimum", "package": "A bundle's graph in onnxruntime-genai"},
}
# Cases without peers that only suite.md shows.
DETAILS = (
    *("position", "overhead", "llama-windows", "growth-context", "growth-size", "growth-threads"),
    *("lookup-dictated-2", "lookup-dictated-3", "lookup-list", "lookup-prose"),
)
UNITS = {
    "per_s": "per second",
    "row_per_s": "per second in a row",
    "ttft_ms": "ms to first token",
    "inter_token_ms": "ms per token",
    "start_s": "s to first token",
    "peak_rss_mb": "MB of memory",
    "file_mb": "MB of files",
    "cosine_mean": "mean cosine to fp32",
    "cosine_min": "least cosine to fp32",
    "ms": "ms",
    "row_ms": "ms in a row",
    "outside_ms": "CPU ms outside of the engine",
}
# Columns of a case's table: heading, figure, number in it, format.
COLUMNS = (
    ("per second", "per_s", "", "{:,.1f}"),
    ("per second in a row", "row_per_s", "", "{:,.1f}"),
    ("first token ms", "ttft_ms", "p50", "{:.1f}"),
    ("ms per token p50", "inter_token_ms", "p50", "{:.2f}"),
    ("p99", "inter_token_ms", "p99", "{:.2f}"),
    ("CPU ms per token", "cpu_ms", "", "{:.2f}"),
    ("of it outside of the engine", "outside_ms", "", "{:.3f}"),
    ("whole ms p50", "ms", "p50", "{:,.0f}"),
    ("p99", "ms", "p99", "{:,.0f}"),
    ("whole ms in a row p50", "row_ms", "", "{:,.0f}"),
    ("process start to first token s", "start_s", "p50", "{:.2f}"),
    ("peak RSS MB", "peak_rss_mb", "", "{:,}"),
    ("files MB", "file_mb", "", "{:,.0f}"),
    ("of memory bandwidth", "bandwidth_share", "", "{:.0%}"),
    ("same tokens", "same_tokens", "", "{:.0%}"),
    ("cosine mean", "cosine_mean", "", "{:.4f}"),
    ("min", "cosine_min", "", "{:.4f}"),
)
IN_TURNS = ("per second", "whole ms p50")  # columns that have another one for works in a row
WITHOUT_AMX = " llama.cpp is compiled without AMX: with it, it crashes."
IN_CACHE = 1.05  # of the memory's speed, which varies from case to case


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with numbers aligned to the right."""
    lines = [heading, ["---", *["--:"] * (len(heading) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def case_section(result: Result) -> str:
    """Return the section of one case: every figure of every entry, skipped entries, and the targets."""
    entries = result["entries"]
    machine = result["machine"]
    used = [c for c in COLUMNS if any(cell(figures, c, machine) for figures in entries.values())]
    rows = [[figures["name"], *(cell(figures, c, machine) for c in used)] for figures in entries.values()]
    both = measured_in_a_row(result)
    parts = [
        f"## {result['title']}\n",
        table(["", *(f"{c[0]} in turns" if both and c[0] in IN_TURNS else c[0] for c in used)], rows),
        f"{result['date']}, {result['rounds']} rounds; the machine reads {machine['read_gb_per_s']} GB/s"
        f" and multiplies at {machine['gflop_per_s']} GFLOP/s{describe_cache(machine)}, and was"
        f" {machine['busy']:.0%} busy with other things.\n",
        "".join(f"- {line}\n" for line in (*notes(result), *targets(result))),
    ]
    return "\n".join(parts)


def describe_cache(machine: Mapping[str, Any]) -> str:
    """Return the size of the last cache in words, where it is known."""
    size = machine.get("last_cache_mb")
    return f", has a last cache of {size:,.0f} MB" if size else ""


def cell(
    figures: Mapping[str, Any],
    column: tuple[str, str, str, str],
    machine: Mapping[str, Any] | None = None,
) -> str:
    """Return a figure as text, "" where it was not measured; a CPU's caches are known by its `machine`."""
    value = figures.get(column[1])
    if machine is not None and column[1] == "bandwidth_share" and lies_in_cache(figures, machine):
        return "in the last cache"
    if isinstance(value, Mapping):
        value = value[column[2]]
    return "" if value is None else column[3].format(value)


def lies_in_cache(figures: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Tell whether weights fit into the last cache and are read faster than the memory can be."""
    fits: bool = figures["file_mb"] <= machine.get("last_cache_mb", 0)
    return fits and figures.get("bandwidth_share", 0) > IN_CACHE


def notes(result: Result) -> Iterator[str]:
    """Yield the differences between the entries, with the reason, and the entries that did not take part."""
    entries = result["entries"]
    first = next(iter(entries.values()), None)
    for figures in entries.values():
        for key in figures["differs"]:
            if first is not None and key not in result["varies"]:
                one, other = abbreviate(first["did"][key], figures["did"][key])
                yield f"{figures['name']}: {key} is {other} instead of {one}: {figures['differences'][key]}"
    for name, reason in result["skipped"].items():
        yield f"without {name}: {reason}"


def targets(result: Result) -> Iterator[str]:
    """Return each target, and whether it was met."""
    for target in result["targets"]:
        verdict = {True: "met", False: "**missed**", None: "not measured"}[target["met"]]
        found = "" if target["found"] is None else f", found {target['found']:g}"
        who = target["of"]
        what = UNITS[target["metric"]]
        if "to" in target:
            who = f"{who} over {target['to']}"
            wanted = f"at least {target['at_least']:g}x"
        else:
            wanted = " and ".join(
                f"{words} {target[key]:g}"
                for key, words in (("at_least", "at least"), ("at_most", "at most"))
                if key in target
            )
        yield f"{who}, {what}: {wanted}{found}: {verdict}"


def comparison_table(results: Mapping[str, Result], heading: str = "") -> str:
    """Return a table of all comparisons, PlanForge first; titles do not repeat the heading above it."""
    rows = comparisons(results, in_a_row=True)
    systems = list(dict.fromkeys(name for row in rows for name in row.values))
    systems.sort(key=lambda name: name != PLANFORGE)
    cells = [
        [row.title.removeprefix(f"{heading}, "), *(row.labels.get(name, "") for name in systems)]
        for row in rows
    ]
    return (table(["", *systems], cells) if rows else "") + "\n"


def summary(results: Mapping[str, Result]) -> str:
    """Return a table of comparisons below each heading, and a line for each case without peers."""
    tables: dict[str, dict[str, Result]] = {}
    lines = []
    for case, result in results.items():
        if not alone(result):
            tables.setdefault(HEADINGS.get(result["group"], "Others"), {})[case] = result
        elif result["entries"] and case not in DETAILS:
            metric = result["metric"]
            found = (
                f"{figures['name'].removeprefix(PLANFORGE).strip()} **{number(value_of(figures, metric))}**"
                for figures in result["entries"].values()
            )
            lines.append(f"- {result['title']}: {'; '.join(found)}\n")
    parts = [
        f"#### {heading}\n\n{comparison_table(compared, heading)}" for heading, compared in tables.items()
    ]
    return "".join(parts + (["#### PlanForge alone\n\n"] if lines else []) + lines)


def plot(results: Mapping[str, Result], path: Path, heading: str) -> None:
    """Draw a panel of bars for each comparison of two systems or more, two panels in a line."""
    from matplotlib.figure import Figure

    rows = [row for row in comparisons(results) if len(row.values) > 1]
    if not rows:
        return
    lines = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    heights = [0.85 + 0.27 * max(len(row.values) for row in line) for line in lines]
    figure = Figure(figsize=(10, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(heading, fontsize=12)
    panels = figure.subplots(len(lines), 2, squeeze=False, height_ratios=heights)
    for pair, line in zip(panels, lines, strict=True):
        slots = max(len(row.values) for row in line)
        for panel, row in itertools.zip_longest(pair, line):
            if row is None:
                panel.axis("off")
            else:
                draw_bars(panel, row, slots)
    figure.savefig(path, dpi=140)


def draw_bars(panel: Any, row: Row, slots: int) -> None:
    """Draw one comparison, the best system on top, in bars as thick as those of a panel with `slots` bars."""
    less_is_better = row.metric in TIMES
    names = sorted(row.values, key=lambda name: row.values[name], reverse=less_is_better)
    colours = ["#d9480f" if name == PLANFORGE else "#adb5bd" for name in names]
    bars = panel.barh(names, [row.values[name] for name in names], color=colours)
    labels = [row.labels[name].replace(" (", "\n(") for name in names]
    panel.bar_label(bars, labels, padding=4, fontsize=8)
    with_cosines = any("\n" in label for label in labels)
    panel.set_xlim(0, max(row.values.values()) * (2.3 if with_cosines else 1.3))  # room for the labels
    panel.set_ylim(len(names) - slots - 0.5, len(names) - 0.5)
    what, _, unit = row.title.rpartition(": ")
    what = textwrap.fill(what, 52)
    panel.set_title(
        f"{what}\n{unit}, {'less' if less_is_better else 'more'} is better", loc="left", fontsize=9
    )
    panel.tick_params(labelsize=9, length=0)
    panel.set_xticks([])
    panel.spines[:].set_visible(False)


def best_rows(suites: Sequence[Suite]) -> str:
    """Return the table of the cases in `BEST`: for each kind of machine, PlanForge and the best other."""
    cells: dict[str, dict[str, tuple[str, str]]] = {}
    kinds = [suite["environment"]["instruction_set"] for suite in suites]
    for kind, suite in zip(kinds, suites, strict=True):
        for row in comparisons({name: suite["cases"][name] for name in BEST if name in suite["cases"]}):
            cells.setdefault(row.title, {})[kind] = row.labels.get(PLANFORGE, ""), best_other(row, kind)
    heading = ["", *(f"{kind}: {who}" for kind in kinds for who in (PLANFORGE, "best other"))]
    rows = [
        [title, *(cell for kind in kinds for cell in found.get(kind, ("", "")))]
        for title, found in cells.items()
    ]
    return table(heading, rows) + "\n"


def best_other(row: Row, kind: str) -> str:
    """Return the best result of those that are not PlanForge's, with its name; "" where there is none."""
    others = {name: value for name, value in row.values.items() if name != PLANFORGE}
    if not others:
        return ""
    best = (min if row.metric in TIMES else max)(others, key=others.__getitem__)
    without = " without AMX" if (best, kind) == ("llama.cpp", "AMX") else ""
    return f"{row.labels[best]}, {best}{without}"


def write_section(page: Path, text: str) -> None:
    """Put a text between the two marker comments of a page.

    Raises:
        ValueError: the markers are not there.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} must have the lines {BEGIN} and {END}, between which the results go")
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def name_files(environment: Mapping[str, Any]) -> str:
    """Return what a suite's files are called on a kind of machine, without their ends."""
    return "suite-" + re.sub(r"[^a-z0-9]+", "-", environment["instruction_set"].lower())


def name_machine(environment: Mapping[str, Any]) -> str:
    """Return a machine in words."""
    return f"{environment['cores']} cores of {environment['cpu']}, {environment['instruction_set']}"


def list_versions(suite: Suite) -> str:
    """Return the measured packages with their versions, and what is special of one."""
    versions = {
        f"{name} {version}"
        for result in suite["cases"].values()
        for figures in result["entries"].values()
        for name, version in figures["versions"].items()
    }
    note = WITHOUT_AMX if suite["environment"]["instruction_set"] == "AMX" else ""
    return f"{', '.join(sorted(versions))}.{note}"


def list_left_out(suite: Suite) -> str:
    """Return a line for each case that has no result, with the reason."""
    return "".join(f"- left out: {reason}\n" for reason in suite["left_out"].values())


def write_report(suite: Suite, out: Path) -> None:
    """Write a suite's Markdown page and plot into a folder."""
    results = suite["cases"]
    machine = name_machine(suite["environment"])
    name = name_files(suite["environment"])
    parts = [case_section(result) for result in results.values()]
    if missing := list_left_out(suite):
        parts.append(missing)
    page = "\n".join([f"# Benchmarks: {machine}\n\n{list_versions(suite)}\n", *parts])
    (out / f"{name}.md").write_text(page, encoding="utf-8")
    plot(results, out / f"{name}.png", f"PlanForge and its peers, {machine}")


def write_pages(suites: Sequence[Suite], out: Path, root: Path) -> None:
    """Put the results of all kinds of machines into docs/benchmark.md, with the plots, and README.md."""
    sections = []
    for suite in suites:
        environment = suite["environment"]
        name = name_files(environment)
        picture = root / "docs" / "pictures" / f"{name}.png"
        shown = f"![The same as bars](pictures/{picture.name})\n"
        if (out / picture.name).exists():
            shutil.copy(out / picture.name, picture)
        sections.append(
            f"### {name_machine(environment)}\n\n{list_versions(suite)}\n\n{summary(suite['cases'])}"
            f"{list_left_out(suite)}\n{shown}"
        )
    write_section(root / "docs" / "benchmark.md", "\n".join(sections))
    write_section(root / "README.md", best_rows(suites))
