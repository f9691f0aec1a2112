"""What a decoder must reproduce, computed in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.bundle.bundle import Bundle
from ...runtime.decoding.cache_shapes import PREFILL_CHUNK
from ...runtime.diagnostics.golden import decoders as golden
from ...runtime.diagnostics.golden.decoders import Context, Golden, Sample
from ...runtime.diagnostics.golden.files import Arrays, choose_evenly
from ...runtime.progress import PartCounter, Report, report_nothing
from ...runtime.text.tokenizer import Tokenizer
from ..errors import VerificationError
from . import passages
from .passages import Passage, cut_passages, make_passage

if TYPE_CHECKING:
    from .model import ReferenceModel

DECODE_STEPS = 16
PROMPT_TOKENS = 48  # at most; several lengths below that are used
CONTEXT_ROWS = 8  # positions compared at the end of a full context


@dataclass(frozen=True)
class Expectation(Golden):
    """What every engine must reproduce, and the real text beside it."""

    passages: tuple[Passage, ...]  # of which every token is predicted
    texts: tuple[tuple[int, ...], ...] = ()  # more, to calibrate with; golden data does without

    def thin(self, texts: int) -> Expectation:
        """Return at most so many samples and passages, without what takes as long as all of them."""
        return replace(
            self,
            draws=None,
            samples=self.samples[-texts:],
            context=Context(),
            passages=tuple(self.passages[i] for i in choose_evenly(len(self.passages), texts)),
        )


def expect(
    model: ReferenceModel,
    bundle: Bundle,
    texts: Sequence[str],
    report: Report = report_nothing,
    seed: int = 0,
) -> Expectation:
    """Compute samples of unequal length, one of a single token, a full context, and drawn batches.

    The parts are reported.
    """
    from .decoder import make_reference
    from .draw import draw_for_decoder

    reference = make_reference(model)
    context = bundle.manifest.max_length
    tuned = {artifact.axis("tokens").opt for artifact in bundle.manifest.artifacts}
    encoded = [tokens for tokens in map(open_plain_tokenizer(bundle).encode, texts) if tokens]
    steps = min(DECODE_STEPS + 1, context // 2)
    longest = min(PROMPT_TOKENS, context - steps)
    chosen = [tokens[: max(1, longest // (1 + i % 3))] for i, tokens in enumerate(encoded)]
    chosen.append(encoded[0][:1])
    judged, others = cut_passages(encoded, context)
    parts = PartCounter(report, 3 + len(chosen) + len(judged))  # the continuations and the context are one
    continuations = reference.continue_greedily(chosen, steps)
    parts.finish_one()
    samples = []
    for prompt, continuation in zip(chosen, continuations, strict=True):
        logits = reference.compute_logits([*prompt, *continuation[:-1]], slice(len(prompt) - 1, None))
        if not np.isfinite(logits).all():
            raise VerificationError("the PyTorch model's own logits are not finite; check its weights")
        best = np.sort(logits, axis=-1)[:, -2:]
        margins = tuple(float(margin) for margin in best[:, 1] - best[:, 0])
        samples.append(Sample(tuple(prompt), tuple(continuation), margins, tuple(range(steps)), logits))
        parts.finish_one()
    text = [token for tokens in encoded for token in tokens]
    filled = fill_context(text, context, reference.count_read(context))
    end = reference.compute_context_logits(filled, min(CONTEXT_ROWS, context - 1))
    known = len(filled.tokens)
    edges = sorted({n for edge in (*tuned, PREFILL_CHUNK) for n in (edge, edge + 1) if n < known})
    edge_logits = reference.compute_logits(filled.tokens[: max(edges, default=1)], [n - 1 for n in edges])
    parts.finish_one()
    passages = []
    for tokens in judged:
        logits = reference.compute_logits(tokens[:-1], slice(None))
        passages.append(make_passage(tokens, logits, len(judged)))
        parts.finish_one()
    rows = max(artifact.axis("batch").max for artifact in bundle.manifest.artifacts)
    # Another exporter's mask of a window may count the cache's columns; that is right as long as no padding
    # stands between a row's tokens, and `generate` leaves none there.
    most = 1 if bundle.manifest.source.get("exporter") else 2
    draws = draw_for_decoder(reference, text, context, rows, seed, most)
    parts.finish_one()
    return Expectation(
        samples=tuple(samples),
        passages=tuple(passages),
        context=filled,
        context_logits=end,
        edges=tuple(edges),
        edge_logits=edge_logits,
        draws=draws,
        texts=tuple(others),
    )


def fill_context(text: Sequence[int], length: int, read: int) -> Context:
    """Return a text that fills a context of `length` tokens, of which about `read` are read."""
    tokens = tuple(text) * (length // len(text) + 1)
    repeats = length // read
    if repeats < 2:
        return Context(tokens[:length])
    count = (length - CONTEXT_ROWS) // repeats
    return Context(tokens[:count], repeats, tokens[count:][: length - repeats * count])


def open_plain_tokenizer(bundle: Bundle) -> Tokenizer:
    return Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))


def to_arrays(expected: Expectation) -> dict[str, npt.NDArray[Any]]:
    """Return samples, passages and some of the logits, as golden data keeps them."""
    return golden.to_arrays(expected) | passages.to_arrays(expected.passages)


def from_arrays(arrays: Arrays) -> Expectation:
    return Expectation(**vars(golden.from_arrays(arrays)), passages=passages.from_arrays(arrays))
