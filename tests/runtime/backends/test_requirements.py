"""What quantized graphs need of ONNX Runtime and of the processor."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export
from planforge.runtime import load
from planforge.runtime.backends import ort_backend, ort_program
from planforge.runtime.backends.requirements import check_version, products_saturate, warn_if_slow
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.errors import BackendUnavailableError

FLOATS: dict[str, Any] = {}
WEIGHTS = {"bits": 8, "block_size": 64}
CACHE = {"cache_bits": 8}


def artifact(quantization: dict[str, Any], precision: str = "int8") -> Artifact:
    made = Artifact("decoder", "ort", precision, 20, "x.onnx", (), "right", (), ())
    return dataclasses.replace(made, quantization=quantization)


@pytest.mark.parametrize(
    ("quantization", "installed", "needed"),
    [
        (FLOATS, "1.17.0", None),
        (WEIGHTS, "1.22.1", "1.23"),
        (WEIGHTS, "1.23.0", None),
        (CACHE, "1.26.4", "1.27"),
        ({**WEIGHTS, **CACHE}, "1.23.2", "1.27"),
        ({**WEIGHTS, **CACHE}, "1.27.0", None),
        (WEIGHTS, "2.0", None),
        (WEIGHTS, "1.100.0.dev2", None),
        (WEIGHTS, "unknown", None),
    ],
)
def test_a_version_too_old_is_told_with_the_one_that_will_do(
    quantization: dict[str, Any], installed: str, needed: str | None
) -> None:
    if needed is None:
        check_version(artifact(quantization), installed)
        return
    with pytest.raises(BackendUnavailableError) as told:
        check_version(artifact(quantization), installed)
    words = (
        f"needs ONNX Runtime {needed} or newer, installed is {installed}: pip install 'onnxruntime>={needed}'"
    )
    assert f"decoder.ort.int8 {words}" in str(told.value)
    assert "load another precision" in str(told.value)


@pytest.mark.parametrize("precision", ["fp16-kv8", "w8a16-kv8"])
def test_a_cache_in_int8_beside_fp16_needs_a_later_one(precision: str) -> None:
    """1.28 gives an error when it runs; 1.29 to 1.31 run it."""
    check_version(artifact(CACHE, precision), "1.29.0")
    with pytest.raises(
        BackendUnavailableError, match=r"needs ONNX Runtime 1\.29 or newer, installed is 1\.28\.0"
    ):
        check_version(artifact(CACHE, precision), "1.28.0")


def test_an_export_that_could_not_be_verified_ends_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_program.import_onnxruntime(), "__version__", "1.26.0")
    with pytest.raises(
        BackendUnavailableError, match=r"needs ONNX Runtime 1.27 or newer, installed is 1.26.0"
    ):
        export("gpt2-demo", tmp_path / "bundle", precision=["int8-kv8"], target=["cpu"])
    assert not list(tmp_path.iterdir())


def test_a_load_with_a_version_too_old(whole_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_program.import_onnxruntime(), "__version__", "1.20.1")
    with pytest.raises(BackendUnavailableError, match=r"decoder.ort.int8 needs ONNX Runtime 1.23"):
        load(whole_bundle, precision="int8")


CPUINFO = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu sse2 {}\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("quantization", "machine", "flags", "said"),
    [
        (WEIGHTS, "x86_64", "avx2 fma", False),
        (WEIGHTS, "x86_64", "avx", True),
        (WEIGHTS, "AMD64", "avx", True),
        (FLOATS, "x86_64", "avx", False),
        (WEIGHTS, "aarch64", "avx", False),  # which has no such flags
        (WEIGHTS, "x86_64", None, False),  # a system that doesn't say
    ],
)
def test_a_processor_without_the_instructions_is_said_once_a_graph(
    quantization: dict[str, Any],
    machine: str,
    flags: str | None,
    said: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(CPUINFO.format(flags), encoding="utf-8")
    with caplog.at_level(logging.WARNING, "planforge"):
        warn_if_slow(artifact(quantization), machine, path)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * said
    if said:
        assert "no AVX2" in caplog.text and "precision='fp32'" in caplog.text


@pytest.mark.parametrize(
    ("machine", "flags", "saturate"),
    [
        ("x86_64", "avx2 fma avx512f avx512bw", True),  # Skylake
        ("x86_64", "avx2 avx512f avx512_vnni", False),
        ("x86_64", "avx2 avx_vnni", False),
        ("AMD64", None, True),  # a system that doesn't say
        ("aarch64", None, False),
    ],
)
def test_products_are_exact_where_they_would_saturate(
    machine: str, flags: str | None, saturate: bool, tmp_path: Path
) -> None:
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(CPUINFO.format(flags), encoding="utf-8")
    assert products_saturate(machine, path) == saturate


@pytest.mark.parametrize("saturate", [True, False])
def test_a_session_is_told_to_be_exact(
    whole_bundle: Path, saturate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_program, "products_saturate", lambda: saturate)
    opened = Bundle.open(whole_bundle)
    program = ort_backend.OrtCpuBackend(1).open(opened, opened.manifest.artifact("decoder.ort.int8"))
    options = program.session.get_session_options()
    assert is_exact(options) == saturate


def test_products_that_fit_need_no_exact_kernels(whole_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_program, "products_saturate", lambda: True)
    opened = Bundle.open(whole_bundle)
    found = opened.manifest.artifact("decoder.ort.int8")
    fitting = dataclasses.replace(found, quantization={**found.quantization, "pair_top": 128})
    assert not is_exact(ort_backend.OrtCpuBackend(1).open(opened, fitting).session.get_session_options())


@pytest.mark.parametrize("top", [None, 129, 254, "128", {}])
def test_codes_that_may_be_larger_need_exact_kernels(top: Any) -> None:
    """Whatever a manifest says: a larger bound than fits is none."""
    assert artifact({"bits": 8, "pair_top": top}).may_saturate
    assert not artifact({"bits": 8, "pair_top": 128}).may_saturate


def is_exact(options: Any) -> bool:
    try:
        return bool(options.get_session_config_entry("session.x64quantprecision") == "1")
    except RuntimeError:  # it has no such entry
        return False
