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
INNER_WIDTHS = ("intermediate_size", "n_inner", "{}_ffn")  # an encoder-decoder has those of each graph
HEADS = ("num_attention_heads", "n_head", "{}_heads")
INNER_FACTOR = 4  # how many times the width the feed-forward part is where none is named
# Results of a layer that live at one time: of the feed-forward part, of the hidden size, and scores.
INNER_RESULTS = 3
HIDDEN_RESULTS = 9
SCORE_RESULTS = 2
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that graphs of one precision need for a batch.

    Attributes:
        batch: texts that run together.
        length: tokens of each, prompt and answer.
        weights: of all graphs, each file once.
        cache: keys and values, of a translation's source too.
        activations: a layer's results that live at one time, of each graph.
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


def sum_memory(
    manifest: Manifest, artifacts: Sequence[Artifact], batch: int, length: int, widens_half: bool
) -> MemoryNeed:
    """Add up what graphs that run together need for a batch of texts of so many tokens.

    Each text has as many rows of the cache as the bundle's search has beams. Of a translation source and
    target have that length. `widens_half` is the engine's.
    """
    rows = batch * (1 if manifest.generation is None else manifest.generation.num_beams)
    return MemoryNeed(
        batch,
        length,
        count_weight_bytes(manifest, artifacts, widens_half),
        sum(count_kept_bytes(artifact, batch, rows, length) for artifact in artifacts),
        # Engines keep what each graph needed, until it is closed.
        sum(
            count_batch_bytes(
                manifest.config, count_step_tokens(artifact, batch, rows, length), length, artifact.graph
            )
            for artifact in artifacts
        ),
    )


def count_weight_bytes(manifest: Manifest, artifacts: Sequence[Artifact], widens_half: bool) -> int:
    """Return what the weights of graphs of one precision take in an engine, each file once.

    An engine that widens fp16 has products by weights in fp32. Quantized ones stay as they are.
    """
    is_widened = widens_half and any(artifact.has_half_weights for artifact in artifacts)
    return manifest.count_weight_bytes(*artifacts) * (2 if is_widened else 1)


def count_kept_bytes(artifact: Artifact, batch: int, rows: int, length: int) -> int:
    """Return the size of a decoder's cache for some rows, and of what it reads of a batch of sources."""
    if not artifact.keeps_cache:
        return 0
    sources = [spec for spec in artifact.inputs if spec.role.startswith("cross.")]
    return count_cache_bytes(artifact, rows, length) + sum(
        count_tensor_bytes(spec, batch, length) for spec in sources
    )


def count_step_tokens(artifact: Artifact, batch: int, rows: int, length: int) -> int:
    """Return the most tokens, padding included, that a graph reads at one time."""
    if artifact.reads_source:
        return rows  # a translation begins with one token
    if artifact.keeps_cache:
        return max(rows, batch * min(length, PREFILL_CHUNK))
    return min(batch * length, max(TOKEN_BUDGET, length))


def count_tensor_bytes(spec: TensorSpec, batch: int, length: int) -> int:
    """Return the size of a source's keys or values, of rows of so many tokens."""
    lengths = [axis if isinstance(axis, int) else min(axis.max, length) for axis in spec.axes]
    if isinstance(spec.axes[0], Axis):
        lengths[0] = batch
    return math.prod(lengths) * np.dtype(spec.dtype).itemsize


def count_batch_bytes(config: Mapping[str, Any], tokens: int, longest: int, graph: str = "encoder") -> int:
    """Return what a batch of so many tokens, padding included, needs while it runs.

    A layer's results that live at one time: its feed-forward part's product, activation and what that is
    computed in (a gated one's gate, product and activation); of the hidden size the layer's input, query, key
    and value before and after they are split into heads, context and sum; and every head's scores of every
    token for every token, twice, as the mask is added to them. All of them count, though scores are gone
    before the feed-forward part begins: an engine gives the place of one to the other in parts only. 0
    where the configuration does not name the sizes.
    """
    width, inner, heads = (
        find_size(config, [name.format(graph) for name in names]) for names in (WIDTHS, INNER_WIDTHS, HEADS)
    )
    if not width or not heads:
        return 0
    inner = inner or INNER_FACTOR * width
    scores = heads * longest
    return int(4 * tokens * (INNER_RESULTS * inner + HIDDEN_RESULTS * width + SCORE_RESULTS * scores))


def find_size(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first of some sizes that a configuration names; 0 where it names none."""
    return next((config[name] for name in names if type(config.get(name)) is int), 0)


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size such as "4GB", "500 MB" or "2GiB"."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or int(float(match[1]) * UNITS[match[2].upper()]) < 1:
        raise InputError(f"{option} {text!r:.40} is not a size; give one such as 500MB, 4GB or 2GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])
