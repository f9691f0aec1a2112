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
PREFIXES = "BIESLUM"
BEGINS = "BSU"
ENDS = "ESLU"


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

    A word has the tag of its first token; an entity's score is its words' mean. Within a word of the
    tokenizer's that has spaces, as where it does not cut texts at all, each space begins a word, as in
    transformers. How labels begin says where entities do, see `split_labels`.
    """
    tags = split_labels(labels)
    spaced = find_spaced_words(text, offsets, words)
    found: list[list[Any]] = []  # label, the scores of its words, start and end of each entity
    tag = OUTSIDE  # of the word before
    is_open = False  # whether a next word may be part of the same entity
    previous_word = None
    for t, word in enumerate(words):
        start, end = offsets[t]
        begins = word in spaced and begins_behind_space(text, start)
        if word is not None and word == previous_word and not begins:
            if tag != OUTSIDE:
                found[-1][3] = end
            continue
        previous_word = word
        if not np.isfinite(probabilities[t]).all():
            tag = OUTSIDE
            continue
        best = int(probabilities[t].argmax())
        prefix, name = tags[best]
        score = float(probabilities[t, best])
        if name != OUTSIDE and name == tag and is_open and prefix not in BEGINS:
            found[-1][1].append(score)
            found[-1][3] = end
        elif name != OUTSIDE:
            found.append([name, [score], start, end])
        tag = name
        is_open = prefix not in ENDS
    return tuple(filter(None, (make_entity(text, *one) for one in found)))


def make_entity(text: str, name: str, scores: Sequence[float], start: int, end: int) -> Entity | None:
    """Return an entity without white space at its ends; None where nothing is left."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    part = part.strip()
    return Entity(name, float(np.mean(scores)), part, start, start + len(part)) if part else None


def find_spaced_words(
    text: str, offsets: Sequence[tuple[int, int]], words: Sequence[int | None]
) -> set[int | None]:
    """Return the words of a tokenizer that have white space within, so that they are none."""
    spans: dict[int | None, tuple[int, int]] = {}
    for word, (start, end) in zip(words, offsets, strict=True):
        spans[word] = (spans.get(word, (start, end))[0], end)
    return {word for word, (start, end) in spans.items() if len(text[start:end].split()) > 1}


def begins_behind_space(text: str, start: int) -> bool:
    """Return whether a token that starts at a character begins with white space or stands behind it."""
    return start == 0 or any(map(str.isspace, text[start - 1 : start + 1]))


def split_labels(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return the prefix and the rest of each label, such as "B" and "PER" of "B-PER".

    "B-" begins an entity and "I-" continues it, and so does a label without a prefix, as in transformers.
    Where all labels but "O" have prefixes of BIOES or BILOU, "E-" and "L-" end one, "S-" and "U-" are one of
    a single word, "M-" continues.
    """
    named = [label for label in labels if label != OUTSIDE]
    is_longer = all(label[0] in PREFIXES and label[1:2] == "-" for label in named if label)
    known = PREFIXES if is_longer and any(label[:2] == "B-" for label in named) else "BI"
    return [
        (label[0], label[2:]) if label[1:2] == "-" and label[0] in known else ("I", label) for label in labels
    ]
