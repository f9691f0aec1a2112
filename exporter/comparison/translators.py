"""Runs an encoder-decoder through the runtime's own loop and compares every number with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import GenerationDefaults
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.beam import Search
from ...runtime.decoding.constraints import Constraints
from ...runtime.diagnostics.golden.cases import Case
from ...runtime.diagnostics.golden.decoders import measure_parts
from ...runtime.diagnostics.golden.evenly import evenly
from ...runtime.diagnostics.golden.translation_engine import Engine
from ...runtime.diagnostics.golden.translations import Sample, measure_cross, to_arrays
from ...runtime.diagnostics.golden.translators import (
    MAX_BATCH,
    at_once_case,
    cross_case,
    decoder_cases,
    encoder_cases,
)
from ...runtime.diagnostics.metrics import (
    Comparison,
    Metrics,
    Outcome,
    VectorMetrics,
    judge_outcome,
    scale_of,
)
from ...runtime.translate.tokenizers import translation_tokenizers
from ..errors import VerificationError
from ..execution.node_executor import ExecutedProgram, NotFiniteError, rounded_engine
from ..execution.translation_engine import engine_of
from ..execution.translation_trial import trial
from ..gate import Gaps, limits_for
from ..passes.weight_files import load_graph
from ..reference.translation_samples import Expectation, from_arrays

if TYPE_CHECKING:
    from ...models import Transformer
    from ..reference.rounding import Rounding
    from ..reference.translation import Reference

SOURCE_TOKENS = 48  # at most; several lengths below that are used
DECODE_STEPS = 32
NUM_BEAMS = 4
CONTEXT_ROWS = 8  # positions compared at the end of a full target
POSITIONS = 6  # of each source, whose keys and values are compared


def search_of(defaults: GenerationDefaults, steps: int, beams: int) -> Search:
    """Return a search that only forbids the tokens that the model itself never generates."""
    constraints = Constraints(eos=defaults.eos, suppressed=defaults.suppressed)
    return Search(num_beams=beams, n_best=beams, max_new_tokens=steps, constraints=constraints)


def expect(model: Transformer, bundle: Bundle, texts: Sequence[str]) -> Expectation:
    """Compute the reference in PyTorch for texts of unequal length."""
    from ..reference.translation import reference_of

    defaults = bundle.manifest.generation
    assert defaults is not None and defaults.decoder_start is not None and defaults.source_eos is not None
    gives_attention = any(
        s.role.startswith("cross_attention.") for a in bundle.manifest.artifacts for s in a.outputs
    )
    reference = reference_of(model, defaults.decoder_start, gives_attention)
    end = defaults.source_eos
    tokenizer, _ = translation_tokenizers(bundle)
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


def gaps(model: Transformer, bundle: Bundle, expected: Expectation, rounding: Rounding) -> Gaps:
    """Measure the effect of rounding in PyTorch."""
    del model, bundle
    assert expected.reference is not None
    return expected.reference.gaps(expected.samples, rounding)


def run_texts(model: Transformer, expected: Expectation) -> None:
    """Run PyTorch over the sources to calibrate with, and over its translations of them."""
    del model
    reference = expected.reference
    assert reference is not None
    for source in expected.texts:
        (best,) = reference.search(source, replace(expected.search, num_beams=1, n_best=1))
        reference.results(source, best.token_ids)


def limits(bundle: Bundle, expected: Expectation, precision: str, gaps: Gaps) -> dict[str, float]:
    """Return the limits of a precision, from the table of caps and the effect of rounding in PyTorch.

    Raises:
        ValueError: the rounded model is not finite.
    """
    del bundle
    kinds = {"": Metrics.LIMITED, "cross.": VectorMetrics.LIMITED, "attention.": VectorMetrics.LIMITED}
    found = {
        f"{kind}{name}": limit
        for kind, names in kinds.items()
        for name, limit in limits_for(precision, gaps.get(kind), names).items()
    }
    # A logit's error moves a token's log-probability by at most twice as much, and so their mean.
    scale = max(scale_of(sample.logits) for sample in expected.samples)
    return found | {"score_error": 2 * found["max_error"] * scale}


def compare(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    limits: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Compare every case of an artifact on ONNX Runtime, with its encoder or decoder; fp16 node by node too.

    Returns:
        A comparison per case, passed or not.
    """
    backend = OrtCpuBackend()  # verify() hashed every file, export() has just written them
    engine = engine_of(bundle, artifact, lambda each: backend.open(bundle, each))
    comparisons = []
    try:
        for name, run in cases(engine, artifact, expected, limits).items():
            progress(f"verifying {artifact.id}: {name}")
            comparisons.append(
                Comparison(artifact=artifact.id, backend=backend.name, case=name, **vars(run()))
            )
    finally:
        engine.close()
    if artifact.precision == "fp16":
        progress(f"verifying {artifact.id}: node by node")
        name = rounded_engine(artifact.precision)
        samples = [*expected.samples[:2], *expected.samples[-2:]]  # two texts, one token, the most
        outcome = compare_node_by_node(bundle, artifact, samples, limits)
        case = f"{len(samples)} sources"
        comparisons.append(Comparison(artifact=artifact.id, backend=name, case=case, **vars(outcome)))
    return comparisons


def cases(
    engine: Engine, artifact: Artifact, expected: Expectation, limits: Mapping[str, float]
) -> dict[str, Case]:
    """Return the cases of one of the two graphs; PyTorch scores targets that golden data does not have."""
    if artifact.graph == "encoder":
        return encoder_cases(engine, expected, limits)
    reference = expected.reference

    def score(sample: Sample, target: tuple[int, ...]) -> float:
        assert reference is not None
        return reference.score(sample.source, target)

    return decoder_cases(engine, expected, limits, None if reference is None else score)


def compare_node_by_node(
    bundle: Bundle, artifact: Artifact, samples: Sequence[Sample], limits: Mapping[str, float]
) -> Outcome:
    """Compare a graph node by node: whether every result is finite, and the outputs."""
    engine = engine_of(
        bundle, artifact, lambda each: ExecutedProgram(load_graph(bundle.path(each.file)), each)
    )
    of_encoder = artifact.graph == "encoder"
    try:
        if of_encoder:
            return cross_case(engine, samples, limits)()
        return at_once_case(engine, samples, limits)()
    except NotFiniteError as error:
        want = [sample.cross if of_encoder else sample.logits for sample in samples]
        nothing = [np.full_like(array, np.nan) for array in want]
        if of_encoder:
            return judge_outcome(measure_cross(nothing, want), limits, "cross.", [str(error)])
        return judge_outcome(measure_parts(list(zip(nothing, want, strict=True))), limits, "", [str(error)])


# An Examiner:
__all__ = ["compare", "expect", "from_arrays", "gaps", "limits", "run_texts", "to_arrays", "trial"]
