"""Runs an encoder's graph over sequences of unequal length: pads them, and removes the padding.

B batch, T tokens, N logit rows
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..backends.backend import Array, Program
from ..bundle.defaults import EncoderDefaults
from ..bundle.manifest import Artifact
from ..errors import ClosedError, ManifestError
from ..memory_budget import MemoryBudget
from ..text.batching import TOKEN_BUDGET, group_by_length, sort_by_first_index
from ..text.long_text import Piece
from .memory import batch_bytes, split_into_sections


class Encoder:
    """An opened encoder graph.

    Args:
        pad: the id of the padding token.
        budget: that batches and outputs are held in; None for no limit.
        config: the model's config, whose sizes a memory limit needs.
    """

    def __init__(
        self,
        program: Program,
        artifact: Artifact,
        pad: int,
        budget: MemoryBudget | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.budget = MemoryBudget(None) if budget is None else budget
        self.config = config or {}
        self.program = program
        self.artifact = artifact
        self.pad = pad
        self.max_batch = artifact.axis("batch").max
        self.inputs = {spec.role: spec.name for spec in artifact.inputs}
        self.lock = threading.Lock()
        self.closed = False

    def run_batches(
        self,
        pieces: Sequence[Piece],
        roles: Sequence[str],
        rows: Sequence[Sequence[int]] | None = None,
        batch_size: int | None = None,
    ) -> Iterator[dict[int, list[Array]]]:
        """Yield the outputs of many sequences, a batch at a time.

        Sequences of similar length run together. The batch that has the first sequence whose outputs are
        still missing runs next, so that what was read first comes out first.

        Args:
            pieces: sequences.
            roles: roles of the outputs to return.
            rows: the positions of each sequence whose "masked_lm" logits are wanted.
            batch_size: the most sequences of a batch; None: as many as the graph takes.

        Raises:
            MemoryLimitError: a sequence alone does not fit, or not beside what this thread holds already.

        Yields:
            For each sequence of a batch, by its index, an array per role, without padding.
        """
        for section, needed in self.sections(pieces, roles, rows):
            groups = group_by_length([len(pieces[i]) for i in section], batch_size or self.max_batch)
            what = f"{len(section)} sequences with their outputs"
            for group in sort_by_first_index(groups):
                indices = [section[i] for i in group]
                batch_rows = None if rows is None else [rows[i] for i in indices]
                # Nothing is held while the caller has the turn, who may call this encoder again.
                with self.budget.reserve(needed, what, "Shorter texts, or a smaller max_length, need less"):
                    outputs = self.batch([pieces[i] for i in indices], roles, batch_rows)
                yield dict(zip(indices, outputs, strict=True))

    def sections(
        self, pieces: Sequence[Piece], roles: Sequence[str], rows: Sequence[Sequence[int]] | None
    ) -> Iterable[tuple[range, int]]:
        """Return which sequences are read ahead together, and what they need; without a limit all."""
        available = self.budget.available()
        if available is None:
            return [(range(len(pieces)), 0)]
        return split_into_sections(
            self.config,
            [self.artifact.output(role) for role in roles],
            [len(piece) for piece in pieces],
            [0] * len(pieces) if rows is None else [len(positions) for positions in rows],
            available,
        )

    def batch(
        self, pieces: Sequence[Piece], roles: Sequence[str], rows: Sequence[Sequence[int]] | None = None
    ) -> list[list[Array]]:
        """Return the outputs of sequences that run together, padded to the longest."""
        T = max(len(piece) for piece in pieces)
        ids = np.full((len(pieces), T), self.pad, np.int64)
        mask = np.zeros_like(ids)
        segments = np.zeros_like(ids)
        for b, piece in enumerate(pieces):
            ids[b, : len(piece)] = piece.ids
            mask[b, : len(piece)] = 1
            segments[b, : len(piece)] = piece.segments
        values = {"ids": ids, "mask": mask, "segments": segments}
        # A graph with a masked-word head always computes one row at least.
        flat = [b * T + t for b, positions in enumerate(rows or ()) for t in positions]
        values["logit_rows"] = np.asarray(flat or [0], np.int64)
        specs = [self.artifact.output(role) for role in roles]
        with self.lock:
            if self.closed:
                raise ClosedError
            outputs = self.program.run(
                {name: values[role] for role, name in self.inputs.items()}, {}, [s.name for s in specs]
            )
        ends = np.cumsum([len(positions) for positions in rows or ()])
        results: list[list[Array]] = []
        for b, piece in enumerate(pieces):
            row: list[Array] = []
            for spec in specs:
                array = outputs[spec.name]
                axes = spec.axis_names()
                if axes[0] == "rows":
                    assert rows is not None
                    row.append(array[ends[b] - len(rows[b]) : ends[b]])
                else:
                    row.append(array[b, : len(piece)] if "tokens" in axes else array[b])
            results.append(row)
        return results

    def close(self) -> None:
        """Free the engine; closing twice is fine."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self.program.close()
        self.budget.close()


def check_manifest(artifact: Artifact, defaults: EncoderDefaults, config: Mapping[str, Any]) -> None:
    """Refuse a manifest whose parts contradict each other, before anything relies on them."""
    roles = {spec.role for spec in artifact.outputs}
    if not defaults.heads and not any(re.fullmatch(r"hidden\.\d+", role) for role in roles):
        raise ManifestError(f"artifact {artifact.id} has neither an output with a hidden state nor a head")
    for head in defaults.heads:
        outputs = [spec for spec in artifact.outputs if spec.role.partition(".")[0] == head]
        if not outputs:
            raise ManifestError(f"artifact {artifact.id} has no output of the head {head!r}")
        width = outputs[0].axes[-1]
        if head in ("sequence_classification", "token_classification") and width != len(defaults.labels):
            raise ManifestError(f"{head} has {width} classes, encoder.labels has {len(defaults.labels)}")
    for name in ("intermediate_size", "hidden_size", "num_attention_heads"):
        if type(config.get(name)) is not int:
            raise ManifestError(f"config.{name} is {config.get(name)!r}, not a whole number")
    if not 4 <= defaults.max_length <= artifact.axis("tokens").max:
        raise ManifestError(f"encoder.max_length={defaults.max_length} is not within the graph's tokens")


def check_memory(
    weight_bytes: int, config: Mapping[str, Any], max_length: int, memory_limit: int | None
) -> None:
    """Refuse a limit below the weights and the largest batch together."""
    tokens = max(TOKEN_BUDGET, max_length)
    batch = batch_bytes(config, tokens, max_length)
    way_out = "A smaller max_length, or a precision of fewer bits, needs less"
    MemoryBudget(memory_limit, weight_bytes).check(batch, f"a batch of {tokens} tokens", way_out)
