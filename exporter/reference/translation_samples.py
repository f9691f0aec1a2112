"""What an encoder-decoder must reproduce, computed in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import GenerationDefaults
from ...runtime.decoding.beam import Search
from ...runtime.decoding.constraints import Constraints
from ...runtime.diagnostics.golden import translations
from ...runtime.diagnostics.golden.evenly import evenly
from ...runtime.diagnostics.golden.files import Arrays
from ...runtime.diagnostics.golden.translations import Golden, Sample
from ...runtime.diagnostics.golden.translators import MAX_BATCH
from ...runtime.translate.tokenizers import open_tokenizers
from ..errors import VerificationError

if TYPE_CHECKING:
    from .model import ReferenceModel
    from .translation import Reference

SOURCE_TOKENS = 48  # at most; several lengths below that are used
DECODE_STEPS = 32
NUM_BEAMS = 4
CONTEXT_ROWS = 8  # positions compared at the end of a full target
POSITIONS = 6  # of each source, whose keys and values are compared


@dataclass(frozen=True)
class Expectation(Golden):
    """What every engine must reproduce.

    Attributes:
        reference: the model in PyTorch, where it is available.
        texts: other sources, to calibrate with; golden data does without.
    """

    reference: Reference | None = None
    texts: tuple[tuple[int, ...], ...] = ()


def expect(model: ReferenceModel, bundle: Bundle, texts: Sequence[str]) -> Expectation:
    """Compute the reference in PyTorch for texts of unequal length."""
    from .translation import reference_of

    defaults = bundle.manifest.generation
    assert defaults is not None and defaults.decoder_start is not None and defaults.source_eos is not None
    gives_attention = any(
        s.role.startswith("cross_attention.") for a in bundle.manifest.artifacts for s in a.outputs
    )
    reference = reference_of(model, defaults.decoder_start, gives_attention)
    end = defaults.source_eos
    tokenizer, _ = open_tokenizers(bundle)
    encoder = next(a for a in bundle.manifest.artifacts if a.graph == "encoder")
    longest = encoder.axis("tokens").max
    encoded = [tokens for tokens in map(tokenizer.encode, texts) if tokens]
    if not encoded:
        raise VerificationError("the texts to verify with have no tokens that this model knows")
    most = min(SOURCE_TOKENS, longest - 1)
    judged, others = split_sources(encoded, most)
    sources = [(*t[: max(1, most // (1 + i % 3))], end) for i, t in enumerate(judged)]
    steps = min(DECODE_STEPS, longest)
    samples = [sample_of(reference, source, defaults, steps) for source in sources]
    search = search_of(defaults, steps, NUM_BEAMS)
    samples[-MAX_BATCH:] = [
        replace(s, beams=tuple(reference.search(s.source, search))) for s in samples[-MAX_BATCH:]
    ]
    samples.append(sample_of(reference, (end,), defaults, steps))
    text = [token for tokens in judged for token in tokens[:most]]
    full = (*(text * (longest // len(text) + 1))[: longest - 1], end)
    written = [token for s in samples for token in s.target]
    target = tuple((written * (longest // len(written) + 1))[:longest])
    samples.append(
        sample_with(reference, full, target, tuple(range(longest - min(CONTEXT_ROWS, longest), longest)))
    )
    return Expectation(tuple(samples), search, reference, tuple((*t, end) for t in others))


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
    if not held:
        return encoded, encoded
    return [t for i, t in enumerate(encoded) if i % 3 != 2], held


def sample_of(
    reference: Reference, source: tuple[int, ...], defaults: GenerationDefaults, steps: int
) -> Sample:
    """Return a source with its greedy target, of `steps` tokens even where it ends before."""
    search = replace(search_of(defaults, steps, 1), constraints=Constraints(eos=()))
    (best,) = reference.search(source, search)
    return sample_with(reference, source, best.token_ids, tuple(range(steps)))


def sample_with(
    reference: Reference, source: tuple[int, ...], target: tuple[int, ...], steps: tuple[int, ...]
) -> Sample:
    logits, attention = reference.results(source, target)
    logits = logits[list(steps)]
    best = np.sort(logits, axis=-1)[:, -2:]
    margins = tuple(float(margin) for margin in best[:, 1] - best[:, 0])
    positions = evenly(len(source), POSITIONS)
    cross = reference.cross(source)[:, list(positions)]
    return Sample(source, target, margins, steps, logits, positions, cross, attention[:, :, list(steps)])


def search_of(defaults: GenerationDefaults, steps: int, beams: int) -> Search:
    """Return a search that only forbids the tokens that the model itself never generates."""
    constraints = Constraints(eos=defaults.eos, suppressed=defaults.suppressed)
    return Search(num_beams=beams, n_best=beams, max_new_tokens=steps, constraints=constraints)


def from_arrays(arrays: Arrays) -> Expectation:
    """Return the expectation that golden data keeps."""
    return Expectation(**vars(translations.from_arrays(arrays)))
