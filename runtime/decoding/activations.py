"""What a graph computes in one step, by the sizes of its model: tokens that it reads, and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..bundle.manifest import Artifact
from .cache_shapes import PREFILL_CHUNK

# Names of a model's sizes in its family's configuration.
WIDTHS = ("hidden_size", "n_embd", "d_model")
INNER_WIDTHS = ("intermediate_size", "n_inner", "{}_ffn")  # an encoder-decoder has those of each graph
HEADS = ("num_attention_heads", "n_head", "{}_heads")
INNER_FACTOR = 4  # how many times the width the feed-forward part is where none is named
# Results of a layer that live at one time: of the feed-forward part, of the hidden size, and scores.
INNER_RESULTS = 3
HIDDEN_RESULTS = 9
SCORE_RESULTS = 2


def count_step_tokens(artifact: Artifact, batch: int, rows: int, length: int) -> int:
    """Return the most tokens, padding included, that a decoder reads at one time."""
    if artifact.reads_source:
        return rows  # a translation begins with one token
    return max(rows, batch * min(length, PREFILL_CHUNK))


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
