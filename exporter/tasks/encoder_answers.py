"""Computes PyTorch's answers to an encoder's cases.

T tokens, E hidden size
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...runtime.apps.check.case import Case, CaseSet, Known, Row
from ...runtime.apps.check.encoder import EncoderEngine, is_per_token
from ...runtime.backends.backend import Array
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, TensorSpec
from ...runtime.encode.encoder import Encoder
from .base import OpenProgram, list_wanted
from .encoder import GRAPH, QUERIES
from .fitted_head import LinearHead

if TYPE_CHECKING:
    from torch import Tensor

    from ..reference_model import ReferenceModel
    from .rounding import Rounding

KEPT_POSITIONS = ((3,), (2,), (1,))  # of a text, in golden data; the first that fits its file


@dataclass(frozen=True)
class Reference:
    """An encoder in PyTorch, and a head that was fitted to it."""

    model: ReferenceModel
    outputs: Mapping[str, Sequence[TensorSpec]]  # of each graph
    head: LinearHead | None

    def read(
        self, case_set: CaseSet, number: int, graph: str = GRAPH
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run the model that a graph was made of over a text."""
        from .pytorch_encoder import run_model

        model: Any = self.model
        return run_model(model if graph == GRAPH else model.query, case_set.texts[number])


def open_reference(model: ReferenceModel, bundle: Bundle, rounding: Rounding | None = None) -> Reference:
    """Return the reference that answers for an encoder, in its current precision."""
    outputs = {artifact.graph: artifact.outputs for artifact in bundle.manifest.artifacts}
    return Reference(model, outputs, LinearHead.load(bundle))


def open_engine(bundle: Bundle, artifact: Artifact, open_program: OpenProgram) -> EncoderEngine:
    """Open an encoder's graph."""
    assert bundle.manifest.encoder is not None
    padding = bundle.manifest.encoder.padding
    return EncoderEngine(Encoder(open_program(artifact), artifact, padding))


def calibrate(reference: Reference, case_set: CaseSet) -> None:
    """Run PyTorch over the texts to calibrate with."""
    from .pytorch_encoder import run_model

    for text in case_set.calibration:
        run_model(reference.model, text)
        if QUERIES in reference.outputs:
            model: Any = reference.model
            run_model(model.query, text)


def read_row(reference: Reference, case_set: CaseSet, case: Case, row: Row) -> object:
    """Run PyTorch over the text of a row."""
    return reference.read(case_set, row.text, case.graph)


def answer_texts(
    reference: Reference, case_set: CaseSet, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Known]]]:
    """Yield PyTorch's answers to texts, by their numbers and outputs."""
    for number in numbers:
        wanted = list_wanted(case_set, number)
        found = {}
        for graph, specs in reference.outputs.items():
            states, results = reference.read(case_set, number, graph)
            for spec in specs:
                if spec.name not in wanted:
                    continue
                array = find_output(spec.role, states, results, reference.head)
                positions = wanted[spec.name].positions
                found[spec.name] = Known(positions, array[positions] if is_per_token(spec) else array[None])
        yield number, found


def find_output(
    role: str, states: list[Tensor], results: Mapping[str, Tensor], head: LinearHead | None
) -> Array:
    """Return the output of this role for one sequence; a fitted head is computed here."""
    kind, _, detail = role.partition(".")
    if head is not None and role == head.role:
        vector = results.get("sentence_embedding")
        embedding = None if vector is None else vector[0].numpy()
        return head.compute_logits([state[0].numpy() for state in states], embedding)
    if kind == "hidden":
        tensor = states[int(detail)]
    elif kind == "question_answering":
        tensor = results[kind][..., ("start", "end").index(detail)]
    else:
        tensor = results[role]
    array: Array = tensor[0].numpy()
    return array
