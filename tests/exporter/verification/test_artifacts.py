"""Faults in what a manifest says of its graphs: each is named; what a user chooses is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.verification.artifacts import compare_artifacts
from planforge.exporter.verification.derivation import compare_with_checkpoint
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.models import one_layer_gpt2
from ...helpers.plans import with_manifest

Edit = Callable[[dict[str, Any]], None]


def compare(bundle: Path, source: str | Path) -> tuple[str, ...]:
    """What is wrong with the manifest's artifacts."""
    found = compare_with_checkpoint(Bundle.open(bundle), resolve_source(source))
    return next(c.failures for c in found if c.case == "artifacts")


def find_artifact(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(a for a in manifest["artifacts"] if a["id"] == name)
    return found


def set_lengths(length: int, axis: str) -> Edit:
    def edit(manifest: dict[str, Any]) -> None:
        for spec in (s for a in manifest["artifacts"] for side in ("inputs", "outputs") for s in a[side]):
            for number, own in enumerate(spec["axes"]):
                if isinstance(own, list) and own[0] == axis:
                    spec["axes"][number] = [axis, own[1], min(own[2], length), length]

    return edit


def set_field(name: str, field: str, value: Any) -> Edit:
    def edit(manifest: dict[str, Any]) -> None:
        assert find_artifact(manifest, name)[field] != value
        find_artifact(manifest, name)[field] = value

    return edit


def exchange_roles(manifest: dict[str, Any]) -> None:
    inputs = {spec["role"]: spec for spec in find_artifact(manifest, "decoder.portable.fp32")["inputs"]}
    key, value = (inputs[f"past.0.{kind}"] for kind in ("key", "value"))
    key["role"], value["role"] = value["role"], key["role"]


def take_files(into: str, other: str) -> Edit:
    """One entry points at another's graph."""

    def edit(manifest: dict[str, Any]) -> None:
        for name in ("file", "data", "opset"):
            find_artifact(manifest, into)[name] = find_artifact(manifest, other)[name]

    return edit


def exchange_files(manifest: dict[str, Any]) -> None:
    one, other = (find_artifact(manifest, f"decoder.ort.{bits}") for bits in ("int8", "int4"))
    for name in ("file", "data"):
        one[name], other[name] = other[name], one[name]


def alias_keys(manifest: dict[str, Any]) -> None:
    find_artifact(manifest, "decoder.inplace.fp32")["aliases"]["present.1.key"] = "cache.0.key"


FAULTS: dict[str, tuple[str, Edit, str]] = {
    "half of the context": (
        "demo_bundle",
        set_lengths(128, "slots"),
        "axis slots is at most 128, the checkpoint's is 256",
    ),
    "twice the context": (
        "demo_bundle",
        set_lengths(512, "tokens"),
        "axis tokens is at most 512, the checkpoint's is 256",
    ),
    "padding on the left": (
        "demo_bundle",
        set_field("decoder.ort.fp32", "padding_side", "left"),
        'decoder.ort.fp32: padding_side is "left", the checkpoint\'s is "right"',
    ),
    "roles exchanged": (
        "demo_bundle",
        exchange_roles,
        "input 'past_key_values.0.key' has the role past.0.value, the checkpoint's is past.0.key",
    ),
    "another alias": (
        "demo_bundle",
        alias_keys,
        'decoder.inplace.fp32: aliases.present.1.key is "cache.0.key", the checkpoint\'s is "cache.1.key"',
    ),
    "another opset": (
        "demo_bundle",
        set_field("decoder.portable.fp32", "opset", 17),
        "opset is 17, the graph's is 20",
    ),
    "fp32 that is fp16": (
        "demo_bundle",
        take_files("decoder.portable.fp32", "decoder.portable.fp16"),
        "decoder.portable.fp32: precision is fp32, and ",
    ),
    "int4 that is int8": (
        "whole_bundle",
        take_files("decoder.ort.int4", "decoder.ort.int8"),
        "decoder.ort.int4: precision is int4, and 16 of 17 weights of its graph have other bits",
    ),
    "int8 and int4 exchanged": (
        "whole_bundle",
        exchange_files,
        "decoder.ort.int8: precision is int8, and 16 of 17 weights of its graph have other bits",
    ),
    "other bits": (
        "whole_bundle",
        lambda manifest: find_artifact(manifest, "decoder.ort.int4")["quantization"].update(bits=8),
        "decoder.ort.int4: precision is int4, and quantization.bits is 8",
    ),
    "int8 that has int8 caches": (
        "whole_bundle",
        set_field("decoder.ort.int8", "precision", "int8-kv8"),
        "decoder.ort.int8-kv8: precision is int8-kv8, and 0 of 4 caches of its graph are in int8",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_an_artifact_is_named(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Of these the first two, the last four and the roles had passed, or were named as weights."""
    fixture, edit, told = FAULTS[name]
    sound: Path = request.getfixturevalue(fixture)
    assert compare(sound, "gpt2-demo") == ()
    bundle = with_manifest(Path(shutil.copytree(sound, tmp_path / "bundle", copy_function=shutil.copy)), edit)
    assert [failure for failure in compare(bundle, "gpt2-demo") if told in failure]


def test_what_a_user_chose_is_no_fault(tmp_path: Path) -> None:
    checkpoint = one_layer_gpt2(tmp_path / "checkpoint")
    bundle = tmp_path / "bundle"
    target = ["cpu", "portable"]
    export(checkpoint, bundle, target=target, max_batch=3, max_length=24, verify=False, precision=["fp32"])
    axes = {artifact.axis("batch").max for artifact in Bundle.open(bundle).manifest.artifacts}
    assert axes == {3}
    assert compare(bundle, checkpoint) == ()


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (set_lengths(16, "total"), "axis total is at most 16, and the longest text has 256 tokens"),
        (
            set_field("decoder.portable.fp32", "padding_side", "right"),
            "of a graph decoder.portable it is 'left'",
        ),
    ],
)
def test_imports_are_held_to_their_longest_text(
    edit: Edit, told: str, demo_bundle: Path, tmp_path: Path
) -> None:
    """Their recipes come from graphs that are gone; what follows from the dialect does not."""
    assert compare_artifacts(Bundle.open(demo_bundle), None)[1] == []
    bundle = with_manifest(Path(shutil.copytree(demo_bundle, tmp_path / "bundle")), edit)
    assert [fault for fault in compare_artifacts(Bundle.open(bundle), None)[1] if told in fault]
