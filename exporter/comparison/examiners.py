"""How each kind of model is compared with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...runtime.backends.backend import Program
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Manifest
from ...runtime.diagnostics.metrics import Comparison
from ..execution.trial import Trial
from ..gate import Gaps
from . import decoders, encoders, translators

if TYPE_CHECKING:
    from ..reference.rounding import Rounding

Progress = Callable[[str], None]


class Examiner(Protocol):
    """How one kind of model is compared with PyTorch: a module of this package."""

    def expect(self, model: Any, bundle: Bundle, texts: Sequence[str]) -> Any: ...

    def gaps(self, model: Any, bundle: Bundle, expected: Any, rounding: Rounding) -> Gaps: ...

    def run_texts(self, model: Any, expected: Any) -> None:
        """Run PyTorch over real text that no comparison uses."""
        ...

    def limits(self, bundle: Bundle, expected: Any, precision: str, gaps: Gaps) -> dict[str, float]: ...

    def compare(
        self,
        bundle: Bundle,
        artifact: Artifact,
        expected: Any,
        limits: Mapping[str, float],
        progress: Progress,
    ) -> list[Comparison]: ...

    def trial(
        self,
        bundle: Bundle,
        artifact: Artifact,
        expected: Any,
        whole: bool = False,
        opened: Callable[[Artifact], Program] | None = None,
    ) -> Trial:
        """Return a trial: a little real text to run through a graph.

        Args:
            whole: take as much text as ranges need.
            opened: opens the graphs that this one runs with, instead of the bundle's files.
        """
        ...

    def to_arrays(self, expected: Any) -> dict[str, Any]: ...

    def from_arrays(self, arrays: Mapping[str, Any]) -> Any: ...


EXAMINERS: dict[str, Examiner] = {
    "text-generation": decoders,
    "text-encoding": encoders,
    "translation": translators,
}


def examiner_of(manifest: Manifest) -> Examiner:
    return EXAMINERS[manifest.task]
