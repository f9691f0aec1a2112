"""`python -m tests.avx2 COMMAND ...`: runs a command on a processor with AVX2, without AVX-512, VNNI and AMX.

PyTorch has switches for it. ONNX Runtime has none: the command gets a copy whose `cpuid` is answered by
avx2only.c. The copy lies in build/avx2, and is made again for another version.

With `--everywhere` before the command the features are hidden from all libraries, such as OpenVINO and
CTranslate2, where the processor can do that (`cpuid_fault` in /proc/cpuinfo). Benchmarks need it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from ..helpers.paths import ROOT

FOLDER = ROOT / "build/avx2"
HERE = Path(__file__).parent
CPUID = b"\x0f\xa2"
UD0 = b"\x0f\xff"  # as long, and no processor has it
# Libraries beside ONNX Runtime that choose their kernels by the processor, and can be told.
SWITCHES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}
# 255 * 127 + 255 * 127 does not fit in 16 bits, in which processors without VNNI add pairs of products.
CHECK = """
import numpy as np, onnx, onnxruntime, torch
from onnx import TensorProto, helper
from planforge.runtime.backends.requirements import products_saturate
byte = np.full((64, 64), 127, np.int8)
graph = helper.make_graph(
    [helper.make_node("MatMulInteger", ["x", "weight"], ["y"])], "products",
    [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 64])],
    [helper.make_tensor_value_info("y", TensorProto.INT32, [1, 64])],
    [onnx.numpy_helper.from_array(byte, "weight")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(y,) = session.run(None, {"x": np.full((1, 64), 255, np.uint8)})
right = 64 * 255 * 127
print(f"a sum of {right} is {y[0, 0]} in ONNX Runtime; PyTorch has {torch.backends.cpu.get_cpu_capability()}")
seen = (int(y[0, 0]) == 64 // 2 * 32767, torch.backends.cpu.get_cpu_capability(), products_saturate())
assert seen == (True, "AVX2", True), f"AVX-512 or VNNI is still seen: {seen}"
"""


def main(command: list[str]) -> None:
    """Run a command in place of this process; where nothing can be hidden, say why and end well."""
    everywhere = command[:1] == ["--everywhere"]
    command = command[everywhere:]
    reason = find_hindrance(everywhere)
    if reason:
        print(f"skipped, not run as with AVX2 alone: {reason}")
        return
    environment = {
        **os.environ,
        **SWITCHES,
        "AVX2_CPUINFO": str(write_features(FOLDER)),
        "LD_PRELOAD": str(compile_answers(FOLDER)),
        **({"AVX2_EVERYWHERE": "1"} if everywhere else {"PYTHONPATH": str(copy_onnxruntime(FOLDER))}),
    }
    subprocess.run([sys.executable, "-c", CHECK], env=environment, check=True)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


def find_hindrance(everywhere: bool = False) -> str | None:
    """Return why this machine cannot show what an AVX2 processor does, or None."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "it takes Linux on x86-64"
    flags = read_flags()
    if "avx2" not in flags:
        return "the processor has no AVX2"
    if not any(is_hidden(flag) for flag in flags):
        return "the processor has neither AVX-512 nor VNNI, so that all tests show it"
    if everywhere and "cpuid_fault" not in flags:
        return "the processor cannot hide its features from all libraries: it has no cpuid_fault"
    missing = [name for name in ("gcc", "objdump") if shutil.which(name) is None]
    return f"there is no {missing[0]}" if missing else None


def read_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])


def is_hidden(flag: str) -> bool:
    """Tell whether a feature, as Linux names it, is one that AVX2 processors lack."""
    return flag.startswith(("avx512", "amx")) or flag in ("avx_vnni", "avx_ifma", "avx_vnni_int8", "avx10")


def write_features(folder: Path) -> Path:
    """Write /proc/cpuinfo without the features that are hidden, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    kept = [" ".join(word for word in line.split(" ") if not is_hidden(word)) for line in lines]
    path = folder / "cpuinfo"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return path


def compile_answers(folder: Path) -> Path:
    """Compile avx2only.c, and return the library."""
    library = folder / "avx2only.so"
    source = str(HERE / "avx2only.c")
    subprocess.run(
        ["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", str(library), source, "-ldl"], check=True
    )
    return library


def copy_onnxruntime(folder: Path) -> Path:
    """Return a folder with the package onnxruntime, of links but for its library, which is changed."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None, "onnxruntime is not installed"
    package = Path(spec.origin).parent
    (library,) = (package / "capi").glob("onnxruntime_pybind11_state*.so")
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:16]
    path = folder / digest
    if path.exists():
        return path
    new = folder / f"{digest}.new"
    shutil.rmtree(new, ignore_errors=True)
    capi = new / "onnxruntime/capi"
    capi.mkdir(parents=True)
    for original, copy in ((package, capi.parent), (package / "capi", capi)):
        for entry in original.iterdir():
            if entry.name not in ("capi", "__pycache__", library.name):
                (copy / entry.name).symlink_to(entry)
    (capi / library.name).write_bytes(replace_cpuid(library))
    new.rename(path)
    return path


def replace_cpuid(library: Path) -> bytes:
    """Return a library's bytes with `UD0` in place of each instruction `cpuid`.

    The same two bytes lie inside of other instructions, too: a disassembler tells them apart.
    """
    content = bytearray(library.read_bytes())
    listing = run("objdump", "--disassemble", "--no-show-raw-insn", str(library))
    addresses = [int(line.split(":")[0], 16) for line in listing.splitlines() if line.endswith("cpuid")]
    assert addresses, f"objdump finds no cpuid in {library}"
    headers = [line.split() for line in run("readelf", "--segments", "--wide", str(library)).splitlines()]
    loads = [[int(word, 16) for word in words[1:5]] for words in headers if words[:1] == ["LOAD"]]
    for address in addresses:
        start = next(o + address - v for o, v, _, size in loads if v <= address < v + size)
        assert content[start : start + 2] == CPUID, f"{library} has no cpuid at {address:#x}"
        content[start : start + 2] = UD0
    return bytes(content)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(sys.argv[1:])
