"""What a decoder must reproduce, computed in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.apps.check import decoders as golden
from ...runtime.apps.check.decoders import Context, Golden, Sample
from ...runtime.apps.check.files import Arrays, choose_evenly
from ...runtime.bundle.bundle import Bundle
from ...runtime.decoding.cache_shapes import PREFILL_CHUNK
from ...runtime.progress import PartCounter, Report, report_nothing
from ...runtime.text.tokenizer import Tokenizer
from ..errors import PromptsError, VerificationError
from ..levels import FULL, Level
from . import passages
from .passages import Passage, cut_passages, make_passage

if TYPE_CHECKING:
    from .decoder import Reference
    from .draw import Drawing
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


@dataclass(frozen=True)
class Questions:
    """What PyTorch is asked: besides the model, all that its answers depend on."""

    prompts: tuple[tuple[int, ...], ...]  # to continue; the last has a single token
    steps: int  # of each continuation
    passages: tuple[tuple[int, ...], ...]  # of which every token is predicted
    context: Context  # whose end is read; an empty one is not
    edges: tuple[int, ...]  # how many of the edge tokens are read
    edge_tokens: tuple[int, ...]
    drawing: Drawing | None  # None where nothing is drawn
    texts: tuple[tuple[int, ...], ...]  # as in an `Expectation`
    left_out: tuple[str, ...]


def choose_questions(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> Questions:
    """Choose samples of unequal length, one of a single token, a full context, and what is drawn.

    A level below "full" has fewer of them.
    """
    from .decoder import make_reference
    from .draw import Drawing, count_weights

    reference = make_reference(model)
    weights = count_weights(model)
    manifest = bundle.manifest
    context = manifest.max_length
    rows = max(artifact.axis("batch").max for artifact in manifest.artifacts)
    encoded, text = encode_texts(bundle, texts)
    steps = min(DECODE_STEPS + 1, context // 2)
    prompts = choose_prompts(encoded, min(PROMPT_TOKENS, context - steps), level, weights)
    passages_of_all, others = cut_passages(encoded, context)
    judged = thin_passages(passages_of_all, level.count_text(weights))
    filled = fill_for_level(reference, text, context, level, weights)
    edges = list_edges(bundle, len(filled.tokens))
    drawing = None
    if level.draw_work:
        # Another exporter's mask of a window may count the cache's columns; that is right as long as no
        # padding stands between a row's tokens, and `generate` leaves none there.
        parts = 1 if manifest.source.get("exporter") else 2
        drawing = Drawing(text, context, rows, seed, parts, level)
    left_out = describe_left_out(
        counts={
            "prompts": (len(prompts) - 1, len(encoded)),
            "passages of real text": (len(judged), len(passages_of_all)),
        },
        context=(len(filled), len(filled.tokens), min(context, reference.count_read(context))),
        full_context=context,
        weights=weights,
        sizes=rows,
        level=level,
    )
    return Questions(
        prompts=tuple(prompts),
        steps=steps,
        passages=tuple(judged),
        context=filled,
        edges=edges,
        edge_tokens=(filled.tokens or text)[: max(edges, default=1)],
        drawing=drawing,
        texts=tuple(others),
        left_out=tuple(left_out),
    )


def encode_texts(bundle: Bundle, texts: Sequence[str]) -> tuple[list[list[int]], tuple[int, ...]]:
    """Return the tokens of each text that has any, and all of them; refuse too few to judge by."""
    encoded = [tokens for tokens in map(open_plain_tokenizer(bundle).encode, texts) if tokens]
    text = tuple(token for tokens in encoded for token in tokens)
    if len(text) < 2:
        raise PromptsError(
            f"the texts to verify with have {len(text)} tokens together, and judging what follows a token"
            " takes 2 or more; write longer texts, one a line, or leave --prompts out"
        )
    return encoded, text


def answer(model: ReferenceModel, questions: Questions, report: Report = report_nothing) -> Expectation:
    """Compute what PyTorch answers; report the parts."""
    from .decoder import make_reference
    from .draw import draw_for_decoder

    # The continuations, the context with the edges, and what is drawn are a part each.
    parts = PartCounter(report, 3 + len(questions.prompts) + len(questions.passages))
    reference = make_reference(model)
    samples = answer_prompts(reference, questions, parts)
    context = questions.context
    end = samples[-1].logits[:0]
    if context:
        end = reference.compute_context_logits(context, min(CONTEXT_ROWS, len(context) - 1))
    edge_rows = [edge - 1 for edge in questions.edges]
    edge_logits = reference.compute_logits(questions.edge_tokens, edge_rows)
    parts.finish_one()
    predicted = []
    for tokens in questions.passages:
        logits = reference.compute_logits(tokens[:-1], slice(None))
        predicted.append(make_passage(tokens, logits, len(questions.passages)))
        parts.finish_one()
    draws = None
    if questions.drawing is not None:
        draws = draw_for_decoder(reference, questions.drawing)
    parts.finish_one()
    return Expectation(
        samples=tuple(samples),
        passages=tuple(predicted),
        context=context,
        context_logits=end,
        edges=questions.edges,
        edge_logits=edge_logits,
        draws=draws,
        texts=questions.texts,
        left_out=questions.left_out,
    )


def answer_prompts(reference: Reference, questions: Questions, parts: PartCounter) -> list[Sample]:
    """Continue the prompts, and compute the logits of each continuation at once."""
    steps = questions.steps
    continuations = reference.continue_greedily(questions.prompts, steps)
    parts.finish_one()
    samples = []
    for prompt, continuation in zip(questions.prompts, continuations, strict=True):
        logits = reference.compute_logits([*prompt, *continuation[:-1]], slice(len(prompt) - 1, None))
        if not np.isfinite(logits).all():
            raise VerificationError("the PyTorch model's own logits are not finite; check its weights")
        best = np.sort(logits, axis=-1)[:, -2:]
        margins = tuple(float(margin) for margin in best[:, 1] - best[:, 0])
        samples.append(Sample(prompt, tuple(continuation), margins, tuple(range(steps)), logits))
        parts.finish_one()
    return samples


def choose_prompts(
    encoded: Sequence[Sequence[int]], longest: int, level: Level, weights: int
) -> list[tuple[int, ...]]:
    """Return the beginnings of some texts, of three lengths, and a single token."""
    count = floor(level.count_samples(weights, PROMPT_TOKENS) - 1, len(encoded))
    few = choose_evenly(len(encoded), count)
    chosen = [tuple(encoded[k][: max(1, longest // (1 + i % 3))]) for i, k in enumerate(few)]
    return [*chosen, tuple(encoded[0][:1])]


def list_edges(bundle: Bundle, known: int) -> tuple[int, ...]:
    """Return the lengths of prompts at which something changes, below that of the known text."""
    tuned = {artifact.axis("tokens").opt for artifact in bundle.manifest.artifacts}
    lengths = {length for edge in (*tuned, PREFILL_CHUNK) for length in (edge, edge + 1)}
    return tuple(sorted(length for length in lengths if length < known))


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
    weights: int,
    sizes: int,
    level: Level,
) -> Iterator[str]:
    """Yield what the level leaves out of the cases that "full" has.

    Args:
        counts: how many of each kind are compared, and how many there are.
        context: how long the context is that is filled, how much of it is read, and how much "full" reads.
        full_context: how long it would be.
        weights: of the model.
        sizes: the most rows of a batch.
        level: how much is computed.
    """
    from .draw import describe_undrawn

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
    yield from describe_undrawn(weights, full_context, sizes, level)


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


def to_arrays(expected: Expectation, whole: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Return samples, passages and some of the logits, as golden data keeps them; all of them if `whole`."""
    return golden.to_arrays(expected, whole) | passages.to_arrays(expected.passages, whole)


def from_arrays(arrays: Arrays) -> Expectation:
    return Expectation(**vars(golden.from_arrays(arrays)), passages=passages.from_arrays(arrays))


def restore(model: ReferenceModel, questions: Questions, arrays: Arrays) -> Expectation:
    """Return what `answer` does, from whole arrays of an earlier run."""
    del model
    return replace(from_arrays(arrays), texts=questions.texts, left_out=questions.left_out)
