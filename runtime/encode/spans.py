"""Finds stretches of a text: answers by their first and last token, entities by the tags of tokens.

T tokens, C classes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.backend import Array
from ..text.long_text import Piece
from .pooling import softmax
from .results import Answer, Answers, Entity

OUTSIDE = "O"


def find_answers(
    context: str,
    offsets: Sequence[tuple[int, int]],
    pieces: Sequence[Piece],
    logits: Sequence[Sequence[Array]],
    *,
    n_best: int,
    max_tokens: int,
    dropped: int,
) -> Answers:
    """Return the best stretches of the context over all windows, from start and end (T,) of each.

    An answer's score is the probability of its first token times that of its last, among the window's
    context and the place that means "none here", its first token.
    """
    best_scores: dict[tuple[int, int], float] = {}  # by the characters of an answer
    no_answer = 1.0
    for piece, (start, end) in zip(pieces, logits, strict=True):
        position, body = piece.body
        if not len(body):
            continue
        places = np.r_[0, position : position + len(body)]
        starts = softmax(start[places])
        ends = softmax(end[places])
        no_answer = min(no_answer, float(starts[0] * ends[0]))
        scores = np.tril(np.triu(np.outer(starts[1:], ends[1:])), max_tokens - 1)
        keep = min(n_best, scores.size)
        for flat in np.argpartition(scores, -keep, axis=None)[-keep:]:
            first, last = np.unravel_index(flat, scores.shape)
            span = (offsets[body[first]][0], offsets[body[last]][1])
            best_scores[span] = max(best_scores.get(span, 0.0), float(scores[first, last]))
    best = sorted(best_scores.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    answers = (Answer(context[a:b], score, a, b) for (a, b), score in best if score > 0)
    return Answers(tuple(answers), no_answer, dropped)


def find_entities(
    text: str,
    probabilities: Array,
    offsets: Sequence[tuple[int, int]],
    words: Sequence[int | None],
    labels: Sequence[str],
) -> tuple[Entity, ...]:
    """Return the entities of a text in order, from (T, C), NaN of tokens that the model did not see.

    A word has the tag of its first token; an entity's score is its words' mean. Of labels "O" means outside,
    "B-" and "I-" begin and continue an entity.
    """
    found: list[list[Any]] = []  # label, the scores of its words, start and end of each entity
    tag = OUTSIDE  # of the word before
    previous_word = None
    for t, word in enumerate(words):
        start, end = offsets[t]
        if word == previous_word and word is not None:
            if tag != OUTSIDE:
                found[-1][3] = end
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
            found[-1][1].append(score)
            found[-1][3] = end
        else:
            tag = name
            found.append([name, [score], start, end])
    return tuple(
        Entity(name, float(np.mean(scores)), text[start:end], start, end)
        for name, scores, start, end in found
    )


def split_label(label: str) -> tuple[str, str]:
    """Return the prefix and the rest of "B-PER"; a label without a prefix continues, as in transformers."""
    if label[:2] in ("B-", "I-"):
        return label[0], label[2:]
    return "I", label
