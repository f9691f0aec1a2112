"""Which plan runs is decided from the manifest, before anything is loaded; on an emulated GPU."""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime import TextGenerator, load
from planforge.runtime.backends.plan_compatibility import choose_plan, covers, make_rebuild_command
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.plan import Plan
from planforge.runtime.errors import (
    BackendError,
    BackendUnavailableError,
    InputError,
    IntegrityError,
    ManifestError,
    MemoryLimitError,
    PlanForgeError,
)

from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.plans import PROMPT, with_manifest


def refusal(bundle: Path, backend: str = "tensorrt-rtx", **machine: Any) -> str:
    with emulated_gpu(bundle, backend, **machine), pytest.raises(PlanForgeError) as caught:
        load(bundle, backend=backend, device=machine.get("device", 0))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plan_for_another_gpu(demo_bundle: Path) -> None:
    text = refusal(demo_bundle, sm="sm90")
    assert "is for sm75 (RTX 20, T4), sm80 (A100, " in text
    assert "this GPU is sm90 (H100, H200), which it does not know" in text
    assert "ort-cuda" in text and "planforge build" not in text


def test_a_plan_for_some_gpus(own_bundle: Path) -> None:
    def some(value: dict[str, Any]) -> None:
        value["plans"][0] |= {"sms": ["sm86"], "candidates": 8}

    text = refusal(with_manifest(own_bundle, some), sm="sm89")
    command = f"planforge build {own_bundle} --target rtx --sm sm89 --top-k 8"
    assert f"is for sm86 (RTX 30, A10), this GPU is sm89 (RTX 40, L4, L40S); {command}" in text


def test_a_tuned_plan_is_built_again_as_it_was(own_bundle: Path) -> None:
    def tune(value: dict[str, Any]) -> None:
        for plan in value["plans"]:
            plan["sms"] = ["sm86"]
            for profile in plan["profiles"]:
                profile["axes"]["batch"] = [1, 2, 4]
        first = next(one for one in value["artifacts"] if one["id"] == value["plans"][0]["built_from"])
        value["artifacts"].append({**first, "id": first["id"].replace("fp16", "w8a16"), "precision": "w8a16"})

    bundle = Bundle.open(with_manifest(own_bundle, tune))
    plan = bundle.manifest.plans[0]
    length = plan.profiles[0]["axes"]["tokens"][1]
    command = make_rebuild_command(bundle, "tensorrt-rtx", "sm89", plan)
    options = f"--precision fp16 --max batch=4 --opt batch=2,length={length}"
    assert command == f"planforge build {own_bundle} --target rtx --sm sm89 {options}"
    wider = make_rebuild_command(bundle, "tensorrt-rtx", "sm89", plan, limits={"batch": 8})
    assert "--max batch=8 --opt batch=2" in wider  # each option once


def test_compatible_plans_are_not_for_jetson() -> None:
    assert covers("sm80+", "sm89") and covers("sm80+", "sm120")
    assert not any(covers("sm80+", sm) for sm in ("sm75", "sm87", "sm101", "sm110"))


def test_a_plan_of_another_version(demo_bundle: Path) -> None:
    text = refusal(demo_bundle, version="1.8.0.5")
    assert "was built by tensorrt-rtx 1.7.1.116, installed is 1.8.0.5" in text and "planforge build" in text


def test_drivers(own_bundle: Path) -> None:
    assert "no NVIDIA driver was found" in refusal(own_bundle, driver=0)
    old = refusal(own_bundle, driver=12040)
    assert "too old: it has CUDA 12.4, cuda-bindings is of 13.0" in old and "cuda-bindings==12.*" in old
    assert "finds no GPU" in refusal(own_bundle, count=0) or "no NVIDIA GPU" in refusal(own_bundle, count=0)

    def needs_more(value: dict[str, Any]) -> None:
        value["plans"][0]["cuda"] = "13.2"

    text = refusal(with_manifest(own_bundle, needs_more))
    assert "needs a driver with CUDA 13.2, this one has 13.0; update the driver" in text


def test_a_gpu_that_does_not_exist(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle, count=2), pytest.raises(InputError) as caught:
        load(demo_bundle, device=2)
    assert str(caught.value) == "device=2 does not exist; this machine has 0 (Emulated GPU), 1 (Emulated GPU)"


def test_a_plan_built_from_another_graph(own_bundle: Path) -> None:
    def other_graph(value: dict[str, Any]) -> None:
        sources = value["plans"][0]["sources"]
        sources[next(iter(sources))] = "0" * 64

    text = refusal(with_manifest(own_bundle, other_graph))
    assert "its plan was built from another onnx/" in text and "planforge build" in text


def test_another_precision(demo_bundle: Path) -> None:
    with (
        emulated_gpu(demo_bundle),
        pytest.raises(BackendUnavailableError, match="plan is fp16, wanted is fp32"),
    ):
        load(demo_bundle, backend="tensorrt-rtx", precision="fp32")


def test_a_damaged_plan_never_reaches_the_library(own_bundle: Path) -> None:
    plan = own_bundle / Bundle.open(own_bundle).manifest.plans[0].file
    content = bytearray(plan.read_bytes())
    content[len(content) // 2] ^= 1
    plan.write_bytes(content)
    with emulated_gpu(own_bundle), pytest.raises(IntegrityError, match="has changed since it was exported"):
        load(own_bundle, backend="tensorrt-rtx")


def test_the_library_may_refuse_a_plan(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle):
        sys.modules["tensorrt_rtx"].plans = {}  # type: ignore[attr-defined]
        with pytest.raises(BackendError, match=r"cannot load .*: the magic tag does not match"):
            load(demo_bundle, backend="tensorrt-rtx")


def test_auto_takes_the_plan_that_fits_and_says_why_not_a_better_one(
    own_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planforge")

    def chosen(**machine: Any) -> str:
        caplog.clear()
        with emulated_gpu(own_bundle, **machine), TextGenerator.load(own_bundle) as model:
            assert model.generate(PROMPT, max_new_tokens=1).token_ids
        (line,) = (r.getMessage() for r in caplog.records if " runs on " in r.getMessage())
        return line

    assert "runs on tensorrt-rtx, Emulated GPU: the plan of decoder.inplace.fp16" in chosen()
    line = chosen(sm="sm70")
    assert "runs on ort-cpu" in line
    assert "tensorrt-rtx was skipped, as its plan is for sm75" in line
    assert "tensorrt was skipped, as the bundle has no plan of tensorrt; make one: planforge build" in line

    def unverified(value: dict[str, Any]) -> None:
        for artifact in value["artifacts"]:
            artifact["gate"] = {}

    with_manifest(own_bundle, unverified)
    assert "decoder.inplace.fp16 was not verified" in chosen()


def test_auto_goes_on_where_a_plan_does_not_open(own_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "planforge")

    def line(**options: Any) -> str:
        caplog.clear()
        with TextGenerator.load(own_bundle, **options) as model:
            assert model.backend == "ort-cpu" and model.generate(PROMPT, max_new_tokens=1).token_ids
        (line,) = (r.getMessage() for r in caplog.records if " runs on " in r.getMessage())
        return line

    with emulated_gpu(own_bundle) as cuda:
        trt: Any = sys.modules["tensorrt_rtx"]
        trt.invalid = 1 | 4
        assert "cannot run here: VERSION_MISMATCH, OLD_CUDA_DRIVER" in line()
        trt.invalid = 0
        plans = trt.plans
        trt.plans = {}
        assert "the magic tag does not match" in line()
        trt.plans = plans
        assert cuda.used == 0
        with pytest.raises(InputError, match="device=1 does not exist"):
            load(own_bundle, device=1)


def test_auto_raises_what_the_caller_cannot_have(own_bundle: Path) -> None:
    with emulated_gpu(with_manifest(own_bundle, shortened)) as cuda:
        with pytest.raises(
            InputError, match="max_length=100 is more than the 40 that the plan was built for"
        ):
            load(own_bundle, max_length=100)
        with pytest.raises(MemoryLimitError, match=r"memory_limit is 1 MB\. No other verified"):
            load(own_bundle, memory_limit=10**6)
        assert cuda.used == 0
        with load(own_bundle, backend="ort-cpu", max_length=100) as model:
            assert model.backend == "ort-cpu"


def test_leaving_a_gpu_that_is_there_is_a_warning(own_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "planforge")

    def record(**machine: Any) -> tuple[str, str]:
        caplog.clear()
        with emulated_gpu(own_bundle, **machine):
            trt: Any = sys.modules["tensorrt_rtx"]
            trt.invalid = machine.get("sm") is None
            load(own_bundle).close()
        (found,) = (r for r in caplog.records if " runs on " in r.getMessage())
        return found.levelname, found.getMessage()

    for machine in ({}, {"sm": "sm70"}, {"sm": "sm86", "driver": 12040}):
        level, said = record(**machine)
        assert level == "WARNING" and "runs on ort-cpu though an NVIDIA GPU is here" in said
    for machine in ({"sm": "sm86", "driver": 0}, {"sm": "sm86", "count": 0}):
        level, said = record(**machine)
        assert level == "INFO" and "runs on ort-cpu" in said
    level, said = record(sm="sm86")
    assert level == "INFO" and "runs on tensorrt-rtx" in said


def shortened(value: dict[str, Any]) -> None:
    """As if the plan were for 40 tokens."""
    for profile in value["plans"][0]["profiles"]:
        axes = profile["axes"]
        axes["tokens"] = [min(length, 40) for length in axes["tokens"]]


@pytest.mark.parametrize(
    ("max_length", "memory", "expected"),
    [
        (None, 2000, "8x128"),  # without a wish the longest, and the largest batch
        (64, 2000, "8x64"),  # the shortest that is long enough
        (65, 2000, "8x128"),
        (500, 2000, "8x128"),  # too long for all
        (None, 300, "2x128"),  # the large batch needs more memory than there is
        (64, 10, "8x64"),
    ],
)
def test_of_several_plans_the_one_that_fits_best(
    max_length: int | None, memory: int, expected: str, demo_bundle: Path
) -> None:
    (plan,) = Bundle.open(demo_bundle).manifest.plans

    def of(batch: int, tokens: int) -> Plan:
        axes = {"batch": [1, 1, batch], "tokens": [1, 1, tokens]}
        profile = {"name": "decode", "axes": axes, "memory": {"weights": 1, "tensors": batch * tokens}}
        return replace(plan, file=f"{batch}x{tokens}", profiles=(profile,))

    plans = [of(8, 128), of(2, 128), of(2, 64), of(8, 64)]
    assert choose_plan(plans, max_length, memory).file == expected
    assert choose_plan(plans[::-1], max_length, memory).file == expected
    later = replace(plans[0], file="later")
    assert choose_plan([*plans, later], None, 2000).file == "later"
    assert choose_plan([*plans, replace(later, compatible=True)], None, 2000).file == "8x128"


def test_a_model_that_is_dropped_gives_its_memory_back_when_the_next_one_loads(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle) as cuda:
        most = 0
        for _ in range(4):
            model = TextGenerator.load(demo_bundle, backend="tensorrt-rtx")
            model.generate(PROMPT, max_new_tokens=2)
            most = most or cuda.used
            del model
            gc.collect()
        assert cuda.used <= most
        with TextGenerator.load(demo_bundle, backend="tensorrt-rtx") as model:
            stream = model.stream(PROMPT, max_new_tokens=9)
            next(stream)
        del stream
        gc.collect()
        load(demo_bundle, backend="tensorrt-rtx").close()
        with TextGenerator.load(demo_bundle, backend="tensorrt-rtx") as model:
            model.generate(PROMPT, max_new_tokens=2)
            assert cuda.used == most


def test_a_bundle_may_have_a_plan_for_each_machine(own_bundle: Path) -> None:
    def two(value: dict[str, Any]) -> None:
        value["plans"].insert(0, {**value["plans"][0], "sms": ["sm87"]})

    with (
        emulated_gpu(with_manifest(own_bundle, two)),
        TextGenerator.load(own_bundle, backend="tensorrt-rtx") as model,
    ):
        assert model.generate(PROMPT, max_new_tokens=1)


def test_narrowed_artifacts_have_the_plans_lengths(demo_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    (plan,) = manifest.plans
    artifact = manifest.artifact(plan.built_from)
    narrowed = plan.narrow_artifact(artifact)
    slots = {spec.axis_names()[2] for spec in narrowed.inputs if spec.role.startswith("past.")}
    assert slots == {manifest.max_length}
    assert narrowed.axis("batch") == artifact.axis("batch")
    broken = replace(plan, profiles=({"name": "decode", "axes": {"batch": [1, 2, 3]}},))
    with pytest.raises(ManifestError, match=r"axes\.\w+ must be list, but is missing"):
        broken.narrow_artifact(artifact)


@pytest.mark.parametrize("lengths", [[1, 2], [3, 2, 1], [-1, 1, 1], ["1", 2, 3]])
def test_a_passport_whose_lengths_are_none_is_refused(demo_bundle: Path, lengths: list[Any]) -> None:
    (plan,) = Bundle.open(demo_bundle).manifest.plans
    with pytest.raises(ManifestError, match="batch"):
        replace(plan, profiles=({"name": "decode", "axes": {"batch": lengths}},))
