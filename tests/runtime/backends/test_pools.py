"""Several models in one process, and ONNX Runtime's own thread pools. Each case has a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import logging, os, sys, threading
import onnxruntime as ort
from planforge.runtime import load
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
folder = sys.argv[1]
tokens = lambda model: model.generate("In the", max_new_tokens=12).token_ids
"""


def run(code: str, folder: Path) -> str:
    """What a process prints."""
    done = subprocess.run(
        [sys.executable, "-c", START + code, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_models_share_a_process_whatever_their_threads(demo_bundle: Path) -> None:
    code = """
models = [load(folder, threads=n) for n in (1, 2)]
alone = [tokens(model) for model in models]
found = [None, None]
def work(i): found[i] = tokens(models[i])
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(alone[0] == alone[1] == found[0] == found[1], len(set(alone[0])))
"""
    same, distinct = run(code, demo_bundle).splitlines()[-1].split()
    assert same == "True"
    assert int(distinct) > 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
def test_idle_models_leave_the_processor_to_others(demo_bundle: Path) -> None:
    """By the CPU time that workers take after a call until they sleep, beside ONNX Runtime's own of one run.

    The medians of ten calls: what another process does to one of them decides nothing.
    """
    code = """
import glob, statistics, time
import numpy as np

def others(): return time.process_time() - time.thread_time()

def is_asleep(task):
    try:
        return open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()[0] == "S"
    except OSError:  # it has just ended
        return True

def list_others(): return set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}

def measure(call):
    spent = []
    for _ in range(10):
        call()
        before = others()
        while not all(map(is_asleep, list_others())): time.sleep(0.01)
        spent.append(others() - before)
    return statistics.median(spent)

models = [load(folder, threads=2) for _ in range(2)]
ours = measure(lambda: [tokens(model) for model in models])
options = ort.SessionOptions()
options.intra_op_num_threads = 2
graph = glob.glob(folder + "/onnx/decoder.portable.fp32*.onnx")[0]
plain = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
sizes = lambda shape: [size if isinstance(size, int) else 1 for size in shape]
kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
feeds = {each.name: np.zeros(sizes(each.shape), kinds[each.type]) for each in plain.get_inputs()}
print(ours, measure(lambda: plain.run(None, feeds)))
"""
    ours, plain = map(float, run(code, demo_bundle).splitlines()[-1].split())
    assert ours < plain / 3, (ours, plain)


def test_a_program_may_have_made_the_global_pool(demo_bundle: Path) -> None:
    code = """
ort.set_global_thread_pool_sizes(2, 1)
before = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else None
model = load(folder)
print(len(tokens(model)))
assert before is None or len(os.listdir("/proc/self/task")) == before  # no pool of its own
"""
    lines = run(code, demo_bundle).splitlines()
    assert any("runs on ONNX Runtime's global thread pool" in line for line in lines)
    assert lines[-1] == "12"
    assert not any("EP Error" in line for line in lines)


def test_a_program_keeps_its_own_sessions(demo_bundle: Path) -> None:
    code = """
import glob
graph = glob.glob(folder + "/onnx/decoder.portable.fp32*.onnx")[0]
before = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
model = load(folder)
after = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
print(len(tokens(model)), len(before.get_inputs()) == len(after.get_inputs()))
"""
    assert run(code, demo_bundle).splitlines()[-1] == "12 True"
