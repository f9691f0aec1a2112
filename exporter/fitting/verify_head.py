"""Verifies a bundle with a fitted head by the original bundle's golden data and scikit-learn's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ...runtime.apps.check.case import Case, Known
from ...runtime.apps.check.encoder import is_per_token, make_measure, make_piece
from ...runtime.apps.check.files import find_golden, read_golden
from ...runtime.apps.check.judge import Limits
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ..execution.on_cpu import open_on_cpu
from ..tasks.base import Progress
from ..tasks.encoder import RANDOM, read_problem_type
from ..tasks.encoder_answers import open_engine
from ..tasks.fitted_head import LinearHead
from ..tasks.verifier import Verifier, open_golden_verifier
from ..verification.report import keep_checks
from ..verification.verdict import compare_all


def verify_graphs(opened: Bundle, staging: Path, manifest: Manifest, progress: Progress) -> Manifest:
    """Compare the new graphs with the old bundle's golden data, if it was verified, and the fitted head."""
    file = find_golden(opened)
    if file is None:
        return manifest
    arrays, limits = read_golden(file)
    without_head = open_golden_verifier(opened, arrays)
    verifier, limits = add_fitted_head(without_head, Bundle(staging, manifest), limits)
    report = compare_all(verifier, limits, progress)
    report.raise_if_failed()
    return keep_checks(staging, manifest, report, verifier.collect_golden(), limits)


def add_fitted_head(
    old: Verifier, new: Bundle, limits: Mapping[str, Limits]
) -> tuple[Verifier, dict[str, dict[str, float]]]:
    """Return the verifier of a bundle with a fitted head, and its limits, from those without the head.

    The head's limits are the caps alone: without PyTorch the effect of rounding is not known.
    """
    head = LinearHead.load(new)
    assert head is not None
    artifact = old.bundle.manifest.artifacts[0]
    spec = new.manifest.artifacts[0].output(head.role)
    encoder = open_engine(old.bundle, artifact, partial(open_on_cpu, old.bundle)).encoder
    roles = [s.role for s in artifact.outputs if s.role.startswith(("hidden.", "sentence_embedding"))]
    last = max(int(role.removeprefix("hidden.")) for role in roles if role.startswith("hidden."))
    logits = {}
    for number, text in enumerate(old.expected.texts):
        (arrays,) = encoder.run_batch([make_piece(text)], roles)
        states = dict(zip(roles, arrays, strict=True))
        by_layer = [states.get(f"hidden.{layer}", np.empty(0)) for layer in range(last + 1)]
        values = head.compute_logits(by_layer, states.get("sentence_embedding"))
        places = old.expected.answers[artifact.output(f"hidden.{last}").name][number].positions
        is_each = is_per_token(spec)
        logits[number] = Known(places, values[places]) if is_each else Known(np.array([0]), values[None])
    encoder.close()
    kind = read_problem_type(new)

    def add_measure(case: Case) -> Case:
        of_texts = not case.name.startswith(RANDOM)
        return replace(case, measures=(*case.measures, make_measure(spec, kind, of_texts)))

    expected = replace(
        old.expected,
        cases=tuple(map(add_measure, old.expected.cases)),
        few=tuple(map(add_measure, old.expected.few)),
        answers={**old.expected.answers, spec.name: logits},
    )
    verifier = Verifier(new, expected)
    return verifier, {name: {**verifier.choose_limits(name, {}), **own} for name, own in limits.items()}
