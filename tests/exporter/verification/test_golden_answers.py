"""Faults in golden data, with its hash put right: verify compares it with PyTorch, and names the file."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from planforge.exporter import verify
from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.levels import QUICK, STANDARD, Level
from planforge.exporter.limits import CAPS
from planforge.exporter.reference_model import load_our_model
from planforge.exporter.tasks.verifier import Verifier, open_verifier
from planforge.exporter.verification.golden_answers import (
    GONE,
    answer_again,
    compare_arrays,
    compare_golden,
    list_loose_limits,
)
from planforge.runtime.apps.check import files
from planforge.runtime.apps.check.case_arrays import from_arrays
from planforge.runtime.apps.check.files import find_golden, read_golden, write_golden
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.plans import with_manifest
from ...helpers.selftest import mend

if TYPE_CHECKING:
    from planforge.exporter.reference_model import ReferenceModel

Change = Callable[[dict[str, Any], dict[str, dict[str, float]]], None]
Find = Callable[[str], tuple[Path, Path]]


@pytest.fixture
def find(request: pytest.FixtureRequest) -> Find:
    """A sound bundle by its name, and its checkpoint. Don't change them."""

    def find(name: str) -> tuple[Path, Path]:
        if name == "gpt2":
            return request.getfixturevalue("demo_bundle"), DEMOS / "gpt2-demo"
        if name == "marian":
            bundle: Path = request.getfixturevalue("marian_bundle")
        else:
            bundle = request.getfixturevalue("head_bundle")(name)
        return bundle, bundle.parent / name

    return find


def examine(
    bundle: Path, checkpoint: Path, level: Level, texts: list[str]
) -> tuple[Verifier, ReferenceModel]:
    opened = Bundle.open(bundle)
    model = load_our_model(checkpoint, opened.manifest.max_length)
    return open_verifier(opened, model, texts, level=level), model


def change_golden(bundle: Path, change: Change) -> Path:
    """Changes golden arrays and limits, and lists the file as if it were right."""
    file = find_golden(Bundle.open(bundle))
    assert file is not None
    arrays, limits = read_golden(file)
    change(arrays, limits)
    file.unlink()
    write_golden(file, arrays, limits)
    mend(bundle, file.relative_to(bundle).as_posix())
    return bundle


def add_noise(arrays: dict[str, Any], limits: dict[str, dict[str, float]]) -> None:
    random = np.random.default_rng(0)
    for name, array in arrays.items():
        if array.dtype.kind == "f" and array.ndim >= 2 and array.size:
            noise = 0.1 * array.std() * random.standard_normal(array.shape)
            arrays[name] = (array + noise).astype(array.dtype)


def loosen(arrays: dict[str, Any], limits: dict[str, dict[str, float]]) -> None:
    for own in limits.values():
        own.update({name: 1e6 for name in own})


def told(comparisons: tuple[Comparison, ...] | list[Comparison]) -> str:
    return "\n".join(f"{c.artifact}, {c.case}: {failure}" for c in comparisons for failure in c.failures)


def test_verify_names_the_file_of_golden_data(find: Find, tmp_path: Path) -> None:
    """Limits a million times as large, and other answers, had passed; `selftest` rests on them."""
    sound, _ = find("classifier")
    (own,) = [c for c in verify(sound).comparisons if c.case == "answers"]
    assert own.passed and own.metrics["answers"] == len(
        read_golden(find_golden(Bundle.open(sound)) or sound)[0]
    )
    damaged = Path(shutil.copytree(sound, tmp_path / "damaged"))
    change_golden(damaged, add_noise)
    change_golden(damaged, loosen)
    report = verify(damaged, source=sound.parent / "classifier", level="quick")
    text = told(report.comparisons)
    assert "golden data, answers: checks/golden-" in text
    assert " of its spread off from PyTorch's, at most 0.001 is allowed" in text
    assert "golden data, limits: checks/golden-" in text
    assert "is limited to 1e+06, verify's limit is " in text
    assert {c.artifact for c in report.comparisons if not c.passed} == {"golden data"}


@pytest.mark.parametrize("kind", ["logits", "flags"])
def test_older_limits_of_a_divergence_of_one_value_are_read(find: Find, tmp_path: Path, kind: str) -> None:
    """The softmax of one value is 1, so its KL divergence was always 0; nothing measures it any more."""
    sound, checkpoint = find("ranker")
    gates = [artifact.gate for artifact in Bundle.open(sound).manifest.artifacts]
    measured = {name for gate in gates for name in (*gate["limits"], *gate["measured"])}
    assert "logits.max_error" in measured and not any(name.endswith(".mean_kl") for name in measured)
    limited = ["max_error", "mean_kl"] + (["probability_error", "label_changes"] if kind == "flags" else [])

    def age(arrays: dict[str, Any], limits: dict[str, dict[str, float]]) -> None:
        plan = json.loads(str(arrays["plan"]))
        for case in (*plan["cases"], *plan["few"]):
            for measure in case["measures"]:
                if measure[0] == "values":
                    measure[0] = kind
                    measure[2] = limited
        arrays["plan"] = np.array(json.dumps(plan))
        for own in limits.values():
            own.update({f"logits.{name}": 1.0 for name in limited[1:]})

    older = change_golden(Path(shutil.copytree(sound, tmp_path / "older")), age)
    result = selftest(older)
    assert result.passed
    assert all("logits.max_error" in comparison.limits for comparison in result.comparisons)
    assert verify(older, source=checkpoint, level="quick").passed


def test_golden_data_that_is_gone_is_told(find: Find, tmp_path: Path) -> None:
    sound, checkpoint = find("classifier")
    damaged = Path(shutil.copytree(sound, tmp_path / "damaged"))

    def remove(manifest: dict[str, Any]) -> None:
        manifest["files"] = {n: e for n, e in manifest["files"].items() if not n.startswith("checks/")}

    report = verify(with_manifest(damaged, remove), source=checkpoint, level="quick")
    assert f"golden data, file: {GONE}" in told(report.comparisons)
    assert any("the bundle has no golden texts" in note for note in report.notes)

    def forget(manifest: dict[str, Any]) -> None:  # as --no-verify leaves them
        for artifact in manifest["artifacts"]:
            artifact["gate"] = {}

    report = verify(with_manifest(damaged, forget), source=checkpoint, level="quick")
    assert report.passed
    assert any("the bundle has no golden texts" in note for note in report.notes)


@pytest.mark.parametrize("name", ["gpt2", "classifier", "marian"])
def test_pytorch_is_asked_again_where_a_run_has_asked_something_else(find: Find, name: str) -> None:
    """Golden data of another level, or other texts; of a sound bundle it is what PyTorch says now too."""
    bundle, checkpoint = find(name)
    few = [text[:60] for text in read_prompts(None, checkpoint)[:3]]
    verifier, model = examine(bundle, checkpoint, QUICK, few)
    file = find_golden(verifier.bundle)
    assert file is not None
    arrays, _ = read_golden(file)
    if name != "gpt2":
        verifier = dataclasses.replace(verifier, level=STANDARD)
    expected = answer_again(verifier, arrays, model)
    if name == "gpt2":
        prompts = from_arrays(arrays).answers["margin"]
        assert {f"margin.{number}.values" for number in prompts} < set(expected) < set(arrays)
    else:
        assert set(expected) == set(arrays) - {"plan"}
    own = verifier.collect_golden()
    assert not all(name in own and np.array_equal(own[name], array) for name, array in expected.items())
    assert list(compare_arrays(arrays, expected, 1e-3)) == []
    damaged = dict(arrays)
    add_noise(damaged, {})
    assert list(compare_arrays(damaged, expected, 1e-3))
    if name == "gpt2":
        tokens = arrays["text.0"].copy()
        tokens[-1] = (tokens[-1] + 1) % 2048
        damaged = arrays | {"text.0": tokens}
        faults = list(compare_arrays(damaged, answer_again(verifier, damaged, model), 1e-3))
        assert faults == ["text.0 has other tokens or places than PyTorch's answers"]


def test_limits_of_golden_data_may_be_a_little_larger() -> None:
    """As those of another level are; a stated loss that the manifest records counts too."""
    own = {"int8": {"max_error": 0.1, "mean_kl": 1e-3, "top1_changes": 0.02, "random.max_error": 0.1}}

    def check(accepted: dict[str, float], **changed: float) -> list[str]:
        golden = {"int8": own["int8"] | changed}
        return [fault for _, fault in list_loose_limits(golden, own, {"int8": accepted}, {})]

    assert check({}) == [] and check({}, max_error=0.3, mean_kl=9e-3, top1_changes=0.1) == []
    assert check({}, max_error=0.31) == ["int8's max_error is limited to 0.31, verify's limit is 0.1"]
    assert check({}, mean_kl=0.01) and check({}, top1_changes=0.5) and check({}, max_error=float("nan"))
    assert check({"max_error": 0.5}, max_error=0.5) == []
    without = {"int8": {name: limit for name, limit in own["int8"].items() if name != "mean_kl"}}
    assert [fault for _, fault in list_loose_limits(without, own, {}, {})] == [
        "there is no limit of int8's mean_kl"
    ]
    assert [fault for _, fault in list_loose_limits({}, own, {}, {})] == ["there are no limits of int8"]


@pytest.mark.parametrize(("limit", "is_loose"), [(CAPS["int8"]["max_error"], False), (1.01, True)])
def test_limits_of_golden_data_may_reach_their_caps_at_the_level_quick(limit: float, is_loose: bool) -> None:
    own = {"int8": {"max_error": 0.1}}
    assert bool(list(list_loose_limits({"int8": {"max_error": limit}}, own, {}, CAPS))) is is_loose


def test_fp32_limits_that_only_float64_explains_are_no_fault(find: Find, tmp_path: Path) -> None:
    """An export may have needed them, and this run not: then PyTorch in float64 is asked."""
    bundle, checkpoint = find("classifier")
    verifier, model = examine(bundle, checkpoint, QUICK, read_prompts(None, checkpoint))
    limits = {"fp32": {f"{name}": cap for name, cap in verifier.choose_limits("fp32", {}).items()}}
    tight = {"fp32": {name: limit / 1e6 for name, limit in limits["fp32"].items()}}
    file = find_golden(verifier.bundle)
    assert (
        file is not None
        and read_golden(file)[1]["fp32"]["last_hidden_state.max_error"] == CAPS["fp32"]["max_error"]
    )
    found = compare_golden(verifier, model, tight, {}, lambda _: None)
    assert next(c for c in found if c.case == "limits").passed
    assert json.dumps([c.to_json() for c in found])


@pytest.mark.parametrize(
    "change",
    [
        {"plan": np.array('{"format": 2}')},
        {"logits.0.values": np.array(["a"])},
        {"text.0": np.array([10**6])},
        {"logits.0.positions": np.array([1000])},
        {"margin.0.positions": np.array([10**6])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_golden_data_that_fits_nothing_is_one_line(
    change: dict[str, Any], find: Find, tmp_path: Path
) -> None:
    bundle, checkpoint = find("gpt2")
    verifier, model = examine(bundle, checkpoint, QUICK, ["Wings lift the plane."])
    damaged = Path(shutil.copytree(bundle, tmp_path / "damaged"))
    change_golden(damaged, lambda arrays, limits: arrays.update(change))
    opened = dataclasses.replace(verifier, bundle=Bundle.open(damaged), level=STANDARD)
    found = compare_golden(opened, model, {}, {}, lambda _: None)
    fault = found[0].failures[0]
    assert fault.startswith("checks/golden-") and "\n" not in fault
    # What has another shape, or other places, is compared, and is another answer.
    assert (" cannot be compared: " in fault) == ("logits" not in fault)


@pytest.mark.parametrize("name", ["gpt2", "classifier", "marian"])
def test_golden_data_that_is_too_large_keeps_fewer_places(
    find: Find, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bundle, checkpoint = find(name)
    verifier, model = examine(bundle, checkpoint, QUICK, read_prompts(None, checkpoint)[:3])
    usual = verifier.collect_golden()
    size = files.count_bytes(usual.values())
    monkeypatch.setattr(files, "MAX_FILE_BYTES", size + files.LIMITS_BYTES - 1)
    fewer = verifier.collect_golden()
    assert usual.keys() == fewer.keys()
    assert files.count_bytes(fewer.values()) < size
    assert list(compare_arrays(fewer, answer_again(verifier, fewer, model), 1e-3)) == []


def test_golden_data_that_cannot_fit_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 2**20)
    arrays = {f"sample.{i}.logits": np.zeros(2**18, np.float32) for i in range(5)}
    with pytest.raises(InputError, match=r"more than 1 MiB.* --prompts, or .* --no-verify"):
        write_golden(tmp_path / "golden.npz", arrays, {})
    assert not list(tmp_path.iterdir())
