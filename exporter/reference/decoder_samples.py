"""What a decoder must reproduce, computed in PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.decoding.decoder import PREFILL_CHUNK
from ...runtime.diagnostics.golden import decoders as golden
from ...runtime.diagnostics.golden.decoders import Golden, Sample
from ...runtime.diagnostics.golden.files import Arrays
from ...runtime.text.tokenizer import Tokenizer
from ..errors import VerificationError
from . import passages
from .passages import Passage, passage_of, windows

if TYPE_CHECKING:
    from .decoder import Reference

DECODE_STEPS = 32
PROMPT_TOKENS = 48  # at most; several lengths below that are used
CONTEXT_ROWS = 8  # positions compared at the end of a full context


@dataclass(frozen=True)
class Expectation(Golden):
    """What every engine must reproduce, and the real text beside it.

    Attributes:
        passages: real text, of which every token is predicted.
        texts: more of it, to calibrate with; golden data does without.
    """

    passages: tuple[Passage, ...]
    texts: tuple[tuple[int, ...], ...] = ()


def expectation_of(
    reference: Reference,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    context: int,
    tuned: Collection[int] = (),
) -> Expectation:
    """Compute samples of unequal length, one of a single token, and a full context of `context` tokens.

    Args:
        tuned: lengths of prompts that plans are tuned for.
    """
    encoded = [tokens for tokens in map(tokenizer.encode, prompts) if tokens]
    steps = min(DECODE_STEPS + 1, context // 2)
    longest = min(PROMPT_TOKENS, context - steps)
    chosen = [tokens[: max(1, longest // (1 + i % 3))] for i, tokens in enumerate(encoded)]
    chosen.append(encoded[0][:1])
    samples = []
    for prompt, continuation in zip(chosen, reference.greedy(chosen, steps), strict=True):
        logits = reference.logits([*prompt, *continuation[:-1]], slice(len(prompt) - 1, None))
        if not np.isfinite(logits).all():
            raise VerificationError("the PyTorch model's own logits are not finite; check its weights")
        best = np.sort(logits, axis=-1)[:, -2:]
        margins = tuple(float(margin) for margin in best[:, 1] - best[:, 0])
        steps_known = tuple(range(steps))
        samples.append(Sample(tuple(prompt), tuple(continuation), margins, steps_known, logits))
    text = [token for tokens in encoded for token in tokens]
    filled = (text * (context // len(text) + 1))[:context]
    ends = range(context - min(CONTEXT_ROWS, context - 1), context)
    edges = sorted({n for edge in (*tuned, PREFILL_CHUNK) for n in (edge, edge + 1) if n < context})
    known = reference.logits(filled, [*ends, *(edge - 1 for edge in edges)])
    judged, texts = windows(encoded, context)
    passages = tuple(
        passage_of(tokens, reference.logits(tokens[:-1], slice(None)), len(judged)) for tokens in judged
    )
    return Expectation(
        samples=tuple(samples),
        passages=passages,
        context=tuple(filled),
        context_logits=known[: len(ends)],
        edges=tuple(edges),
        edge_logits=known[len(ends) :],
        texts=tuple(texts),
    )


def to_arrays(expected: Expectation) -> dict[str, npt.NDArray[Any]]:
    """Return samples, passages and some of the logits, as golden data keeps them."""
    return golden.to_arrays(expected) | passages.to_arrays(expected.passages)


def from_arrays(arrays: Arrays) -> Expectation:
    """Return the expectation that `to_arrays` stored."""
    return Expectation(**vars(golden.from_arrays(arrays)), passages=passages.from_arrays(arrays))
