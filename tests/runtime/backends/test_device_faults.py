"""What is bound wrongly, freed or too large is noticed, on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime import TextGenerator
from planforge.runtime.backends import tensorrt_backend
from planforge.runtime.backends.backend import LoadRequest
from planforge.runtime.backends.device_buffer import DeviceBuffer
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.decoding.caches import make_cache
from planforge.runtime.decoding.static_cache import StaticCache
from planforge.runtime.errors import BackendError, InputError, MemoryLimitError, PlanForgeError

from ...helpers.emulated_cuda import EmulatedCuda
from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.plans import PROMPT


@pytest.fixture
def opened(demo_bundle: Path) -> Iterator[tuple[EmulatedCuda, Any, Any]]:
    """An emulated GPU, the demo's program on it, and its artifact."""
    with emulated_gpu(demo_bundle) as cuda:
        bundle = Bundle.open(demo_bundle)
        backend = tensorrt_backend.TensorRtBackend("tensorrt-rtx", bundle, LoadRequest())
        artifact = backend.artifact(bundle, "decoder", None)
        yield cuda, backend.open(bundle, artifact), artifact


def slots(program: Any, artifact: Artifact, batch: int = 1) -> StaticCache:
    cache = make_cache(program, artifact, batch, 16)
    assert isinstance(cache, StaticCache)
    return cache


def step(cache: Any, tokens: int = 3, batch: int = 1) -> Any:
    ids = np.arange(7, 7 + tokens * batch).reshape(batch, tokens)
    return cache.step(ids, np.ones_like(ids, bool), np.arange(batch))["logits"]


def test_swapped_cache_bindings_are_refused(opened: tuple[EmulatedCuda, Any, Any]) -> None:
    _, program, artifact = opened
    cache = slots(program, artifact)
    cache.buffers["present.0.key"], cache.buffers["present.0.value"] = (
        cache.buffers["present.0.value"],
        cache.buffers["present.0.key"],
    )
    with pytest.raises(InputError, match=r"'present.0.key' must be bound to the buffer of 'cache.0.key'"):
        step(cache)


def test_a_shape_past_the_profile_names_the_axis_and_the_way_out(
    opened: tuple[EmulatedCuda, Any, Any],
    demo_bundle: Path,
) -> None:
    _, program, artifact = opened
    most = artifact.axis("batch").max
    ids = np.zeros((most + 1, 1), np.int64)
    with pytest.raises(InputError) as caught:
        program.run({"input_ids": ids, "past_lengths": ids[:, 0], "logit_rows": ids[:1, 0]}, {})
    assert "was not given" in str(caught.value)
    buffers = {
        spec.name: program.allocate(spec.name, (most + 1, *[a for a in spec.axis_names()[1:]]))
        for spec in artifact.inputs
        if spec.role.startswith("past.")
    }
    with pytest.raises(InputError) as caught:
        program.run({"input_ids": ids, "past_lengths": ids[:, 0], "logit_rows": ids[:1, 0]}, buffers)
    text = str(caught.value)
    assert f"takes 1 to {most} on axis 0 of input 'input_ids', not {most + 1}" in text
    assert text.endswith("export it again with a larger --max-batch") and f"takes {most} at most" in text
    bundle = Bundle.open(demo_bundle)
    (plan,) = bundle.manifest.plans
    told = tensorrt_backend.explain(bundle, plan, "input_ids", 1, 7)
    assert told.endswith("--max length=7") and told.startswith(f"planforge build {demo_bundle} --target rtx")


def test_a_freed_buffer_is_noticed(opened: tuple[EmulatedCuda, Any, Any]) -> None:
    cuda, program, artifact = opened
    cache = slots(program, artifact)
    step(cache)
    buffer = cache.buffers["cache.0.key"]
    assert isinstance(buffer, DeviceBuffer)
    buffer.memory.close()
    with pytest.raises(PlanForgeError, match="was freed"):
        step(cache, 1)
    cache = slots(program, artifact)
    buffer = cache.buffers["cache.1.key"]
    assert isinstance(buffer, DeviceBuffer)
    cuda.cudaFree(buffer.address)  # behind the backend's back
    with pytest.raises(BackendError, match="cudaErrorIllegalAddress"):
        step(cache)


def test_two_programs_cannot_share_a_cache(opened: tuple[EmulatedCuda, Any, Any], demo_bundle: Path) -> None:
    _, program, artifact = opened
    bundle = Bundle.open(demo_bundle)
    other = tensorrt_backend.TensorRtBackend("tensorrt-rtx", bundle, LoadRequest()).open(bundle, artifact)
    cache = slots(program, artifact)
    step(cache)
    others = slots(other, artifact)
    others.buffers = cache.buffers
    with pytest.raises(InputError, match=r"'present\.0\.key' is the cache of another program or plan"):
        step(others, 1)


def test_memory_of_the_host_is_refused(opened: tuple[EmulatedCuda, Any, Any]) -> None:
    from planforge.runtime.backends.backend import ArrayBuffer

    _, program, artifact = opened
    cache = slots(program, artifact)
    cache.buffers["cache.0.key"] = ArrayBuffer(np.zeros(cache.buffers["cache.0.key"].shape, np.float16))
    with pytest.raises(InputError, match=r"buffer 'cache\.0\.key' is a ArrayBuffer, not GPU memory"):
        step(cache)


def test_a_full_gpu_says_what_fits(demo_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    (plan,) = manifest.plans
    row = count_cache_bytes(plan.narrow_artifact(manifest.artifact(plan.built_from)), 1, manifest.max_length)
    memory = 5 * row + 2_000_000  # beside the cache come logits and what the plan computes on the way
    with (
        emulated_gpu(demo_bundle, memory=memory),
        TextGenerator.load(demo_bundle, backend="tensorrt-rtx") as model,
    ):
        with pytest.raises(MemoryLimitError) as caught:
            model.generate([PROMPT] * 8, max_new_tokens=2)
        assert "cache for 8 rows of" in str(caught.value) and "MB are free" in str(caught.value)
        rows = int(str(caught.value).rpartition("batch of ")[2].split()[0])
        assert 1 <= rows < 8 and model.generate([PROMPT] * rows, max_new_tokens=2)
    small = emulated_gpu(demo_bundle, memory=2000)
    none = pytest.raises(MemoryLimitError, match="not even one row would fit")
    with small, TextGenerator.load(demo_bundle, backend="tensorrt-rtx", max_length=32) as model, none:
        model.generate(PROMPT)


def test_a_gpu_that_was_full_serves_again_when_there_is_room(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle) as cuda, TextGenerator.load(demo_bundle, backend="tensorrt-rtx") as model:
        cuda.memory = cuda.used + 1_050_000  # of the cache, but not of what the plan computes on the way
        for _ in range(2):
            with pytest.raises(MemoryLimitError, match="are needed for"):
                model.generate(PROMPT, max_new_tokens=4)
        cuda.memory = 8 * 10**9
        assert len(model.generate(PROMPT, max_new_tokens=4).token_ids) == 4


def test_memory_is_reused_and_given_back(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle) as cuda:
        with TextGenerator.load(demo_bundle, backend="tensorrt-rtx") as model:
            model.generate(PROMPT, max_new_tokens=4)
            used = cuda.used
            for _ in range(3):
                model.generate(PROMPT, max_new_tokens=4)
            assert cuda.used == used
        assert cuda.used == 0
