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
# Prefixes of labels: B-PER begins an entity, I-PER goes on with it. Where a model has more of them, one of a
# single word is S-PER (or U-PER), and the last word's is E-PER (or L-PER).
BEGIN = "BSU"
END = "ESLU"


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

    A word has the tag of its first token; an entity's score is its words' mean. The label "O" means outside.
    """
    found: list[list[Any]] = []  # label, the scores of its words, start and end of each entity
    tags = [split_label(label, labels) for label in labels]
    tag = OUTSIDE  # of the word before
    going = OUTSIDE  # the same, unless an entity ended there
    previous_word = None
    for t, word in enumerate(words):
        start, end = offsets[t]
        if word == previous_word and word is not None:
            if tag != OUTSIDE:
                found[-1][3] = end
            continue
        previous_word = word
        if not np.isfinite(probabilities[t]).all():
            tag = going = OUTSIDE
            continue
        best = int(probabilities[t].argmax())
        prefix, tag = tags[best]
        score = float(probabilities[t, best])
        if tag != OUTSIDE and prefix not in BEGIN and tag == going:
            found[-1][1].append(score)
            found[-1][3] = end
        elif tag != OUTSIDE:
            found.append([tag, [score], start, end])
        going = OUTSIDE if prefix in END else tag
    return tuple(
        Entity(name, float(np.mean(scores)), text[start:end], start, end)
        for name, scores, start, end in found
    )


def split_label(label: str, labels: Sequence[str]) -> tuple[str, str]:
    """Return the prefix and the rest of "B-PER"; a label without a prefix continues, as in transformers.

    "S-CLASS" has one where "B-CLASS" or "I-CLASS" is a label too.
    """
    prefix, _, name = label.partition("-")
    is_pair = prefix in ("B", "I") or (
        prefix in tuple(END) and not {f"B-{name}", f"I-{name}"}.isdisjoint(labels)
    )
    return (prefix, name) if name and is_pair else ("I", label)


def number_words(
    text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], unknown: int | None
) -> list[int]:
    """Return the number of each token's word, where the tokenizer knows no words, as transformers does.

    A word begins behind a space, and an unknown token is the first of a word.
    """
    words: list[int] = []
    word = 0
    for token, (start, _) in zip(ids, offsets, strict=True):
        word += start == 0 or " " in text[start - 1 : start + 1] or token == unknown
        words.append(word)
    return words
