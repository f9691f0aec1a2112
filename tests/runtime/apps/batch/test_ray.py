"""Jobs on a Ray cluster, actors of Ray Data, replicas of Ray Serve: each in a process of its own.

A deprecation warning of Ray's, of something that we use, is an error there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from planforge.runtime.apps.batch.ray_engine import count_rooms, join_cluster
from planforge.runtime.errors import BatchError

from ....helpers.cli import INTERRUPTIBLE
from ....helpers.paths import ROOT
from ....helpers.patience import PATIENCE, wait_until
from .cluster_kills import find_workers, wait_for_none

TEXTS = [f"wings lift the plane {number} times" for number in range(8000)]
STRICT = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
ENVIRONMENT = {
    **os.environ,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # a service that cannot start says so at once
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PATIENCE),  # Ray kills one that takes 3 times 5 s to start
    "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
}

pytestmark = pytest.mark.slow


def run_module(name: str, *arguments: str | Path, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.runtime.apps.batch.{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)


def strict_command(*arguments: str | Path) -> list[str]:
    return [INTERRUPTIBLE[0], *STRICT, *INTERRUPTIBLE[1:], "batch", *map(str, arguments)]


@pytest.fixture
def bundle(head_bundle: Callable[[str], Path]) -> Path:
    return head_bundle("pretrained")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("\n".join(TEXTS))
    return path


def test_a_job_among_kills(bundle: Path, source: Path, tmp_path: Path) -> None:
    """Workers, raylets and the driver are killed: every row is there once, as one process computes it."""
    options = ["--input", str(source), "--kills", "6", "--rows-per-part", "40"]
    done = run_module("cluster_kills", bundle, tmp_path / "out", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "8,000 rows, each id once, equal to one process's" in done.stdout


def test_actors_of_a_data_set(bundle: Path, tmp_path: Path) -> None:
    done = run_module("ray_dataset", bundle, tmp_path / "out")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_service(demo_bundle: Path, minilm_bundle: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    done = run_module("ray_service", demo_bundle, minilm_bundle, str(port))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "a model could not be loaded" in done.stdout
    assert "is not a folder" in done.stdout


def test_a_worker_that_cannot_load_says_why_once(bundle: Path, source: Path, tmp_path: Path) -> None:
    command = strict_command(bundle, "--task", "embed", "--input", source, "-o", tmp_path / "out")
    command += ["--address", "local", "--option", "pooling=middle"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr.count("pooling='middle' is not one of") == 1
    assert "Traceback" not in done.stderr
    wait_for_none(find_workers, "workers that are left")


def test_ctrl_c_ends_a_job_and_its_cluster(bundle: Path, source: Path, tmp_path: Path) -> None:
    options: Sequence[str | Path] = ("--address", "local", "--rows-per-part", "10")
    command = strict_command(bundle, "--task", "embed", "--input", source, "-o", tmp_path / "out", *options)
    job = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: job.poll() is not None or bool(list((tmp_path / "out").glob("part-*"))))
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    output, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 130
    assert output == ""
    assert "rows are kept, and the same command goes on with the rest" in errors
    assert "Traceback" not in errors
    wait_for_none(find_workers, "workers that are left")
    assert not list((tmp_path / "out" / "_job").glob(".tmp-*"))


def test_workers_that_no_machine_has_room_for(bundle: Path, source: Path, tmp_path: Path) -> None:
    command = strict_command(bundle, "--task", "embed", "--input", source, "-o", tmp_path / "out")
    command += ["--address", "local", "--threads", "500", "--gpus", "2"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "no machine of the cluster has the 500 CPUs and 2 GPUs" in done.stderr


@pytest.mark.parametrize(
    ("alive", "resources", "rooms"),
    [
        (True, {"CPU": 8, "GPU": 1}, 2),
        (True, {"CPU": 3, "GPU": 1}, 1),
        (True, {"CPU": 8}, 0),
        (True, {"GPU": 1}, 0),
        (True, {"CPU": 1, "GPU": 1}, 0),
        (False, {"CPU": 8, "GPU": 1}, 0),
    ],
)
def test_a_machine_has_room_for_as_many_as_its_scarcest_allows(
    alive: bool, resources: dict[str, int], rooms: int
) -> None:
    """Each worker takes two CPUs and half a GPU; without GPUs, two CPUs alone."""
    node = {"Alive": alive, "Resources": resources}
    assert count_rooms(node, 2, 0.5) == rooms
    assert count_rooms(node, 2, 0) == alive * (resources.get("CPU", 0) // 2)


def test_where_no_cluster_is(bundle: Path, source: Path, tmp_path: Path) -> None:
    command = strict_command(bundle, "--task", "embed", "--input", source, "-o", tmp_path / "out")
    done = subprocess.run(
        [*command, "--address", "auto"], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert "--address auto: no Ray cluster answers there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nowhere.invalid:6379"])
def test_where_nothing_listens(address: str) -> None:
    """What Ray itself would wait for; the command shows it as the one above."""
    with pytest.raises(BatchError, match=f"--address {address}: no Ray cluster answers there"):
        join_cluster(address)


def test_the_spark_example_answers_a_batch(minilm_bundle: Path) -> None:
    """Its function, as Spark's worker makes and calls it; `make spark` runs all of it in Spark."""
    code = (
        "import runpy, sys, numpy as np; predict = runpy.run_path(sys.argv[1])['make_predict'](sys.argv[2]);"
    )
    code += "a = predict(np.array(['wings', None], dtype=object));"
    code += "print(a['embedding'].shape, np.isnan(a['embedding']).any(axis=1).tolist(), a['error'].tolist())"
    command = [sys.executable, "-c", code, str(ROOT / "docs/examples/spark.py"), str(minilm_bundle)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout == "(2, 384) [False, True] [None, 'text is missing']\n", done.stderr
