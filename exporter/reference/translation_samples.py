"""What an encoder-decoder must reproduce, with PyTorch where it is available."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.diagnostics.golden import translations
from ...runtime.diagnostics.golden.files import Arrays
from ...runtime.diagnostics.golden.translations import Golden

if TYPE_CHECKING:
    from .translation import Reference


@dataclass(frozen=True)
class Expectation(Golden):
    """What every engine must reproduce.

    Attributes:
        reference: the model in PyTorch, where it is available.
        texts: other sources, to calibrate with; golden data does without.
    """

    reference: Reference | None = None
    texts: tuple[tuple[int, ...], ...] = ()


def from_arrays(arrays: Arrays) -> Expectation:
    """Return the expectation that golden data keeps."""
    return Expectation(**vars(translations.from_arrays(arrays)))
