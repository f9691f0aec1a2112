"""Plans on an emulated GPU: the same results as ONNX Runtime's, and what is said where they cannot run.

The plans are built by the real TensorRT-RTX; in place of their kernels ONNX Runtime executes their graphs.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from planforge.exporter import build
from planforge.exporter.tensorrt.build import Options
from planforge.runtime import load
from planforge.runtime.backends import cuda_memory, tensorrt_backend
from planforge.runtime.backends.device_buffer import DeviceBuffer
from planforge.runtime.bundle.bundle import Bundle, sha256_of
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.decoding.cache import SlotCache, cache_bytes, new_cache
from planforge.runtime.errors import (
    BackendError,
    BackendUnavailableError,
    InputError,
    IntegrityError,
    ManifestError,
    MemoryLimitError,
    PlanForgeError,
)

from .helpers_emulated_cuda import EmulatedCuda, Status
from .helpers_emulated_gpu import EmulatedRuntimeCache, emulated_gpu

PROMPT = "Now therefore"  # the demo's greedy answer has 27 different tokens of 40
PROMPTS = ["Now therefore", "In the beginning God created the heaven", "And"]
Change = Callable[[dict[str, Any]], None]


def with_manifest(bundle: Path, change: Change) -> Path:
    """Edits a bundle's manifest."""
    path = bundle / "manifest.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    return bundle


def of_tensorrt(value: dict[str, Any]) -> None:
    """As if TensorRT had built the plans, on a machine with an RTX 3090."""
    for plan in value["plans"]:
        plan |= {"engine": "tensorrt", "version": "10.15.1.29", "sms": ["sm86"], "cuda": "12.0"}


@pytest.fixture(scope="module")
def portable_plan(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a plan whose cache grows."""
    from planforge.exporter.tensorrt.build import build_plan
    from planforge.exporter.tensorrt.profiles import profiles_for

    folder = Path(shutil.copytree(demo_bundle, tmp_path_factory.mktemp("portable") / "bundle"))
    artifact = Bundle.open(folder).manifest.artifact("decoder.portable.fp16")
    out = folder / "plans/growing.plan"
    report = build_plan(
        folder / artifact.file, artifact, sms=["sm86"], profiles=profiles_for(artifact), out=out
    )

    def change(value: dict[str, Any]) -> None:
        entry = {"sha256": sha256_of(out), "bytes": out.stat().st_size}
        value["files"]["plans/growing.plan"] = entry
        value["plans"] = [report.passport(artifact.id, "plans/growing.plan").to_json()]

    return with_manifest(folder, change)


@pytest.fixture
def tensorrt_bundle(own_bundle: Path) -> Path:
    return with_manifest(own_bundle, of_tensorrt)


def answers(bundle: Path, backend: str, **options: Any) -> list[tuple[int, ...]]:
    with load(bundle, backend, precision="fp16") as model:
        found = model.generate(PROMPTS, max_new_tokens=24, **options)
        found += [model.generate(PROMPT * 60, max_new_tokens=8)]  # longer than one step's tokens
        found += model.generate(PROMPTS, max_new_tokens=24, seed=5, temperature=1.2, **options)
    return [one.token_ids for one in found]


def only(bundle: Path, copy: Path, *ids: str) -> Path:
    """A copy of a bundle that has no graphs but these."""

    def change(value: dict[str, Any]) -> None:
        value["artifacts"] = [a for a in value["artifacts"] if a["id"] in ids]
        value["plans"] = [p for p in value["plans"] if p["built_from"] in ids]

    return with_manifest(Path(shutil.copytree(bundle, copy)), change)


@pytest.fixture(scope="module")
def expected(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """The answers of the same graph, run by ONNX Runtime."""
    folder = tmp_path_factory.mktemp("inplace") / "bundle"
    found = answers(only(demo_bundle, folder, "decoder.inplace.fp16"), "ort-cpu")
    assert len({token for tokens in found for token in tokens}) > 40
    return found


# The same results


@pytest.mark.parametrize("library", ["tensorrt-rtx", "tensorrt"])
def test_generation_is_that_of_onnx_runtime(
    library: str, demo_bundle: Path, tensorrt_bundle: Path, expected: list[tuple[int, ...]]
) -> None:
    bundle = demo_bundle if library == "tensorrt-rtx" else tensorrt_bundle
    with emulated_gpu(bundle, library) as cuda:
        assert answers(bundle, library) == expected
        assert (cuda.graph_launches > 40) == (library == "tensorrt")  # TensorRT-RTX captures by itself
        assert not cuda.queues


def test_a_growing_cache_keeps_two_sets_of_buffers(portable_plan: Path, tmp_path: Path) -> None:
    expected = answers(only(portable_plan, tmp_path / "bundle", "decoder.portable.fp16"), "ort-cpu")
    with emulated_gpu(portable_plan) as cuda:
        assert answers(portable_plan, "tensorrt-rtx") == expected
        assert cuda.used == 0


@pytest.mark.parametrize("option", [{"speculative": "prompt-lookup"}, {"reuse_prompt": True}])
def test_drafts_and_reused_prompts(
    option: dict[str, Any], demo_bundle: Path, expected: list[tuple[int, ...]]
) -> None:
    with emulated_gpu(demo_bundle), load(demo_bundle, "tensorrt-rtx") as model:
        for _ in range(2):
            found = model.generate(PROMPTS, max_new_tokens=24, **option)
            assert [one.token_ids for one in found] == expected[:3]


def test_scores(demo_bundle: Path, tmp_path: Path) -> None:
    with load(only(demo_bundle, tmp_path / "bundle", "decoder.inplace.fp16"), "ort-cpu") as model:
        meant = model.score(PROMPT * 30).logprobs
    with emulated_gpu(demo_bundle), load(demo_bundle, "tensorrt-rtx") as model:
        assert model.score(PROMPT * 30).logprobs == pytest.approx(meant, abs=1e-6)


def test_translation_with_beams(marian_bundle: Path, tmp_path: Path) -> None:
    from .helpers_translation import SENTENCES

    sources = SENTENCES[:6]
    options: list[dict[str, Any]] = [{}, {"num_beams": 4}]
    same = only(marian_bundle, tmp_path / "bundle", "encoder.portable.fp16", "decoder.inplace.fp16")
    with load(same, "ort-cpu") as model:
        meant = [model.translate(sources, max_new_tokens=12, **option) for option in options]
    assert len({one.token_ids for one in meant[0]}) > 3
    with emulated_gpu(marian_bundle) as cuda, load(marian_bundle, "tensorrt-rtx") as model:
        found = [model.translate(sources, max_new_tokens=12, **option) for option in options]
        assert "cudaMemcpy2DAsync" in cuda.calls  # beams move rows on the device
    assert [[one.token_ids for one in batch] for batch in found] == [
        [one.token_ids for one in batch] for batch in meant
    ]


def test_embeddings_and_labels(head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(head_bundle("classifier"), tmp_path / "bundle"))
    build(bundle, target="rtx", sms=["sm86"], limits={"batch": 4})
    texts = ["a bird can fly", "the baker sells bread and the plane can not fly", "bread", "plane"] * 3
    with load(bundle, "ort-cpu", precision="fp16") as model:
        meant, labels = model.embed(texts), model.classify(texts)
    with emulated_gpu(bundle), load(bundle, "tensorrt-rtx") as model:
        assert model.encoder.max_batch == 4
        np.testing.assert_allclose(model.embed(texts), meant, atol=1e-6)
        assert [one.label for one in model.classify(texts)] == [one.label for one in labels]
        model.embed(texts[0])


def test_a_smaller_plan_limits_the_context(own_bundle: Path) -> None:
    build(own_bundle, target="rtx", sms=["sm86"], limits={"batch": 2, "length": 40})

    def only_the_new(value: dict[str, Any]) -> None:
        value["plans"] = [plan for plan in value["plans"] if plan["sms"] == ["sm86"]]

    with_manifest(own_bundle, only_the_new)
    with emulated_gpu(own_bundle):
        with load(own_bundle, "tensorrt-rtx") as model:
            assert (model.max_length, model.max_batch) == (40, 2)
            assert model.generate(PROMPT, max_new_tokens=100).finish_reason == "context"
            assert len(model.generate(PROMPTS, max_new_tokens=3)) == 3
        with pytest.raises(InputError, match="max_length=41 is more than the 40 that the plan was built for"):
            load(own_bundle, "tensorrt-rtx", max_length=41)


def test_steps_that_repeat_are_captured_once(tensorrt_bundle: Path) -> None:
    with emulated_gpu(tensorrt_bundle, "tensorrt") as cuda, load(tensorrt_bundle, "tensorrt") as model:
        first = model.generate(PROMPT, max_new_tokens=20)
        launches, captured = cuda.graph_launches, cuda.calls.count("cudaStreamBeginCapture")
        assert (launches, captured) == (18, 1)  # prefill, a first step, and the others by the graph
        for more, captured in ((19, 1), (20, 2)):
            # The next call's cache lies where the last one's did; a prefill that is repeated is captured too.
            launches += more
            assert model.generate(PROMPT, max_new_tokens=20).token_ids == first.token_ids
            assert (cuda.graph_launches, cuda.calls.count("cudaStreamBeginCapture")) == (launches, captured)


def test_a_step_that_cannot_be_captured_is_launched(
    tensorrt_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planforge")
    with emulated_gpu(tensorrt_bundle, "tensorrt") as cuda, load(tensorrt_bundle, "tensorrt") as model:
        monkeypatch.setattr(cuda, "cudaStreamEndCapture", lambda stream: refused(cuda))
        found = model.generate(PROMPT, max_new_tokens=12)
        assert cuda.graph_launches == 0
    assert "cannot be captured in a CUDA graph" in caplog.text
    assert len(found.token_ids) == 12


def refused(cuda: EmulatedCuda) -> tuple[Status, None]:
    cuda.captured = None
    return Status.cudaErrorStreamCaptureInvalidated, None


def test_kernels_compiled_once_are_kept_beside_the_plan(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmulatedRuntimeCache, "kept", True)

    def run() -> None:
        with load(own_bundle, "tensorrt-rtx") as model:
            model.generate(PROMPT, max_new_tokens=2)

    with emulated_gpu(own_bundle):
        run()
        (cache,) = (own_bundle / "plans").glob("*.sm86.cache")
        written = cache.read_bytes()
        head, content = written.split(b"\n", 1)
        assert json.loads(head)["sm"] == "sm86" and content == b"kernels of this GPU"
        run()
        assert cache.read_bytes() == written
        cache.write_bytes(written + b"!")  # damaged: passed over and written again
        run()
        assert cache.read_bytes() == written
    with load(own_bundle, "ort-cpu") as model:  # a reader ignores it
        model.generate(PROMPT, max_new_tokens=1)


# Every line counts


PROGRAM, CACHE = "backends/tensorrt_program.py", "decoding/cache.py"
LINES = [
    (PROGRAM, "            self.device.synchronise()\n            return {name", "            return {name"),
    (PROGRAM, "if not lane.context.set_input_shape(name, shape):", "if False:"),
    (PROGRAM, "if not lane.context.set_tensor_address(name, address):", "if False:"),
    (PROGRAM, "self.staging[name].upload(sizes[name])", "pass"),
    (PROGRAM, "self.staging[name].download(sizes[name])", "pass"),
    (
        PROGRAM,
        "return new_buffer(self.device, name, shape, self.dtype_of(name))",
        "return DeviceBuffer(self.device.allocate(2 * int(np.prod(shape)), name), shape, np.dtype('e'))",
    ),
    (PROGRAM, "        self.set_shapes(lane, step.shapes)\n", ""),
    (PROGRAM, "(*addresses.values(), *pinned)", "()"),
    (PROGRAM, "self.share_activations(profile)", "pass"),
    (PROGRAM, "lanes = list(self.lanes.values())", "pass"),
    (PROGRAM, "Step(profile, shapes, wanted,", "Step(0, (), wanted,"),
    (PROGRAM, ".on_host(array.shape)[...] = array", ".on_host(array.shape)"),
    (CACHE, "{spec.name: buffer, out.name: buffer}", "{spec.name: buffer}"),
    (CACHE, "{spec.name: buffer, out.name: buffer}", "{spec.name: buffer, out.name: self.slots[0]}"),
]


@pytest.mark.parametrize(("file", "line", "instead"), LINES, ids=[line[1].strip()[:48] for line in LINES])
def test_without_one_line_the_emulated_gpu_notices(
    file: str,
    line: str,
    instead: str,
    tensorrt_bundle: Path,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_line(file, line, instead, monkeypatch)
    with emulated_gpu(tensorrt_bundle, "tensorrt"):
        try:
            found = answers(tensorrt_bundle, "tensorrt")
        except (PlanForgeError, AssertionError, KeyError):
            return
    assert found != expected


def replace_line(file: str, line: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a module of the runtime without one of its lines, in place of what is imported."""
    path = Path(cuda_memory.__file__).parents[1] / file
    source = path.read_text(encoding="utf-8")
    assert source.count(line) == 1, f"{file} has the line {source.count(line)} times"
    name = "planforge.runtime." + file.removesuffix(".py").replace("/", ".")
    module = ModuleType(name)
    vars(module).update({"__package__": name.rpartition(".")[0], "__file__": str(path)})
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source.replace(line, instead), str(path), "exec"), module.__dict__)
    if file == CACHE:
        decoder = sys.modules["planforge.runtime.decoding.decoder"]
        monkeypatch.setattr(decoder, "new_cache", module.new_cache)
    else:
        monkeypatch.setattr(tensorrt_backend, "TensorRtProgram", module.TensorRtProgram)


def test_the_unchanged_source_run_in_that_way_gives_the_same(
    tensorrt_bundle: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, line in ((PROGRAM, "class TensorRtProgram:"), (CACHE, "class SlotCache:")):
        replace_line(file, line, line, monkeypatch)
    with emulated_gpu(tensorrt_bundle, "tensorrt"):
        assert answers(tensorrt_bundle, "tensorrt") == expected


# Faults


Open = Callable[..., AbstractContextManager[tuple[EmulatedCuda, Any, Any]]]


@pytest.fixture
def opened(demo_bundle: Path) -> Iterator[tuple[EmulatedCuda, Any, Any]]:
    """An emulated GPU, the demo's program on it, and its artifact."""
    with emulated_gpu(demo_bundle) as cuda:
        bundle = Bundle.open(demo_bundle)
        backend = tensorrt_backend.TensorRtBackend("tensorrt-rtx", bundle)
        artifact = backend.artifact(bundle, "decoder", None)
        yield cuda, backend.open(bundle, artifact), artifact


def slots(program: Any, artifact: Artifact, batch: int = 1) -> SlotCache:
    cache = new_cache(program, artifact, batch, 16)
    assert isinstance(cache, SlotCache)
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
    assert "planforge build" in text and "--max" in text


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
    other = tensorrt_backend.TensorRtBackend("tensorrt-rtx", bundle).open(bundle, artifact)
    cache = slots(program, artifact)
    step(cache)
    cache.program = other
    with pytest.raises(InputError, match=r"'present\.0\.key' is the cache of another program or plan"):
        step(cache, 1)


def test_memory_of_the_host_is_refused(opened: tuple[EmulatedCuda, Any, Any]) -> None:
    from planforge.runtime.backends.backend import ArrayBuffer

    _, program, artifact = opened
    cache = slots(program, artifact)
    cache.buffers["cache.0.key"] = ArrayBuffer(np.zeros(cache.buffers["cache.0.key"].shape, np.float16))
    with pytest.raises(InputError, match=r"buffer 'cache\.0\.key' is a ArrayBuffer, not memory of the GPU"):
        step(cache)


def test_rows_are_copied_as_numpy_copies_them(opened: tuple[EmulatedCuda, Any, Any]) -> None:
    _, program, artifact = opened
    cache = slots(program, artifact, 3)
    step(cache, 3, 3)
    meant = cache.slots[1].numpy()
    assert np.isfinite(meant).all() and len(np.unique(meant[:, 0, 0, 0])) == 3
    cache.slots[1].copy_rows(2, 0, 2)
    meant[0, :, :2] = meant[2, :, :2]
    np.testing.assert_array_equal(cache.slots[1].numpy(), meant)
    np.testing.assert_array_equal(cache.slots[1].row(1).numpy(), meant[1:2])


def test_a_full_gpu_says_what_fits(demo_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    (plan,) = manifest.plans
    row = cache_bytes(plan.narrowed(manifest.artifact(plan.built_from)), 1, manifest.max_length)
    memory = 5 * row + 2_000_000  # beside the cache come logits and what the plan computes on the way
    with emulated_gpu(demo_bundle, memory=memory), load(demo_bundle, "tensorrt-rtx") as model:
        with pytest.raises(MemoryLimitError) as caught:
            model.generate([PROMPT] * 8, max_new_tokens=2)
        assert "cache for 8 rows of" in str(caught.value) and "MB are free" in str(caught.value)
        rows = int(str(caught.value).rpartition("batch of ")[2].split()[0])
        assert 1 <= rows < 8 and model.generate([PROMPT] * rows, max_new_tokens=2)
    small = emulated_gpu(demo_bundle, memory=2000)
    none = pytest.raises(MemoryLimitError, match="not even one row would fit")
    with small, load(demo_bundle, "tensorrt-rtx", max_length=32) as model, none:
        model.generate(PROMPT)


def test_memory_is_reused_and_given_back(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle) as cuda:
        with load(demo_bundle, "tensorrt-rtx") as model:
            model.generate(PROMPT, max_new_tokens=4)
            used = cuda.used
            for _ in range(3):
                model.generate(PROMPT, max_new_tokens=4)
            assert cuda.used == used
        assert cuda.used == 0


# What is known before anything is loaded


def refusal(bundle: Path, backend: str = "tensorrt-rtx", **machine: Any) -> str:
    with emulated_gpu(bundle, backend, **machine), pytest.raises(PlanForgeError) as caught:
        load(bundle, backend, device=machine.get("device", 0))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plan_for_another_gpu(demo_bundle: Path) -> None:
    text = refusal(demo_bundle, sm="sm90")
    assert "is for sm75, sm80, sm86, sm89, sm120, sm121, this GPU is sm90, which it does not know" in text
    assert "ort-cuda" in text and "planforge build" not in text


def test_a_plan_for_some_gpus(own_bundle: Path) -> None:
    build(own_bundle, target="rtx", sms=["sm86"])

    def only_the_new(value: dict[str, Any]) -> None:
        value["plans"] = [plan for plan in value["plans"] if plan["sms"] == ["sm86"]]

    text = refusal(with_manifest(own_bundle, only_the_new), sm="sm89")
    assert f"is for sm86, this GPU is sm89; planforge build {own_bundle} --target rtx --sm sm89" in text


def test_a_plan_of_another_version(demo_bundle: Path) -> None:
    text = refusal(demo_bundle, version="1.8.0.5")
    assert "was built by tensorrt-rtx 1.7.1.116, installed is 1.8.0.5" in text and "planforge build" in text


def test_drivers(own_bundle: Path) -> None:
    assert "no NVIDIA driver was found" in refusal(own_bundle, driver=0)
    old = refusal(own_bundle, driver=12040)
    assert "too old: it has CUDA 12.4, cuda-bindings is of 13.0" in old and "cuda-bindings==12.*" in old
    assert "finds no GPU" in refusal(own_bundle, count=0) or "no NVIDIA GPU" in refusal(own_bundle, count=0)

    def needs_more(value: dict[str, Any]) -> None:
        value["plans"][0]["cuda"] = "13.2"

    text = refusal(with_manifest(own_bundle, needs_more))
    assert "needs a driver with CUDA 13.2, this one has 13.0; update the driver" in text


def test_a_gpu_that_does_not_exist(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle, count=2), pytest.raises(InputError) as caught:
        load(demo_bundle, device=2)
    assert str(caught.value) == "device=2 does not exist; this machine has 0 (Emulated GPU), 1 (Emulated GPU)"


def test_a_plan_built_from_another_graph(own_bundle: Path) -> None:
    def other_graph(value: dict[str, Any]) -> None:
        sources = value["plans"][0]["sources"]
        sources[next(iter(sources))] = "0" * 64

    text = refusal(with_manifest(own_bundle, other_graph))
    assert "its plan was built from another onnx/" in text and "planforge build" in text


def test_another_precision(demo_bundle: Path) -> None:
    with (
        emulated_gpu(demo_bundle),
        pytest.raises(BackendUnavailableError, match="plan is fp16, wanted is fp32"),
    ):
        load(demo_bundle, "tensorrt-rtx", precision="fp32")


def test_a_damaged_plan_never_reaches_the_library(own_bundle: Path) -> None:
    plan = own_bundle / Bundle.open(own_bundle).manifest.plans[0].file
    content = bytearray(plan.read_bytes())
    content[len(content) // 2] ^= 1
    plan.write_bytes(content)
    with emulated_gpu(own_bundle), pytest.raises(IntegrityError, match="has changed since it was exported"):
        load(own_bundle, "tensorrt-rtx")


def test_the_library_may_refuse_a_plan(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle):
        sys.modules["tensorrt_rtx"].plans = {}  # type: ignore[attr-defined]
        with pytest.raises(BackendError, match=r"cannot load .*: the magic tag does not match"):
            load(demo_bundle, "tensorrt-rtx")


def test_a_stripped_plan_reads_the_bundles_weights(own_bundle: Path, expected: list[tuple[int, ...]]) -> None:
    whole = Bundle.open(own_bundle).manifest
    build(own_bundle, target="rtx", options=Options(strip=True))
    manifest = Bundle.open(own_bundle).manifest
    (plan,) = manifest.plans
    left_out = sum(math.prod(weight.shape) * 2 for weight in plan.weights)
    sizes = [m.files[m.plans[0].file].bytes for m in (whole, manifest)]
    assert left_out > 0.9 * manifest.files[plan.weights[0].file].bytes
    assert sizes[0] - sizes[1] > 0.7 * left_out
    with emulated_gpu(own_bundle) as cuda:
        found = answers(own_bundle, "tensorrt-rtx")
        assert found[:4] == expected[:4]  # with weights as inputs ONNX Runtime rounds otherwise: greedy alone
        assert cuda.used == 0
        opened = Bundle.open(own_bundle)
        backend = tensorrt_backend.TensorRtBackend("tensorrt-rtx", opened)
        first, again = (backend.weight(opened, plan.weights[0]) for _ in range(2))
        assert first.address == again.address  # two graphs that read a weight have it once
        values = np.fromfile(own_bundle / plan.weights[0].file, "float16", 40, offset=plan.weights[0].offset)
        np.testing.assert_array_equal(first.numpy().reshape(-1)[:40], values)

    def of_two_layers(value: dict[str, Any]) -> None:
        swapped = [w for w in value["plans"][0]["weights"] if "c_fc" in w["name"]][:2]
        swapped[0]["offset"], swapped[1]["offset"] = swapped[1]["offset"], swapped[0]["offset"]

    with emulated_gpu(with_manifest(own_bundle, of_two_layers)):
        assert answers(own_bundle, "tensorrt-rtx")[:4] != expected[:4]  # so the weights come from there

    def beyond(value: dict[str, Any]) -> None:
        value["plans"][0]["weights"][-1]["offset"] = 2**40

    with (
        emulated_gpu(with_manifest(own_bundle, beyond)),
        pytest.raises(ManifestError, match="beyond the end"),
    ):
        load(own_bundle, "tensorrt-rtx")


def test_auto_takes_the_plan_that_fits_and_says_why_not_a_better_one(
    own_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planforge")

    def chosen(**machine: Any) -> str:
        caplog.clear()
        with emulated_gpu(own_bundle, **machine), load(own_bundle) as model:
            assert model.generate(PROMPT, max_new_tokens=1).token_ids
        (line,) = (r.getMessage() for r in caplog.records if " runs on " in r.getMessage())
        return line

    assert "runs on tensorrt-rtx, Emulated GPU: the plan of decoder.inplace.fp16" in chosen()
    line = chosen(sm="sm70")
    assert "runs on ort-cpu" in line
    assert "tensorrt-rtx was skipped, as its plan is for sm75" in line
    assert "tensorrt was skipped, as the bundle has no plan of tensorrt; make one: planforge build" in line

    def unverified(value: dict[str, Any]) -> None:
        for artifact in value["artifacts"]:
            artifact["gate"] = {}

    with_manifest(own_bundle, unverified)
    assert "decoder.inplace.fp16 was not verified" in chosen()


def test_a_bundle_may_have_a_plan_for_each_machine(own_bundle: Path) -> None:
    def two(value: dict[str, Any]) -> None:
        value["plans"].insert(0, {**value["plans"][0], "sms": ["sm87"]})

    with emulated_gpu(with_manifest(own_bundle, two)), load(own_bundle, "tensorrt-rtx") as model:
        assert model.generate(PROMPT, max_new_tokens=1)


def test_narrowed_artifacts_have_the_plans_lengths(demo_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    (plan,) = manifest.plans
    artifact = manifest.artifact(plan.built_from)
    narrowed = plan.narrowed(artifact)
    slots = {spec.axis_names()[2] for spec in narrowed.inputs if spec.role.startswith("past.")}
    assert slots == {manifest.max_length}
    assert narrowed.axis("batch") == artifact.axis("batch")
    broken = replace(plan, profiles=({"name": "decode", "axes": {"batch": [1, 2]}},))
    with pytest.raises((PlanForgeError, TypeError)):
        broken.narrowed(artifact)
