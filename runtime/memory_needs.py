"""The memory that a bundle's graphs need, added up before anything is loaded or built.

B batch, T tokens
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bundle.artifact import Artifact, Axis, TensorSpec
from .bundle.manifest import Manifest
from .decoding.cache_shapes import PREFILL_CHUNK, count_cache_bytes
from .errors import InputError
from .text.batching import TOKEN_BUDGET

# Names of a model's sizes in its family's configuration.
WIDTHS = ("hidden_size", "n_embd", "d_model")
INNER_WIDTHS = ("intermediate_size", "n_inner", "decoder_ffn")
HEADS = ("num_attention_heads", "n_head", "decoder_heads")
INNER_FACTOR = 4  # how many times the width the feed-forward part is where none is named
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that graphs of one precision need for a batch.

    Attributes:
        batch: rows that run together.
        length: tokens of each row, prompt and answer.
        weights: of all graphs, each file once.
        cache: keys and values, of a translation's source too.
        activations: a layer's largest results.
    """

    batch: int
    length: int
    weights: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        """All of them; Python, the engine and the tokenizer, 70 to 110 MB, don't count."""
        return self.weights + self.cache + self.activations

    def describe(self) -> str:
        """Return the sum and its parts, in words."""
        parts = {"weights": self.weights, "cache": self.cache, "activations": self.activations}
        told = " + ".join(f"{size / 1e6:.1f} MB of {name}" for name, size in parts.items() if size)
        return f"{self.total / 1e6:.1f} MB for {self.batch} x {self.length} tokens: {told}"


def sum_memory(manifest: Manifest, artifacts: Sequence[Artifact], batch: int, length: int) -> MemoryNeed:
    """Add up what graphs that run together need for a batch of rows of so many tokens."""
    cache = 0
    tokens = batch * length
    for artifact in artifacts:
        if artifact.keeps_cache:
            cache += count_cache_bytes(artifact, batch, length)
            cache += sum(
                count_tensor_bytes(spec, batch, length)
                for spec in artifact.inputs
                if spec.role.startswith("cross.")
            )
            tokens = batch * min(length, PREFILL_CHUNK)
    if manifest.encoder is not None:
        tokens = min(tokens, max(TOKEN_BUDGET, length))
    activations = count_batch_bytes(manifest.config, tokens, length)
    return MemoryNeed(batch, length, manifest.count_weight_bytes(*artifacts), cache, activations)


def count_tensor_bytes(spec: TensorSpec, batch: int, length: int) -> int:
    """Return the size of a source's keys or values, of rows of so many tokens."""
    lengths = [axis if isinstance(axis, int) else min(axis.max, length) for axis in spec.axes]
    if isinstance(spec.axes[0], Axis):
        lengths[0] = batch
    return math.prod(lengths) * np.dtype(spec.dtype).itemsize


def count_batch_bytes(config: Mapping[str, Any], tokens: int, longest: int) -> int:
    """Return what a batch of so many tokens, padding included, needs while it runs.

    A layer's largest results: what the feed-forward part widens to, six of the hidden size (the layer's
    input, query, key, value, context, sum), and every head's scores of every token for every token. 0 where
    the configuration does not name the sizes.
    """
    width, inner, heads = (find_size(config, names) for names in (WIDTHS, INNER_WIDTHS, HEADS))
    if not width or not heads:
        return 0
    return int(4 * tokens * ((inner or INNER_FACTOR * width) + 6 * width + heads * longest))


def find_size(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first of some sizes that a configuration names; 0 where it names none."""
    return next((config[name] for name in names if type(config.get(name)) is int), 0)


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size such as "4GB", "500 MB" or "2GiB"."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or int(float(match[1]) * UNITS[match[2].upper()]) < 1:
        raise InputError(f"{option} {text!r:.40} is not a size; give one such as 500MB, 4GB or 2GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])
