"""The processes that an export starts: they end with it, and their errors arrive as what they were."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planforge.exporter import export
from planforge.exporter.bundle.writer import open_staging_folder
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import find_demo, resolve_source
from planforge.exporter.errors import (
    BuildError,
    CheckpointError,
    ExportError,
    VerificationError,
    make_named_error,
)
from planforge.exporter.exporting import start_plans
from planforge.exporter.graphs import trace_graphs
from planforge.exporter.options import Request
from planforge.exporter.processes import leave_cores, start_child
from planforge.exporter.reference_model import load_our_model
from planforge.exporter.tensorrt import build, choices, plans
from planforge.exporter.tracing import trace
from planforge.exporter.verification.explain import make_tracer
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError, ManifestError, MemoryLimitError

from ..helpers.patience import PATIENCE, wait_until

# Says its number in a file, and, unless it is ended before, that it slept enough.
SLEEPS = (
    "import os, pathlib, sys, time; path = pathlib.Path(sys.argv[1]);"
    "path.write_text(str(os.getpid())); time.sleep(300); path.write_text('it was not ended')"
)
# Fails once another has said its number.
FAILS = (
    "import pathlib, sys, time; path = pathlib.Path(sys.argv[2])\n"
    "while not (path.exists() and path.read_text()): time.sleep(0.01)\n"
    "sys.exit('no such recipe')"
)


def wait_for(path: Path) -> int:
    """Return the process number that a child writes to a file."""
    wait_until(lambda: path.is_file() and bool(path.read_text()))
    return int(path.read_text())


def is_gone(number: int) -> bool:
    """Whether no process has a number; a killed child that nobody has waited for still has one."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    return False


def test_one_tracer_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(checkpoint: Path, recipe: str, choices: Any, out: Path) -> subprocess.Popen[str]:
        code = SLEEPS if recipe == "decoder.ort" else FAILS
        command = [sys.executable, "-c", code, str(tmp_path / recipe), str(tmp_path / "decoder.ort")]
        return start_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(trace, "start_tracer", start)
    checkpoint = Checkpoint(resolve_source("gpt2-demo"))
    model: Any = None
    with pytest.raises(ExportError, match=r"tracing failed \(exit 1\): no such recipe"):
        trace_graphs(checkpoint, ["decoder.ort", "decoder.portable"], model)
    assert is_gone(wait_for(tmp_path / "decoder.ort"))


def test_a_tracer_that_fails_while_a_fault_is_explained_ends_the_others(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(checkpoint: Path, recipe: str, choices: Any, out: Path) -> subprocess.Popen[str]:
        code = SLEEPS if recipe == "decoder.portable" else FAILS
        command = [sys.executable, "-c", code, str(tmp_path / recipe), str(tmp_path / "decoder.portable")]
        return start_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(trace, "start_tracer", start)
    source = resolve_source("gpt2-demo")
    tracer = make_tracer(Bundle.open(demo_bundle).manifest, source, load_our_model(source.folder, 256))
    with pytest.raises(ExportError, match="no such recipe"):
        tracer(["decoder.ort", "decoder.portable"])
    assert is_gone(wait_for(tmp_path / "decoder.portable"))


def test_damaged_weights_end_the_tracers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(checkpoint: Path, recipe: str, choices: Any, out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SLEEPS, str(tmp_path / recipe)]
        child = start_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_for(tmp_path / recipe)
        return child

    def fail(folder: Path, **options: Any) -> Any:
        wait_for(tmp_path / "decoder.ort")
        raise ValueError("model.safetensors is not whole")

    monkeypatch.setattr(trace, "start_tracer", start)
    monkeypatch.setattr("planforge.models.load_model", fail)
    with pytest.raises(CheckpointError, match="is not whole"):
        export("gpt2-demo", tmp_path / "B", target=["cpu"], precision=["fp32"], verify=False)
    assert is_gone(wait_for(tmp_path / "decoder.ort"))


def test_a_failed_verification_does_not_wait_for_plans(
    own_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    monkeypatch.setattr(build, "CHILD", (sys.executable, "-c", SLEEPS, str(pid)))
    request = Request(output=own_bundle, targets=("rtx",), precisions=("fp16",), sms=("sm86",))
    with (
        pytest.raises(VerificationError, match="the decoder differs"),
        open_staging_folder(own_bundle),
        start_plans(Bundle.open(own_bundle), request, lambda _: None),
    ):
        number = wait_for(pid)
        raise VerificationError("the decoder differs")
    assert is_gone(number) and wait_for(pid) == number


class Refusing:
    """A bundle of an encoder-decoder, of which TensorRT takes the encoder alone."""

    folder = Path("bundle")
    manifest = SimpleNamespace(source={"exporter": "optimum"})

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graphs = [
            SimpleNamespace(id=f"{graph}.portable.fp16", graph=graph, precision="fp16", constraints=())
            for graph in ("encoder", "decoder")
        ]
        for module in (plans, choices):
            monkeypatch.setattr(module, "find_plan_graphs", lambda manifest, dialect: graphs)
        group = SimpleNamespace(graphs=graphs, architectures=("sm86",))
        monkeypatch.setattr(choices, "choose_architectures", lambda *arguments: group)
        monkeypatch.setattr(plans, "derive_profiles", lambda artifact, **limits: [])
        monkeypatch.setattr(plans, "build_plan_of_graph", self.build_plan_of_graph)
        monkeypatch.setattr(plans, "is_installed", lambda engine: True)

    @staticmethod
    def build_plan_of_graph(bundle: Any, artifact: Any, *arguments: Any) -> Any:
        folder = arguments[3]
        if artifact.graph == "decoder":
            raise BuildError("node strange: Det is not supported")
        (folder / "plans").mkdir(exist_ok=True)
        (folder / "plans" / "encoder.plan").write_bytes(b"plan")
        file = "plans/encoder.plan"
        return SimpleNamespace(built_from=artifact.id, file=file, list_files=lambda: [file])


def test_a_plan_whose_partner_is_refused_is_dropped_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle: Any = Refusing(monkeypatch)
    monkeypatch.setattr(plans, "Bundle", lambda folder, manifest: bundle)
    told: list[tuple[str, str]] = []

    def build_all(refused: Any) -> list[Any]:
        found: Any = plans.build_plans(
            tmp_path, bundle.manifest, ["cpu", "rtx"], ["sm86"], lambda _: None, refused
        )
        return list(found)

    assert build_all(lambda target, error: told.append((target, str(error)))) == []
    assert not list((tmp_path / "plans").iterdir())
    message = (
        "node strange: Det is not supported\n  the plan of encoder.portable.fp16 was built, but was removed"
    )
    assert told == [("rtx", f"{message}, too")]
    with pytest.raises(BuildError, match="Det is not supported"):
        build_all(None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ManifestError", ManifestError),
        ("BuildError", BuildError),
        ("InputError", InputError),
        ("VerificationError", VerificationError),
        ("MemoryLimitError", ExportError),  # has numbers beside its message, which are not here
        ("ZeroDivisionError", ExportError),
        ("", ExportError),
    ],
)
def test_errors_cross_the_boundary_by_name(
    name: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = make_named_error(name, "manifest.json: rows is missing")
    assert type(error) is kind and str(error) == "manifest.json: rows is missing"
    assert not isinstance(error, MemoryLimitError)
    answer = f'{{"error": "{name}", "message": "manifest.json: rows is missing"}}'
    code = f"import pathlib, sys; pathlib.Path(sys.argv[2]).write_text({answer!r})"
    monkeypatch.setattr(build, "CHILD", (sys.executable, "-c", code))
    with pytest.raises(kind, match=r"manifest\.json: rows is missing"):
        build.build_in_child({"engine": "tensorrt-rtx", "onnx": "g.onnx"})


def test_a_tracers_error_is_what_it_was(tmp_path: Path) -> None:
    out = tmp_path / "decoder.ort.traced"
    folder = str(find_demo("gpt2-demo"))
    trace.main([folder, "decoder.ort", "2", "64", "hidden_states", str(out)])
    ended = subprocess.Popen([sys.executable, "-c", ""], stderr=subprocess.PIPE, text=True)
    with pytest.raises(InputError, match="a decoder supports only"):
        trace.read_traced(ended, out)
    assert list(tmp_path.iterdir()) == []


CLEANS_UP = """
import os, signal, time
from planforge.exporter.processes import end_children_on_signals

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
with end_children_on_signals():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(300)
    finally:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signal.raise_signal(getattr(signal, name))  # whose handler has run when it returns
        print("cleaned up")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="its signals end a process at once")
def test_a_second_signal_does_not_disturb_the_cleaning_up() -> None:
    done = subprocess.run([sys.executable, "-c", CLEANS_UP], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "cleaned up\n", done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\n")


LOSES_THE_FIRST = """
import os, signal, sys, time, weakref
from planforge.exporter.processes import end_children_on_signals

class Watched:
    pass

signal.signal(signal.SIGINT, signal.default_int_handler)
with end_children_on_signals():
    watched = Watched()
    # Python drops whatever a callback of a weak reference raises, as it does with those of its import locks.
    kept = weakref.ref(watched, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del watched
    print("lost", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(300)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="its signals end a process at once")
def test_a_signal_that_python_lost_does_not_silence_the_next() -> None:
    command = [sys.executable, "-c", LOSES_THE_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "lost\n"
    assert "Exception ignored in" in done.stderr and done.stderr.endswith("KeyboardInterrupt\n")
    assert done.returncode == -signal.SIGINT


REPLACES_IT = """
import signal, torch, typer
from planforge.exporter.processes import end_children_on_signals
from planforge.runtime.apps.commands.console import end_with_exit_code

class Interrupted:
    def __len__(self):
        return 1

    def __getitem__(self, place):
        signal.raise_signal(signal.SIGTERM)

try:
    with end_children_on_signals(), end_with_exit_code(typer.Context(typer.core.TyperGroup())):
        try:
            torch.tensor(Interrupted())
        except ValueError as error:
            print(error, error.__context__)
            raise
except typer.Exit as error:
    raise SystemExit(error.exit_code)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="its signals end a process at once")
def test_an_error_that_replaces_an_interrupt_counts_as_the_interrupt() -> None:
    """torch.tensor drops what the sequence that it reads raises, and raises a ValueError."""
    command = [sys.executable, "-c", REPLACES_IT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "could not determine the shape of object type 'Interrupted' None\n", done.stderr
    assert (done.returncode, done.stderr) == (143, "terminated; nothing was changed\n")


def test_children_may_be_started_while_others_are_counted() -> None:
    """Each start forgets the children that have ended, in whichever thread: the set must not change."""
    failures: list[BaseException] = []

    class Ended:
        """A child that has ended, and lets other threads run whenever it is asked."""

        @property
        def returncode(self) -> int:
            time.sleep(0)
            return 0

    def start_many() -> None:
        try:
            for _ in range(200):
                start_child(["planforge-child"])
        except BaseException as error:
            failures.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda command: Ended())
        threads = [threading.Thread(target=start_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_the_child_answers_that_an_engine_is_missing_without_onnx(tmp_path: Path) -> None:
    (tmp_path / "request").write_text('{"engine": "tensorrt", "release": null}')
    code = (
        "import sys; sys.modules['onnx'] = sys.modules['tensorrt'] = None;"
        "from planforge.exporter.tensorrt.builder import main; main(sys.argv[1:])"
    )
    files = [str(tmp_path / "request"), str(tmp_path / "answer")]
    subprocess.run([sys.executable, "-c", code, *files], check=True)
    assert json.loads((tmp_path / "answer").read_text())["error"] == "BackendUnavailableError"


@pytest.mark.parametrize(("threads", "children", "left"), [(4, 1, 3), (2, 2, 1), (1, 3, 1), (3, 0, 3)])
def test_torch_leaves_a_core_to_each_child(threads: int, children: int, left: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(InputError), leave_cores(children):
            assert torch.get_num_threads() == left
            raise InputError("what goes wrong inside")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_reference_is_computed_beside_the_children_that_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trace, "start_tracer", lambda *arguments: SimpleNamespace(returncode=0))
    monkeypatch.setattr(trace, "read_traced", lambda *arguments: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    set_threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    checkpoint = Checkpoint(resolve_source("gpt2-demo"))
    assert len(checkpoint.recipes) == 3
    with trace.start_trace(tmp_path, checkpoint.choices, checkpoint.recipes):
        assert set_threads == [5]
    assert set_threads == [5, 8]
