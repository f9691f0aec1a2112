"""The memory that an encoder's batches take, and how many texts are read ahead under a limit.

Sequences run in batches of like length, and results are given out in the order in which texts came. So
outputs wait for their turn; under a limit sequences are computed in sections, each of which is given out
before the next begins. What a section needs, with the outputs of all its sequences, is held while one of its
batches runs, and not while the caller has the turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..bundle.manifest import TensorSpec
from ..text.batching import TOKEN_BUDGET


def batch_bytes(config: Mapping[str, Any], tokens: int, longest: int) -> int:
    """Return what a batch needs while it runs.

    A layer's largest results: what the feed-forward part widens to, six of the hidden size (the layer's
    input, query, key, value, context, sum), and every head's scores of every token for every token.

    Args:
        config: the model's config.
        tokens: tokens of the batch, padding included.
        longest: its longest sequence, in tokens.
    """
    width = config["intermediate_size"] + 6 * config["hidden_size"]
    return int(4 * tokens * (width + config["num_attention_heads"] * longest))


def section_bytes(
    config: Mapping[str, Any], specs: Sequence[TensorSpec], count: int, longest: int, rows: int
) -> int:
    """Return what a section needs: its largest batch, and the outputs of all its sequences.

    Args:
        config: the model's config.
        specs: the outputs that are wanted.
        count: number of sequences.
        longest: the longest of them, in tokens.
        rows: positions whose masked-word logits are wanted.
    """
    outputs = 0
    for spec in specs:
        names = spec.axis_names()
        numbers = math.prod(axis for axis in names if isinstance(axis, int))
        places = count
        if names[0] == "rows":
            places = rows
        elif "tokens" in names:
            places = count * longest
        outputs += places * numbers * np.dtype(spec.dtype).itemsize
    tokens = min(count * longest, max(TOKEN_BUDGET, longest))
    return outputs + batch_bytes(config, tokens, longest)


def split_into_sections(
    config: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    lengths: Sequence[int],
    rows: Sequence[int],
    available: int,
) -> Iterator[tuple[range, int]]:
    """Yield sections of sequences in their order, as large as the memory allows, and what each needs.

    A sequence that needs more than there is makes a section of its own.

    Args:
        config: the model's config.
        specs: the outputs that are wanted.
        lengths: the length of each sequence in tokens.
        rows: how many masked-word logits of each sequence are wanted.
        available: bytes beside the weights.
    """
    begin = 0
    while begin < len(lengths):
        end = begin
        longest = 0
        logits = 0
        needed = 0
        while end < len(lengths):
            longest = max(longest, lengths[end])
            logits += rows[end]
            more = section_bytes(config, specs, end + 1 - begin, longest, logits)
            if end > begin and more > available:
                break
            end += 1
            needed = more
        yield range(begin, end), needed
        begin = end
