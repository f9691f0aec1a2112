"""Workers on a Ray cluster: each part is a task, which is started again, from here, where it is lost."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ...errors import BatchError
from .engine import Lost, Outcome
from .part_runner import JobSpec, run_part
from .plan import Part

QUEUED = 2  # parts for each that can run: Ray starts machines for what waits, and none waits for this process
NAME = "planforge"
LOCAL = "local"  # the address that starts a cluster on this machine
CONNECT_SECONDS = 10.0
COUNT_SECONDS = 1.0  # between two looks at how large the cluster is

log = logging.getLogger("planforge")


class RayEngine:
    """Computes the parts of a job on a cluster.

    Args:
        spec: the job.
        address: "auto", "ray://host:10001", "host:6379", or "local", which starts a cluster on this machine.
        threads: CPUs of a worker.
        gpus: of a worker.
    """

    def __init__(self, spec: JobSpec, address: str, threads: int, gpus: float) -> None:
        self.threads = threads
        self.gpus = gpus
        self._is_ours = not ray.is_initialized()  # of a program that has joined a cluster we take that one
        if self._is_ours:
            join_cluster(address)
        check_room(address, threads, gpus)
        self._spec = ray.put(spec)
        self._task: Any = ray.remote(run_part).options(
            name=f"{NAME}-{spec.task}", num_cpus=threads, num_gpus=gpus, max_retries=0
        )
        self._running: dict[ray.ObjectRef[Any], Part] = {}
        self._slots = 0
        self._counted = -COUNT_SECONDS

    def count_slots(self) -> int:
        """Return how many parts may wait or run, of what the cluster has now."""
        if time.monotonic() - self._counted >= COUNT_SECONDS:
            self._counted = time.monotonic()
            rooms = [count_rooms(node, self.threads, self.gpus) for node in list_nodes()]
            self._slots = max(sum(rooms), 1) * QUEUED
        return self._slots

    def start(self, part: Part) -> None:
        """Let a worker compute a part."""
        self._running[self._task.remote(self._spec, part)] = part

    def wait(self) -> list[tuple[Part, Outcome]]:
        """Return the parts that ended."""
        references = list(self._running)
        ray.wait(references, num_returns=1)
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return [(self._running.pop(reference), read_outcome(reference)) for reference in done]

    def close(self) -> None:
        """Leave the cluster, which then ends the workers of this job.

        Nothing is cancelled before: a task that ends at that moment would let Ray abort this process. Where a
        program has joined the cluster itself, what runs comes to its end.
        """
        if self._is_ours:
            ray.shutdown()


def join_cluster(address: str) -> None:
    """Connect this process to a cluster, or start one."""
    if match := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address):
        check_listens(address, match[1], int(match[2]))  # Ray would try without an end
    # Of a cluster that ends with the job nobody looks at the dashboard, which is ten processes.
    own: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        raise BatchError(
            f"--address {address}: no Ray cluster answers there: {error}. If one runs there, this machine"
            " needs its token too, in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from error


def check_listens(address: str, host: str, port: int) -> None:
    """Refuse an address where nothing listens."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BatchError(f"--address {address}: no Ray cluster answers there: {error}") from error


def list_nodes() -> list[Mapping[str, Any]]:
    """Return the machines of the cluster."""
    nodes: list[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def count_rooms(node: Mapping[str, Any], threads: int, gpus: float) -> int:
    """Return how many workers a machine of the cluster has room for."""
    if not node["Alive"]:
        return 0
    resources = node["Resources"]
    rooms = resources.get("CPU", 0) / threads
    return int(min(rooms, resources.get("GPU", 0) / gpus) if gpus else rooms)


def check_room(address: str, threads: int, gpus: float) -> None:
    """Refuse workers that no machine has room for, or warn where the cluster may get one that has."""
    if any(count_rooms(node, threads, gpus) for node in list_nodes()):
        return
    message = f"no machine of the cluster has the {threads} CPUs and {gpus:g} GPUs that each worker needs"
    if address == LOCAL:
        ray.shutdown()
        raise BatchError(f"{message}; ask for fewer threads or GPUs")
    log.warning("%s; the job waits for one", message)


def read_outcome(reference: Any) -> Outcome:
    """Return what a task returned; raise what it raised."""
    try:
        outcome: Outcome = ray.get(reference)
    except (RayTaskError, GetTimeoutError):
        raise
    except RayError as error:  # the worker, or its machine, is gone
        return Lost(str(error).partition("\n")[0])
    return outcome
