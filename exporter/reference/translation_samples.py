"""What an encoder-decoder must reproduce, computed in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.apps.check import translations
from ...runtime.apps.check.files import Arrays, choose_evenly
from ...runtime.apps.check.translations import Golden, Sample
from ...runtime.apps.check.translators import MAX_BATCH
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import GenerationDefaults
from ...runtime.bundle.manifest import Manifest
from ...runtime.decoding.beam import Search
from ...runtime.decoding.constraints import Constraints
from ...runtime.progress import PartCounter, Report, report_nothing
from ...runtime.translate.sources import open_tokenizers
from ..errors import VerificationError
from ..levels import FULL, Level

if TYPE_CHECKING:
    from .draw import Drawing
    from .model import ReferenceModel
    from .translation import Reference

SOURCE_TOKENS = 48  # at most; several lengths below that are used
DECODE_STEPS = 32
NUM_BEAMS = 4
CONTEXT_ROWS = 8  # positions compared at the end of a full target
POSITIONS = 6  # of each source, whose keys and values are compared


@dataclass(frozen=True)
class Expectation(Golden):
    """What every engine must reproduce."""

    reference: Reference | None = None  # the model in PyTorch, where it is available
    texts: tuple[tuple[int, ...], ...] = ()  # other sources, to calibrate with; golden data does without
    left_out: tuple[str, ...] = ()  # what the level of verification does without, in words


@dataclass(frozen=True)
class Questions:
    """What PyTorch is asked: besides the model, all that its answers depend on."""

    sources: tuple[tuple[int, ...], ...]  # the last is the end token alone
    searched: range  # of these sources, those for which beams are searched
    full: tuple[int, ...]  # a source as long as one may be, whose target is too
    steps: int  # of the other targets
    defaults: GenerationDefaults
    gives_attention: bool  # whether a graph does
    drawing: Drawing | None  # None where nothing is drawn; phrases of PyTorch's targets are its real text
    texts: tuple[tuple[int, ...], ...]  # as in an `Expectation`
    left_out: tuple[str, ...]

    def make_reference(self, model: ReferenceModel) -> Reference:
        """Return the model as it is asked."""
        from .translation import make_reference

        assert self.defaults.decoder_start is not None
        return make_reference(model, self.defaults.decoder_start, self.gives_attention)


def choose_questions(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> Questions:
    """Choose sources of unequal length, one of a single token, a full one, and what is drawn."""
    from .draw import count_weights, describe_undrawn

    manifest = bundle.manifest
    defaults = manifest.generation
    assert defaults is not None and defaults.source_eos is not None
    roles = [spec.role for artifact in manifest.artifacts for spec in artifact.outputs]
    end = defaults.source_eos
    tokenizer, _ = open_tokenizers(bundle)
    encoder = next(a for a in manifest.artifacts if a.graph == "encoder")
    longest = encoder.axis("tokens").max
    rows = encoder.axis("batch").max
    encoded = [tokens for tokens in map(tokenizer.encode, texts) if tokens]
    if not encoded:
        raise VerificationError("the texts to verify with have no tokens that this model knows")
    most = min(SOURCE_TOKENS, longest - 1)
    judged, others = split_sources(encoded, most)
    every = len(judged)
    weights = count_weights(model)
    few = min(every, level.count_samples(weights, SOURCE_TOKENS + DECODE_STEPS))
    judged = [judged[i] for i in choose_evenly(every, int(few))]
    sources = [(*t[: max(1, most // (1 + i % 3))], end) for i, t in enumerate(judged)]
    text = [token for tokens in judged for token in tokens[:most]]
    left_out = [f"{every - len(judged)} of {every} sources"] if len(judged) < every else []
    left_out += describe_undrawn(weights, longest, rows, level)
    return Questions(
        sources=(*sources, (end,)),
        searched=range(max(0, len(sources) - MAX_BATCH), len(sources)),
        full=(*(text * (longest // len(text) + 1))[: longest - 1], end),
        steps=min(DECODE_STEPS, longest),
        defaults=defaults,
        gives_attention=any(role.startswith("cross_attention.") for role in roles),
        drawing=make_drawing(manifest, tuple(text), end, seed, level) if level.draw_work else None,
        texts=tuple((*t, end) for t in others),
        left_out=tuple(left_out),
    )


def make_drawing(manifest: Manifest, real: tuple[int, ...], end: int, seed: int, level: Level) -> Drawing:
    """Return what is drawn, from tokens of real sources."""
    from .draw import Drawing, SourceDrawing

    limits = {a.graph: (a.axis("tokens").max, a.axis("batch").max) for a in manifest.artifacts}
    longest_source, rows = limits["encoder"]
    longest_target, rows_of_beams = limits["decoder"]
    # As for imported decoders there is no padding between a row's tokens.
    parts = 1 if manifest.source.get("exporter") else 2
    sources = SourceDrawing(real, longest_source, end)
    return Drawing((), longest_target, min(rows, rows_of_beams), seed, parts, level, sources)


def answer(
    model: ReferenceModel, bundle: Bundle, questions: Questions, report: Report = report_nothing
) -> Expectation:
    """Compute what PyTorch answers; report the parts."""
    from .draw_translation import draw_for_translator

    # The full target, and what is drawn, are a part each.
    parts = PartCounter(report, len(questions.sources) + len(questions.searched) + 2)
    reference = questions.make_reference(model)
    samples = []
    for source in questions.sources:
        samples.append(make_greedy_sample(reference, source, questions.defaults, questions.steps))
        parts.finish_one()
    search = make_search(questions.defaults, questions.steps, NUM_BEAMS)
    for i in questions.searched:
        beams = tuple(reference.search(samples[i].source, search))
        samples[i] = replace(samples[i], beams=beams)
        parts.finish_one()
    written = [token for s in samples for token in s.target]
    longest = len(questions.full)
    target = tuple((written * (longest // len(written) + 1))[:longest])
    last = tuple(range(longest - min(CONTEXT_ROWS, longest), longest))
    samples.append(make_sample(reference, questions.full, target, last))
    parts.finish_one()
    draws = None
    if questions.drawing is not None:
        draws = draw_for_translator(reference, replace(questions.drawing, real=tuple(written)))
    parts.finish_one()
    return Expectation(
        samples=tuple(samples),
        search=search,
        reference=reference,
        texts=questions.texts,
        left_out=questions.left_out,
        draws=draws,
    )


def split_sources(
    encoded: Sequence[Sequence[int]], most: int
) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """Return sources to judge by their first `most` tokens, and sources of at most as many to calibrate with.

    For calibration, long texts give what follows, short ones every third text; a single short text is both.
    """
    behind = [t[start : start + most] for t in encoded for start in range(most, len(t), most)]
    if behind:
        return encoded, behind
    held = encoded[2::3]
    return [t for i, t in enumerate(encoded) if i % 3 != 2], held or encoded


def make_greedy_sample(
    reference: Reference, source: tuple[int, ...], defaults: GenerationDefaults, steps: int
) -> Sample:
    """Return a source with its greedy target, of `steps` tokens even where it ends before."""
    search = replace(make_search(defaults, steps, 1), constraints=Constraints(eos=()))
    (best,) = reference.search(source, search)
    return make_sample(reference, source, best.token_ids, tuple(range(steps)))


def make_sample(
    reference: Reference, source: tuple[int, ...], target: tuple[int, ...], steps: tuple[int, ...]
) -> Sample:
    logits, attention = reference.compute_results(source, target)
    logits = logits[list(steps)]
    best = np.sort(logits, axis=-1)[:, -2:]
    margins = tuple(float(margin) for margin in best[:, 1] - best[:, 0])
    positions = choose_evenly(len(source), POSITIONS)
    cross = reference.stack_keys_values(source)[:, list(positions)]
    return Sample(source, target, margins, steps, logits, positions, cross, attention[:, :, list(steps)])


def make_search(defaults: GenerationDefaults, steps: int, beams: int) -> Search:
    """Return a search that only forbids the tokens that the model itself never generates."""
    constraints = Constraints(eos=defaults.eos, suppressed=defaults.suppressed)
    return Search(num_beams=beams, n_best=beams, max_new_tokens=steps, constraints=constraints)


def to_arrays(expected: Expectation, whole: bool = False) -> dict[str, npt.NDArray[Any]]:
    return translations.to_arrays(expected, whole)


def from_arrays(arrays: Arrays) -> Expectation:
    return Expectation(**vars(translations.from_arrays(arrays)))


def restore(model: ReferenceModel, questions: Questions, arrays: Arrays) -> Expectation:
    """Return what `answer` does, from whole arrays of an earlier run."""
    reference = questions.make_reference(model)
    known = from_arrays(arrays)
    return replace(known, reference=reference, texts=questions.texts, left_out=questions.left_out)
