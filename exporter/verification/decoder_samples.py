"""What a decoder must reproduce, and how it is kept as golden data.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.bundle.bundle import Bundle
from ...runtime.decoding.decoder import PREFILL_CHUNK
from ...runtime.text.tokenizer import Tokenizer
from ..errors import VerificationError
from . import passages
from .evenly import evenly
from .gate import Gaps, Logits, limits_for
from .passages import Passage, TextMetrics, passage_of, windows

if TYPE_CHECKING:
    from ...models import GPT2
    from .decoder_reference import Reference
    from .rounding import Rounding

DECODE_STEPS = 32
PROMPT_TOKENS = 48  # at most; several lengths below that are used
CONTEXT_ROWS = 8  # positions compared at the end of a full context
GOLDEN_STEPS = 3  # logits kept per sample: a row of GPT-2's has 200 KB


@dataclass(frozen=True)
class Sample:
    """A prompt, and how PyTorch continues it.

    Attributes:
        prompt: token ids.
        continuation: PyTorch's greedy tokens.
        margins: by how much PyTorch preferred each of them to the next best, in logits.
        steps: the steps whose logits are known; step 0 follows the prompt, step i the i-th new token.
        logits: (len(steps), V) PyTorch's, computed at once and without a cache.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    margins: tuple[float, ...]
    steps: tuple[int, ...]
    logits: Logits

    def thinned(self, count: int) -> Sample:
        """Only `count` of the steps, the first and last among them."""
        keep = list(evenly(len(self.steps), count))
        return replace(self, steps=tuple(self.steps[i] for i in keep), logits=self.logits[keep])


@dataclass(frozen=True)
class Expectation:
    """What every engine must reproduce.

    Attributes:
        samples: one of them has a prompt of a single token, so that past 0 and past 1 are seen.
        passages: real text, of which every token is predicted.
        context: tokens that fill the whole context.
        context_logits: (CONTEXT_ROWS, V) PyTorch's at its last positions.
        edges: lengths of prompts where something changes: a plan's tuning, a chunk of the prefill.
        edge_logits: (len(edges), V) that follow so many tokens of the context.
        texts: real text beside the passages, to calibrate with; golden data does without.
    """

    samples: tuple[Sample, ...]
    passages: tuple[Passage, ...]
    context: tuple[int, ...]
    context_logits: Logits
    edges: tuple[int, ...]
    edge_logits: Logits
    texts: tuple[tuple[int, ...], ...] = ()


def expect(model: GPT2, bundle: Bundle, prompts: Sequence[str]) -> Expectation:
    """Asks PyTorch.

    Args:
        prompts: real text, cut to unequal lengths, so that batches are padded; all of it fills the context.
    """
    from .decoder_reference import Reference

    manifest = bundle.manifest
    tokenizer = Tokenizer.from_file(bundle.path(str(manifest.tokenizer["files"][0])))
    tuned = {artifact.axis("tokens").opt for artifact in manifest.artifacts}
    return expectation_of(Reference(model), tokenizer, prompts, manifest.max_length, tuned)


def gaps(model: GPT2, bundle: Bundle, expected: Expectation, rounding: Rounding) -> Gaps:
    """What rounding does in PyTorch."""
    del bundle
    from .decoder_reference import Reference

    return Reference(model).gaps(expected, rounding)


def run_texts(model: GPT2, expected: Expectation) -> None:
    """Runs PyTorch over the texts to calibrate with."""
    from .decoder_reference import Reference

    for tokens in expected.texts:
        Reference(model).logits(tokens, slice(None))


def limits(bundle: Bundle, expected: Expectation, precision: str, gaps: Gaps) -> dict[str, float]:
    """The limits of a precision, from the one table and from what rounding does in PyTorch.

    Raises:
        ValueError: the rounded model is not finite.
    """
    del bundle, expected
    return limits_for(precision, gaps.get("")) | limits_for(precision, gaps.get("text"), TextMetrics.LIMITED)


def expectation_of(
    reference: Reference,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    context: int,
    tuned: Collection[int] = (),
) -> Expectation:
    """Samples of unequal length, one of a single token, and a full context of `context` tokens.

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
    """Samples, tokens and some of the logits, as golden data keeps them."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "context.tokens": np.array(expected.context),
        "context.logits": expected.context_logits[-GOLDEN_STEPS:],
        "edges": np.array(expected.edges, np.int64),
        "edges.logits": expected.edge_logits,
    }
    for i, sample in enumerate(expected.samples):
        thin = sample.thinned(GOLDEN_STEPS)
        arrays |= {
            f"sample.{i}.prompt": np.array(thin.prompt),
            f"sample.{i}.continuation": np.array(thin.continuation),
            f"sample.{i}.margins": np.array(thin.margins),
            f"sample.{i}.steps": np.array(thin.steps),
            f"sample.{i}.logits": thin.logits,
        }
    return arrays | passages.to_arrays(expected.passages)


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Expectation:
    """What `to_arrays` made."""

    def integers(name: str) -> tuple[int, ...]:
        return tuple(int(number) for number in arrays[name])

    samples = tuple(
        Sample(
            prompt=integers(f"sample.{i}.prompt"),
            continuation=integers(f"sample.{i}.continuation"),
            margins=tuple(float(margin) for margin in arrays[f"sample.{i}.margins"]),
            steps=integers(f"sample.{i}.steps"),
            logits=arrays[f"sample.{i}.logits"],
        )
        for i in range(sum(name.endswith(".prompt") for name in arrays))
    )
    found = passages.from_arrays(arrays)
    return Expectation(
        samples=samples,
        passages=found,
        context=integers("context.tokens"),
        context_logits=arrays["context.logits"],
        edges=integers("edges"),
        edge_logits=arrays["edges.logits"],
    )
