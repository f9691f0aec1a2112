"""Pictures of how much each token counted, and of how neurons fire. Need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...backends.backend import Array
from ...errors import InputError
from ..figure import INCHES_PER_TOKEN, MAX_INCHES, show_token, start_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .neurons import Factors

CHART_INCHES = 6.0  # the height of a chart of neurons
SHADED = 99  # percent of a firing chart that have a shade of their own


def draw_saliency(
    saliency: Mapping[str, Array], method: str | None, tokens: Sequence[str], targets: Sequence[str]
) -> Figure:
    """Return a picture, a row for each target and a column for each token; blue is for it, red against."""
    names = list(saliency)
    if not names:
        raise InputError(
            "there are no scores of tokens to draw: explain with the method gradient or occlusion"
        )
    if method is None:
        method = names[0]
    if method not in names:
        raise InputError(f"method={method!r} is not one of {', '.join(names)}", option="method")
    values = np.ma.masked_invalid(saliency[method])
    rows, columns = values.shape
    width = min(MAX_INCHES, 2 + INCHES_PER_TOKEN * columns)
    figure = start_figure(width, min(MAX_INCHES, 1.5 + INCHES_PER_TOKEN * rows))
    axes = figure.add_subplot()
    most = float(np.abs(values).max()) or 1.0
    is_share = bool(values.min() >= 0)
    low = 0.0 if is_share else -most
    image = axes.imshow(values, cmap="Blues" if is_share else "RdBu", vmin=low, vmax=most, aspect="auto")
    figure.colorbar(image, ax=axes, shrink=0.6, label=method.replace("_", " "))
    axes.xaxis.tick_top()
    axes.set_xticks(range(columns), list(map(show_token, tokens)), rotation=90)
    axes.set_yticks(range(rows), list(map(show_token, targets)))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def draw_firing(factors: Factors | None, tokens: Sequence[str]) -> Figure:
    """Return a chart, a row for each neuron and a column for each token; lines part the groups."""
    if factors is None:
        raise InputError("there are no neurons to draw: explain with the method neurons")
    rows, columns = factors.firing.shape
    figure = start_figure(min(MAX_INCHES, 2 + INCHES_PER_TOKEN * columns), CHART_INCHES)
    axes = figure.add_subplot()
    # A few fire many times more than all others, such as those of a first token: they have the darkest shade.
    most = np.percentile(factors.firing, SHADED) or factors.firing.max()
    image = axes.imshow(
        factors.firing, cmap="Blues", vmin=0, vmax=most, aspect="auto", interpolation="nearest"
    )
    figure.colorbar(image, ax=axes, shrink=0.6, label="activation", extend="max")
    starts = np.flatnonzero(np.diff(factors.groups, prepend=-1))
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="gray", linewidth=0.5)
    middles = (starts + np.append(starts[1:], rows) - 1) / 2
    axes.set_yticks(middles, [f"group {group + 1}" for group in factors.groups[starts]])
    axes.xaxis.tick_top()
    axes.set_xticks(range(columns), list(map(show_token, tokens)), rotation=90)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure
