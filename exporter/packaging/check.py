"""Runs a package in its own runtime, and holds what it answers to PyTorch's golden data.

B batch, V vocabulary
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.diagnostics.golden import decoders, encoders
from ...runtime.diagnostics.golden.cases import Case, find_room
from ...runtime.diagnostics.golden.texts import find_texts, read_texts
from ...runtime.diagnostics.metrics import Comparison, Logits, judge_outcome
from ...runtime.diagnostics.selftest import load_golden
from ...runtime.errors import BundleError
from ...runtime.text.tokenizer import Tokenizer


class Run(Protocol):
    """Rows that a decoder goes on with, step by step."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Logits:
        """Read a prompt in each row; return the logits (B, V) of what follows."""

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Read a token in each row; return the logits (B, V) of what follows."""


class Package(Protocol):
    """A packaged folder that its runtime has opened."""

    def start(self, rows: int, room: int) -> Run:
        """Begin so many rows, of up to `room` tokens each."""

    def encode(self, rows: Sequence[Sequence[int]]) -> Mapping[str, Any]:
        """Return an encoder's outputs of a padded batch, by their names."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, as the runtime reads it."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Runtime:
    """A runtime that is installed here: its name and version, and how it opens a package."""

    name: str
    version: str
    open: Any


def compare_decoder(package: Package, bundle: Bundle, artifact: Artifact) -> Iterator[Comparison]:
    """Yield what is compared of a decoder: forced steps, greedy text of a padded batch."""
    arrays, limits = load_golden(bundle)
    golden = decoders.from_arrays(arrays)
    room = find_room(artifact)
    samples = [sample for sample in golden.samples if len(sample) <= room]
    own = limits[artifact.precision]
    parts = [decoders.force_tokens(package, sample) for sample in samples]
