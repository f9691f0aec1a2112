"""A classifier is judged by what its users read: logits, probabilities, and which label is likeliest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from planforge.exporter import verify
from planforge.exporter.commands.summary import describe_verdict
from planforge.exporter.tasks.gaps import list_first_texts
from planforge.exporter.verification.user_limits import check_limits, tighten_limits
from planforge.runtime.apps.check.case_arrays import from_arrays
from planforge.runtime.apps.check.files import find_golden, read_golden
from planforge.runtime.apps.check.metrics import measure_labels
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.cli import error_line, planforge
from ...helpers.graphs import replace_graph

RANDOM = np.random.default_rng(0)
WANT = RANDOM.standard_normal((40, 4)).astype(np.float32)
GOT = (WANT + 0.4 * RANDOM.standard_normal((40, 4))).astype(np.float32)


@pytest.mark.parametrize("independent", [False, True])
def test_labels_and_probabilities_are_torchs(independent: bool) -> None:
    got, want = torch.from_numpy(GOT), torch.from_numpy(WANT)

    def read(logits: Tensor) -> tuple[Tensor, Tensor]:
        if independent:
            return logits.sigmoid(), logits.sigmoid() > 0.5
        return logits.softmax(-1), logits.argmax(-1)[:, None]

    found = measure_labels(GOT, WANT, independent=independent)
    flips = int((read(got)[1] != read(want)[1]).any(-1).sum())
    assert 0 < flips == found.label_flips < 40
    assert ("mean_kl" in found.to_json()) == ("mean_kl" in found.LIMITED) == (not independent)
    assert found.label_changes == pytest.approx(flips / 40)
    assert found.top1_agreement == pytest.approx(1 - flips / 40)
    assert found.probability_error == pytest.approx(float((read(got)[0] - read(want)[0]).abs().max()), 1e-5)
    few = measure_labels(GOT[:8], WANT[:8], independent=independent)
    assert few.label_changes == 0  # a share of so few says nothing
    drawn = measure_labels(GOT, WANT, independent=independent, of_texts=False)
    assert (drawn.label_changes, drawn.label_flips) == (0, flips)


@pytest.fixture
def classifier(head_bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = head_bundle("classifier")
    shutil.copytree(folder.parent / "classifier", tmp_path / "classifier")
    return Path(shutil.copytree(folder, tmp_path / "bundle"))


def test_the_summary_has_what_a_user_reads(
    head_bundle: Callable[[str], Path], demo_bundle: Path, minilm_bundle: Path
) -> None:
    for name in ("classifier", "tagger", "distilled"):
        for artifact in Bundle.open(head_bundle(name)).manifest.artifacts:
            words = describe_verdict(artifact)
            assert "labels flip" in words and "probabilities within" in words and "logits within" in words
            assert "cosine" not in words
            measured = artifact.gate["measured"]
            assert f"logits within {measured['logits.max_error']:.2g} of their spread" in words
            assert f"probabilities within {measured['logits.probability_error']:.2g}," in words
    for name in ("ranker", "reader"):
        for artifact in Bundle.open(head_bundle(name)).manifest.artifacts:
            words = describe_verdict(artifact)
            assert "largest error" in words and "cosine" not in words and "label" not in words
    for artifact in Bundle.open(demo_bundle).manifest.artifacts:
        assert "label" not in describe_verdict(artifact)


def test_labels_that_flip_are_refused_and_counted(classifier: Path) -> None:
    """A bias that swaps most labels is planted; torch counts those of the same texts."""
    shift = np.array([3.0, -3.0, 0.0], np.float32)

    def move(model: ir.Model) -> None:
        for name, value in model.graph.initializers.items():
            if name.endswith("sequence_classification.bias"):
                assert value.const_value is not None
                value.const_value = ir.tensor(value.const_value.numpy() + shift, name=name)

    artifact = "encoder.portable.fp32"
    replace_graph(classifier, artifact, move)
    report = verify(classifier, only=[artifact])
    (case,) = (c for c in report.comparisons if c.case == "one by one")
    file = find_golden(Bundle.open(classifier))
    assert file is not None
    case_set = from_arrays(read_golden(file)[0])
    texts = list_first_texts(case_set)
    logits = torch.from_numpy(np.stack([case_set.answers["logits"][text].values[0] for text in texts]))
    moved = logits + torch.from_numpy(shift)
    assert case.metrics["logits.label_flips"] == int((moved.argmax(-1) != logits.argmax(-1)).sum()) > 0
    error = float((moved.softmax(-1) - logits.softmax(-1)).abs().max())
    assert case.metrics["logits.probability_error"] == pytest.approx(error, abs=1e-4)
    for metric in ("max_error", "probability_error", "label_changes"):
        assert any(failure.startswith(f"logits.{metric} is ") for failure in case.failures)


def test_a_limit_may_be_of_one_output_and_of_an_agreement(classifier: Path) -> None:
    done = planforge("verify", classifier, "--limit", "logits.top1_agreement=1", "--level", "quick")
    assert done.returncode == 0, done.stdout + done.stderr
    done = planforge("verify", classifier, "--limit", "logits.max_error=1e-12", "--level", "quick")
    assert done.returncode == 1
    assert "logits.max_error is " in done.stdout and "last_hidden_state.max_error is" not in done.stdout
    line = error_line("verify", classifier, "--limit", "states.max_error=1", "--level", "quick")
    assert "logits.max_error" in line and "last_hidden_state.max_error" in line
    line = error_line("verify", classifier, "--limit", "logits.top1_agreement=2")
    assert "it is a share, which must be at most 1" in line


def judge(metrics: dict[str, Any], limits: dict[str, float]) -> tuple[str, ...]:
    """The failures of a comparison under a user's limits."""
    from planforge.exporter.verification.report import VerificationReport

    usual = {"logits.max_error": 0.1}
    comparison = Comparison(metrics, usual, artifact="e", backend="ort-cpu", case="one by one")
    check_limits(limits)
    (judged,) = tighten_limits(VerificationReport(True, (comparison,)), limits).comparisons
    return judged.failures


def test_an_agreement_is_the_least_that_is_wanted() -> None:
    metrics = {"logits.max_error": 0.05, "states.max_error": 0.5, "logits.top1_agreement": 0.95}
    for name in ("logits.top1_agreement", "top1_agreement"):
        assert judge(metrics, {name: 1.0}) == ("logits.top1_agreement is 0.95, at least 1 is wanted",)
        assert judge(metrics, {name: 0.9}) == ()
    assert judge({**metrics, "logits.top1_agreement": 1.0}, {"logits.top1_agreement": 1.0}) == ()
    assert judge(metrics, {"logits.max_error": 0.01}) == ("logits.max_error is 0.05, at most 0.01 is wanted",)
    assert len(judge(metrics, {"max_error": 0.01})) == 2
    with pytest.raises(InputError, match="the metric is not one of"):
        judge(metrics, {"logits.rows": 1.0})
