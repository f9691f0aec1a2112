"""Merges the tags of tokens into tagged stretches of words.

T tokens, C classes
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.backend import Array
from .results import Entity

OUTSIDE = "O"


def find_entities(
    text: str,
    probabilities: Array,
    offsets: Sequence[tuple[int, int]],
    words: Sequence[int | None],
    labels: Sequence[str],
) -> tuple[Entity, ...]:
    """Merge the tokens of a word, then the words of an entity.

    Args:
        text: what was tagged.
        probabilities: (T, C) of each token, NaN where the model did not see it.
        offsets: characters [start, end) of each token.
        words: the word that each token belongs to.
        labels: C names; "O" means outside, "B-" and "I-" begin and continue an entity.

    Returns:
        Entities in order. A word has the tag of its first token; an entity's score is its words' mean.
    """
    entities: list[Entity] = []
    scores: list[float] = []  # of the words of the last entity
    tag = OUTSIDE  # of the word before
    previous_word = None
    for t, word in enumerate(words):
        start, end = offsets[t]
        if word == previous_word and word is not None:
            if tag != OUTSIDE:
                entities[-1] = extend_entity(entities[-1], text, end, scores)
            continue
        previous_word = word
        if not np.isfinite(probabilities[t]).all():
            tag = OUTSIDE
            continue
        best = int(probabilities[t].argmax())
        prefix, name = split_label(labels[best])
        score = float(probabilities[t, best])
        if name == OUTSIDE:
            tag = OUTSIDE
        elif prefix != "B" and name == tag:
            scores.append(score)
            entities[-1] = extend_entity(entities[-1], text, end, scores)
        else:
            tag = name
            scores = [score]
            entities.append(Entity(name, score, text[start:end], start, end))
    return tuple(entities)


def split_label(label: str) -> tuple[str, str]:
    """Return the prefix and the rest of "B-PER"; a label without a prefix continues, as in transformers."""
    if label[:2] in ("B-", "I-"):
        return label[0], label[2:]
    return "I", label


def extend_entity(entity: Entity, text: str, end: int, scores: Sequence[float]) -> Entity:
    """Return the entity, extended to `end`."""
    return Entity(entity.label, float(np.mean(scores)), text[entity.start : end], entity.start, end)
