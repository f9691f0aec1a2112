"""Runs an encoder through the runtime's own batching and compares every output with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.diagnostics.golden.encoders import (
    Sample,
    batch_case,
    cases,
    compared,
    metrics_of,
    padded,
    run_batch,
    to_arrays,
)
from ...runtime.diagnostics.metrics import Comparison, Outcome
from ...runtime.encode.encoder import Encoder
from ...runtime.text.long_text import Piece
from ..execution.node_executor import ExecutedProgram, NotFiniteError, rounded_engine
from ..execution.trial import Reading, Step, Trial, positions_of
from ..gate import limits_for
from ..passes.weight_files import load_graph
from ..reference.encoder_samples import Expectation, expect, from_arrays, gaps, limits, run_model, run_texts
from ..reference.fitted_head import HEAD, LinearHead


def with_head(
    old: Bundle, new: Bundle, expected: Expectation, limits: Mapping[str, Mapping[str, float]]
) -> tuple[Expectation, dict[str, dict[str, float]]]:
    """Return the golden data of a bundle before a head was fitted, together with the head's results.

    The limits are the caps alone: without PyTorch the effect of rounding is not known.
    """
    head = LinearHead.of(new)
    assert head is not None and old.manifest.encoder is not None
    artifact = old.manifest.artifacts[0]
    spec = new.manifest.artifacts[0].output(HEAD)
    encoder = Encoder(OrtCpuBackend().open(old, artifact), artifact, old.manifest.encoder.tokens["pad"])
    roles = [s.role for s in artifact.outputs if s.role.startswith("hidden.")]
    layers = sorted(roles, key=lambda role: int(role.removeprefix("hidden.")))
    roles = layers + [s.role for s in artifact.outputs if s.role == "sentence_embedding"]
    samples = []
    for sample in expected.samples:
        (arrays,) = encoder.batch([sample.piece], roles)
        states = dict(zip(roles, arrays, strict=True))
        last = int(layers[-1].removeprefix("hidden."))
        by_layer = [states.get(f"hidden.{layer}", np.empty(0)) for layer in range(last + 1)]
        logits = head.logits(by_layer, states.get("sentence_embedding"))
        samples.append(replace(sample, outputs={**sample.outputs, spec.name: logits}))
    encoder.close()
    names = metrics_of(spec).LIMITED
    with_caps = {}
    for precision, own in limits.items():
        caps = limits_for(precision, None, names)
        capped = {f"{spec.name}.{name}": cap for name, cap in caps.items()}
        with_caps[precision] = {**own, **capped}
    return replace(expected, samples=tuple(samples)), with_caps


def compare(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    limits: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Compare every case of one artifact on ONNX Runtime; fp16 also node by node.

    Returns:
        A comparison per case, passed or not.
    """
    assert bundle.manifest.encoder is not None
    backend = OrtCpuBackend()  # verify() hashed every file, export() has just written them
    encoder = Encoder(backend.open(bundle, artifact), artifact, bundle.manifest.encoder.tokens["pad"])
    comparisons = []
    try:
        for case, run in cases(encoder, expected, limits).items():
            progress(f"verifying {artifact.id}: {case}")
            comparisons.append(
                Comparison(artifact=artifact.id, backend=backend.name, case=case, **vars(run()))
            )
    finally:
        encoder.close()
    if artifact.precision == "fp16":
        engine = rounded_engine(artifact.precision)
        program = ExecutedProgram(load_graph(bundle.path(artifact.file)), artifact)
        encoder = Encoder(program, artifact, encoder.pad)
        full = expected.samples[-1]
        batch = trial_samples(expected)
        for case, samples in {padded(batch): batch, f"{len(full)} tokens": [full]}.items():
            progress(f"verifying {artifact.id}: {case}, {engine}")
            outcome = compare_node_by_node(encoder, samples, limits)
            comparisons.append(Comparison(artifact=artifact.id, backend=engine, case=case, **vars(outcome)))
    return comparisons


def compare_node_by_node(encoder: Encoder, samples: Sequence[Sample], limits: Mapping[str, float]) -> Outcome:
    """Compare a batch node by node: whether every result is finite, and the outputs."""
    try:
        return batch_case(encoder, samples, limits)()
    except NotFiniteError as error:
        nothing = [{name: np.full_like(a, np.nan) for name, a in s.outputs.items()} for s in samples]
        return compared(nothing, samples, encoder.artifact, limits, [str(error)])


def trial(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    whole: bool = False,
    opened: Callable[[Artifact], Program] | None = None,
) -> Trial:
    """Return a trial of two texts and a single token as a padded batch; a whole trial has all samples."""
    del opened
    assert bundle.manifest.encoder is not None
    padding = bundle.manifest.encoder.tokens["pad"]
    samples = list(expected.samples) if whole else trial_samples(expected)

    def drive(program: Program) -> None:
        run_batch(Encoder(program, artifact, padding), samples)

    def reading(piece: Piece) -> Reading:
        return lambda model, rounding: run_model(model, piece)

    lengths = np.array([len(sample.piece) for sample in samples])
    step = Step("batch", positions_of(np.arange(lengths.max()) < lengths[:, None]))
    return Trial(drive, (step,), tuple(reading(sample.piece) for sample in samples))


def trial_samples(expected: Expectation) -> list[Sample]:
    """Return two texts and a single token."""
    *texts, single, _ = expected.samples
    return [*texts[:2], single]


# An Examiner:
__all__ = ["compare", "expect", "from_arrays", "gaps", "limits", "run_texts", "to_arrays", "trial"]
