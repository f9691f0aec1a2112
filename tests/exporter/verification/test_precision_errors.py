"""What a precision may lose: limits, counts with their intervals, accepted losses, fp32's own rounding."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import VerificationReport, export, verify
from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.calibration.repeat import read_calibration
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.limits import CAPS, TABLE, compute_limits, find_upper_bound
from planforge.exporter.tasks.verifier import open_verifier
from planforge.exporter.verification.precision_errors import (
    annotate_precision_errors,
    describe_rounding,
    is_lost_in_pytorch,
)
from planforge.models import load_model
from planforge.runtime.apps.check.failures import Exceeded, OtherToken
from planforge.runtime.apps.check.metrics import Metrics, TextMetrics
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.cli import error_line
from ...helpers.graphs import replace_graph
from ...helpers.models import TINY, random_gpt2, tiny_bert, write_wordpiece
from ...helpers.reading_faults import doubled_scales

ANY_LOSS = dict.fromkeys(TABLE, 100.0)
FP16_LOSS = Metrics(0.144, 0.01, 1e-5, 1.0, 1.0, 0.0, True, 100)  # of a model that fp16 changes by 0.144


def lose_text(share: float, rows: int) -> TextMetrics:
    return TextMetrics(text_kl=1e-4, top1_changes=share, perplexity_change=1e-4, finite=True, rows=rows)


def test_a_count_may_be_what_chance_makes_of_its_share_and_no_more() -> None:
    share, rows = 0.02, 800
    bound = find_upper_bound(share, rows)
    # Counts of so many tokens, drawn: 99 of 100 are inside on both sides together, so 199 of 200 below.
    drawn = np.random.default_rng(0).binomial(rows, share, 20_000) / rows
    assert 0.99 < (drawn <= bound).mean() < 0.9999
    assert find_upper_bound(share, 100 * rows) < 1.1 * share  # many tokens leave little to chance
    assert compute_limits("int8", lose_text(0.03, rows), TextMetrics.LIMITED)["top1_changes"] > 0.0302


def test_an_accepted_loss_takes_the_place_of_its_cap_and_of_no_other() -> None:
    usual = compute_limits("fp16", FP16_LOSS)
    assert usual["max_error"] == CAPS["fp16"]["max_error"]
    accepted = compute_limits("fp16", FP16_LOSS, accepted={"max_error": 0.2})
    assert accepted == {**usual, "max_error": 0.2}
    least = compute_limits("fp16", FP16_LOSS, accepted={"max_error": 0.01})
    assert least == usual  # a smaller one makes nothing stricter
    sound = Metrics(1e-4, 1e-5, 1e-10, 1.0, 1.0, 0.0, True, 100)
    own = 3 * sound.max_error  # what PyTorch itself does not lose is a fault, accepted or not
    assert compute_limits("fp16", sound, accepted={"max_error": 5.0})["max_error"] == pytest.approx(own)
    counted = compute_limits("int8", lose_text(0.03, 800), TextMetrics.LIMITED, {"perplexity_change": 5.0})
    assert counted["perplexity_change"] == CAPS["int8"]["perplexity_change"]


@pytest.mark.parametrize(
    ("accept", "precision", "verify", "message"),
    [
        ({"max_eror": 0.2}, ["int8"], True, "accept of 'max_eror': the metric is not one of .*max_error"),
        ({"max_error": -1.0}, ["int8"], True, "accept of 'max_error' must be a number of 0 or more"),
        ({"max_error": math.nan}, ["int8"], True, "accept of 'max_error' must be a number of 0 or more"),
        ({"max_error": 0.2}, ["int8"], False, "which --no-verify turns off"),
        ({"max_error": 0.2}, ["fp32"], True, "accept is for precisions below fp32"),
    ],
)
def test_what_cannot_be_accepted_is_refused_by_name(
    accept: dict[str, float], precision: list[str], verify: bool, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        export("gpt2-demo", tmp_path / "b", precision=precision, target=["cpu"], verify=verify, accept=accept)
    assert not (tmp_path / "b").exists()


def test_the_option_names_what_is_wrong_with_it(tmp_path: Path) -> None:
    line = error_line("export", "gpt2-demo", "-o", str(tmp_path / "b"), "--accept", "top1_changes", code=2)
    assert "--accept 'top1_changes' must be METRIC=VALUE" in line


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT whose int8 and int4 GPTQ rounds, exported with whatever that loses."""
    folder = tmp_path_factory.mktemp("lossy")
    tiny_bert(folder / "bert", "BertForTokenClassification", intermediate_size=64)
    write_wordpiece(folder / "bert")
    precision = ["int8", "int4"]
    done = export(folder / "bert", folder / "bundle", precision=precision, target=["cpu"], accept=ANY_LOSS)
    return done.bundle


def collect_limits(report: VerificationReport, artifact: str) -> dict[str, float]:
    comparisons = [comparison for comparison in report.comparisons if comparison.artifact == artifact]
    return {name: limit for comparison in comparisons for name, limit in comparison.limits.items()}


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_later_verification_has_the_limits_of_the_export_unless_weights_are_damaged(
    lossy: Path, precision: str, tmp_path: Path
) -> None:
    """The checkpoint alone does not tell what GPTQ made of it, and damaged weights set no limits."""
    bundle = Bundle.open(lossy)
    artifact = bundle.manifest.artifact(f"encoder.ort.{precision}")
    report = verify(lossy, only=[artifact.id])
    assert report.passed
    limits = collect_limits(report, artifact.id)
    assert limits == artifact.gate["limits"]

    source = lossy.parent / "bert"
    model = load_model(source)
    verifier = open_verifier(bundle, model, read_prompts(None, source))
    rounding = read_calibration(bundle, model).make_rounding(precision)
    assert rounding is not None
    nearest = verifier.choose_limits(precision, verifier.measure_gaps(model, rounding), dict(ANY_LOSS))
    assert nearest["logits.max_error"] != pytest.approx(limits["logits.max_error"], rel=0.01)

    damaged = Path(shutil.copytree(lossy, tmp_path / "damaged"))
    replace_graph(damaged, artifact.id, doubled_scales("layers.0.intermediate", share=1.0))
    report = verify(damaged, source=source, only=[artifact.id])
    assert not report.passed
    # Both are PyTorch's fp32, which adds up in another order elsewhere: four units in the last place of
    # logits of up to 4 are 1e-6, of limits from 0.1 on.
    assert collect_limits(report, artifact.id) == pytest.approx(nearest, rel=1e-5)


def test_what_exceeds_its_cap_most_describes_fp32s_own_rounding() -> None:
    losses = {"max_error": 3e-4, "cross.max_error": 5e-4, "score_error": 0.1}  # scores have no cap
    assert "a cross.max_error of 0.0005, and at most 0.0001 is usual" in describe_rounding(losses)


@pytest.mark.parametrize(("margin", "is_lost"), [(6.0, True), (6.1, False)])
def test_tokens_that_pytorchs_own_loss_can_swap_are_a_loss(margin: float, is_lost: bool) -> None:
    limit, own, scale = 1.0, 2.0, 0.5
    outcome = Comparison(
        artifact="decoder.ort.int8",
        backend="ort-cpu",
        case="greedy",
        metrics={"max_error": 3.0},
        limits={"max_error": limit},
        failures=(Exceeded.of("max_error", 3.0, limit), OtherToken("new token 3 is 7, PyTorch's is 5")),
        divergence={"margin": margin, "allowed": 2 * limit * scale},
    )
    losses = {"max_error": own}  # each of two logits may be off by 3 * own * scale
    assert is_lost_in_pytorch(outcome, losses) is is_lost
    told = annotate_precision_errors(outcome, losses, "int8").failures
    assert ["PyTorch itself, in int8" in line for line in told] == [True, is_lost]


def test_a_model_that_amplifies_rounding_is_exported_and_says_so(tmp_path: Path) -> None:
    """Weights of standard deviation 0.7, whose fp32 in PyTorch is far from float64."""
    folder = tmp_path / "unsure"
    shutil.copytree(find_demo("gpt2-demo"), folder)
    settings = TINY | {"vocab_size": 2048, "n_embd": 128, "n_head": 8, "n_layer": 6, "initializer_range": 0.7}
    random_gpt2(seed=1, **settings).save_pretrained(folder)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
    bundle = export(folder, tmp_path / "bundle", **options).bundle
    (artifact,) = Bundle.open(bundle).manifest.artifacts
    usual = CAPS["fp32"]["max_error"]
    assert artifact.gate["passed"] and artifact.gate["measured"]["max_error"] > usual
    report = json.loads(next((bundle / "checks").glob("parity-*.json")).read_text(encoding="utf-8"))
    (note,) = report["notes"]
    assert note.startswith("this model amplifies rounding: PyTorch's own fp32 differs from float64 by a ")
