"""A plan is bound to the bytes it was built from: another one under its entry is refused, hashes or not.

The plans come from the real TensorRT-RTX, and their names are read from their bytes; the GPU is emulated.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import build, verify
from planforge.exporter.commands.inspection import inspect
from planforge.exporter.reports.tables import collect_details
from planforge.exporter.tensorrt.build import check_plan_names, summarize_plan
from planforge.runtime import TextGenerator, load
from planforge.runtime.bundle.bundle import Bundle, compute_sha256
from planforge.runtime.errors import BackendError, IntegrityError

from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.plans import PROMPT, only, with_manifest

DECODER = "decoder.inplace.fp16"


def with_plan(bundle: Path, plan: Path) -> Path:
    """A bundle with another plan's file in place of its own, and with hashes that are right."""
    name = Bundle.open(bundle).manifest.plans[0].file
    shutil.copyfile(plan, bundle / name)

    def put_right(value: dict[str, Any]) -> None:
        value["files"][name] = {"sha256": compute_sha256(plan), "bytes": plan.stat().st_size}

    return with_manifest(bundle, put_right)


def other_model(bundle: Path, copy: Path) -> Path:
    """A bundle of the same graph with other weights, and a plan of its own."""
    only(bundle, copy, DECODER)
    (artifact,) = Bundle.open(copy).manifest.artifacts
    data = copy / artifact.data[0]
    weights = np.fromfile(data, np.float16)
    np.roll(weights, 64).tofile(data)

    def put_right(value: dict[str, Any]) -> None:
        value["files"][artifact.data[0]]["sha256"] = compute_sha256(data)
        value["plans"] = []

    with_manifest(copy, put_right)
    build(copy, target="rtx", sms=["sm86"])
    return copy


@pytest.fixture(scope="module")
def other(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`other_model` of the demo. Don't change it."""
    return other_model(demo_bundle, tmp_path_factory.mktemp("other") / "bundle")


def test_another_models_plan_is_refused_though_its_hash_is_right(
    demo_bundle: Path, own_bundle: Path, other: Path
) -> None:
    foreign = other / Bundle.open(other).manifest.plans[0].file
    with emulated_gpu(other), TextGenerator.load(other, backend="tensorrt-rtx", precision="fp16") as model:
        assert model.generate(PROMPT, max_new_tokens=4).token_ids  # it is sound, in its own bundle
    bundle = with_plan(own_bundle, foreign)
    for backend in ("tensorrt-rtx", "auto"):
        with emulated_gpu(bundle, others=[other]), pytest.raises(IntegrityError) as caught:
            load(bundle, backend=backend)
        text = str(caught.value)
        own = demo_bundle / Bundle.open(demo_bundle).manifest.plans[0].file
        names = [summarize_plan(plan)["network"] for plan in (foreign, own)]
        assert all(name in text for name in names) and names[0] != names[1]
        assert "was built from another graph" in text and "build it again: planforge build" in text


def test_verify_tells_a_foreign_plan_without_a_gpu(own_bundle: Path, other: Path) -> None:
    check_plan_names(Bundle.open(own_bundle))
    bundle = with_plan(own_bundle, other / Bundle.open(other).manifest.plans[0].file)
    with pytest.raises(
        IntegrityError, match="is the plan of another graph: it was built from 'planforge dec"
    ):
        verify(bundle, only=["decoder.ort.fp32"], level="quick")  # the plans are all looked at


def test_what_did_not_run_is_said(demo_bundle: Path) -> None:
    seen = inspect(demo_bundle)
    assert seen.to_json()["checks"] == {"plans": "not run"}
    assert any(title.startswith("plans: not run (") for title, _, _ in seen.sections)
    plan = inspect(demo_bundle / Bundle.open(demo_bundle).manifest.plans[0].file)
    assert plan.to_json()["plan"] == "not run" and "planforge decoder" in plan.to_json()["network"]
    report = verify(demo_bundle, only=["decoder.ort.fp32"], level="quick")
    assert report.to_json()["plans"] == "not run"
    assert any(title == "plans: not run" and lines for title, lines in collect_details(report).items())
    assert "plans" not in replace(report, plans="").to_json()


def test_exchanged_plans_of_encoder_and_decoder_are_refused(marian_bundle: Path, tmp_path: Path) -> None:
    def exchange(value: dict[str, Any]) -> None:
        first, second = value["plans"]
        first["file"], second["file"] = second["file"], first["file"]

    bundle = with_manifest(Path(shutil.copytree(marian_bundle, tmp_path / "bundle")), exchange)
    with emulated_gpu(bundle, others=[marian_bundle]), pytest.raises(IntegrityError) as caught:
        load(bundle, backend="tensorrt-rtx")
    assert "planforge encoder.portable.fp16" in str(caught.value)
    assert "planforge decoder.inplace.fp16" in str(caught.value)


def test_a_plan_that_does_not_say_what_it_was_built_from_is_to_be_built_again(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle):
        trt: Any = sys.modules["tensorrt_rtx"]
        trt.plans = {key: replace(plan, name="Unnamed Network 0") for key, plan in trt.plans.items()}
        with pytest.raises(BackendError, match=r"does not say which graph .*build it again: planforge build"):
            load(demo_bundle, backend="tensorrt-rtx")
        with load(demo_bundle) as model:  # nothing wrong is run: another engine can do it
            assert model.backend == "ort-cpu"


def test_a_plan_for_other_lengths_than_listed_is_refused(own_bundle: Path, tmp_path: Path) -> None:
    smaller = Path(shutil.copytree(own_bundle, tmp_path / "smaller"))
    build(smaller, target="rtx", sms=["sm86"], limits={"batch": 2})
    bundle = with_plan(own_bundle, smaller / Bundle.open(smaller).manifest.plans[-1].file)
    with (
        emulated_gpu(bundle, others=[smaller]),
        pytest.raises(IntegrityError, match=r"is not as manifest\.json describes it: .*in profile 0"),
    ):
        load(bundle, backend="tensorrt-rtx")


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("input_ids", {"name": "ids"}, r"it has no input 'input_ids'"),
        ("past_lengths", {"dtype": "float32"}, r"'past_lengths' is float32, listed is int32"),
        ("cache.0.key", {"axes": (8, 1, 1, 1)}, r"'cache\.0\.key' has shape"),
    ],
)
def test_a_plan_with_other_tensors_than_listed_is_refused(
    name: str, change: dict[str, Any], problem: str, demo_bundle: Path
) -> None:
    with emulated_gpu(demo_bundle):
        trt: Any = sys.modules["tensorrt_rtx"]
        ((key, plan),) = trt.plans.items()
        inputs = tuple(
            replace(spec, **change) if spec.name == name else spec for spec in plan.artifact.inputs
        )
        trt.plans = {key: replace(plan, artifact=replace(plan.artifact, inputs=inputs))}
        with pytest.raises(IntegrityError, match=problem):
            load(demo_bundle, backend="tensorrt-rtx")
