"""Finds the best answers in a context, from the logits of their first and last token.

T tokens of a window
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.backend import Array
from ..text.long_text import Piece
from .probabilities import softmax
from .results import Answer, Answers


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
    """Return the best stretches of text over all windows.

    Args:
        context: the text that may hold the answer.
        offsets: characters [start, end) of each of its tokens.
        pieces: windows over it.
        logits: start and end (T,) of each window.
        n_best: at most so many answers.
        max_tokens: the most tokens of an answer.
        dropped: tokens of the context that are in no window.

    Returns:
        Answers whose score is the probability of their first token times that of their last, among
        the window's context and the place that means "none here", its first token.
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
        scores = np.triu(np.outer(starts[1:], ends[1:]))
        scores = np.tril(scores, max_tokens - 1)
        keep = min(n_best, scores.size)
        for flat in np.argpartition(scores, -keep, axis=None)[-keep:]:
            first, last = np.unravel_index(flat, scores.shape)
            span = (offsets[body[first]][0], offsets[body[last]][1])
            best_scores[span] = max(best_scores.get(span, 0.0), float(scores[first, last]))
    best = sorted(best_scores.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    answers = (Answer(context[a:b], score, a, b) for (a, b), score in best if score > 0)
    return Answers(tuple(answers), no_answer, dropped)
