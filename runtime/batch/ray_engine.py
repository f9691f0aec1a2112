"""Workers on a Ray cluster: each part is a task, which is started again, from here, where it is lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ..errors import BatchError
from .engine import Lost, Outcome
from .part_runner import JobSpec, run_part
from .plan import Part

QUEUED = 2  # parts for each that can run: Ray starts machines for what waits, and none waits for this process
NAME = "planforge"


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
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RayError, ValueError, RuntimeError) as error:
            raise BatchError(f"--address {address}: no Ray cluster is there: {error}") from error
        self._spec = ray.put(spec)
        self._task: Any = ray.remote(run_part).options(
            name=f"{NAME}-{spec.task}", num_cpus=threads, num_gpus=gpus, max_retries=0
        )
        self._running: dict[ray.ObjectRef[Any], Part] = {}

    def count_slots(self) -> int:
        """Return how many parts may wait or run, of what the cluster has now."""
        resources: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        slots = int(resources.get("CPU", 0) // self.threads)
        if self.gpus:
            slots = min(slots, int(resources.get("GPU", 0) / self.gpus))
        return max(slots, 1) * QUEUED

    def start(self, part: Part) -> None:
        """Let a worker compute a part."""
        self._running[self._task.remote(self._spec, part)] = part

    def wait(self) -> list[tuple[Part, Outcome]]:
        """Return the parts that ended."""
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=None)
        return [(self._running.pop(reference), read_outcome(reference)) for reference in done]

    def close(self) -> None:
        """Leave the cluster, which then ends the workers of this job.

        Nothing is cancelled before: a task that ends at that moment would let Ray abort this process.
        """
        ray.shutdown()


def read_outcome(reference: Any) -> Outcome:
    """Return what a task returned; raise what it raised."""
    try:
        outcome: Outcome = ray.get(reference)
    except (RayTaskError, GetTimeoutError):
        raise
    except RayError as error:  # the worker, or its machine, is gone
        return Lost(str(error).partition("\n")[0])
    return outcome
