"""Where an export's graphs come from: traced here, or written by optimum."""

from __future__ import annotations

import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..runtime.bundle.manifest import Artifact
from ..runtime.progress import BYTES, StageCounter
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.source import Source
from .errors import CheckpointError
from .graphs import attach_weights, list_tensors
from .imported.checkpoint import ImportedCheckpoint
from .imported.decoder import ImportedDecoder
from .imported.encoder import ImportedEncoder
from .imported.folder import Folder, read_folder
from .imported.translator import ImportedTranslator
from .reference.model import load_our_model
from .request import Request
from .tensorrt.plans import Progress
from .tracing.recipes.recipe import find_alike

if TYPE_CHECKING:
    import onnx_ir as ir

    from .reference.model import ReferenceModel

log = logging.getLogger("planforge")

T = TypeVar("T")

GENERATES = ("ForCausalLM", "LMHeadModel")
ADVICE = (
    "int8 and int4 run in attention over shared buffers, which may not be the model's; fp32 and fp16 do"
    " without"
)


class GraphProvider(ABC):
    """Makes the graphs of one checkpoint, and loads the model that they are compared with."""

    checkpoint: Checkpoint

    @abstractmethod
    def make_graphs(
        self, recipes: Sequence[str], progress: Progress, beside: Callable[[], T]
    ) -> tuple[dict[str, ir.Model], T]:
        """Return graphs in fp32, with weights, by the ids of their recipes, and what `beside` returns."""

    @abstractmethod
    def load_reference(self, progress: Progress) -> ReferenceModel:
        """Return the model that the graphs are compared with."""

    def leave_out(self, failed: Iterable[Artifact]) -> GraphProvider | None:
        """Return a provider that does without what failed verification; None if there is none."""
        return None

    def advise(self, failed: Iterable[Artifact]) -> str:
        """Return what a user can do about graphs that failed verification; empty if nothing is known."""
        return ""


class TracedGraphs(GraphProvider):
    """Graphs of PlanForge's own models, traced by torch.export.

    Args:
        checkpoint: the checkpoint.
        model: the model, if it is loaded already.
        computes: whether the model is to compute anything; else its weights stay in their files, and are
            converted to fp32 one by one while the graphs are written.
    """

    def __init__(
        self, checkpoint: Checkpoint, model: ReferenceModel | None = None, computes: bool = True
    ) -> None:
        self.checkpoint = checkpoint
        self._model = model
        self._computes = computes

    def make_graphs(
        self, recipes: Sequence[str], progress: Progress, beside: Callable[[], T]
    ) -> tuple[dict[str, ir.Model], T]:
        """Trace graphs in child processes, those that are alike once, while `beside` runs here."""
        from .tracing.onnx_export import trace_recipes

        checkpoint = self.checkpoint
        first = find_alike({**checkpoint.recipes, **checkpoint.explanations}, recipes)
        with tempfile.TemporaryDirectory(prefix="planforge-trace-") as folder:
            paths = {recipe: Path(folder, recipe) for recipe in first.values()}
            traced, (model, result) = trace_recipes(
                checkpoint.source.folder,
                checkpoint.choices,
                paths,
                lambda: (self.load_reference(progress), beside()),
                StageCounter(progress, f"tracing {', '.join(recipes)}", "graphs"),
            )
        graphs = {recipe: traced[first[recipe]].clone() for recipe in recipes}
        attach_weights(checkpoint, graphs, model)
        return graphs, result

    def load_reference(self, progress: Progress) -> ReferenceModel:
        if self._model is None:
            checkpoint = self.checkpoint
            self._model = load_our_model(
                checkpoint.source.folder,
                checkpoint.choices.max_length,
                keep_types=not self._computes,
                report=StageCounter(progress, "reading weights", BYTES),
            )
        return self._model


class ImportedGraphs(GraphProvider):
    """Graphs that optimum wrote, of a checkpoint whose weights transformers can read.

    `shared` tells whether a decoder's attention may run over shared buffers, if its form is known.
    """

    def __init__(self, source: Source, folder: Folder, request: Request, shared: bool) -> None:
        self.source = source
        self.folder = folder
        self.request = request
        kind = choose_class(folder)
        self.checkpoint: ImportedCheckpoint = kind(
            source, folder, request.max_batch, request.max_length, shared
        )
        self._reference: ReferenceModel | None = None

    def make_graphs(
        self, recipes: Sequence[str], progress: Progress, beside: Callable[[], T]
    ) -> tuple[dict[str, ir.Model], T]:
        model = self.load_reference(progress) if self.request.needs_reference else None
        tensors = {} if model is None else {n: tensor.numpy() for n, tensor in list_tensors(model).items()}
        graphs = self.checkpoint.make_graphs(set(recipes), tensors)
        attach_weights(self.checkpoint, graphs, model)
        return graphs, beside()

    def load_reference(self, progress: Progress) -> ReferenceModel:
        if self._reference is None:
            from .reference.transformers_reference import load_reference

            progress("reading the model to compare with")
            checkpoint = self.checkpoint
            self._reference = load_reference(checkpoint.source.folder, checkpoint.task, checkpoint.encoder)
        return self._reference

    def leave_out(self, failed: Iterable[Artifact]) -> GraphProvider | None:
        """Return a provider of attention as optimum wrote it, if only that over shared buffers failed."""
        if not only_shared_buffers_failed(failed) or self.request.needs_shared_buffers:
            return None
        log.warning(
            "attention over shared buffers does not compute this model, so it stays as optimum wrote it: the"
            " bundle is right, and slower on a CPU"
        )
        other = ImportedGraphs(self.source, read_folder(self.folder.path), self.request, shared=False)
        other._reference = self._reference
        return other

    def advise(self, failed: Iterable[Artifact]) -> str:
        return ADVICE if only_shared_buffers_failed(failed) else ""


def only_shared_buffers_failed(failed: Iterable[Artifact]) -> bool:
    """Tell whether a decoder's attention over shared buffers failed, and the same graph without passed."""
    return {a.dialect for a in failed if a.graph == "decoder" and a.precision == "fp32"} == {"ort"}


def choose_class(found: Folder) -> type[ImportedCheckpoint]:
    """Return the class that reads a folder's graphs: by their inputs, not by what config.json calls them."""
    if found.encoder is not None:
        return ImportedTranslator
    if any(str(value.name).startswith("past") for value in found.read.graph.inputs):
        return ImportedDecoder
    if found.architecture.endswith(GENERATES):
        raise CheckpointError(
            f"{found.model} has no cache, and {found.architecture} generates text; export it again with"
            " --task text-generation-with-past"
        )
    return ImportedEncoder
