"""After close() nothing reaches a CUDA stream that is gone, whichever thread asks and when; emulated GPU."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime.backends.backend import LoadRequest
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.backends.ort_cuda_backend import OrtCudaBackend
from planforge.runtime.backends.tensorrt_backend import TensorRtBackend
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.caches import make_cache
from planforge.runtime.errors import ClosedError

from ...helpers.emulated_cuda import EmulatedCuda
from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.emulated_ort_cuda import emulated_ort_cuda
from ...helpers.patience import PATIENCE, wait_until

Opened = tuple[EmulatedCuda, Any, Any]  # the GPU, a program on it, and a cache of three rows that it filled


def filled(program: Any, artifact: Any) -> Any:
    cache: Any = make_cache(program, artifact, 3, 16)
    step(cache)
    return cache


def step(cache: Any) -> Any:
    ids = np.arange(7, 10).reshape(3, 1)
    return cache.step(ids, np.ones_like(ids, bool), np.arange(3))


@pytest.fixture(params=["tensorrt-rtx", "ort-cuda"])
def opened(request: pytest.FixtureRequest, demo_bundle: Path) -> Iterator[Opened]:
    bundle = Bundle.open(demo_bundle)
    machine = emulated_gpu(demo_bundle) if request.param == "tensorrt-rtx" else emulated_ort_cuda()
    with machine as cuda:
        engine: Any
        if request.param == "tensorrt-rtx":
            engine = TensorRtBackend("tensorrt-rtx", bundle, LoadRequest())
        else:
            engine = OrtCudaBackend(bundle, LoadRequest())
        artifact = engine.artifact(bundle, "decoder", None)
        program = engine.open(bundle, artifact)
        yield cuda, program, filled(program, artifact)


def buffer_of(cache: Any) -> Any:
    return cache.slots[0] if hasattr(cache, "slots") else next(iter(cache.past.values()))


def name_of(cache: Any) -> str:
    return str(next(iter(cache.buffers if hasattr(cache, "slots") else cache.past)))


ENTRIES: dict[str, Callable[[Any, Any], Any]] = {
    "run": lambda program, cache: step(cache),
    "no backend on this machine": lambda program, cache: program.run({}, {}),
    "allocate": lambda program, cache: program.allocate(name_of(cache), (1, 1, 1, 1)),
    "free_memory": lambda program, cache: program.free_memory(),
    "copy_rows": lambda program, cache: buffer_of(cache).copy_rows(0, 1, 1),
    "rows of the cache": lambda program, cache: cache.copy_rows([(0, 1)]),
    "numpy": lambda program, cache: buffer_of(cache).numpy(),
    "a row's numpy": lambda program, cache: buffer_of(cache).row(1).numpy(),
    "zeros": lambda program, cache: buffer_of(cache).fill_with_zeros(),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_says_that_the_model_was_closed(entry: str, opened: Opened) -> None:
    cuda, program, cache = opened
    if entry != "no backend on this machine":
        ENTRIES[entry](program, cache)
    program.close()
    program.close()  # closing twice is fine
    assert not cuda.queues
    with pytest.raises(ClosedError, match=r"the model was closed; load\(\) it again"):
        ENTRIES[entry](program, cache)


class TellingLock:
    """A lock that tells whether a thread had to wait for it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.is_wanted = threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.is_wanted.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("entry", ["run", "copy_rows", "numpy", "allocate"])
def test_who_waits_for_a_turn_while_the_model_is_closed_hears_of_it(entry: str, opened: Opened) -> None:
    _, program, cache = opened
    lock = TellingLock(program.device.lock)
    program.device.lock = lock
    with ThreadPoolExecutor(1) as pool:
        with lock:
            waiting = pool.submit(ENTRIES[entry], program, cache)
            assert lock.is_wanted.wait(PATIENCE)
            program.close()
        with pytest.raises(ClosedError):
            waiting.result(timeout=PATIENCE)


def test_threads_that_never_stop_end_with_closed_errors(opened: Opened) -> None:
    _, program, cache = opened
    uses: Counter[str] = Counter()
    must_end = threading.Event()

    def use(entry: str) -> None:
        while not must_end.is_set():
            ENTRIES[entry](program, cache)
            uses[entry] += 1

    entries = ("copy_rows", "numpy", "free_memory")
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(use, entry) for entry in entries]
        try:
            wait_until(lambda: all(uses[entry] >= 10 for entry in entries))
            program.close()
            errors = [one.exception(timeout=PATIENCE) for one in running]
        finally:
            must_end.set()
    assert [type(error) for error in errors] == [ClosedError] * 3


def test_buffers_that_outlive_the_stream_are_freed_by_the_next_model(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle) as cuda:

        def cache_of_a_closed_model() -> Any:
            bundle = Bundle.open(demo_bundle)
            engine = TensorRtBackend("tensorrt-rtx", bundle, LoadRequest())
            artifact = engine.artifact(bundle, "decoder", None)
            program = engine.open(bundle, artifact)
            cache = filled(program, artifact)
            program.close()
            return cache

        cache = cache_of_a_closed_model()
        held = cuda.used
        assert held > 0
        del cache
        gc.collect()
        cache_of_a_closed_model()
        gc.collect()
        assert cuda.used <= held


def test_a_cpu_program_says_it_too(demo_bundle: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    engine = OrtCpuBackend(1)
    artifact = engine.artifact(bundle, "decoder", None)
    program = engine.open(bundle, artifact)
    cache = filled(program, artifact)
    program.close()
    program.close()
    with pytest.raises(ClosedError, match=r"load\(\) it again"):
        step(cache)
