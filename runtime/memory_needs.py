"""The memory that a bundle's graphs need, added up before anything is loaded or built.

B batch, T tokens
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .activations import (
    count_batch_bytes,
    count_logit_bytes,
    count_output_bytes,
    count_picture_bytes,
    count_word_bytes,
    describe_usual_batch,
)
from .bundle.artifact import Artifact, Axis, TensorSpec
from .bundle.manifest import Manifest
from .decoding.cache_shapes import count_cache_bytes, count_step_tokens
from .errors import InputError
from .text.batching import TOKEN_BUDGET

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that graphs of one precision need for a batch.

    Attributes:
        batch: texts that run together.
        length: tokens of each, prompt and answer; 0 of pictures.
        weights: of all graphs, each file once.
        cache: keys and values, of a translation's source too.
        activations: a layer's results that live at one time, of each graph, and what it gives.
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
        what = f"{self.batch} x {self.length} tokens" if self.length else f"{self.batch} of the usual size"
        parts = {"weights": self.weights, "cache": self.cache, "activations": self.activations}
        told = " + ".join(f"{size / 1e6:.1f} MB of {name}" for name, size in parts.items() if size)
        return f"{self.total / 1e6:.1f} MB for {what}: {told}"


def sum_memory(
    manifest: Manifest, artifacts: Sequence[Artifact], batch: int, length: int, widens_half: bool
) -> MemoryNeed:
    """Add up what graphs that run together need for a batch of texts of so many tokens.

    Each text has as many rows of the cache as the bundle's search has beams. Of a translation source and
    target have that length; pictures have their usual size. `widens_half` is the engine's.
    """
    rows = batch * (1 if manifest.generation is None else manifest.generation.num_beams)
    weights = count_weight_bytes(manifest, artifacts, widens_half)
    if manifest.images is not None:
        has_scores = not any(artifact.fuses_scores for artifact in artifacts)
        usual = describe_usual_batch(manifest.images, batch, has_scores)
        activations = count_picture_bytes(manifest.config, usual, manifest.images.multiple)
        return MemoryNeed(batch, 0, weights, 0, activations)
    return MemoryNeed(
        batch,
        length,
        weights,
        sum(count_kept_bytes(artifact, batch, rows, length) for artifact in artifacts),
        # Engines keep what each graph needed, until it is closed.
        sum(
            count_batch_bytes(
                manifest.config, count_read_tokens(artifact, batch, rows, length), length, artifact.graph
            )
            + count_result_bytes(manifest, artifact, rows, length)
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
    """Return the size of a decoder's cache for some rows, and of what it reads of a batch of sources.

    Of a recurrent decoder that is also the states that the encoder gives it.
    """
    if not artifact.keeps_cache and not artifact.keeps_state:
        return 0
    sources = [spec for spec in artifact.inputs if spec.is_given_by_encoder]
    return count_cache_bytes(artifact, rows, length) + sum(
        count_tensor_bytes(spec, batch, length) for spec in sources
    )


def count_read_tokens(artifact: Artifact, batch: int, rows: int, length: int) -> int:
    """Return the most tokens, padding included, that a graph reads at one time."""
    if artifact.reads_source or artifact.keeps_cache:
        return count_step_tokens(artifact, batch, rows, length)
    return min(batch * length, max(TOKEN_BUDGET, length))


def count_result_bytes(manifest: Manifest, artifact: Artifact, rows: int, length: int) -> int:
    """Return the size of a decoder's logits, or of an encoder's outputs, with one masked word of each text.

    What a translation's encoder gives is the decoder's; see `count_kept_bytes`.
    """
    if manifest.encoder is not None:
        words = count_word_bytes(artifact.outputs, count_read_tokens(artifact, rows, rows, length))
        return count_output_bytes(artifact.outputs, rows, length, rows) + words
    return count_logit_bytes(artifact, rows)


def count_tensor_bytes(spec: TensorSpec, batch: int, length: int) -> int:
    """Return the size of a source's keys or values, of rows of so many tokens."""
    lengths = [axis if isinstance(axis, int) else min(axis.max, length) for axis in spec.axes]
    if isinstance(spec.axes[0], Axis):
        lengths[0] = batch
    return math.prod(lengths) * np.dtype(spec.dtype).itemsize


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size such as "4GB", "500 MB" or "2GiB"."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or int(float(match[1]) * UNITS[match[2].upper()]) < 1:
        raise InputError(f"{option} {text!r:.40} is not a size; give one such as 500MB, 4GB or 2GiB")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if not match[2] and size < UNITS["MB"]:
        raise InputError(
            f"{option} {text!r} has no unit, so it is {size} bytes; give a unit, as in {match[1]}MB or"
            f" {match[1]}GB"
        )
    return size
