"""`planforge bench`: measures how fast a bundle's precisions are here, and which one load() should take."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...runtime.apps.commands.console import name_options, print_json, print_tables, show_stages, split_names
from ...runtime.apps.commands.run_options import (
    BackendOption,
    BundleArgument,
    IndexOption,
    JsonOption,
    MaxMemoryOption,
    ThreadsOption,
    make_option,
    read_max_memory,
)
from ...runtime.apps.stage_progress import Notice
from ...runtime.backends.select import OPTIONAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from ...runtime.apps.diagnostics.bench import BenchResult, Case


PrecisionsOption = Annotated[
    str | None, make_option("Precisions to measure, such as fp32,int8.", show_default="all")
]
PixelsOption = Annotated[int | None, make_option("Of pictures, in pixels.", show_default="the model's own")]


def bench(
    bundle: BundleArgument,
    backend: BackendOption = "auto",
    precision: PrecisionsOption = None,
    threads: ThreadsOption = None,
    prompt_tokens: Annotated[
        int | None, make_option("Tokens of each text.", show_default="32; for an encoder 128")
    ] = None,
    new_tokens: Annotated[
        int | None, make_option("Tokens to generate; end tokens are ignored.", show_default="64")
    ] = None,
    batch: Annotated[int, make_option("Texts per call, or pictures.", show_default=True)] = 1,
    steps: Annotated[int | None, make_option("Steps of each picture.", show_default="4")] = None,
    height: PixelsOption = None,
    width: PixelsOption = None,
    output: Annotated[Path | None, make_option("Write JSON to a file.", "--output", "-o")] = None,
    plot: Annotated[
        Path | None, make_option(r"Draw the result to a picture file; needs planforge\[plot].")
    ] = None,
    set_default: Annotated[
        bool,
        make_option(
            "Make the fastest verified precision the default of load(); of equals, the most exact.",
            "--set-default",
        ),
    ] = False,
    max_memory: MaxMemoryOption = None,
    index: IndexOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the speed of each precision of a bundle, each in its own process. Needs no torch."""
    with show_stages() as progress:
        from ...runtime.apps.diagnostics.bench import bench as measure
        from ...runtime.apps.diagnostics.plots import draw_bench, make_figure
        from ..reports.output import check_writable, write_whole

        if output is not None:
            check_writable(output)  # what would fail at the end fails now
        if plot is not None:
            make_figure(plot, 1, 1)
        result = measure(
            bundle,
            backend=backend,
            precisions=split_names("--precision", precision) or (),
            threads=threads,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            batch=batch,
            steps=steps,
            height=height,
            width=width,
            memory_limit=read_max_memory(max_memory),
            index=index,
            progress=lambda line: progress(name_limit(line)),
        )
        if output is not None:
            write_whole(output, json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n")
        if plot is not None:
            draw_bench(result, plot)
        chosen = record_default(bundle, result) if set_default else None
        if as_json:
            print_json(result.to_json(), indent=1)
        else:
            print_tables(make_bench_tables(result, chosen))


def name_limit(line: str) -> str:
    """Return a line of progress; what is said of a precision that does not fit names the command's option."""
    limit = {"memory_limit": "--max-memory"}
    return Notice(name_options(line, limit)) if isinstance(line, Notice) else line


def record_default(folder: Path, result: BenchResult) -> Case:
    """Make load() take the precision that a measurement recommends; return its case."""
    from ..bundle.writer import replace_manifest

    chosen = result.best_default()
    backend = chosen.backend if chosen.backend == OPTIONAL else None
    replace_manifest(
        folder,
        lambda now: dataclasses.replace(now, default_precision=chosen.precision, default_backend=backend),
    )
    return chosen


def make_bench_tables(result: BenchResult, chosen: Case | None) -> list[RenderableType]:
    """Return a row for each precision, at most 80 columns wide, without columns that are all empty."""
    from ...runtime.apps.commands.tables import FittingTable

    where = result.environment
    first = result.cases[0]
    title = f"{first.amount}, batch {first.batch}"
    rows = [make_picture_row(case) if case.steps else make_row(case) for case in result.cases]
    engine = ""
    if len({case.backend for case in result.cases}) == 1:
        title += f", on {first.backend}"
    else:
        engine = "" if chosen is None else f" on {chosen.backend}"
        rows = [{"engine": case.backend, **row} for case, row in zip(result.cases, rows, strict=True)]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    numbers = [name for name in columns if name not in ("engine", "precision", "verified")]
    figures = FittingTable(title, columns, [[row[name] for name in columns] for row in rows], numbers)
    notes = [
        f"Measured on {where['cpu']} with {where['threads']} threads ({where['threads_reason']}).",
        "Spread: half of the rounds lie within it.",
    ]
    if "memory speed" in columns:
        speed = where["read_gb_per_s"]
        notes.append(f"Memory speed: the share of the {speed} GB/s, measured here, that decoding uses.")
    if "on CPU" in columns:
        notes.append("On CPU: nodes that compute there more than shapes, of all, which slow each step.")
    if graphs := list(filter(None, map(describe_graphs, result.cases))):
        notes.append(f"CUDA graphs captured: {', '.join(graphs)}.")
    if chosen is not None:
        why = explain_default(chosen, result)
        notes.append(f"load() and `planforge run` now take {chosen.precision}{engine}: {why}.")
    return [figures, "\n".join(notes)]


def explain_default(chosen: Case, result: BenchResult) -> str:
    """Return why a case became the default, in words."""
    fastest = result.fastest()
    if chosen == fastest:
        return "it is the fastest"
    gain = f"{fastest.tokens_per_s / chosen.tokens_per_s - 1:.1%}"
    if chosen.tokens_per_s_range["p75"] >= fastest.tokens_per_s_range["p25"]:
        lead = f"{fastest.precision} measured {gain} faster, which is within the spread"
    else:
        lead = f"{fastest.precision} is only {gain} faster"
    return f"{lead}, and {chosen.precision} is more exact"


def describe_cpu_nodes(nodes: Mapping[str, int]) -> str:
    """Return how many nodes compute on the CPU beside a GPU, of all: "12 of 219"."""
    count = nodes["gpu"] + nodes["cpu_shapes"] + nodes["cpu_others"]
    return f"{nodes['cpu_others']} of {count}"


def describe_graphs(case: Case) -> str:
    """Return how many CUDA graphs were captured in the warm-up: "fp16 3 (1.2 MB)"; nothing for none."""
    if case.nodes is None or not case.nodes["captured"]:
        return ""
    return f"{case.precision} {case.nodes['captured']} ({case.nodes['captured_bytes'] / 1e6:.1f} MB)"


def make_picture_row(case: Case) -> dict[str, str]:
    """Return the figures of a case of pictures, as `make_row`."""
    others = make_row(case)
    between = case.inter_token_ms
    figures = {
        "precision": case.precision,
        "s/step": "" if between is None else f"{between['p50'] / 1e3:.3f}",
        "its p99": "" if between is None else f"{between['p99'] / 1e3:.3f}",
        "s/picture": f"{case.latency_ms['p50'] / 1e3 / case.batch:.3f}",
        "spread": others["spread"],
    }
    return figures | {name: others[name] for name in ("on CPU", "load ms", "peak MB", "verified")}


def make_row(case: Case) -> dict[str, str]:
    """Return a case's figures by the headings of their columns; "" where a figure does not apply."""
    between = case.inter_token_ms
    return {
        "precision": case.precision,
        "tokens/s": f"{case.tokens_per_s:.1f}",
        "spread": f"±{case.spread:.1%}",
        "texts/s": f"{case.texts_per_s:.1f}" if between is None else "",
        "first token ms": "" if case.ttft_ms is None else f"{case.ttft_ms:.1f}",
        "next token ms": "" if between is None else f"{between['p50']:.2f}",
        "its p99 ms": "" if between is None else f"{between['p99']:.2f}",
        "memory speed": "" if case.bandwidth_share is None else f"{case.bandwidth_share:.0%}",
        "on CPU": "" if case.nodes is None else describe_cpu_nodes(case.nodes),
        "load ms": f"{case.load_ms:.0f}",
        "peak MB": "" if case.peak_rss_mb is None else f"{case.peak_rss_mb:.0f}",
        "verified": "yes" if case.gate_passed else "NO",
    }
