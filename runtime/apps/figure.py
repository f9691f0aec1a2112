"""What pictures share. Needs matplotlib, which nothing else of the runtime loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import BackendUnavailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCHES_PER_TOKEN = 0.28
MAX_INCHES = 40.0


def start_figure(width: float, height: float) -> Figure:
    """Return an empty picture of this width and height, in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise BackendUnavailableError("pictures need matplotlib: pip install 'planforge[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def show_token(token: str) -> str:
    """Return a token's text with a lone space made visible, and no formula for matplotlib to read."""
    return ("␣" if token == " " else token).replace("$", r"\$")
