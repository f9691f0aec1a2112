"""Steps that ONNX Runtime captures in CUDA graphs, on an emulated GPU: as on the CPU, with few captures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export
from planforge.runtime import ImageGenerator, TextEncoder, TextGenerator, Translator
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.backends.captured_step import CapturedStep
from planforge.runtime.backends.ort_cuda_backend import OrtCudaProgram
from planforge.runtime.decoding.static_cache import GroupQueryCache

from ...helpers.captures import PROMPTS, answer, count_captures, count_replays
from ...helpers.emulated_cuda import EmulatedCuda
from ...helpers.emulated_ort_cuda import emulated_ort_cuda
from ...helpers.llamas import WINDOW, shallow_llama
from ...helpers.old_graphs import compute_last_slots_on_the_cpu


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured") / "bundle"
    export("gpt2-demo", folder, target=["cuda"], precision=["fp16"], verify="quick")
    return folder


@pytest.fixture
def cuda() -> Iterator[EmulatedCuda]:
    with emulated_ort_cuda() as cuda:
        yield cuda


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_k": 40, "seed": 3},
    {"temperature": 0.9, "seed": 3},
    {"repetition_penalty": 1.2},
    {"num_beams": 3},
    {"logprobs": True, "top_logprobs": 3},
]


@pytest.mark.parametrize("options", KINDS, ids=lambda options: ",".join(options) or "greedy")
def test_answers_are_those_of_the_cpu_and_few_graphs_are_captured(
    options: dict[str, Any], bundle: Path, cuda: EmulatedCuda
) -> None:
    with TextGenerator.load(bundle, backend="ort-cpu", precision="fp16") as model:
        expected = answer(model, **options)
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        assert answer(model, **options) == expected
        assert count_replays(cuda) >= 18  # of 19 steps of one token, the first of which runs without
        assert answer(model, **options) == expected  # memory may come in another order once
        captures = count_captures(cuda)
        for _ in range(3):
            assert answer(model, **options) == expected
        assert count_captures(cuda) == captures <= 4  # a decoder's and a choice's, for two orders of memory


def test_logits_stay_on_the_gpu_where_candidates_are_enough(bundle: Path, cuda: EmulatedCuda) -> None:
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        vocabulary = model.decoder.artifact.output("logits").axes[-1]
        for options in KINDS[:2]:
            answer(model, **options)
            before = cuda.downloaded
            answer(model, **options)
            # A step's logits of three rows, candidates and their ids, and a log-sum.
            assert cuda.downloaded - before == 20 * 3 * 4 * (2 * 64 + 1) < 20 * 3 * 4 * int(str(vocabulary))


def test_one_row_fetches_its_logits(bundle: Path, cuda: EmulatedCuda) -> None:
    """Which takes less time than choosing on the GPU."""
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        vocabulary = int(str(model.decoder.artifact.output("logits").axes[-1]))
        for options in (*KINDS[:2], {"speculative": "prompt-lookup"}):
            before = cuda.downloaded
            answer(model, 1, **options)
            assert cuda.downloaded - before >= 10 * 4 * vocabulary
        assert len(cuda.sessions) == 1  # none that chooses


def test_lengths_within_a_bucket_share_a_graph(bundle: Path, cuda: EmulatedCuda) -> None:
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        for count in range(130, 180, 7):
            model.generate(PROMPTS[0], max_new_tokens=count)
        assert count_captures(cuda) <= 2  # for two orders of memory


def test_a_shape_that_comes_once_is_not_captured(bundle: Path, cuda: EmulatedCuda) -> None:
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        model.generate(PROMPTS[0], max_new_tokens=2)
        assert not count_captures(cuda)
        model.generate(PROMPTS[0], max_new_tokens=2)
        assert count_captures(cuda) == 1


def test_requests_join_and_leave(bundle: Path, cuda: EmulatedCuda) -> None:
    prompts = [*PROMPTS, "God said", "the king of", "O my God", "Behold"]
    with TextGenerator.load(bundle, backend="ort-cpu", precision="fp16") as model:
        expected = [model.generate(p, max_new_tokens=4 + 3 * i).token_ids for i, p in enumerate(prompts)]
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        for _ in range(2):
            waiting = [model.submit(p, max_new_tokens=4 + 3 * i) for i, p in enumerate(prompts)]
            assert [one.result().token_ids for one in waiting] == expected
        # The longest request alone has 21 steps, in each round; a step of 1, 2, 3, 4, 6, 8 rows comes once
        # without a graph, and again where the logits' memory has grown meanwhile.
        assert count_replays(cuda) >= 2 * 21 - 2 * 6
        assert count_captures(cuda) <= 2 * 6


@pytest.mark.parametrize("name", ["llama-demo", "transformer-demo"])
def test_other_decoders(name: str, tmp_path: Path, cuda: EmulatedCuda) -> None:
    export(name, tmp_path / "b", target=["cuda"], precision=["fp16"], verify="quick")
    found = {}
    for backend in ("ort-cpu", "ort-cuda"):
        if name == "llama-demo":
            with TextGenerator.load(tmp_path / "b", backend=backend, precision="fp16") as model:
                long = model.generate(PROMPTS[1] * 40, max_new_tokens=9)
                found[backend] = [*answer(model), long.token_ids]
        else:
            with Translator.load(tmp_path / "b", backend=backend, precision="fp16") as translator:
                texts = ["the 3rd of May, 1998", "May 4, 2001", "12/10/1975"]
                beams = translator.translate(texts, num_beams=3)
                found[backend] = [one.token_ids for one in [*translator.translate(texts), *beams]]
    assert found["ort-cuda"] == found["ort-cpu"]
    assert count_replays(cuda) > 20


def test_windows_move_under_a_captured_step(tmp_path: Path, cuda: EmulatedCuda) -> None:
    """Of layers that see a window the newest slots are kept, and moved together when they are full."""
    shallow_llama(tmp_path / "checkpoint", "gemma 3", max_position_embeddings=512)
    export(tmp_path / "checkpoint", tmp_path / "b", target=["cuda"], precision=["fp16"], verify="quick")
    prompt = PROMPTS[1] * 30
    found = []
    for backend in ("ort-cpu", "ort-cuda"):
        with TextGenerator.load(tmp_path / "b", backend=backend, precision="fp16") as model:
            assert model.artifact.window == WINDOW
            found.append(model.generate(prompt, max_new_tokens=100, ignore_eos=True).token_ids)
    assert found[1] == found[0] and len(found[0]) == 100
    assert count_replays(cuda) >= 98  # of 99 steps, the first of which runs without


def test_encoders_capture_buckets(head_bundle: Callable[[str], Path], cuda: EmulatedCuda) -> None:
    folder = head_bundle("classifier")
    texts = ["bread", "a bird can fly", "the baker sells bread and the plane can not fly"]
    texts += [" ".join(texts[1:] * count) for count in (1, 2)]
    with TextEncoder.load(folder, backend="ort-cpu", precision="fp16") as model:
        expected = model.embed(texts)
    with TextEncoder.load(folder, backend="ort-cuda", precision="fp16") as model:
        for text, vector in zip(texts, expected, strict=True):
            np.testing.assert_allclose(model.embed(text), vector, atol=1e-3)
        for count in range(1, 6):
            np.testing.assert_allclose(model.embed(texts[:count]), expected[:count], atol=1e-3)
        for count in range(1, 6):  # memory that grew for the last ones has moved
            model.embed(texts[:count])
        captures = count_captures(cuda)
        for count in range(1, 6):
            model.embed(texts[:count])
        assert count_captures(cuda) == captures <= 16


def test_a_capture_that_fails_is_said_and_not_tried_again(
    bundle: Path, cuda: EmulatedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "planforge")
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        expected = answer(model)
    cuda.fails_to_capture = True
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        before = count_captures(cuda)
        assert answer(model) == expected
        assert count_captures(cuda) == before
    assert "no CUDA graph can be captured of it, so each kernel is launched" in caplog.text


def test_a_graph_that_needs_what_the_cpu_computes_is_not_captured(
    bundle: Path, cuda: EmulatedCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As bundles of older versions do for the last slots of a step."""
    caplog.set_level(logging.WARNING, "planforge")
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        expected = answer(model)
    older = compute_last_slots_on_the_cpu(bundle, tmp_path / "older")
    before = count_captures(cuda)
    with TextGenerator.load(older, backend="ort-cuda") as model:
        assert answer(model) == expected
        assert not model.decoder.captures_steps
    assert count_captures(cuda) - before == 1  # of the choice
    assert "cannot use the graph capture feature" in caplog.text


FAULTS = ["past_lengths", "input_ids", "a total that is too small", "a stale length"]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_by_selftest(
    fault: str, bundle: Path, cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CapturedStep.run
    place = GroupQueryCache.place
    stale: dict[int, Any] = {}

    def skip(step: CapturedStep, inputs: Any, number: int) -> Any:
        kept = {
            name: array for name, array in inputs.items() if name != fault or step.program.graphs.count == 0
        }
        return run(step, kept, number)

    def repeat(step: CapturedStep, inputs: Any, number: int) -> Any:
        if "past_lengths" in inputs:
            length = stale.setdefault(id(step), inputs["past_lengths"])
            inputs = {**inputs, "past_lengths": length}
        return run(step, inputs, number)

    def shorten(cache: GroupQueryCache, lengths: Any, width: int, first: int = 0) -> Any:
        placed = place(cache, lengths, width, first)
        if width == 1:
            placed["total_sequence_length"] = np.array(2, np.int32)
        return placed

    def passes() -> bool:
        try:
            return selftest(bundle, backend="ort-cuda").passed
        except Exception as error:
            assert "seqlens_k" in str(error)
            return False

    assert passes()
    if fault == FAULTS[2]:
        monkeypatch.setattr(GroupQueryCache, "place", shorten)
    else:
        monkeypatch.setattr(CapturedStep, "run", repeat if fault == FAULTS[3] else skip)
    assert not passes()


def test_steps_of_a_picture_are_one_graph_for_each_size(
    picture_bundle: Path, tmp_path: Path, cuda: EmulatedCuda
) -> None:
    export(picture_bundle.parent / "checkpoint", tmp_path / "b", target=["cuda"], verify=False)
    with ImageGenerator.load(tmp_path / "b", backend="ort-cpu", precision="fp32") as model:
        expected = {size: draw(model, size) for size in (32, 40)}
    with ImageGenerator.load(tmp_path / "b", backend="ort-cuda", precision="fp32") as model:
        for size, pixels in expected.items():
            np.testing.assert_array_equal(draw(model, size), pixels)
        unet = model.parts["unet"].program
        assert isinstance(unet, OrtCudaProgram)
        assert unet.graphs.count == 2
        replays = count_replays(cuda)
        for size, pixels in expected.items():
            np.testing.assert_array_equal(draw(model, size), pixels)
        assert unet.graphs.count == 2
        assert count_replays(cuda) - replays >= 2 * 6


def draw(model: ImageGenerator, size: int) -> Any:
    return model.generate("one", steps=6, seed=1, height=size, width=size)[0].pixels
