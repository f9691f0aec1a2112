"""Runs an encoder-decoder through the runtime's own loop and compares every number with PyTorch's.

V vocabulary, L layers, H heads, D head size
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import GenerationDefaults
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.beam import Search
from ...runtime.decoding.constraints import Constraints
from ...runtime.load import translation_tokenizers
from ..errors import VerificationError
from .decoders import errors_of_steps, measure_parts
from .divergence import follow, with_divergence
from .evenly import evenly
from .gate import (
    Comparison,
    Gaps,
    Metrics,
    Outcome,
    ScoreMetrics,
    VectorMetrics,
    judged,
    limits_for,
    scale_of,
)
from .node_executor import ExecutedProgram, NotFiniteError, rounded_engine
from .translation_engine import Engine
from .translation_samples import (
    Expectation,
    Sample,
    from_arrays,
    measure_attention,
    measure_cross,
    to_arrays,
)
from .translation_trial import trial

if TYPE_CHECKING:
    from ...models import Transformer
    from .rounding import Rounding
    from .translation_reference import Reference

SOURCE_TOKENS = 48  # at most; several lengths below that are used
DECODE_STEPS = 32
MAX_BATCH = 4  # of the padded cases
NUM_BEAMS = 4
CONTEXT_ROWS = 8  # positions compared at the end of a full target
POSITIONS = 6  # of each source, whose keys and values are compared


def search_of(defaults: GenerationDefaults, steps: int, beams: int) -> Search:
    """A search that only forbids what the model itself never says."""
    constraints = Constraints(eos=defaults.eos, suppressed=defaults.suppressed)
    return Search(num_beams=beams, n_best=beams, max_new_tokens=steps, constraints=constraints)


def expect(model: Transformer, bundle: Bundle, texts: Sequence[str]) -> Expectation:
    """Asks PyTorch about texts of unequal length."""
    from .translation_reference import Reference

    defaults = bundle.manifest.generation
    assert defaults is not None and defaults.decoder_start is not None and defaults.source_eos is not None
    gives_attention = any(
        s.role.startswith("cross_attention.") for a in bundle.manifest.artifacts for s in a.outputs
    )
    reference = Reference(model, defaults.decoder_start, gives_attention)
    end = defaults.source_eos
    tokenizer, _ = translation_tokenizers(bundle)
    encoder = next(a for a in bundle.manifest.artifacts if a.graph == "encoder")
    longest = encoder.axis("tokens").max
    encoded = [tokens for tokens in map(tokenizer.encode, texts) if tokens]
    if not encoded:
        raise VerificationError("the texts to verify with have no tokens that this model knows")
    most = min(SOURCE_TOKENS, longest - 1)
    judged, others = split(encoded, most)
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


def split(
    encoded: Sequence[Sequence[int]], most: int
) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """Sources to judge with, by their first `most` tokens, and sources of at most so many to calibrate with.

    Of long texts those are what follows, of short ones every third text; a single short text is both.
    """
    behind = [t[start : start + most] for t in encoded for start in range(most, len(t), most)]
    if behind:
        return encoded, behind
    held = encoded[2::3]
    return ([t for i, t in enumerate(encoded) if i % 3 != 2], held) if held else (encoded, encoded)


def sample_of(
    reference: Reference, source: tuple[int, ...], defaults: GenerationDefaults, steps: int
) -> Sample:
    """A source with its greedy target, of `steps` tokens even where it ends before."""
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
    """What rounding does in PyTorch."""
    del model, bundle
    assert expected.reference is not None
    return expected.reference.gaps(expected.samples, rounding)


def run_texts(model: Transformer, expected: Expectation) -> None:
    """Runs PyTorch over the sources to calibrate with, and over what it makes of them."""
    del model
    reference = expected.reference
    assert reference is not None
    for source in expected.texts:
        (best,) = reference.search(source, replace(expected.search, num_beams=1, n_best=1))
        reference.results(source, best.token_ids)


def limits(bundle: Bundle, expected: Expectation, precision: str, gaps: Gaps) -> dict[str, float]:
    """The limits of a precision, from the one table and from what rounding does in PyTorch.

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
    """Every case of one artifact on ONNX Runtime, together with its partner; fp16 also node by node.

    Returns:
        A comparison per case, passed or not.
    """
    cases = encoder_cases if artifact.graph == "encoder" else decoder_cases
    backend = OrtCpuBackend()  # verify() hashed every file, export() has just written them
    engine = Engine(bundle, artifact, lambda each: backend.open(bundle, each))
    comparisons = []
    try:
        for name, run in cases(engine, expected, limits).items():
            progress(f"{artifact.id}: {name}")
            comparisons.append(
                Comparison(artifact=artifact.id, backend=backend.name, case=name, **vars(run()))
            )
    finally:
        engine.close()
    if artifact.precision == "fp16":
        progress(f"{artifact.id}: node by node")
        name = rounded_engine(artifact.precision)
        engine = Engine(bundle, artifact, lambda each: ExecutedProgram(ir.load(bundle.path(each.file)), each))
        samples = [*expected.samples[:2], *expected.samples[-2:]]  # two texts, one token, the most
        run = (cross_case if artifact.graph == "encoder" else at_once_case)(engine, samples, limits)
        case = f"{len(samples)} sources"
        comparisons.append(Comparison(artifact=artifact.id, backend=name, case=case, **vars(run())))
    return comparisons


def encoder_cases(
    engine: Engine, expected: Expectation, limits: Mapping[str, float]
) -> dict[str, Callable[[], Outcome]]:
    *texts, single, full = expected.samples

    def one_by_one() -> Outcome:
        got = [engine.cross([sample])[0] for sample in texts]
        return judged(measure_cross(got, [s.cross for s in texts]), limits, "cross.")

    batch = [*texts[-MAX_BATCH + 1 :], single]
    return {
        "one by one": one_by_one,
        f"batch of {len(batch)}, padded": cross_case(engine, batch, limits),
        "1 token": cross_case(engine, [single], limits),
        f"{len(full.source)} tokens": cross_case(engine, [full], limits),
    }


def cross_case(
    engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]
) -> Callable[[], Outcome]:
    """What the decoder reads of the sources, as one batch."""

    def run() -> Outcome:
        want = [sample.cross for sample in samples]
        try:
            return judged(measure_cross(engine.cross(samples), want), limits, "cross.")
        except NotFiniteError as error:
            nothing = measure_cross([np.full_like(cross, np.nan) for cross in want], want)
            return judged(nothing, limits, "cross.", [str(error)])

    return run


def decoder_cases(
    engine: Engine, expected: Expectation, limits: Mapping[str, float]
) -> dict[str, Callable[[], Outcome]]:
    *texts, single, full = expected.samples

    def forced(samples: Sequence[Sample]) -> Callable[[], Outcome]:
        def run() -> Outcome:
            parts = [(engine.teacher_forced(s), s.logits) for s in samples]
            return judged(measure_parts(parts), limits, errors=errors_of_steps(parts))

        return run

    batch = [*texts[-MAX_BATCH + 1 :], single]

    def greedily() -> Outcome:
        run = engine.run(batch, 1, len(single.target))
        followed = follow(run, run.decode([engine.start] * len(batch)), batch, limits)
        outcome = judged(measure_parts(followed.parts), limits, "", followed.failures)
        sources = [engine.source_tokenizer.decode(sample.source) for sample in batch]
        return with_divergence(outcome, followed, sources, batch, engine.target_tokenizer.decode)

    searched = [sample for sample in texts if sample.beams]
    attention = {"attention, 2 rows of a source": attention_case(engine, [*texts, single], limits)}
    return {
        **(attention if single.attention.size else {}),
        "decode, batch 1": forced([*texts, single]),
        "at once, batch 1": at_once_case(engine, [*texts, single], limits),
        f"greedy, batch {len(batch)}, padded": greedily,
        f"full target of {len(full.target)} tokens": forced([full]),
        f"{expected.search.num_beams} beams, batch {len(searched)}, padded": beams_case(
            engine, searched, expected, limits
        ),
    }


def attention_case(
    engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]
) -> Callable[[], Outcome]:
    """What each target token looked at; each of two rows that share a source."""

    def run() -> Outcome:
        want = [sample.attention for sample in samples for _ in range(2)]
        got = [weights for sample in samples for weights in engine.attention(sample)]
        return judged(measure_attention(got, want), limits, "attention.")

    return run


def at_once_case(
    engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]
) -> Callable[[], Outcome]:
    """All of PyTorch's tokens in one step, without a past."""

    def run() -> Outcome:
        try:
            return judged(measure_parts([(engine.at_once(s), s.logits) for s in samples]), limits)
        except NotFiniteError as error:
            nothing = [(np.full_like(s.logits, np.nan), s.logits) for s in samples]
            return judged(measure_parts(nothing), limits, "", [str(error)])

    return run


def beams_case(
    engine: Engine, samples: Sequence[Sample], expected: Expectation, limits: Mapping[str, float]
) -> Callable[[], Outcome]:
    """Beam search over a padded batch: the same targets, each with the score that the model gives it.

    A search may prune another beam where two are as good as equal. So another target than PyTorch's is a
    failure only if PyTorch finds it worse than its own by more than rounding explains. What a target's
    score is, PyTorch is asked; golden data knows those that PyTorch found.
    """

    def run() -> Outcome:
        allowed = limits["score_error"]
        errors, failures = [], []
        for sample, got in zip(samples, engine.search(samples, expected.search), strict=True):
            known = {hypothesis.token_ids: hypothesis.score for hypothesis in sample.beams}
            if expected.reference is not None:
                known |= {h.token_ids: expected.reference.score(sample.source, h.token_ids) for h in got}
            errors += [abs(h.score - known[h.token_ids]) for h in got if h.token_ids in known]
            best, second = sample.beams[0], sample.beams[min(1, len(sample.beams) - 1)]
            # Of a target that PyTorch is not asked about, only that PyTorch hardly preferred its own.
            lost = best.score - known.get(got[0].token_ids, second.score)
            if got[0].token_ids != best.token_ids and not lost <= 2 * allowed:
                failures.append(
                    f"the best target is {list(got[0].token_ids)}, PyTorch's is {list(best.token_ids)},"
                    f" better by {lost:.3g} (at most {2 * allowed:.3g} is rounding)"
                )
        if not errors:
            failures.append("none of the targets is known, so no score could be compared")
        worst = float(np.max(errors, initial=0.0))
        metrics = ScoreMetrics(worst, bool(np.isfinite(worst)), len(errors))
        return judged(metrics, limits, "", failures)

    return run


# An Examiner:
__all__ = ["compare", "expect", "from_arrays", "gaps", "limits", "run_texts", "to_arrays", "trial"]
