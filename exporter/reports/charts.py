"""Computes the geometry of an HTML report's charts; the template draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...runtime.apps.check.outcome import Comparison
from ..passes.fp16_ranges import FP16_MAX
from ..verification.fp32_nodes import Fp32Node
from .tables import format_figure

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LEAST = 1e-12  # errors beyond these are drawn on the edge
MOST = 1e6
LABEL_HEIGHT = 14
DIGIT_WIDTH = 7
ABOVE = 4  # from a limit's line to its label
Scale: TypeAlias = Callable[[float], float]

LOWEST = -24  # powers of two; what is beyond them is counted with the last
HIGHEST = 40


@dataclass(frozen=True)
class Box:
    """The edges of a chart's plot area within the picture."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class Line:
    """The line of one artifact's errors."""

    label: str  # the text at the line's end
    tone: int  # the index of its colour, the same for the same precision
    dash: int  # the index of its dash pattern, different for each line of a tone
    paths: tuple[str, ...]  # SVG paths; several where a step is not finite
    broken: tuple[float, ...]  # x of the steps that are not finite
    end: float  # y of the last finite point
    label_y: float  # y of the label, which does not overlap others


@dataclass(frozen=True)
class Limit:
    """A limit of one precision."""

    y: float  # of its line
    label: str  # the text on the line
    label_y: float  # y of the label's baseline, which does not overlap others
    tone: int  # the index of its precision's colour


@dataclass(frozen=True)
class LineChart:
    """Errors over decode steps, on a logarithmic scale."""

    case: str
    width: float  # of the whole picture
    height: float
    box: Box  # the plot area
    rows: tuple[tuple[float, str], ...]  # y and label of each decade
    steps: tuple[tuple[float, str], ...]  # x and label of some steps
    lines: tuple[Line, ...]  # one per artifact
    limits: tuple[Limit, ...]  # the dashed lines that errors must stay below


def draw_line_charts(comparisons: Sequence[Comparison], precisions: Mapping[str, str]) -> list[LineChart]:
    """Return a chart for each case that has errors of steps; `precisions` are those of artifacts."""
    drawn = [c for c in comparisons if c.errors]
    cases = dict.fromkeys(c.case for c in drawn)
    return [draw_lines(case, [c for c in drawn if c.case == case], precisions) for case in cases]


def draw_lines(case: str, comparisons: Sequence[Comparison], precisions: Mapping[str, str]) -> LineChart:
    box = Box(44, 14, 560, 246 + max(0, len(comparisons) - 16) * LABEL_HEIGHT)
    names = [precisions.get(c.artifact, c.artifact) for c in comparisons]
    tones = {name: tone for tone, name in enumerate(dict.fromkeys(names))}
    limits = {
        (name, c.limits["max_error"]): tones[name]
        for name, c in zip(names, comparisons, strict=True)
        if "max_error" in c.limits
    }
    known = [error for c in comparisons for error in c.errors if math.isfinite(error) and error > 0]
    known += [limit for _, limit in limits if limit > 0]
    low = math.floor(math.log10(clamp(min(known, default=1e-6))))
    high = max(low + 1, math.ceil(math.log10(clamp(max(known, default=1.0)))))
    count = max(len(c.errors) for c in comparisons)

    def x(step: float) -> float:
        return round(box.left + (box.right - box.left) * step / max(1, count - 1), 1)

    def y(error: float) -> float:
        share = (math.log10(min(max(error, 10.0**low), 10.0**high)) - low) / (high - low)
        return round(box.bottom - (box.bottom - box.top) * share, 1)

    every = -(-(high - low) // 8)
    between = next(step for step in (1, 2, 4, 8, 16, 32, 64, 10**9) if count <= 9 * step)
    drawn: list[Line] = []
    for name, c in zip(names, comparisons, strict=True):
        paths, broken = draw_paths(c.errors, x, y)
        end = y(next((error for error in reversed(c.errors) if math.isfinite(error)), 10.0**high))
        dash = sum(line.tone == tones[name] for line in drawn)
        drawn.append(Line(c.artifact, tones[name], dash, paths, broken, end, end))
    return LineChart(
        case=case,
        width=box.right + 190,
        height=box.bottom + 40,
        box=box,
        rows=tuple((y(10.0**k), f"10{str(k).translate(SUPERSCRIPTS)}") for k in range(low, high + 1, every)),
        steps=tuple((x(step), str(step)) for step in range(0, count, between)),
        lines=spread_labels(drawn, box),
        limits=place_limits(limits, y, box),
    )


def clamp(error: float) -> float:
    return min(max(error, LEAST), MOST)


def draw_paths(errors: Sequence[float], x: Scale, y: Scale) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return SVG paths through errors, broken where one is not finite, and x of those steps."""
    paths: list[list[str]] = [[]]
    broken = []
    for step, error in enumerate(errors):
        if math.isfinite(error):
            paths[-1].append(f"{x(step)} {y(error)}")
        else:
            broken.append(x(step))
            paths.append([])
    # A point alone is a line of no length, which round caps make a dot.
    drawn = (f"M{' L'.join(points)}{' h0' if len(points) == 1 else ''}" for points in paths if points)
    return tuple(drawn), tuple(broken)


def spread_labels(lines: Sequence[Line], box: Box) -> tuple[Line, ...]:
    """Return the lines with labels that do not overlap, in the order of their ends."""
    ordered = sorted(lines, key=lambda line: line.end)
    places = spread([line.end for line in ordered], box.top, box.bottom)
    return tuple(replace(line, label_y=place) for line, place in zip(ordered, places, strict=True))


def place_limits(limits: Mapping[tuple[str, float], int], y: Scale, box: Box) -> tuple[Limit, ...]:
    """Return the limits, the highest first, with labels that do not overlap."""
    ordered = sorted(limits, key=lambda name_and_limit: y(name_and_limit[1]))
    places = spread([y(limit) - ABOVE for _, limit in ordered], box.top - ABOVE, box.bottom - ABOVE)
    return tuple(
        Limit(y(limit), f"limit of {name}: {format_figure(limit)}", place, limits[name, limit])
        for (name, limit), place in zip(ordered, places, strict=True)
    )


def spread(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Return heights at least `LABEL_HEIGHT` apart, near `wanted`, which rises, from `top` to `bottom`."""
    places: list[float] = []
    for height in wanted:
        places.append(max(height, places[-1] + LABEL_HEIGHT if places else top))
    floor = bottom
    for i in reversed(range(len(places))):
        places[i] = min(places[i], floor)
        floor = places[i] - LABEL_HEIGHT
    return places


@dataclass(frozen=True)
class Bar:
    """A bar for the nodes of a magnitude from 2^power to 2^(power + 1)."""

    x: float  # its rectangle
    y: float
    width: float
    height: float
    count: int
    label: str  # the count, or "" where it would touch the label of the bar before it
    beyond: bool  # whether fp16 cannot hold them


@dataclass(frozen=True)
class Histogram:
    """The number of nodes by the magnitude of their results."""

    box: Box  # the plot area
    bars: tuple[Bar, ...]  # those that are not empty
    powers: tuple[tuple[float, str], ...]  # x and label of some powers of two
    largest: float  # x of fp16's largest value


def draw_histogram(nodes: Sequence[Fp32Node]) -> Histogram:
    """Return a histogram of the larger magnitude of each node's range."""
    counts: dict[int, list[float]] = {}
    for node in nodes:
        magnitude = max(abs(node.low), abs(node.high))
        power = math.frexp(magnitude)[1] - 1 if math.isfinite(magnitude) else HIGHEST
        power = LOWEST if magnitude == 0 else min(max(power, LOWEST), HIGHEST)
        counts.setdefault(power, []).append(magnitude)
    box = Box(8, 24, 412, 132)
    low = min([-2, *counts])
    high = max([17, *counts])
    step = (box.right - box.left) / (high + 1 - low)
    most = max(map(len, counts.values()), default=1)

    def x(power: float) -> float:
        return round(box.left + (power - low) * step, 1)

    bars: list[Bar] = []
    free = box.left  # where no label has been written
    for power, magnitudes in sorted(counts.items()):
        count = len(magnitudes)
        height = round((box.bottom - box.top - 16) * count / most, 1)
        half = len(str(count)) * DIGIT_WIDTH / 2
        label = "" if x(power + 0.5) - half < free else str(count)
        if label:
            free = x(power + 0.5) + half + 1
        beyond = not max(magnitudes) <= FP16_MAX
        width = round(step - 2, 1)
        bars.append(Bar(x(power) + 1, box.bottom - height, width, height, count, label, beyond))
    every = 4 if high - low <= 32 else 8
    powers = tuple(
        (x(k), f"2{str(k).translate(SUPERSCRIPTS)}") for k in range(low, high + 2) if k % every == 0
    )
    return Histogram(box, tuple(bars), powers, x(math.log2(FP16_MAX)))
