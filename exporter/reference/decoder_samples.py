"""What a decoder must reproduce, computed in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from ..levels import FULL, Level
from . import passages
from .passages import Passage, cut_passages, make_passage

if TYPE_CHECKING:
    from ...runtime.diagnostics.golden.draws import Draws
    from .decoder import Reference
    from .model import ReferenceModel

DECODE_STEPS = 16
PROMPT_TOKENS = 48  # at most; several lengths below that are used
CONTEXT_ROWS = 8  # positions compared at the end of a full context


@dataclass(frozen=True)
class Expectation(Golden):
    """What every engine must reproduce, and the real text beside it."""

    passages: tuple[Passage, ...]  # of which every token is predicted
    texts: tuple[tuple[int, ...], ...] = ()  # more, to calibrate with; golden data does without
    left_out: tuple[str, ...] = ()  # what the level of verification does without, in words

    def thin(self, texts: int) -> Expectation:
        """Return at most so many samples and passages, without what takes as long as all of them."""
        return replace(
            self,
            draws=None,
            samples=self.samples[-texts:],
            context=Context(),
            passages=tuple(self.passages[i] for i in choose_evenly(len(self.passages), texts)),
        )

    def thin_for_gap(self) -> Expectation:
        """Return half of the passages, without the context."""
        few = choose_evenly(len(self.passages), math.ceil(len(self.passages) / 2))
        return replace(self, context=Context(), passages=tuple(self.passages[i] for i in few))


def expect(
    model: ReferenceModel,
    bundle: Bundle,
    texts: Sequence[str],
    report: Report = report_nothing,
    seed: int = 0,
    level: Level = FULL,
) -> Expectation:
    """Compute samples of unequal length, one of a single token, a full context, and drawn batches.

    The parts are reported. A level below "full" has fewer of them.
    """
    from .decoder import make_reference
    from .draw import count_weights, draw_for_decoder

    reference = make_reference(model)
    weights = count_weights(model)
    context = bundle.manifest.max_length
    tuned = {artifact.axis("tokens").opt for artifact in bundle.manifest.artifacts}
    encoded = [tokens for tokens in map(open_plain_tokenizer(bundle).encode, texts) if tokens]
    steps = min(DECODE_STEPS + 1, context // 2)
    longest = min(PROMPT_TOKENS, context - steps)
    few = choose_evenly(len(encoded), floor(level.count_samples(weights, PROMPT_TOKENS) - 1, len(encoded)))
    chosen = [encoded[k][: max(1, longest // (1 + i % 3))] for i, k in enumerate(few)]
    chosen.append(encoded[0][:1])
    passages_of_all, others = cut_passages(encoded, context)
    judged = thin_passages(passages_of_all, level.count_text(weights))
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
    filled = fill_for_level(reference, text, context, level, weights)
    end = samples[-1].logits[:0]
    if filled:
        end = reference.compute_context_logits(filled, min(CONTEXT_ROWS, len(filled) - 1))
    known = len(filled.tokens)
    edges = sorted({n for edge in (*tuned, PREFILL_CHUNK) for n in (edge, edge + 1) if n < known})
    edge_logits = reference.compute_logits(
        (filled.tokens or text)[: max(edges, default=1)], [n - 1 for n in edges]
    )
    parts.finish_one()
    passages = []
    for tokens in judged:
        logits = reference.compute_logits(tokens[:-1], slice(None))
        passages.append(make_passage(tokens, logits, len(judged)))
        parts.finish_one()
    rows = max(artifact.axis("batch").max for artifact in bundle.manifest.artifacts)
    draws = None
    if level.draw_work:
        # Another exporter's mask of a window may count the cache's columns; that is right as long as no
        # padding stands between a row's tokens, and `generate` leaves none there.
        most = 1 if bundle.manifest.source.get("exporter") else 2
        draws = draw_for_decoder(reference, text, context, rows, seed, most, level)
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
        left_out=tuple(
            describe_left_out(
                counts={
                    "prompts": (len(few), len(encoded)),
                    "passages of real text": (len(judged), len(passages_of_all)),
                },
                context=(len(filled), known, min(context, reference.count_read(context))),
                full_context=context,
                draws=draws,
                weights=weights,
                sizes=rows,
                level=level,
            )
        ),
    )


def floor(count: float, most: int) -> int:
    """Return a count as a whole number, at most `most`."""
    return int(min(count, most))


def thin_passages(passages: Sequence[tuple[int, ...]], tokens: float) -> list[tuple[int, ...]]:
    """Return some of the passages, of about so many tokens together; at least one, cut where it is longer."""
    longest = max(map(len, passages))
    count = max(1, floor(tokens / longest, len(passages)))
    return [passages[i][: max(2, floor(tokens, longest))] for i in choose_evenly(len(passages), count)]


def fill_for_level(
    reference: Reference, text: Sequence[int], context: int, level: Level, weights: int
) -> Context:
    """Return a context of which no more is read than the level allows, but what a window sees.

    Where keys and values cannot be repeated, it ends before the model's own does.
    """
    most = floor(level.count_context(weights), context)
    if not most:
        return Context()
    if most >= context:
        return fill_context(text, context, reference.count_read(context))
    if not reference.repeats:
        return fill_context(text, most, most)
    windows = [window for window in reference.model.config.windows if window is not None]
    read = min(reference.count_read(context), max(most, max(windows, default=0) + CONTEXT_ROWS))
    return fill_context(text, context, read)


def describe_left_out(
    counts: Mapping[str, tuple[int, int]],
    context: tuple[int, int, int],
    full_context: int,
    draws: Draws | None,
    weights: int,
    sizes: int,
    level: Level,
) -> Iterator[str]:
    """Yield what the level leaves out of the cases that "full" has.

    Args:
        counts: how many of each kind are compared, and how many there are.
        context: how long the context is that is filled, how much of it is read, and how much "full" reads.
        full_context: how long it would be.
        draws: what is drawn.
        weights: of the model.
        sizes: the most rows of a batch.
        level: how much is computed.
    """
    from .draw import count_alike, count_tokens, list_sizes

    for what, (some, every) in counts.items():
        if some < every:
            yield f"{every - some} of {every} {what}"
    length, read, usually_read = context
    if not length:
        yield "a full context, and prompts as long as a prefill's chunk"
    elif length < full_context:
        yield f"positions {length:,} to {full_context - 1:,} of a context"
    elif read < usually_read:
        yield f"reading {usually_read:,} tokens of a context: {read:,} are, and stand in it more than once"
    if draws is None:
        yield "drawn batches, and single steps at every position"
        return
    longest = len(draws.texts[0])
    usual = min(full_context, count_tokens(weights, FULL) // 2)
    if longest < usual:
        yield f"drawn rows and single steps of {longest + 1:,} to {usual:,} tokens"
    if count_alike(weights, list_sizes(sizes), level) == 1:
        yield "a second drawn batch of each size"


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
