"""The graphs that optimum wrote, on ONNX Runtime: the reference of a bundle that has no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...models import KeyValue
from ...runtime.apps.check.metrics import Logits
from ...runtime.backends.backend import Array
from ...runtime.backends.ort_backend import open_plain_session
from ..imported.branches import SWITCH
from ..imported.folder import LAYERS, Folder
from ..imported.plain_attention import CROSS, STATES
from .decoder import Reference, compute_whole_columns
from .transformers_reference import name_results
from .translation import UncachedReference

if TYPE_CHECKING:
    from ...runtime.text.long_text import Piece


class OnnxGraphs:
    """A folder's graphs, opened."""

    reference = "the graphs that optimum wrote"

    def __init__(self, found: Folder) -> None:
        self.layers = found.read_integer(LAYERS) or 0
        self.model = open_plain_session(found.first or found.model)
        self.encoder = None if found.encoder is None else open_plain_session(found.encoder)

    def named_parameters(self, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return no parameters: the weights do not have a checkpoint's names."""
        del options
        return iter(())

    named_buffers = named_parameters

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Return every output, computed without a past; inputs that are not given are made from the ids."""
        ids = given["input_ids"]
        feeds = dict(given)
        for spec in self.model.get_inputs():
            if spec.name.startswith("past"):
                heads = spec.shape[1]  # of (B, H, P, D)
                size = spec.shape[3]
                feeds[spec.name] = np.zeros((len(ids), heads, 0, size), np.float32)
        feeds.setdefault("attention_mask", np.ones_like(ids))
        feeds.setdefault("token_type_ids", np.zeros_like(ids))
        feeds["position_ids"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        feeds[SWITCH] = np.array([False])
        names = [spec.name for spec in self.model.get_inputs()]
        outputs = [spec.name for spec in self.model.get_outputs()]
        results = self.model.run(outputs, {name: feeds[name] for name in names})
        return dict(zip(outputs, results, strict=True))


def run_encoder(graphs: OnnxGraphs, piece: Piece) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the last hidden states (1, T, E) of one sequence, for any layer, and the head's results."""
    given = {"input_ids": np.array([piece.ids]), "token_type_ids": np.array([piece.segments])}
    out = {name: torch.from_numpy(array) for name, array in graphs.run(given).items()}
    return name_results(out, graphs.layers)


class OnnxDecoder(Reference):
    """A decoder's graph; sequences are computed at once and without a past."""

    repeats = False

    def count_read(self, context: int) -> int:
        return context

    def compute_columns(self, tokens: Sequence[int], columns: Sequence[int]) -> Logits:
        return compute_whole_columns(self, tokens, columns)

    def compute_logits(self, tokens: Sequence[int], rows: slice | list[int]) -> Logits:
        found: Logits = self.model.run({"input_ids": np.array([list(tokens)])})["logits"][0, rows]
        return found

    def continue_greedily(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        rows = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(steps):
                tokens.append(int(self.compute_logits(tokens, [-1]).argmax()))
            rows.append(tokens[len(prompt) :])
        return rows


class OnnxTranslator(UncachedReference):
    """An encoder-decoder's graphs."""

    def encode(self, source: Sequence[int]) -> Array:
        ids = np.array([list(source)])
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        found: Array = self.model.encoder.run(["last_hidden_state"], given)[0]
        return found

    def compute_logits(self, states: Array, targets: Sequence[Sequence[int]]) -> Logits:
        return self.run_decoder(states, targets)["logits"]

    def run_decoder(self, states: Array, targets: Sequence[Sequence[int]]) -> dict[str, Array]:
        states = np.repeat(states, len(targets), axis=0)
        mask = np.ones(states.shape[:2], np.int64)
        given = {"input_ids": np.array(targets), STATES: states, "encoder_attention_mask": mask}
        found: dict[str, Array] = self.model.run(given)
        return found

    def compute_keys_values(self, source: Sequence[int]) -> list[KeyValue]:
        out = self.run_decoder(self.encode(source), [[self.start]])
        tensors = [torch.from_numpy(array) for name, array in out.items() if CROSS.fullmatch(name)]
        return list(zip(tensors[::2], tensors[1::2], strict=True))
