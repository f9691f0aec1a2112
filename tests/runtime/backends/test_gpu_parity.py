"""What a real GPU, its driver and its engines answer. The same tests run on the emulated GPU where they can.

`make gpu` runs those for a GPU; elsewhere they are skipped, with what the runtime says is missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.checkpoints import demo
from planforge.exporter import build, export
from planforge.runtime import TextGenerator, load
from planforge.runtime.apps.check.metrics import measure, measure_scale
from planforge.runtime.apps.check.outcome import judge
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.apps.diagnostics.doctor import diagnose
from planforge.runtime.backends.cuda_memory import Device
from planforge.runtime.backends.device_buffer import upload_array
from planforge.runtime.backends.gpus import find_gpu, list_gpus
from planforge.runtime.backends.tensorrt_library import LIBRARIES
from planforge.runtime.errors import BackendUnavailableError, InputError, MemoryLimitError, PlanForgeError

from ...conftest import Once
from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.emulated_ort_cuda import emulated_ort_cuda
from ...helpers.models import edit_json, greedy

TARGETS = {"ort-cuda": "cuda", "tensorrt-rtx": "rtx", "tensorrt": "tensorrt"}  # of export, by backend
PRECISIONS = {"ort-cuda": ("fp32", "fp16"), "tensorrt-rtx": ("fp16",), "tensorrt": ("fp16",)}
DEMOS = ("gpt2-demo", "bert-demo", "transformer-demo")
PROMPT = "Now therefore"
NEW = 40
NO_SM = "sm75"  # an architecture of TensorRT-RTX; sm120 stands in for it where the GPU is one


@dataclass(frozen=True)
class Place:
    """Where a test runs: a backend on this machine's GPU, or on the emulated one."""

    backend: str
    real: bool

    @property
    def plans(self) -> bool:
        return self.backend != "ort-cuda"


def places(*backends: str, emulated: tuple[str, ...] = ("ort-cuda", "tensorrt-rtx")) -> pytest.MarkDecorator:
    """A test's parameter: these backends, those of them that can be emulated also in that way."""
    return pytest.mark.parametrize(
        "place",
        [
            *(pytest.param(Place(b, True), marks=pytest.mark.gpu, id=f"{b}-gpu") for b in backends),
            *(pytest.param(Place(b, False), id=f"{b}-emulated") for b in backends if b in emulated),
        ],
    )


EVERYWHERE = places("ort-cuda", "tensorrt-rtx", "tensorrt")
PLANS = places("tensorrt-rtx", "tensorrt")


def skip_without(backend: str) -> None:
    """Skips where there is no GPU, or nothing that runs this backend on it."""
    try:
        list_gpus()
    except BackendUnavailableError as error:
        pytest.skip(f"needs a GPU: {error}")
    state = next(state for state in diagnose().backends if state.backend == backend)
    if not state.available:
        pytest.skip(f"needs a GPU: {state.reason}")


@pytest.fixture
def bundle_of(once: Callable[[str], Once], request: pytest.FixtureRequest) -> Callable[[Place, str], Path]:
    """A demo's verified bundle with what a backend runs. Don't change it."""
    emulated = {"gpt2-demo": "demo_bundle", "transformer-demo": "marian_bundle"}

    def bundle(place: Place, name: str) -> Path:
        if not place.real and name == "bert-demo":  # the real one takes long to verify
            return request.getfixturevalue("head_bundle")("classifier")  # type: ignore[no-any-return]
        if not place.real:
            return request.getfixturevalue(emulated[name])  # type: ignore[no-any-return]
        with once(f"gpu-{name}-{place.backend}") as (folder, first):
            if first:
                export(name, folder, target=[TARGETS[place.backend]], precision=["fp32", "fp16"])
        return folder

    return bundle


@pytest.fixture
def at(bundle_of: Callable[[Place, str], Path]) -> Iterator[Callable[..., Path]]:
    """Goes to a place: a demo's bundle there, until the test ends."""
    with ExitStack() as stack:

        def go(place: Place, name: str = "gpt2-demo") -> Path:
            if place.real:
                skip_without(place.backend)
            bundle = bundle_of(place, name)
            if not place.real:
                stack.enter_context(emulated_gpu(bundle) if place.plans else emulated_ort_cuda())
            return bundle

        yield go


# Parity with PyTorch


@EVERYWHERE
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_logits_and_tokens_are_pytorchs(place: Place, precision: str, at: Callable[..., Path]) -> None:
    bundle = at(place)
    if precision not in PRECISIONS[place.backend]:
        with pytest.raises(BackendUnavailableError, match=f"plan is fp16, wanted is {precision}"):
            load(bundle, backend=place.backend, precision=precision)
        return
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(demo("gpt2-demo"), dtype=torch.float32)
    with TextGenerator.load(bundle, backend=place.backend, precision=precision) as model:
        prompt = model.tokenizer.encode(PROMPT)
        wanted = greedy(reference, prompt, NEW)
        assert len(set(wanted)) >= 10
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *wanted[:-1]]])
            want = reference(ids).logits[0, len(prompt) - 1 :].numpy()
        run = model.decoder.start(1, len(prompt) + NEW)
        got = [run.prefill([prompt]), *(run.decode([token]) for token in wanted[:-1])]
        limits = {name: model.artifact.gate["limits"][name] for name in ("max_error", "mean_kl")}
        assert judge(measure(np.concatenate(got), want), limits) == ()
        tokens = model.generate(PROMPT, max_new_tokens=NEW).token_ids
    # Free to choose, it may leave PyTorch's tokens only where both scores are within twice the limit.
    for ours, theirs, scores in zip(tokens, wanted, want, strict=True):
        if ours != theirs:
            assert scores[theirs] - scores[ours] <= 2 * limits["max_error"] * measure_scale(want)
            break


@pytest.mark.parametrize("name", DEMOS)
@places("ort-cuda", "tensorrt-rtx", "tensorrt", emulated=("ort-cuda",))
def test_every_demo_passes_its_selftest(place: Place, name: str, at: Callable[..., Path]) -> None:
    bundle = at(place, name)
    for precision in PRECISIONS[place.backend]:
        result = selftest(bundle, place.backend, precision)
        assert result.passed, [c for c in result.comparisons if not c.passed]
        assert result.backend == place.backend


# What the driver and the library say


@PLANS
def test_a_plan_for_another_gpu_is_refused_before_it_is_loaded(
    place: Place, at: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(at(place), tmp_path / "bundle"))
    here = find_gpu(0).sm
    plans = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["plans"]
    edit_json(bundle / "manifest.json", plans=[plan | {"sms": ["sm999"]} for plan in plans])
    with pytest.raises(BackendUnavailableError, match=f"is for sm999, this GPU is {here}"):
        load(bundle, backend=place.backend)


@places("tensorrt-rtx", emulated=())
def test_a_plan_whose_passport_lies_is_refused_by_the_library(
    place: Place, at: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(at(place), tmp_path / "bundle"))
    here = find_gpu(0).sm
    other = NO_SM if here != NO_SM else "sm120"
    assert other in LIBRARIES["tensorrt-rtx"].sms
    build(bundle, target="rtx", sms=[other])
    plans = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["plans"]
    lying = [plan | {"sms": [here]} for plan in plans if plan["sms"] == [other]]
    edit_json(bundle / "manifest.json", plans=lying)
    with pytest.raises(PlanForgeError) as caught:
        load(bundle, backend=place.backend)
    assert "\n" not in str(caught.value) and "tensorrt_rtx" in str(caught.value)


@EVERYWHERE
def test_a_gpu_that_does_not_exist(place: Place, at: Callable[..., Path]) -> None:
    bundle = at(place)
    found = list_gpus()
    names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in found)
    with pytest.raises(InputError) as caught:
        load(bundle, backend=place.backend, device=len(found))
    assert str(caught.value) == f"device={len(found)} does not exist; this machine has {names}"


@EVERYWHERE
def test_a_cache_larger_than_the_gpu_is_refused_and_the_model_goes_on(
    place: Place, at: Callable[..., Path]
) -> None:
    bundle = at(place)
    memory = find_gpu(0).memory
    with TextGenerator.load(bundle, backend=place.backend, precision="fp16") as model:
        expected = model.generate(PROMPT, max_new_tokens=8).token_ids
        spec = next(spec for spec in model.artifact.inputs if spec.role.startswith("past."))
        shape = (1, 1, memory, 1)  # of fp16: twice what there is
        with pytest.raises(MemoryLimitError) as caught:
            model.decoder.program.allocate(spec.name, shape)
        text = str(caught.value)
        assert f"MB free of {memory / 1e6:.0f} MB, and {2 * memory / 1e6:.1f} MB are needed for" in text
        assert spec.name in text and caught.value.needed == 2 * memory > caught.value.limit > 0
        assert model.generate(PROMPT, max_new_tokens=8).token_ids == expected


@EVERYWHERE
def test_close_gives_the_memory_back(place: Place, at: Callable[..., Path]) -> None:
    bundle = at(place)

    def use() -> None:
        with TextGenerator.load(bundle, backend=place.backend, precision="fp16") as model:
            model.generate([PROMPT] * 4, max_new_tokens=4)

    use()  # what libraries load once stays
    device = Device(0)
    before = device.free_memory()
    for _ in range(8):
        use()
    weights = sum(path.stat().st_size for path in (bundle / "onnx").glob("*fp16*"))
    assert weights > 1e6 and before - device.free_memory() < weights  # 8 of them, had they been kept


# Memory and streams


@pytest.fixture(
    params=[pytest.param(True, marks=pytest.mark.gpu, id="gpu"), pytest.param(False, id="emulated")]
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if not request.param:
        with emulated_ort_cuda():
            yield Device(0)
        return
    try:
        list_gpus()
    except BackendUnavailableError as error:
        pytest.skip(f"needs a GPU: {error}")
    yield Device(0)


def test_a_captured_copy_happens_when_it_is_launched_and_again_with_what_is_there_then(
    device: Device,
) -> None:
    ones = np.full(1000, 1, np.float32)
    twos = np.full(1000, 2, np.float32)
    source = upload_array(device, "a test", ones)
    target = upload_array(device, "a test", np.zeros(1000, np.float32))

    def copy() -> None:
        kind = device.cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        device.call("cudaMemcpyAsync", target.address, source.address, source.nbytes, kind, device.stream)

    with device.turn():
        graph = device.capture(copy)
        assert graph is not None and not target.numpy().any()
        graph.launch()
        np.testing.assert_array_equal(target.numpy(), ones)
        again = upload_array(device, "a test", twos)
        kind = device.cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        device.call("cudaMemcpyAsync", source.address, again.address, source.nbytes, kind, device.stream)
        graph.launch()
        np.testing.assert_array_equal(target.numpy(), twos)
        graph.close()


@pytest.mark.gpu
def test_what_cannot_be_captured_leaves_the_stream_usable() -> None:
    skip_without("ort-cuda")
    device = Device(0)
    with device.turn():
        assert device.capture(device.synchronise) is None
    np.testing.assert_array_equal(upload_array(device, "a test", np.arange(9)).numpy(), np.arange(9))


def test_rows_of_a_cache_are_copied_as_numpy_copies_them(device: Device) -> None:
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((3, 4, 10, 8)).astype(np.float16)  # rows, heads, slots, size of a head
    buffer = upload_array(device, "a test", cache)
    buffer.copy_rows(2, 0, 7)
    cache[0, :, :7] = cache[2, :, :7]
    np.testing.assert_array_equal(buffer.numpy(), cache)
    np.testing.assert_array_equal(buffer.row(1).numpy(), cache[1:2])
    buffer.row(1).fill_with_zeros()
    cache[1] = 0
    np.testing.assert_array_equal(buffer.numpy(), cache)


@pytest.mark.parametrize(("source", "target", "count"), [(0, 5, 5), (6, 2, 4), (3, 0, 7), (1, 0, 9)])
def test_slots_of_a_row_are_copied_as_numpy_copies_them(
    device: Device, source: int, target: int, count: int
) -> None:
    """Apart, side by side, and over each other: one copy of CUDA's must not read what it has written."""
    cache = np.random.default_rng(0).standard_normal((3, 4, 10, 8)).astype(np.float16)
    buffer = upload_array(device, "a test", cache)
    buffer.copy_slots(1, source, target, count)
    cache[1, :, target : target + count] = cache[1, :, source : source + count].copy()
    np.testing.assert_array_equal(buffer.numpy(), cache)
