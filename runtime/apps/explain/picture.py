"""A picture of how much each token counted. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...backends.backend import Array
from ...errors import InputError
from ..figure import INCHES_PER_TOKEN, MAX_INCHES, show_token, start_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
