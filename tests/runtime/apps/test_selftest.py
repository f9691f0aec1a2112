"""An engine held against golden data: what was exported passes, and what cannot be compared is said.

Plans run on an emulated GPU, on which ONNX Runtime executes their graphs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter.tensorrt.profiles import derive_profiles
from planforge.runtime.apps.check.case_arrays import from_arrays, to_arrays
from planforge.runtime.apps.check.divergence import list_samples
from planforge.runtime.apps.check.files import find_golden, read_golden, write_golden
from planforge.runtime.apps.check.metrics import measure
from planforge.runtime.apps.check.selftest import SelftestResult, selftest
from planforge.runtime.bundle.bundle import Bundle, compute_sha256
from planforge.runtime.bundle.plan import make_network_name
from planforge.runtime.errors import (
    BackendUnavailableError,
    BundleError,
    InputError,
    IntegrityError,
    ManifestError,
)

from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.models import edit_json
from ...helpers.plans import of_tensorrt, with_manifest
from ...helpers.selftest import DECODING, DRAWN_TARGETS, TRANSLATING, bundle_named, copied, failed, mend


def assert_passed(bundle: Path, result: SelftestResult) -> None:
    """Passed by its figures, each of which was held to the limit that the export recorded."""
    assert result.passed and not failed(result)
    manifest = Bundle.open(bundle).manifest
    for comparison in result.comparisons:
        recorded: Mapping[str, float] = manifest.artifact(comparison.artifact).gate["limits"]
        assert comparison.backend == result.backend
        assert comparison.limits and comparison.limits.items() <= recorded.items()
        for name, limit in comparison.limits.items():
            assert 0 <= comparison.metrics[name] <= limit
        counts = [value for name, value in comparison.metrics.items() if name.endswith("rows")]
        assert counts and min(counts) > 0
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["passed"] is True


# What was exported passes
COUNTS = {"gpt2": 10, "pretrained": 5, "marian": 12, "dates": 13}  # of cases


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("name", "dialects"),
    [
        ("gpt2", {"decoder": ("ort", "portable")}),
        ("pretrained", {"encoder": ("ort", "portable")}),
        ("reader", {"encoder": ("ort", "portable")}),
        ("distilled", {"encoder": ("ort", "portable")}),
        ("marian", {"encoder": ("ort", "portable"), "decoder": ("ort", "portable")}),
        ("dates", {"encoder": ("ort", "portable"), "decoder": ("ort", "portable")}),
    ],
)
def test_every_task_passes_on_onnx_runtime(
    name: str, dialects: dict[str, tuple[str, str]], precision: str, request: pytest.FixtureRequest
) -> None:
    bundle = bundle_named(name, request)
    result = selftest(bundle, "ort-cpu", precision)
    assert_passed(bundle, result)
    dialect = ("fp32", "fp16").index(precision)
    assert result.artifacts == tuple(f"{graph}.{d[dialect]}.{precision}" for graph, d in dialects.items())
    assert result.seconds > 0

    report = json.loads(next((bundle / "checks").glob("parity-*.json")).read_text(encoding="utf-8"))
    compared = {
        (c["artifact"], c["case"])
        for c in report["comparisons"]
        if c["backend"] == "ort-cpu" and c["artifact"] in result.artifacts
    }
    assert {(c.artifact, c.case) for c in result.comparisons} == compared
    assert len(result.comparisons) == COUNTS.get(name, len(compared))


def test_quantized_graphs_are_held_to_their_own_limits(tmp_path: Path) -> None:
    from planforge.exporter import export

    options: dict[str, Any] = {"precision": ["int8"], "target": ["cpu"], "verify": "quick"}
    bundle = export("gpt2-demo", tmp_path / "bundle", **options).bundle
    result = selftest(bundle)
    assert_passed(bundle, result)
    assert result.artifacts == ("decoder.ort.int8",)
    assert result.comparisons[0].limits["max_error"] > 1e-3  # beyond fp32's


def test_the_tokens_are_those_of_the_golden_data(demo_bundle: Path) -> None:
    """And there are many different ones, so that a constant engine would not pass."""
    file = find_golden(Bundle.open(demo_bundle))
    assert file is not None
    samples = list_samples(from_arrays(read_golden(file)[0]))
    tokens = [sample.continuation for sample in samples]
    assert max(len(set(row)) for row in tokens) >= 10
    assert len(set(tokens)) == len(tokens)
    greedy = [c for c in selftest(demo_bundle, "ort-cpu").comparisons if c.case.startswith("greedy")]
    assert [c.metrics["common_prefix"] for c in greedy] == [len(tokens[0])] * 2
    assert all(c.divergence is None for c in greedy)


@pytest.mark.parametrize("library", ["tensorrt-rtx", "tensorrt"])
def test_a_decoders_plan_passes(library: str, demo_bundle: Path, own_bundle: Path) -> None:
    bundle = demo_bundle if library == "tensorrt-rtx" else with_manifest(own_bundle, of_tensorrt)
    with emulated_gpu(bundle, library) as cuda:
        result = selftest(bundle, library)
        assert (cuda.used, cuda.queues) == (0, {})
    assert_passed(bundle, result)
    assert (result.backend, result.artifacts) == (library, ("decoder.inplace.fp16",))
    assert [c.case for c in result.comparisons] == DECODING


def test_auto_takes_what_load_takes(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle):
        found = {p: selftest(demo_bundle, precision=p).backend for p in (None, "fp16", "fp32")}
    assert found == {None: "tensorrt-rtx", "fp16": "tensorrt-rtx", "fp32": "ort-cpu"}


def test_an_encoder_decoders_plans_pass(marian_bundle: Path) -> None:
    with emulated_gpu(marian_bundle):
        result = selftest(marian_bundle)
    assert_passed(marian_bundle, result)
    assert result.backend == "tensorrt-rtx"
    assert result.artifacts == ("encoder.portable.fp16", "decoder.inplace.fp16")
    cases = [c.case for c in result.comparisons]
    assert cases[4:] == [DRAWN_TARGETS[0], *TRANSLATING, *DRAWN_TARGETS]


def test_an_encoders_plan_of_a_smaller_batch_passes(
    head_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = with_plan(copied(head_bundle("classifier"), tmp_path), "encoder.portable.fp16", 4, 64)
    with emulated_gpu(bundle):
        result = selftest(bundle)
    assert_passed(bundle, result)
    assert result.artifacts == ("encoder.portable.fp16",)
    cases = ["one by one", "8 texts, padded", "1 token", "64 tokens", "random batches, padded, seed 0"]
    assert [c.case for c in result.comparisons] == cases
    assert not result.skipped  # larger batches run as several


def with_plan(bundle: Path, artifact_id: str, batch: int, length: int) -> Path:
    """As if a plan had been built of a graph; what is in it only a real GPU reads."""
    file = bundle / "plans" / "made-up.plan"
    file.parent.mkdir(exist_ok=True)
    manifest = Bundle.open(bundle).manifest
    artifact = manifest.artifact(artifact_id)
    file.write_bytes(
        make_network_name(artifact, {n: entry.sha256 for n, entry in manifest.files.items()}).encode()
    )
    profiles = derive_profiles(artifact, max_batch=batch, max_length=length)

    def change(value: dict[str, Any]) -> None:
        value["files"]["plans/made-up.plan"] = {"sha256": compute_sha256(file), "bytes": file.stat().st_size}
        value["plans"] = [
            {
                **{"built_from": artifact_id, "file": "plans/made-up.plan", "engine": "tensorrt-rtx"},
                **{"version": "1.7.1.116", "sms": ["sm86"]},
                "profiles": [profile.to_json() for profile in profiles],
            }
        ]

    return with_manifest(bundle, change)


# Plans that take less than golden data has


def narrowed(bundle: Path, batch: int, length: int) -> Path:
    """As if the plans had been built with --max batch=... --max length=..."""
    manifest = Bundle.open(bundle).manifest

    def change(value: dict[str, Any]) -> None:
        for plan in value["plans"]:
            artifact = manifest.artifact(plan["built_from"])
            profiles = derive_profiles(artifact, max_batch=batch, max_length=length)
            plan["profiles"] = [profile.to_json() for profile in profiles]

    return with_manifest(bundle, change)


def test_what_a_smaller_plan_cannot_take_is_skipped_and_said(own_bundle: Path) -> None:
    with emulated_gpu(narrowed(own_bundle, 2, 60)):
        result = selftest(own_bundle)
    assert result.passed
    too_long = {"prompts of 128, 129 tokens", "full context"}
    assert [c.case for c in result.comparisons] == [case for case in DECODING if case not in too_long]
    told = {each.what: each.reason for each in result.skipped}
    # Prompts of 48, and 17 new tokens: forced ones run as far as there is room.
    assert told["1 of 2 rows of 'greedy, 2 prompts, padded'"] == "65 tokens are needed, it takes 60"
    assert told["1 of 1 rows of 'full context'"] == "256 tokens are needed, it takes 60"
    assert sum("of 'random batches, padded, seed 0'" in what for what in told) == 2 and len(told) == 11
    cut = "the last steps of 2 of 7 rows of 'prefill and decode, batch 1'"
    assert told[cut] == "64 tokens are needed, it takes 60"
    (rows,) = {c.metrics["rows"] for c in result.comparisons if c.case.startswith("prefill")}
    assert rows == 5 * 3 + 2 * 2  # of the steps that golden data keeps, those that are left


@pytest.mark.parametrize("batch", [1, 2])
def test_a_plan_that_takes_a_single_sample(batch: int, own_bundle: Path) -> None:
    with emulated_gpu(narrowed(own_bundle, batch, 30)):
        result = selftest(own_bundle)
    assert result.passed and "7 of 8 rows of 'greedy, 8 prompts, padded'" in [s.what for s in result.skipped]


def test_nothing_compared_is_no_pass(own_bundle: Path) -> None:
    file = find_golden(Bundle.open(own_bundle))
    assert file is not None
    arrays, limits = read_golden(file)
    case_set = from_arrays(arrays)
    long = tuple(
        case for case in case_set.cases if case.name in ("full context", "prompts of 128, 129 tokens")
    )
    write_golden(file, to_arrays(dataclasses.replace(case_set, cases=long)), limits)
    mend(own_bundle, file.relative_to(own_bundle).as_posix())
    with emulated_gpu(narrowed(own_bundle, 2, 8)):
        result = selftest(own_bundle)
    assert result.comparisons == () and len(result.skipped) == 2
    assert not result.passed
    assert result.to_json()["passed"] is False


def test_each_graph_must_be_compared(marian_bundle: Path, tmp_path: Path) -> None:
    bundle = copied(marian_bundle, tmp_path)
    with emulated_gpu(narrowed(bundle, 1, 20)):  # targets have 32 tokens, and what is full has 64
        result = selftest(bundle)
    assert result.passed
    told = [each.what for each in result.skipped]
    assert "2 of 2 rows of '4 beams, 2 sources, padded'" in told
    assert "1 of 1 rows of '64 tokens'" in told
    decode = next(c for c in result.comparisons if c.case == "decode, batch 1")
    assert decode.metrics["rows"] == 2  # of one source, the first and the middle of the steps that are kept
    file = find_golden(Bundle.open(bundle))
    assert file is not None
    arrays, limits = read_golden(file)
    case_set = from_arrays(arrays)
    alone = tuple(case for case in case_set.cases if case.graph == "encoder")
    write_golden(file, to_arrays(dataclasses.replace(case_set, cases=alone)), limits)
    mend(bundle, file.relative_to(bundle).as_posix())
    with emulated_gpu(bundle):
        result = selftest(bundle)
    assert {c.artifact for c in result.comparisons} == {"encoder.portable.fp16"}
    assert not failed(result) and not result.passed


def test_an_encoders_smaller_plan(head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = with_plan(copied(head_bundle("pretrained"), tmp_path), "encoder.portable.fp16", 1, 20)
    with emulated_gpu(bundle):
        result = selftest(bundle)
    assert result.passed
    cases = ["one by one", "8 texts, padded", "1 token", "random batches, padded, seed 0"]
    assert [c.case for c in result.comparisons] == cases
    told = {each.what: each.reason for each in result.skipped}
    assert told["1 of 1 rows of '64 tokens'"] == "64 tokens are needed, it takes 20"
    assert len(told) == 4  # and some of the texts, alone and as a batch, and of the random batches


# What cannot be tested


@pytest.mark.parametrize("name", ["whole_bundle", "minilm_bundle"])
def test_without_golden_data_the_way_out_is_named(name: str, request: pytest.FixtureRequest) -> None:
    bundle: Path = request.getfixturevalue(name)
    with pytest.raises(BundleError) as caught:
        selftest(bundle)
    assert str(caught.value) == (
        f"{bundle} has no golden data to test with: it was exported with --no-verify, so export it again"
        " without that option; or another tool chose how activations are rounded, so there is none:"
        f" compare it by planforge verify {bundle}"
    )


@pytest.mark.parametrize("ending", [".data", ".plan", ".npz", "tokenizer", ".onnx", "parity"])
def test_every_file_is_hashed_first(own_bundle: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the engine does not read, and those above 256 MiB."""
    monkeypatch.setattr("planforge.runtime.bundle.bundle.ALWAYS_HASHED_BYTES", 0)
    for name in (name for name in Bundle.open(own_bundle).manifest.files if ending in name):
        content = bytearray((own_bundle / name).read_bytes())
        content[len(content) // 2] ^= 1
        (own_bundle / name).write_bytes(content)
    with pytest.raises(IntegrityError, match="has changed since it was exported"):
        selftest(own_bundle, "ort-cpu")


@pytest.mark.parametrize("missing", ["limits", "plan", "margin.0.values"])
def test_golden_data_of_another_version_is_named(own_bundle: Path, missing: str) -> None:
    file = find_golden(Bundle.open(own_bundle))
    assert file is not None
    with np.load(file, allow_pickle=False) as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != missing}
    np.savez(file, **kept)
    mend(own_bundle, file.relative_to(own_bundle).as_posix())
    with pytest.raises(BundleError, match=rf"of PlanForge, and lacks '{missing}'; export the bundle again"):
        selftest(own_bundle)


def test_what_load_refuses_is_refused(own_bundle: Path) -> None:
    with pytest.raises(InputError, match="backend='gpu' is not one of"):
        selftest(own_bundle, "gpu")
    with pytest.raises(InputError, match="precision='int3' is not in this bundle"):
        selftest(own_bundle, "ort-cpu", "int3")
    with pytest.raises(InputError, match="device=-1 must be"):
        selftest(own_bundle, device=-1)
    with (
        emulated_gpu(own_bundle, sm="sm90"),
        pytest.raises(BackendUnavailableError, match="this GPU is sm90"),
    ):
        selftest(own_bundle, "tensorrt-rtx")
    with emulated_gpu(own_bundle, count=2), pytest.raises(InputError, match="device=2 does not exist"):
        selftest(own_bundle, device=2)
    edit_json(own_bundle / "manifest.json", task="speech")
    with pytest.raises(ManifestError, match="is for 'speech', which this version does not run"):
        selftest(own_bundle)


def test_the_figures_are_the_formulas_by_hand() -> None:
    """`measure`, on which every verdict rests, of two rows of logits."""
    want = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], np.float32))
    got = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]], np.float32))
    found = measure(got, want)
    assert found.max_error == pytest.approx(np.log(2))
    assert found.mean_kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2)
    assert found.top1_agreement == 0.5
    assert found.flip_margin == pytest.approx(np.log(2))
