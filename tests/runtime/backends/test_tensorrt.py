"""Plans on an emulated GPU: the same results as ONNX Runtime's, and what is said where they cannot run.

The plans are built by the real TensorRT-RTX; in place of their kernels ONNX Runtime executes their graphs.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from planforge.exporter import build
from planforge.exporter.tensorrt.build import Options
from planforge.runtime import TextEncoder, TextGenerator, Translator, load
from planforge.runtime.backends import cuda_memory, tensorrt_backend
from planforge.runtime.backends.backend import LoadRequest
from planforge.runtime.backends.tensorrt_program import TensorRtProgram
from planforge.runtime.bundle.artifact import Artifact
from planforge.runtime.bundle.bundle import Bundle, compute_sha256
from planforge.runtime.bundle.plan import make_network_name
from planforge.runtime.errors import InputError, ManifestError, PlanForgeError

from ...helpers.emulated_cuda import EmulatedCuda, Status
from ...helpers.emulated_gpu import EmulatedRuntimeCache, emulated_gpu
from ...helpers.plans import PROMPT, PROMPTS, answers, of_tensorrt, only, with_manifest
from ...helpers.tensorrt_surface import VERSIONS


@pytest.fixture(scope="module")
def portable_plan(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a plan whose cache grows."""
    from planforge.exporter.tensorrt.build import PlanRequest, build_plan
    from planforge.exporter.tensorrt.profiles import derive_profiles

    folder = Path(shutil.copytree(demo_bundle, tmp_path_factory.mktemp("portable") / "bundle"))
    artifact = Bundle.open(folder).manifest.artifact("decoder.portable.fp16")
    out = folder / "plans/growing.plan"
    profiles = derive_profiles(artifact)
    name = named(folder, artifact)
    plan = build_plan(PlanRequest(folder / artifact.file, artifact, profiles, out, sms=["sm86"], name=name))

    def change(value: dict[str, Any]) -> None:
        entry = {"sha256": compute_sha256(out), "bytes": out.stat().st_size}
        value["files"]["plans/growing.plan"] = entry
        value["plans"] = [plan.to_json()]

    return with_manifest(folder, change)


def named(folder: Path, artifact: Artifact) -> str:
    """What a plan of a bundle's graph must be called."""
    files = Bundle.open(folder).manifest.files
    return make_network_name(artifact, {name: entry.sha256 for name, entry in files.items()})


@pytest.fixture
def tensorrt_bundle(own_bundle: Path) -> Path:
    return with_manifest(own_bundle, of_tensorrt)


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


@pytest.fixture(scope="module")
def grown(portable_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """The answers of the graph whose cache grows, run by ONNX Runtime."""
    folder = tmp_path_factory.mktemp("grown") / "bundle"
    return answers(only(portable_plan, folder, "decoder.portable.fp16"), "ort-cpu")


def test_a_growing_cache_keeps_two_sets_of_buffers(portable_plan: Path, grown: list[tuple[int, ...]]) -> None:
    with emulated_gpu(portable_plan) as cuda:
        assert answers(portable_plan, "tensorrt-rtx") == grown
        assert cuda.used == 0


@pytest.mark.parametrize("option", [{"speculative": "prompt-lookup"}, {"reuse_prompt": True}])
def test_drafts_and_reused_prompts(
    option: dict[str, Any], demo_bundle: Path, expected: list[tuple[int, ...]]
) -> None:
    with emulated_gpu(demo_bundle), TextGenerator.load(demo_bundle, backend="tensorrt-rtx") as model:
        for _ in range(2):
            found = model.generate(PROMPTS, max_new_tokens=24, **option)
            assert [one.token_ids for one in found] == expected[:3]


def test_scores(demo_bundle: Path, tmp_path: Path) -> None:
    with TextGenerator.load(
        only(demo_bundle, tmp_path / "bundle", "decoder.inplace.fp16"), backend="ort-cpu"
    ) as model:
        meant = model.score(PROMPT * 30).logprobs
    with emulated_gpu(demo_bundle), TextGenerator.load(demo_bundle, backend="tensorrt-rtx") as model:
        assert model.score(PROMPT * 30).logprobs == pytest.approx(meant, abs=1e-6)


def test_translation_with_beams(marian_bundle: Path, tmp_path: Path) -> None:
    from ...helpers.translation import SENTENCES

    sources = SENTENCES[:6]
    options: list[dict[str, Any]] = [{}, {"num_beams": 4}]
    same = only(marian_bundle, tmp_path / "bundle", "encoder.portable.fp16", "decoder.inplace.fp16")
    with Translator.load(same, backend="ort-cpu") as model:
        meant = [model.translate(sources, max_new_tokens=12, **option) for option in options]
    assert len({one.token_ids for one in meant[0]}) > 3
    with emulated_gpu(marian_bundle) as cuda, Translator.load(marian_bundle, backend="tensorrt-rtx") as model:
        found = [model.translate(sources, max_new_tokens=12, **option) for option in options]
        assert "cudaMemcpy2DAsync" in cuda.calls  # beams move rows on the device
    assert [[one.token_ids for one in batch] for batch in found] == [
        [one.token_ids for one in batch] for batch in meant
    ]


def test_embeddings_and_labels(head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(head_bundle("classifier"), tmp_path / "bundle"))
    build(bundle, target="rtx", sms=["sm86"], limits={"batch": 4})
    texts = ["a bird can fly", "the baker sells bread and the plane can not fly", "bread", "plane"] * 3
    with TextEncoder.load(bundle, backend="ort-cpu", precision="fp16") as model:
        meant = model.embed(texts)
        labels = model.classify(texts)
    with emulated_gpu(bundle), TextEncoder.load(bundle, backend="tensorrt-rtx") as model:
        assert model.encoder.max_batch == 4
        np.testing.assert_allclose(model.embed(texts), meant, atol=1e-6)
        assert [one.label for one in model.classify(texts)] == [one.label for one in labels]
        model.embed(texts[0])


def test_an_encoder_runs_in_the_profile_that_is_nearest(
    head_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(head_bundle("classifier"), tmp_path / "bundle"))
    texts = ["the baker sells bread and the plane can not fly"] * 8
    build(bundle, target="rtx", sms=["sm86"])
    with emulated_gpu(bundle), TextEncoder.load(bundle, backend="tensorrt-rtx") as model:
        program = model.encoder.program
        assert isinstance(program, TensorRtProgram)
        model.embed(texts[0])
        assert set(program.states) == {0}
        model.embed(texts)
        assert set(program.states) == {0, 1}
    build(bundle, target="rtx", sms=["sm86"], options=Options(opt=[{"batch": 8}, {"batch": 1}]))
    with emulated_gpu(bundle), TextEncoder.load(bundle, backend="tensorrt-rtx") as model:
        program = model.encoder.program
        assert isinstance(program, TensorRtProgram)
        model.embed(texts[0])
        assert set(program.states) == {1}


def test_a_smaller_plan_limits_the_context(own_bundle: Path) -> None:
    large = Bundle.open(own_bundle).manifest
    build(own_bundle, target="rtx", limits={"batch": 2, "length": 40})
    with emulated_gpu(own_bundle):
        with TextGenerator.load(own_bundle, backend="tensorrt-rtx", max_length=40) as model:
            assert (model.max_length, model.max_batch) == (40, 2)
            assert model.generate(PROMPT, max_new_tokens=100).finish_reason == "context"
            assert len(model.generate(PROMPTS, max_new_tokens=3)) == 3
        for max_length in (None, 41):  # the large one is still there
            with TextGenerator.load(own_bundle, backend="tensorrt-rtx", max_length=max_length) as model:
                assert (model.max_length, model.max_batch) == (max_length or large.max_length, 8)

    def drop_the_large_one(value: dict[str, Any]) -> None:
        del value["plans"][0]

    with emulated_gpu(with_manifest(own_bundle, drop_the_large_one)):
        for backend in ("tensorrt-rtx", "auto"):
            with pytest.raises(InputError, match="max_length=41 is more than the 40 that the plan was built"):
                load(own_bundle, backend=backend, max_length=41)


def test_steps_that_repeat_are_captured_once(tensorrt_bundle: Path) -> None:
    with (
        emulated_gpu(tensorrt_bundle, "tensorrt") as cuda,
        TextGenerator.load(tensorrt_bundle, backend="tensorrt") as model,
    ):
        first = model.generate(PROMPT, max_new_tokens=20)
        launches = cuda.graph_launches
        captured = cuda.calls.count("cudaStreamBeginCapture")
        assert (launches, captured) == (18, 1)  # prefill, a first step, and the others by the graph
        for captured in (2, 2):
            # The next call's cache lies where the last one's did; a prefill that is repeated is captured too.
            launches += 20
            assert model.generate(PROMPT, max_new_tokens=20).token_ids == first.token_ids
            assert (cuda.graph_launches, cuda.calls.count("cudaStreamBeginCapture")) == (launches, captured)


def test_a_step_that_cannot_be_captured_is_launched(
    tensorrt_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planforge")
    with (
        emulated_gpu(tensorrt_bundle, "tensorrt") as cuda,
        TextGenerator.load(tensorrt_bundle, backend="tensorrt") as model,
    ):
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
        with TextGenerator.load(own_bundle, backend="tensorrt-rtx") as model:
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
    with TextGenerator.load(own_bundle, backend="ort-cpu") as model:  # a reader ignores it
        model.generate(PROMPT, max_new_tokens=1)


@pytest.mark.parametrize("release", VERSIONS)
def test_every_release_of_tensorrt_is_called_by_the_names_that_it_has(
    release: str, portable_plan: Path, grown: list[tuple[int, ...]], tmp_path: Path
) -> None:
    def of_release(value: dict[str, Any]) -> None:
        of_tensorrt(value)
        value["plans"][0]["version"] = f"{release}.0.1"

    bundle = with_manifest(Path(shutil.copytree(portable_plan, tmp_path / "bundle")), of_release)
    with emulated_gpu(bundle, "tensorrt") as cuda:
        with TextGenerator.load(bundle, backend="tensorrt") as model:
            found = model.generate(PROMPTS, max_new_tokens=24)
        assert cuda.used == 0
    assert [one.token_ids for one in found] == grown[: len(PROMPTS)]


def test_only_steps_whose_shapes_repeat_wait_for_kernels_of_their_own(demo_bundle: Path) -> None:
    with emulated_gpu(demo_bundle), TextGenerator.load(demo_bundle, backend="tensorrt-rtx") as model:
        model.generate(PROMPT, max_new_tokens=3)
        program: Any = model.decoder.program
        states = program.states
        names = [profile["name"] for profile in Bundle.open(demo_bundle).manifest.plans[0].profiles]
        found = {names[index]: state.context.strategy for index, state in states.items()}
    assert found == {"prefill": "LAZY", "decode": "EAGER"}


# Every line counts


PROGRAM = "backends/tensorrt_program.py"
CACHE = "decoding/static_cache.py"
LINES = [
    (PROGRAM, "            self.device.synchronise()\n            return {name", "            return {name"),
    (PROGRAM, "if not state.context.set_input_shape(name, shape):", "if False:"),
    (PROGRAM, "if not state.context.set_tensor_address(name, address):", "if False:"),
    (PROGRAM, "self.staging[name].upload(sizes[name])", "pass"),
    (PROGRAM, "self.staging[name].download(sizes[name])", "pass"),
    (
        PROGRAM,
        "return make_buffer(self.device, name, shape, self.find_dtype(name))",
        "return DeviceBuffer(self.device.allocate(2 * int(np.prod(shape)), name), shape, np.dtype('e'))",
    ),
    (PROGRAM, "            self.set_shapes(state, step.shapes)\n", ""),
    (PROGRAM, "            state.forget()\n            self.set", "            self.set"),
    (PROGRAM, "(*addresses.values(), *pinned)", "()"),
    (PROGRAM, "context.set_device_memory(self.activations.address, self.activations.size)", "pass"),
    (PROGRAM, "size = max(count_activation_bytes(", "size = min(count_activation_bytes("),
    (PROGRAM, "Step(profile, shapes, wanted,", "Step(0, (), wanted,"),
    (PROGRAM, ".on_host(array.shape)[...] = array", ".on_host(array.shape)"),
    (CACHE, "{spec.name: used, out.name: used}", "{spec.name: used}"),
    (CACHE, "{spec.name: used, out.name: used}", "{spec.name: used, out.name: self.slots[0]}"),
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
        caches = sys.modules["planforge.runtime.decoding.caches"]
        monkeypatch.setitem(caches.LAYOUTS, "inplace", module.StaticCache)
    else:
        monkeypatch.setattr(tensorrt_backend, "TensorRtProgram", module.TensorRtProgram)


def test_the_unchanged_source_run_in_that_way_gives_the_same(
    tensorrt_bundle: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, line in (
        (PROGRAM, "class TensorRtProgram(DeviceProgram):"),
        (CACHE, "class StaticCache(RowState):"),
    ):
        replace_line(file, line, line, monkeypatch)
    with emulated_gpu(tensorrt_bundle, "tensorrt"):
        assert answers(tensorrt_bundle, "tensorrt") == expected


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
        backend = tensorrt_backend.TensorRtBackend("tensorrt-rtx", opened, LoadRequest())
        first, again = (backend.load_weight(opened, plan.weights[0]) for _ in range(2))
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
        load(own_bundle, backend="tensorrt-rtx")
