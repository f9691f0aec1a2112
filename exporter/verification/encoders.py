"""Runs an encoder through the runtime's own batching and compares every output with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.encoding.encoder import Encoder
from ...runtime.text.long_text import Piece
from .encoder_samples import (
    Expectation,
    Outputs,
    Sample,
    expect,
    from_arrays,
    gaps,
    limits,
    measure_all,
    metrics_of,
    run_model,
    run_texts,
    to_arrays,
)
from .fitted_head import HEAD, LinearHead
from .gate import (
    Comparison,
    Outcome,
    judge,
    limits_for,
)
from .node_executor import ExecutedProgram, NotFiniteError, rounded_engine
from .trial import Step, Trial, positions_of

MAX_BATCH = 8  # of the padded case


def with_head(
    old: Bundle, new: Bundle, expected: Expectation, limits: Mapping[str, Mapping[str, float]]
) -> tuple[Expectation, dict[str, dict[str, float]]]:
    """Golden data of a bundle before a head was fitted, together with the head's results.

    Its limits are the caps alone: without PyTorch nothing is known of what rounding does.
    """
    head = LinearHead.of(new)
    assert head is not None and old.manifest.encoder is not None
    artifact, spec = old.manifest.artifacts[0], new.manifest.artifacts[0].output(HEAD)
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
        with_caps[precision] = {**own, **{f"{spec.name}.{name}": cap for name, cap in caps.items()}}
    return replace(expected, samples=tuple(samples)), with_caps


def compare(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    limits: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Every case of one artifact on ONNX Runtime; fp16 also node by node.

    Returns:
        A comparison per case, passed or not.
    """
    assert bundle.manifest.encoder is not None
    backend = OrtCpuBackend()  # verify() hashed every file, export() has just written them
    encoder = Encoder(backend.open(bundle, artifact), artifact, bundle.manifest.encoder.tokens["pad"])
    *texts, single, full = expected.samples
    comparisons = []

    def add(case: str, engine: str, samples: Sequence[Sample], run: Callable[[], list[Outputs]]) -> None:
        progress(f"{artifact.id}: {case}")
        found: dict[str, Any] = {}
        failures: list[str] = []
        try:
            got, want = run(), [sample.outputs for sample in samples]
        except NotFiniteError as error:
            failures.append(str(error))
            got = want = [{name: np.full_like(a, np.nan) for name, a in s.outputs.items()} for s in samples]
        for name, metrics in measure_all(got, want, artifact.outputs).items():
            own = {m: limits[f"{name}.{m}"] for m in metrics.LIMITED}
            failures += [f"{name}: {failure}" for failure in judge(metrics, own)]
            found |= {f"{name}.{key}": value for key, value in metrics.to_json().items()}
        outcome = Outcome(found, limits, tuple(failures))
        comparisons.append(Comparison(artifact=artifact.id, backend=engine, case=case, **vars(outcome)))

    def padded(samples: Sequence[Sample]) -> Callable[[], list[Outputs]]:
        return lambda: run_batch(encoder, samples)

    try:
        add("one by one", backend.name, texts, lambda: [run_batch(encoder, [s])[0] for s in texts])
        batch = [*texts[-MAX_BATCH + 1 :], single]
        add(f"batch of {len(batch)}, padded", backend.name, batch, padded(batch))
        add("1 token", backend.name, [single], padded([single]))
        add(f"{len(full.piece)} tokens", backend.name, [full], padded([full]))
    finally:
        encoder.close()
    if artifact.precision == "fp16":
        engine = rounded_engine(artifact.precision)
        program = ExecutedProgram(ir.load(bundle.path(artifact.file)), artifact)
        encoder, batch = Encoder(program, artifact, encoder.pad), trial_samples(expected)
        add(f"batch of {len(batch)}, padded", engine, batch, padded(batch))
        add(f"{len(full.piece)} tokens", engine, [full], padded([full]))
    return comparisons


def run_batch(encoder: Encoder, samples: Sequence[Sample]) -> list[Outputs]:
    """The outputs of sequences that run together, of results per token the known positions."""
    specs = encoder.artifact.outputs
    positions = [list(sample.positions) for sample in samples]
    results = encoder.batch([s.piece for s in samples], [spec.role for spec in specs], positions)
    return [
        {
            spec.name: array[known] if "tokens" in spec.axis_names() else array
            for spec, array in zip(specs, arrays, strict=True)
        }
        for arrays, known in zip(results, positions, strict=True)
    ]


def trial(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    whole: bool = False,
    opened: Callable[[Artifact], Program] | None = None,
) -> Trial:
    """Two texts and a single token as a padded batch; of a whole trial all samples."""
    del opened
    assert bundle.manifest.encoder is not None
    padding = bundle.manifest.encoder.tokens["pad"]
    samples = list(expected.samples) if whole else trial_samples(expected)

    def drive(program: Program) -> None:
        run_batch(Encoder(program, artifact, padding), samples)

    def reading(piece: Piece) -> Callable[[Any], object]:
        return lambda model: run_model(model, piece)

    lengths = np.array([len(sample.piece) for sample in samples])
    step = Step("batch", positions_of(np.arange(lengths.max()) < lengths[:, None]))
    return Trial(drive, (step,), tuple(reading(sample.piece) for sample in samples))


def trial_samples(expected: Expectation) -> list[Sample]:
    """Two texts and a single token."""
    *texts, single, _ = expected.samples
    return [*texts[:2], single]


# An Examiner:
__all__ = ["compare", "expect", "from_arrays", "gaps", "limits", "run_texts", "to_arrays", "trial"]
