"""Pictures of what a model did. Needs matplotlib, which nothing else of the runtime loads."""

from __future__ import annotations

from pathlib import Path

from .errors import BackendUnavailableError, InputError
from .tasks.translator import Alignment

INCHES_PER_TOKEN = 0.28
MOST_INCHES = 40.0


def draw_attention(
    alignment: Alignment, path: Path, *, layer: int | None = None, head: int | None = None
) -> None:
    """Draws how much each target token (a row) looked at each source token (a column).

    Args:
        alignment: from `Translator.align`.
        path: of the picture; its ending, such as .png or .svg, says its kind.
        layer: of the decoder, from 0; the average of all when None.
        head: likewise.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
        InputError: no such layer or head, or a picture that cannot be written.
    """
    weights = alignment.averaged(layer, head)
    if not path.suffix:
        raise InputError(f"the picture {path} needs an ending that says its kind, such as .png")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise BackendUnavailableError("pictures need matplotlib: pip install 'planforge[plot]'") from error
    rows, columns = weights.shape
    size = (min(MOST_INCHES, 1.5 + INCHES_PER_TOKEN * n) for n in (columns, rows))
    figure = Figure(figsize=tuple(size), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    axes.xaxis.tick_top()
    axes.set_xticks(range(columns), [shown(token) for token in alignment.source])
    axes.set_yticks(range(rows), [shown(token) for token in alignment.target])
    for label, token in zip(axes.get_xticklabels(), alignment.source, strict=True):
        label.set_rotation(90 if len(token) > 2 else 0)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("source")
    axes.set_ylabel("target")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture {path} cannot be written: {error}") from error


def shown(token: str) -> str:
    """A token's text where a space alone would not be seen, and matplotlib reads no formula."""
    return ("␣" if token == " " else token).replace("$", r"\$")
