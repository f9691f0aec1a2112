"""Diagnoses this machine: what it has, which backends run on it, and what the next one needs."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ...backends.architectures import describe_sm, describe_sms
from ...backends.select import OPTIONAL
from ...backends.tensorrt_library import LIBRARIES
from ...backends.threads import ROOT
from .jetson import Jetson, fill_in_from_board, find_jetson
from .machine import Graphics, Memory, Processor, find_graphics, read_memory, read_processor
from .packages import DISTRIBUTIONS, OnnxRuntime, Package, ask_onnxruntime, find_package, parse_major

OLDEST_CUDA = 12  # that cuda-bindings and the engines are made for
FIRST_TURING_ONLY = 11  # TensorRT from 11 on wants this architecture or a newer one
TURING = 75
NO_GPU = "no NVIDIA GPU or driver was found"
NEW_DRIVER = "install NVIDIA's driver 580 or newer, which has CUDA 13, and restart"
# ONNX Runtime's packages with CUDA, and all they load of it: from 1.27 on they are made for CUDA 13.
CUDA_13_WHEEL = "'planforge[gpu]' 'onnxruntime-gpu[cuda,cudnn]'"
CUDA_12_WHEEL = "'planforge[gpu]' 'onnxruntime-gpu[cuda,cudnn]<1.27'"


@dataclass(frozen=True)
class Facts:
    """All that is known about a machine."""

    planforge: str
    python: str
    system: str
    libc: str | None
    processor: Processor
    memory: Memory
    graphics: Graphics
    jetson: Jetson | None
    packages: tuple[Package, ...]
    onnxruntime: OnnxRuntime

    def package(self, module: str) -> Package:
        return next(package for package in self.packages if package.module == module)


@dataclass(frozen=True)
class BackendState:
    """A backend, whether bundles run on it here, why, and what to do if not; empty if nothing helps."""

    backend: str
    available: bool
    reason: str
    remedy: str = ""


Obstacle: TypeAlias = tuple[str, str]  # why a backend does not run here, and what to do
Check: TypeAlias = Callable[[Facts], Obstacle | None]


@dataclass(frozen=True)
class Diagnosis:
    """Facts, backends from the best to the last, and what follows from them."""

    facts: Facts
    backends: tuple[BackendState, ...]
    advice: tuple[str, ...]
    summary: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(root: Path = ROOT) -> Diagnosis:
    """Examine this machine, of which etc, proc and sys lie in `root`; imports ONNX Runtime alone."""
    facts = examine(root)
    backends = find_backends(facts)
    return Diagnosis(facts, backends, find_advice(facts), summarize_backends(backends))


def examine(root: Path = ROOT) -> Facts:
    """Return the facts of this machine. A fact that can't be found is None."""
    board = find_jetson(root)
    card = find_graphics(root)
    return Facts(
        planforge=importlib.metadata.version("planforge"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        libc=" ".join(platform.libc_ver()).strip() or None,
        processor=read_processor(root),
        memory=read_memory(root),
        graphics=fill_in_from_board(card, board) if board else card,
        jetson=board,
        packages=tuple(find_package(module) for module in DISTRIBUTIONS),
        onnxruntime=ask_onnxruntime(),
    )


def find_backends(facts: Facts) -> tuple[BackendState, ...]:
    """Return the backends, the best first."""
    names = []
    for backend, (runs_with, checks) in LADDER.items():
        obstacle = next(filter(None, (check(facts) for check in checks)), None)
        if obstacle is None:
            names.append(BackendState(backend, True, str(facts.package(runs_with))))
        else:
            names.append(BackendState(backend, False, *obstacle))
    return tuple(names)


def check_gpu(facts: Facts) -> Obstacle | None:
    """Return the obstacle where nothing runs on a GPU."""
    graphics = facts.graphics
    if not graphics.gpus and graphics.problem:
        return graphics.problem, f"{NEW_DRIVER}; a container needs --gpus all"
    if not graphics.gpus:
        return NO_GPU, ""
    if (find_cuda(facts) or OLDEST_CUDA) >= OLDEST_CUDA:
        return None
    if facts.jetson is None:
        return f"the driver has CUDA {graphics.cuda}, {OLDEST_CUDA} or newer is needed", NEW_DRIVER
    remedy = "install JetPack 6 or newer" if facts.jetson.sm == "sm87" else ""
    return f"this board's JetPack has CUDA {graphics.cuda}, {OLDEST_CUDA} or newer is needed", remedy


def check_rtx(facts: Facts) -> Obstacle | None:
    """Return the obstacle where TensorRT-RTX has no support for the GPUs or for the architecture."""
    architecture = facts.processor.architecture
    sms = LIBRARIES["tensorrt-rtx"].sms
    present = [gpu.sm or "a GPU of unknown architecture" for gpu in facts.graphics.gpus]
    if architecture.lower() in ("x86_64", "amd64") and set(sms) & set(present):
        return None
    here = f"{describe_sms(dict.fromkeys(present))} and {architecture}"
    return f"TensorRT-RTX is for {describe_sms(sms)} and x86-64, this machine has {here}", ""


def check_tensorrt(facts: Facts) -> Obstacle | None:
    """Return the obstacle where all GPUs are older than Turing, which TensorRT 11 does not support."""
    sms = [gpu.sm for gpu in facts.graphics.gpus if gpu.sm]
    version = facts.package("tensorrt").major or FIRST_TURING_ONLY
    if not sms or any(int(sm[2:]) >= TURING for sm in sms) or version < FIRST_TURING_ONLY:
        return None
    oldest = describe_sm(f"sm{TURING}")
    return f"TensorRT {FIRST_TURING_ONLY} is for {oldest} and newer, this machine has {describe_sms(sms)}", ""


def check_packages(library: str, facts: Facts) -> Obstacle | None:
    """Return the obstacle where a TensorRT library, if any, or CUDA's bindings are missing or too new."""
    needed = {library: facts.package(LIBRARIES[library].module)} if library else {}
    needed["cuda-bindings"] = facts.package("cuda.bindings")
    driver = find_cuda(facts)
    for package in needed.values():
        if driver and package.cuda and package.cuda > driver:
            reason = f"{package} is for CUDA {package.cuda}, the driver has {facts.graphics.cuda}"
            return reason, suggest_replacement(package, library, facts)
    absent = [name for name, package in needed.items() if not package.versions]
    if not absent:
        return None
    reason = f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
    jetpack = facts.jetson.jetpack if facts.jetson else None
    if library in absent and jetpack and not facts.python.startswith(f"{jetpack.python}."):
        reason += f"; JetPack's is for Python {jetpack.python}, this is {facts.python}"
    return reason, suggest_install(library, absent, facts)


def suggest_replacement(package: Package, library: str, facts: Facts) -> str:
    """Return what to do about a package that is for a newer CUDA than the driver's."""
    if package.module == "cuda.bindings":
        return suggest_install(library, ["cuda-bindings"], facts)
    if library == "tensorrt":
        install = suggest_install(library, [library], facts)
        return f"pip uninstall {' '.join(package.versions)}, then {install}"
    return NEW_DRIVER  # there is no other TensorRT-RTX


def suggest_install(library: str, absent: Sequence[str], facts: Facts) -> str:
    """Return the commands that install a TensorRT library, CUDA's bindings, or both."""
    driver = find_cuda(facts)
    steps = []
    packages = []
    if library in absent and facts.jetson:
        steps = ["sudo apt install nvidia-jetpack", "/usr/bin/python3 -m venv --system-site-packages .venv"]
        packages = ["planforge"]  # in that .venv, which sees JetPack's TensorRT
        absent = ["cuda-bindings"]
    elif library in absent and driver == 12 and library == "tensorrt":
        packages = ["tensorrt-cu12"]  # `tensorrt` is for CUDA 13
    elif library in absent:
        packages = [f"'planforge[{library}]'"]
        if driver == 12:
            steps = [NEW_DRIVER]
            driver = 13
    if "cuda-bindings" in absent:
        packages.append(f"'cuda-bindings=={driver}.*'" if driver else "cuda-bindings")
    where = "in it " if "planforge" in packages else ""
    return ", then ".join([*steps, f"{where}pip install {' '.join(packages)}"])


def check_onnxruntime(facts: Facts) -> Obstacle | None:
    """Return the obstacle where not even the CPU's engine runs."""
    package = facts.package("onnxruntime")
    error = facts.onnxruntime.error
    if not package.versions:
        return "onnxruntime is not installed", "pip install 'planforge[cpu]'"
    if error:
        names = " ".join(package.versions)
        return f"onnxruntime can't be imported: {error}", f"pip install --force-reinstall --no-deps {names}"
    return None


def check_openvino(facts: Facts) -> Obstacle | None:
    """Return the obstacle where encoders do not run in OpenVINO."""
    if facts.package("openvino").versions:
        return None
    return "openvino is not installed", "pip install 'planforge[openvino]'"


def check_cuda_provider(facts: Facts) -> Obstacle | None:
    """Return the obstacle where ONNX Runtime runs on the CPU alone."""
    package = facts.package("onnxruntime")
    runtime = facts.onnxruntime
    driver = find_cuda(facts)
    wheel = f"pip install {CUDA_12_WHEEL if driver == 12 else CUDA_13_WHEEL}"
    if facts.jetson and facts.jetson.jetpack:
        wheel = (
            f"install NVIDIA's own wheel of onnxruntime-gpu for JetPack {facts.jetson.jetpack.version}"
            " (the public ones have no code for this GPU)"
        )
    without = f"pip uninstall {' '.join(package.versions)}, then {wheel}"
    if not package.versions:
        return "onnxruntime-gpu is not installed", wheel
    if runtime.error:
        return f"onnxruntime can't be imported: {runtime.error}", without
    if "CUDAExecutionProvider" not in runtime.providers:
        return f"{package} has no CUDAExecutionProvider", without
    if driver and (parse_major(runtime.cuda) or 0) > driver:
        return f"{package} is for CUDA {runtime.cuda}, the driver has {facts.graphics.cuda}", wheel
    return None


# The backends, the best first, and at last the one for encoders alone: the module that runs each, and what
# may stand in its way.
LADDER: dict[str, tuple[str, tuple[Check, ...]]] = {
    "tensorrt-rtx": ("tensorrt_rtx", (check_gpu, check_rtx, partial(check_packages, "tensorrt-rtx"))),
    "tensorrt": ("tensorrt", (check_gpu, check_tensorrt, partial(check_packages, "tensorrt"))),
    "ort-cuda": ("onnxruntime", (check_gpu, check_cuda_provider, partial(check_packages, ""))),
    "ort-cpu": ("onnxruntime", (check_onnxruntime,)),
    "openvino": ("openvino", (check_openvino,)),
}


def find_cuda(facts: Facts) -> int | None:
    """Return the major version of CUDA that the driver has."""
    return parse_major(facts.graphics.cuda)


def find_advice(facts: Facts) -> tuple[str, ...]:
    """Return what is wrong or slow although bundles run."""
    said = []
    builds = facts.package("onnxruntime").versions
    if len(builds) > 1:
        said.append(
            f"{' and '.join(builds)} overwrite each other's files: pip uninstall {' '.join(builds)}, then"
            " install one of them alone"
        )
    cudnn = facts.package("nvidia.cudnn").versions
    if not (cudnn or check_gpu(facts) or check_cuda_provider(facts)):
        said.append(
            "cuDNN was not found; without it ONNX Runtime's CUDAExecutionProvider falls back to the CPU:"
            f" pip install {CUDA_12_WHEEL if find_cuda(facts) == 12 else CUDA_13_WHEEL}"
        )
    if facts.jetson and (commands := facts.jetson.power.commands()):
        said.append(f"this board is not at full speed; before benchmarking: {' && '.join(commands)}")
    return tuple(said)


def summarize_backends(names: Sequence[BackendState]) -> str:
    """Return one line: the backends that bundles run on, and how to get the next better one."""
    available = [state.backend for state in names if state.available]
    best = next((place for place, state in enumerate(names) if state.available), len(names))
    line = f"bundles run on: {', '.join(available) or 'nothing'}"
    for state in reversed(names[:best]):
        if state.remedy and state.backend != OPTIONAL:
            return f"{line}; next: {state.backend} ({state.remedy})"
    return f"{line}; nothing that can be installed is better" if best else line
