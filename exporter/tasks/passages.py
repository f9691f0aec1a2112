"""Cuts real text for a decoder: passages of which every token is predicted, and others to calibrate with."""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.apps.check.files import choose_evenly
from ...runtime.bundle.bundle import Bundle
from ...runtime.text.tokenizer import Tokenizer
from ..errors import PromptsError

PASSAGE_TOKENS = 256  # at most of one, and at most the context
JUDGED = 0.6  # of the passages; the others are for calibration
MAX_PASSAGES = 32


def encode_texts(bundle: Bundle, texts: Sequence[str]) -> tuple[list[list[int]], tuple[int, ...]]:
    """Return the tokens of each text that has any, and all joined; refuse texts too short to judge by."""
    encoded = [tokens for tokens in map(open_plain_tokenizer(bundle).encode, texts) if tokens]
    text = tuple(token for tokens in encoded for token in tokens)
    if len(text) < 2:
        raise PromptsError(
            f"the texts to verify with have {len(text)} tokens in all, and comparing next-token predictions"
            " needs at least 2; write longer texts, one per line, or leave --prompts out"
        )
    return encoded, text


def cut_passages(
    encoded: Sequence[Sequence[int]], context: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Cut the joined texts into passages to judge with, and to calibrate with; a single one is both."""
    text = [token for tokens in encoded for token in tokens]
    length = min(PASSAGE_TOKENS, context)
    cut = [tuple(text[start : start + length]) for start in range(0, len(text) - 1, length)][:MAX_PASSAGES]
    judged = max(1, round(JUDGED * len(cut)))
    return cut[:judged], cut[judged:] or cut


def thin_passages(passages: Sequence[tuple[int, ...]], tokens: float) -> list[tuple[int, ...]]:
    """Return some of the passages, of about so many tokens together; at least one, cut where it is longer."""
    longest = max(map(len, passages))
    count = max(1, clamp_count(tokens / longest, len(passages)))
    return [passages[i][: max(2, clamp_count(tokens, longest))] for i in choose_evenly(len(passages), count)]


def clamp_count(count: float, most: int) -> int:
    """Return a count as an integer, at most `most`."""
    return int(min(count, most))


def open_plain_tokenizer(bundle: Bundle) -> Tokenizer:
    return Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))
