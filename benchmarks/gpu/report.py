"""The results of the GPU benchmarks as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..report import cell, table

Result = Mapping[str, Any]

# Columns of a case's table: heading, figure, number in it, format.
COLUMNS = (
    ("first token ms", "ttft_ms", "p50", "{:.2f}"),
    ("ms per token p50", "inter_token_ms", "p50", "{:.3f}"),
    ("p99", "inter_token_ms", "p99", "{:.3f}"),
    ("whole ms p50", "ms", "p50", "{:,.2f}"),
    ("p99", "ms", "p99", "{:,.2f}"),
    ("tokens/s", "tokens_per_s", "", "{:,.0f}"),
    ("texts/s", "texts_per_s", "", "{:,.0f}"),
    ("of memory bandwidth", "bandwidth_share", "", "{:.0%}"),
    ("of the matrix rate", "matrix_share", "", "{:.0%}"),
    ("captured graphs", "captured", "", "{:,}"),
    ("device MB", "device_mb", "", "{:,.0f}"),
    ("same tokens", "same_tokens", "", "{:.0%}"),
    ("least cosine", "cosine_min", "", "{:.4f}"),
)
NAMES = {
    "inter_token_ms": "ms per token",
    "ttft_ms": "ms to the first token",
    "tokens_per_s": "tokens/s",
    "ms": "ms",
    "bandwidth_share": "share of memory bandwidth",
    "matrix_share": "share of the matrix rate",
}
VERDICTS = {True: "met", False: "**missed**", None: "not measured"}


def report(results: Result) -> str:
    """Return the whole report."""
    parts = ["# GPU benchmarks\n", "".join(f"- {line}\n" for line in machine(results["environment"]))]
    parts += [section(case) for case in results["cases"].values()]
    rows = [target_row(target) for target in results["targets"]]
    parts += ["## Targets\n", table(["case", "entry", "what", "wanted", "found", ""], rows)]
    return "\n".join(parts)


def machine(environment: Result) -> Iterator[str]:
    """Return lines about the GPU and its software."""
    gpu = environment["gpu"]
    software = f"driver {environment['driver']}, CUDA {environment['cuda']}"
    yield f"{gpu['name']}, {gpu['sm']}, {gpu['memory_gb']} GB; {software}"
    if told := {name: value for name, value in gpu["nvidia_smi"].items() if value is not None}:
        yield "nvidia-smi: " + ", ".join(f"{name} {number(value)}" for name, value in told.items())
    yield f"{environment['cpu']}, {environment['system']}, Python {environment['python']}"
    yield ", ".join(f"{name} {version}" for name, version in environment["versions"].items())


def number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def section(case: Result) -> str:
    """Return the section of one case: every figure of every entry, and the entries that did not run."""
    entries = case["entries"]
    used = [column for column in COLUMNS if any(cell(figures, column) for figures in entries.values())]
    rows = [[name, *(cell(figures, column) for column in used)] for name, figures in entries.items()]
    bounds = case["bounds"]
    clocks = ", ".join(f"{n} {number(v)}" for n, v in bounds["clocks"].items() if v is not None)
    parts = [
        f"## {case['title']}\n",
        table(["", *(column[0] for column in used)], rows) if rows else "",
        f"{case['date']}, {case['rounds']} rounds; the GPU copies {bounds['copy_gb_per_s']} GB/s, read and"
        f" written, and multiplies at {bounds['fp16_tflops']} TFLOP/s in fp16"
        f"{f', then at {clocks}' if clocks else ''}.\n",
        "".join(f"- {line}\n" for line in remarks(case)),
    ]
    return "\n".join(part for part in parts if part)


def remarks(case: Result) -> Iterator[str]:
    """Return the remarks that a reader needs in addition to the figures."""
    if case["refused"]:
        yield f"not measured: {case['refused']}"
    for name, figures in case["entries"].items():
        if not figures["alike"]:
            yield f"**{name} does not compute this model**: {unlike(figures)}"
        if figures.get("captured") == 0:
            yield f"{name} replayed no CUDA graph: each kernel was launched"
    for name, reason in case["skipped"].items():
        yield f"without {name}: {reason}"


def unlike(figures: Result) -> str:
    """Return how an entry's results differ from the model's."""
    if "judge" not in figures:
        return f"its least cosine to PyTorch's fp16 is {figures['cosine_min']:.4f}"
    judge = figures["judge"]
    if judge["worst"] is None:
        return "a token of its answers has no score, or may not be chosen"
    worst = f"a token of its answers is {judge['worst']:.3g} below the best"
    return f"{worst}, rounding explains {judge['limit']:.3g}"


def target_row(target: Result) -> list[str]:
    """Return a target as cells of a table."""
    unit = "x" if target["against"] else ""
    bound = f"{'at most' if target['most'] else 'at least'} {target['value']:g}{unit}"
    what = NAMES[target["metric"]]
    if target["against"]:
        case, entry = target["against"]
        bound += f" {entry}" if case == target["case"] else f" {case}"
    found = "" if target["found"] is None else f"{target['found']:g}{unit}"
    verdict = VERDICTS[target["met"]]
    return [
        target["case"],
        target["entry"],
        what,
        bound,
        found,
        f"{verdict}: {target['why']}" if target["why"] else verdict,
    ]
