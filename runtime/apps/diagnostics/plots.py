"""Pictures of what a model did, and how fast. Needs matplotlib, which nothing else of the runtime loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from ..figure import INCHES_PER_TOKEN, MAX_INCHES, show_token, start_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...translate.results import Alignment
    from .bench import BenchResult


MAX_BARS = 40  # of a panel


def draw_attention(
    alignment: Alignment, path: Path, *, layer: int | None = None, head: int | None = None
) -> None:
    """Draw how much each target token (a row) looked at each source token (a column).

    Without a layer or a head it is the average of all. The path's ending says the picture's kind.
    """
    weights = alignment.averaged(layer, head)
    rows, columns = weights.shape
    width = min(MAX_INCHES, 1.5 + INCHES_PER_TOKEN * columns)
    height = min(MAX_INCHES, 1.5 + INCHES_PER_TOKEN * rows)
    figure = make_figure(path, width, height)
    axes = figure.add_subplot()
    image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    axes.xaxis.tick_top()
    axes.set_xticks(range(columns), [show_token(token) for token in alignment.source])
    axes.set_yticks(range(rows), [show_token(token) for token in alignment.target])
    for label, token in zip(axes.get_xticklabels(), alignment.source, strict=True):
        label.set_rotation(90 if len(token) > 2 else 0)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("source")
    axes.set_ylabel("target")
    save(figure, path)


def draw_bench(result: BenchResult, path: Path) -> None:
    """Draw what `bench` measured: a bar per precision of its speed, time to the first token, and memory.

    A line at the end of a bar of speed goes from p25 to p75 of the rounds.
    """
    cases = result.cases
    unit = "step" if cases[0].steps else "token"
    speed = f"{unit}s/s"
    panels: list[tuple[str, Sequence[float | None]]] = [
        (speed, [case.tokens_per_s for case in cases]),
        (f"first {unit}, ms", [case.ttft_ms for case in cases]),
        ("peak memory, MB", [case.peak_rss_mb for case in cases]),
    ]
    panels = [(title, values) for title, values in panels if None not in values]
    figure = make_figure(path, 3.2 * len(panels) + 0.8, 0.5 * len(cases) + 1.4)
    below = [case.tokens_per_s - case.tokens_per_s_range["p25"] for case in cases]
    above = [case.tokens_per_s_range["p75"] - case.tokens_per_s for case in cases]
    for place, (title, values) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), place)
        names = [case.precision for case in cases]
        ranges = [below, above] if title == speed else None
        bars = axes.barh(names, [value or 0.0 for value in values], height=0.6, xerr=ranges, capsize=2)
        axes.bar_label(bars, fmt="{:.4g}", padding=3)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.set_title(title, fontsize="medium")
        axes.set_xticks([])
        axes.tick_params(length=0, labelleft=place == 1)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    first = cases[0]
    where = result.environment
    title = f"{where['cpu']}, {where['threads']} threads: {first.amount}, batch {first.batch}"
    figure.suptitle(title, fontsize="small")
    save(figure, path)


def draw_times(panels: Sequence[tuple[str, Mapping[str, float]]], title: str, path: Path) -> None:
    """Draw times in milliseconds, a panel of bars for each title; the longest `MAX_BARS` come first."""
    shown = [sorted(times.items(), key=lambda item: -item[1])[:MAX_BARS] for _, times in panels]
    figure = make_figure(path, 5.0 * len(panels) + 0.8, 0.25 * max(map(len, shown)) + 1.4)
    for place, ((name, _), bars) in enumerate(zip(panels, shown, strict=True), 1):
        axes = figure.add_subplot(1, len(panels), place)
        drawn = axes.barh(range(len(bars)), [time for _, time in bars], height=0.6)
        axes.bar_label(drawn, fmt="{:.3g}", padding=3, fontsize="small")
        axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize="small")
        axes.margins(x=0.2)
        axes.invert_yaxis()
        axes.set_title(name, fontsize="medium")
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(title, fontsize="small")
    save(figure, path)


def make_figure(path: Path, width: float, height: float) -> Figure:
    """Return an empty picture for a file, of this width and height in inches."""
    if not path.suffix:
        raise InputError(f"the picture {path} needs a file extension, such as .png")
    return start_figure(width, height)


def save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture {path} cannot be written: {error}") from error
