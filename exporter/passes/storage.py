"""The forms in which graphs store quantized weights; a new form is one more file here, and a row below.

`precisions.PRECISIONS` names the forms of each precision, by dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import onnx_ir as ir

from . import store_blocks, store_dequantized, store_rows
from .quantize import QuantizedWeights
from .quantized_weight import StoredWeight


class Form(Protocol):
    """A form of weights: how they are stored, and how they are read back."""

    OPERATORS: tuple[str, ...]  # those that read such weights

    def store(self, model: ir.Model, weights: QuantizedWeights) -> None:
        """Put the weights that are in this form into a graph that multiplies by them in floats."""

    def read(self, node: ir.Node, graph: ir.Graph) -> StoredWeight | None:
        """Return the weight that a node of `OPERATORS` reads; None if no export can have written it."""


FORMS: Mapping[str, Form] = {
    "rows": store_rows,
    "blocks": store_blocks,
    "dequantized": store_dequantized,
}


def read_weights(graph: ir.Graph, joined: Iterable[str] = ()) -> list[StoredWeight]:
    """Return the quantized weights that a graph's nodes read, in the order of the nodes.

    `joined` has the names of those that are stored as one, as manifests write them: "query+key+value".
    """
    together = {names[0]: names for names in (tuple(text.split("+")) for text in joined)}
    readers = {operator: form.read for form in FORMS.values() for operator in form.OPERATORS}
    read = [readers[node.op_type](node, graph) for node in graph if node.op_type in readers]
    found = [replace(w, names=find_names(w, together)) for w in read if w is not None]
    tables = {weight.names for weight in found if weight.is_table}
    return [replace(weight, is_table=weight.names in tables) for weight in found]


def find_names(weight: StoredWeight, joined: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return a weight's parameters; of joined ones with rounded rows, all that belong to the first.

    A product may read one of them alone in blocks, as DeBERTa's of distances do.
    """
    return weight.names if weight.rows is None else joined.get(weight.names[0], weight.names)
