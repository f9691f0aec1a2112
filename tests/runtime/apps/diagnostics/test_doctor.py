"""Which backends the doctor says run, on machines of which all is made up but the reasoning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime.apps.diagnostics import packages as packages_module
from planforge.runtime.apps.diagnostics.doctor import (
    LADDER,
    BackendState,
    Facts,
    find_advice,
    find_backends,
    summarize_backends,
)
from planforge.runtime.apps.diagnostics.machine import Graphics
from planforge.runtime.apps.diagnostics.packages import OnnxRuntime, Package, ask_onnxruntime, find_package
from planforge.runtime.backends.select import BACKEND_PRIORITY, OPTIONAL

from ....helpers.machines import facts

GPU_ORT = {"onnxruntime-gpu": "1.31.1", "nvidia-cudnn-cu13": "9.1", "cuda-bindings": "13.0"}
CUDA_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
ORIN: dict[str, Any] = {"architecture": "aarch64", "cuda": "12.6", "release": "36.4.3"}


def by_backend(found: tuple[BackendState, ...]) -> dict[str, BackendState]:
    return {backend.backend: backend for backend in found}


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_engine.py").write_text("raise RuntimeError('it was imported')")
    monkeypatch.setitem(packages_module.DISTRIBUTIONS, "no_such_engine", ("no-such-engine", "the-other"))
    assert find_package("no_such_engine") == Package("no_such_engine", {})
    monkeypatch.syspath_prepend(tmp_path)
    assert str(find_package("no_such_engine")) == "no_such_engine unknown version"
    information = tmp_path / "no_such_engine-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: no-such-engine\nVersion: 1.2\n")
    assert str(find_package("no_such_engine")) == "no-such-engine 1.2"


@pytest.mark.filterwarnings("ignore:Implicit None on return values:DeprecationWarning")  # Python 3.12
def test_half_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_engine").mkdir()
    (tmp_path / "no_such_engine" / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (tmp_path / "no_such_engine-1.2.dist-info").mkdir()
    (tmp_path / "no_such_engine-1.2.dist-info" / "METADATA").write_text("Name: no-such-engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(packages_module.DISTRIBUTIONS, "no_such_engine", ("no-such-engine",))
    monkeypatch.setitem(packages_module.DISTRIBUTIONS, "no_such_engine.part", ("no-such-part",))
    assert str(find_package("no_such_engine")) == "no-such-engine unknown version"
    assert str(find_package("no_such_engine.part")) == "not installed"


@pytest.mark.parametrize("error", [ImportError("libonnx.so: cannot open\nand more"), AttributeError("")])
def test_an_onnx_runtime_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(packages_module, "import_onnxruntime", fail)
    said = ask_onnxruntime().error
    assert said == (str(error).partition("\n")[0] or "AttributeError")
    backend = by_backend(find_backends(facts(onnxruntime=OnnxRuntime(error=said))))["ort-cpu"]
    assert backend.reason == f"onnxruntime can't be imported: {said}"
    assert backend.remedy == "pip install --force-reinstall --no-deps onnxruntime"


def test_the_doctor_loads_no_framework_and_no_engine_but_onnx_runtime() -> None:
    code = (
        "import json, sys\nfrom planforge.runtime.apps.diagnostics import doctor\n"
        "after_import = list(sys.modules)\n"
        "doctor.diagnose()\nprint(json.dumps([after_import, list(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, diagnosed = map(set, json.loads(done.stdout.splitlines()[-1]))
    unwanted = {"torch", "onnx", "typer", "rich", "tensorrt", "tensorrt_rtx", "cuda.bindings", "transformers"}
    assert not (imported | diagnosed) & unwanted
    assert "onnxruntime" not in imported and "onnxruntime" in diagnosed


def test_the_doctors_ladder_is_the_one_that_load_walks() -> None:
    """But for the engine that "auto" takes in its own precisions alone, which no advice should put first."""
    assert [*LADDER] == [*(name for name in BACKEND_PRIORITY if name != OPTIONAL), OPTIONAL]
    assert [*LADDER] == ["tensorrt-rtx", "tensorrt", "ort-cuda", "ort-cpu", "openvino"]


def test_a_machine_with_everything() -> None:
    versions = {
        **GPU_ORT,
        "tensorrt-rtx-cu13": "1.7.1.116",
        "tensorrt": "11.4",
        "cuda-bindings": "13.0.3",
    }
    found = find_backends(facts("sm89", packages=versions, providers=CUDA_PROVIDERS, ort_cuda="13.0"))
    assert found == (
        BackendState("tensorrt-rtx", True, "tensorrt-rtx-cu13 1.7.1.116"),
        BackendState("tensorrt", True, "tensorrt 11.4"),
        BackendState("ort-cuda", True, "onnxruntime-gpu 1.31.1"),
        BackendState("ort-cpu", True, "onnxruntime-gpu 1.31.1"),
        BackendState("openvino", False, "openvino is not installed", "pip install 'planforge[openvino]'"),
    )
    assert summarize_backends(found) == "bundles run on: tensorrt-rtx, tensorrt, ort-cuda, ort-cpu"


RTX_SMS = (
    "TensorRT-RTX is for sm75 (RTX 20, T4), sm80 (A100, A30), sm86 (RTX 30, A10), sm89 (RTX 40, L4, L40S),"
    " sm120 (RTX 50, RTX PRO Blackwell), sm121 (DGX Spark, GB10) and x86-64"
)
CUDA_13_ORT = "pip install 'planforge[gpu]' 'onnxruntime-gpu[cuda,cudnn]'"
JETSON_TENSORRT = (
    "sudo apt install nvidia-jetpack, then /usr/bin/python3 -m venv --system-site-packages .venv,"
    " then in it pip install planforge 'cuda-bindings==12.*'"
)


@pytest.mark.parametrize(
    ("found", "backend", "reason", "remedy"),
    [
        (
            facts("sm89"),
            "tensorrt-rtx",
            "tensorrt-rtx and cuda-bindings are not installed",
            "pip install 'planforge[tensorrt-rtx]' 'cuda-bindings==13.*'",
        ),
        (
            facts("sm90"),
            "tensorrt-rtx",
            f"{RTX_SMS}, this machine has sm90 (H100, H200) and x86_64",
            "",
        ),
        (
            facts("sm87", **ORIN),
            "tensorrt-rtx",
            f"{RTX_SMS}, this machine has sm87 (Jetson Orin) and aarch64",
            "",
        ),
        (
            facts("sm121", architecture="aarch64"),
            "tensorrt-rtx",
            f"{RTX_SMS}, this machine has sm121 (DGX Spark, GB10) and aarch64",
            "",
        ),
        (
            facts("sm90", packages={"cuda-bindings": "13.0.3"}),
            "tensorrt",
            "tensorrt is not installed",
            "pip install 'planforge[tensorrt]'",
        ),
        (
            facts("sm90", packages={"tensorrt": "11.4"}, cuda="12.4"),
            "tensorrt",
            "cuda-bindings is not installed",
            "pip install 'cuda-bindings==12.*'",
        ),
        (
            facts("sm90", packages={"tensorrt": "11.4"}, cuda=None),
            "tensorrt",
            "cuda-bindings is not installed",
            "pip install cuda-bindings",
        ),
        (
            facts("sm86", cuda="12.4"),
            "tensorrt",
            "tensorrt and cuda-bindings are not installed",
            "pip install tensorrt-cu12 'cuda-bindings==12.*'",
        ),
        (
            facts("sm86", cuda="12.4"),
            "tensorrt-rtx",
            "tensorrt-rtx and cuda-bindings are not installed",
            "install NVIDIA's driver 580 or newer, which has CUDA 13, and restart,"
            " then pip install 'planforge[tensorrt-rtx]' 'cuda-bindings==13.*'",
        ),
        (
            facts("sm86", cuda="12.4", packages={"tensorrt-rtx-cu13": "1.7", "cuda-bindings": "12.9"}),
            "tensorrt-rtx",
            "tensorrt-rtx-cu13 1.7 is for CUDA 13, the driver has 12.4",
            "install NVIDIA's driver 580 or newer, which has CUDA 13, and restart",
        ),
        (
            facts("sm86", cuda="12.4", packages={"tensorrt": "11.4", "tensorrt-cu13": "11.4"}),
            "tensorrt",
            "tensorrt 11.4, tensorrt-cu13 11.4 is for CUDA 13, the driver has 12.4",
            "pip uninstall tensorrt tensorrt-cu13, then pip install tensorrt-cu12",
        ),
        (
            facts("sm87", **ORIN),
            "tensorrt",
            "tensorrt and cuda-bindings are not installed",
            JETSON_TENSORRT,
        ),
        (
            facts("sm87", **ORIN, python="3.12.3"),
            "tensorrt",
            "tensorrt and cuda-bindings are not installed; JetPack's is for Python 3.10, this is 3.12.3",
            JETSON_TENSORRT,
        ),
        (
            facts(
                "sm87",
                **ORIN,
                packages={"tensorrt": "10.3.0", "cuda-bindings": "13.5.0"},
            ),
            "tensorrt",
            "cuda-bindings 13.5.0 is for CUDA 13, the driver has 12.6",
            "pip install 'cuda-bindings==12.*'",
        ),
        (
            facts("sm70"),
            "tensorrt",
            "TensorRT 11 is for sm75 (RTX 20, T4) and newer, this machine has sm70 (V100)",
            "",
        ),
        (
            facts("sm87", architecture="aarch64", cuda="11.4", release="35.4.1"),
            "ort-cuda",
            "this board's JetPack has CUDA 11.4, 12 or newer is needed",
            "install JetPack 6 or newer",
        ),
        (
            facts(
                "sm72", architecture="aarch64", cuda="11.4", release="35.4.1"
            ),  # JetPack 6 is not for Xavier
            "tensorrt",
            "this board's JetPack has CUDA 11.4, 12 or newer is needed",
            "",
        ),
        (
            facts("sm86", cuda="11.4"),
            "ort-cuda",
            "the driver has CUDA 11.4, 12 or newer is needed",
            "install NVIDIA's driver 580 or newer, which has CUDA 13, and restart",
        ),
        (
            facts("sm86"),
            "ort-cuda",
            "onnxruntime 1.31.1 has no CUDAExecutionProvider",
            f"pip uninstall onnxruntime, then {CUDA_13_ORT}",
        ),
        (facts("sm86", packages={}), "ort-cuda", "onnxruntime-gpu is not installed", CUDA_13_ORT),
        (
            facts("sm86", packages=GPU_ORT, cuda="12.4", providers=CUDA_PROVIDERS, ort_cuda="13.0"),
            "ort-cuda",
            "onnxruntime-gpu 1.31.1 is for CUDA 13.0, the driver has 12.4",
            "pip install 'planforge[gpu]' 'onnxruntime-gpu[cuda,cudnn]<1.27'",
        ),
        (
            facts("sm87", **ORIN),
            "ort-cuda",
            "onnxruntime 1.31.1 has no CUDAExecutionProvider",
            "pip uninstall onnxruntime, then install NVIDIA's own wheel of onnxruntime-gpu for JetPack 6.2"
            " (the public ones have no code for this GPU)",
        ),
        (facts(packages={}), "ort-cpu", "onnxruntime is not installed", "pip install 'planforge[cpu]'"),
    ],
)
def test_what_stands_in_the_way_and_what_to_do(found: Facts, backend: str, reason: str, remedy: str) -> None:
    assert by_backend(find_backends(found))[backend] == BackendState(backend, False, reason, remedy)


@pytest.mark.parametrize(
    ("found", "available"),
    [
        (facts("sm75", cuda="12.4", packages={"onnxruntime-gpu": "1.26.0"}), ["ort-cpu"]),
        (
            facts(
                "sm75",
                cuda="12.4",
                packages={"onnxruntime-gpu": "1.26.0", "cuda-bindings": "12.9"},
                providers=CUDA_PROVIDERS,
            ),
            ["ort-cuda", "ort-cpu"],
        ),
        (
            facts("sm75", cuda="12.4", packages={"onnxruntime-gpu": "1.26.0"}, providers=CUDA_PROVIDERS),
            ["ort-cpu"],
        ),
        (
            facts(
                "sm75",
                cuda="12.4",
                packages={"onnxruntime-gpu": "1.26.0", "cuda-bindings": "13.0"},
                providers=CUDA_PROVIDERS,
            ),
            ["ort-cpu"],
        ),
        (facts("sm70", packages={"tensorrt": "10.3", "cuda-bindings": "12.9"}), ["tensorrt"]),
        (facts("sm70", "sm86", packages={"tensorrt": "11.4", "cuda-bindings": "12.9"}), ["tensorrt"]),
        (facts(None, packages={"tensorrt": "11.4", "cuda-bindings": "12.9"}, cuda=None), ["tensorrt"]),
        (facts("sm90", "sm120", packages={"tensorrt-rtx": "1.7", "cuda-bindings": "13.0"}), ["tensorrt-rtx"]),
        (
            facts("sm89", architecture="AMD64", packages={"tensorrt-rtx": "1.7", "cuda-bindings": "13.0"}),
            ["tensorrt-rtx"],
        ),
        (
            facts(
                "sm87",
                **ORIN,
                packages={"tensorrt": "unknown version", "cuda-bindings": "12.9.4", "onnxruntime": "1.23.2"},
            ),
            ["tensorrt", "ort-cpu"],
        ),
        (facts(packages={"onnxruntime": "1.31.1"}), ["ort-cpu"]),
        (facts(packages={}), []),
    ],
)
def test_the_backends_that_run(found: Facts, available: list[str]) -> None:
    said = find_backends(found)
    assert [backend.backend for backend in said if backend.available] == available
    assert summarize_backends(said).startswith(f"bundles run on: {', '.join(available) or 'nothing'}")


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (facts(), "bundles run on: ort-cpu; nothing that can be installed is better"),
        (
            facts(packages={}),
            "bundles run on: nothing; next: ort-cpu (pip install 'planforge[cpu]')",
        ),
        (
            facts("sm89"),
            "bundles run on: ort-cpu; next: ort-cuda (pip uninstall onnxruntime, then pip install"
            " 'planforge[gpu]' 'onnxruntime-gpu[cuda,cudnn]')",
        ),
        (
            facts("sm90", packages=GPU_ORT, providers=CUDA_PROVIDERS),
            "bundles run on: ort-cuda, ort-cpu; next: tensorrt (pip install 'planforge[tensorrt]')",
        ),
        (
            facts("sm90", packages={"tensorrt": "11.4", "cuda-bindings": "13.0"}),
            "bundles run on: tensorrt; nothing that can be installed is better",
        ),
    ],
)
def test_the_last_line_names_the_next_better_backend(found: Facts, line: str) -> None:
    assert summarize_backends(find_backends(found)) == line


def test_two_onnx_runtimes_at_once() -> None:
    both = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    assert find_advice(facts(packages=both)) == (
        "onnxruntime-gpu and onnxruntime overwrite each other's files: pip uninstall onnxruntime-gpu"
        " onnxruntime, then install one of them alone",
    )
    assert find_advice(facts()) == ()


def test_cuda_without_cudnn() -> None:
    versions = {"onnxruntime-gpu": "1.31.1"}
    said = find_advice(facts("sm86", packages=versions, providers=CUDA_PROVIDERS))
    assert len(said) == 1
    assert said[0].startswith("cuDNN was not found") and said[0].endswith(CUDA_13_ORT)
    assert find_advice(facts("sm86", packages=GPU_ORT, providers=CUDA_PROVIDERS)) == ()
    assert find_advice(facts(packages=versions, providers=CUDA_PROVIDERS)) == ()  # no GPU, so no need of it


versions_or_words = st.sampled_from(["", "unknown version", "12.9", "13.0.3", "8.6.1", "x.y", "²"])


@given(
    sms=st.lists(st.sampled_from(["sm72", "sm87", "sm90", "sm120", None]), max_size=2),
    cuda=st.none() | versions_or_words,
    installed_versions=st.dictionaries(
        st.sampled_from([name for names in packages_module.DISTRIBUTIONS.values() for name in names]),
        versions_or_words,
    ),
    release=st.sampled_from([None, "36.4.3", "35.4.1", "32.7.1", "99.1"]),
    architecture=st.sampled_from(["x86_64", "aarch64", "arm64", ""]),
    ort_cuda=st.none() | versions_or_words,
    providers=st.sampled_from([(), CUDA_PROVIDERS, CUDA_PROVIDERS[1:]]),
    problem=st.sampled_from([None, "nvidia-smi: no"]),
)
def test_every_machine_is_told_something(
    sms: list[str | None],
    cuda: str | None,
    installed_versions: dict[str, str],
    release: str | None,
    architecture: str,
    ort_cuda: str | None,
    providers: tuple[str, ...],
    problem: str | None,
) -> None:
    known = facts(
        *sms,
        cuda=cuda,
        packages=installed_versions,
        release=release,
        architecture=architecture,
        ort_cuda=ort_cuda,
        providers=providers,
        **({} if sms else {"graphics": Graphics(problem=problem)}),
    )
    found = find_backends(known)
    find_advice(known)
    line = summarize_backends(found)
    for backend in found:
        assert backend.reason
        assert not (backend.available and backend.remedy)
        assert not (backend.available and backend.backend not in ("ort-cpu", OPTIONAL) and not sms)
        named = line.partition(";")[0].removeprefix("bundles run on: ").split(", ")
        assert (backend.backend in named) == backend.available
