"""`prove` on a GPU: which one it was, its power and memory, and a plan's layers. The GPU is emulated."""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from planforge.exporter.commands.layers import map_modules
from planforge.runtime import TextGenerator
from planforge.runtime.apps.diagnostics.child import Child
from planforge.runtime.apps.proof import prove as prove_module
from planforge.runtime.apps.proof.evidence import read_evidence
from planforge.runtime.apps.proof.prove import prove
from planforge.runtime.bundle.bundle import Bundle

from ....helpers.cli import planforge
from ....helpers.emulated_gpu import emulated_gpu
from ....helpers.emulated_worker import GPUS, UUID
from ....helpers.machines import Machine
from ....helpers.paths import ROOT
from .conftest import LABELS, draw_texts, write_lines, write_table

TEXTS = ["In the beginning God created the heaven and the earth.", "And it came to pass in those days"] * 40
MIB = 2**20


def write_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, memory: str) -> Path:
    """An nvidia-smi that counts all GPUs; return the file that it reads the process's number from.

    The process has `memory`, in the driver's words. Other GPUs take 50 W.
    """
    number = folder / "process"
    Machine(folder, monkeypatch).command(
        "nvidia-smi",
        f"""case "$*" in
        *compute-apps*--id={UUID}) read pid < {number}; echo "1, 9000 MiB"; echo "$pid, {memory}";;
        *power.draw*--id={UUID}*) while :; do echo 300.0; done;;
        *power.draw*) while :; do echo 50.0; done;;
        *) echo "0, Another GPU, 8.6, 8000 MiB, 580.1";;
        esac""",
    )
    return number


def test_without_a_gpu_at_work_none_is_told(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is in the machine, whose power and name say nothing of what the processor computes."""
    asked = tmp_path / "asked"
    Machine(tmp_path, monkeypatch).command("nvidia-smi", f"echo $* >> {asked}; echo 50.0")
    texts = draw_texts(130)
    proof = prove(classifier, write_table(tmp_path / "e.tsv", texts, [LABELS[0]] * 130), backend="ort-cpu")
    assert proof.backend == "ort-cpu"
    assert "gpu" not in proof.machine
    assert proof.joules is None and proof.gpu_memory_mb is None
    assert not asked.exists()


@pytest.mark.parametrize(("memory", "megabytes"), [("412 MiB", 412 * MIB / 1e6), ("[N/A]", None)])
def test_a_plan_is_measured_on_the_gpu_that_cuda_counts(
    memory: str, megabytes: float | None, demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 1 of those that CUDA_VISIBLE_DEVICES shows is nvidia-smi's number 2."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    number = write_driver(tmp_path, monkeypatch, memory)

    class EmulatedChild(Child):
        def __init__(self, module: str, what: str, work: dict[str, Any]) -> None:
            super().__init__("tests.helpers.emulated_worker", what, work)
            number.write_text(str(self.child.pid))

    monkeypatch.setattr(prove_module, "Child", EmulatedChild)
    own = Path(shutil.copytree(demo_bundle, tmp_path / "own"))
    texts = write_lines(tmp_path / "t.txt", TEXTS)
    with emulated_gpu(own, **GPUS):  # where the layers are measured
        done = planforge("prove", own, "--data", texts, "--backend", "tensorrt-rtx", "--device", 1)
    assert done.returncode == 0, done.stderr
    bundle = Bundle.open(own)
    (plan,) = bundle.manifest.plans
    (proof,) = read_evidence(bundle)
    assert (proof.backend, proof.file, proof.artifact) == ("tensorrt-rtx", plan.file, plan.built_from)
    assert proof.machine["gpu"] == "Emulated GPU"
    assert proof.threads is None
    assert proof.joules is not None
    assert proof.joules.mean_watts == 300.0
    assert proof.gpu_memory_mb == (None if megabytes is None else pytest.approx(megabytes, abs=0.05))
    assert proof.peak_rss_mb is not None and proof.peak_rss_mb > 20
    shown = re.findall(r"^GPU memory of the process +(\S+ \S+)$", done.stdout, re.MULTILINE)
    assert shown == (["432 MB"] if megabytes else [])
    assert proof.token_ms is not None
    with TextGenerator.load(own, backend="ort-cpu", precision="fp16") as model:
        wanted = [-model.score(text).total for text in TEXTS]
    assert proof.losses == pytest.approx(wanted, rel=2**-10)  # the rounding of fp16

    graph = bundle.path(bundle.manifest.artifact(plan.built_from).file)
    count = 1 + math.ceil(len(onnx.load(graph, load_external_data=False).graph.node) / 2)
    assert proof.layers.keys() == {profile["name"] for profile in plan.profiles}
    modules = set(map_modules(graph).values()) - {""}
    for times in proof.layers.values():  # the emulated layers take 1, 2, 3 and so on of 1,024 parts of 1 ms
        assert sum(times.values()) == pytest.approx(count * (count + 1) / 2 / 1024, abs=1e-6 * count)
        named = {module for name in times for module in name.split(", ")} & modules
        assert "h.0.attn.c_attn" in named
