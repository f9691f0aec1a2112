"""How many CUDA graphs are captured, when, of what, and what else uses the GPU; on an emulated one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from planforge.exporter import export
from planforge.runtime import TextEncoder, TextGenerator, Translator
from planforge.runtime.backends import captured_step, token_choice
from planforge.runtime.backends.captured_step import CapturedGraphs
from planforge.runtime.backends.cuda_memory import TURNS, Device, Turns
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.cache_shapes import count_recent_slots
from planforge.runtime.decoding.slots import SharedSlots, make_slots
from planforge.runtime.decoding.static_cache import GroupQueryCache

from ...helpers.captures import PROMPTS, Answers, answer, count_captures, count_replays
from ...helpers.emulated_cuda import EmulatedCuda
from ...helpers.emulated_ort_cuda import GRAPH_BYTES, emulated_ort_cuda
from ...helpers.llamas import WINDOW, shallow_llama
from ...helpers.old_graphs import rewrite_ort_graphs
from ...helpers.patience import PATIENCE

UNKNOWN = """<ir_version: 8, opset_import: ["" : 17]>
graph (float[rows, vocabulary] logits) => (float[rows, count] found) { found = NoSuchNode (logits) }"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured") / "bundle"
    export("gpt2-demo", folder, target=["cuda"], precision=["fp16"], verify="quick")
    return folder


@pytest.fixture
def cuda() -> Iterator[EmulatedCuda]:
    with emulated_ort_cuda() as cuda:
        yield cuda


def test_the_number_of_graphs_is_bounded(
    bundle: Path, cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        expected = [model.generate(PROMPTS[:n], max_new_tokens=5) for n in (1, 2, 3)]
    monkeypatch.setattr(captured_step, "MAX_GRAPHS", 1)
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        before = count_captures(cuda)
        found = [model.generate(PROMPTS[:n], max_new_tokens=5) for n in (1, 2, 3)]
        assert count_captures(cuda) - before == 2  # the decoder's and the choice's
        assert [r.levelname for r in caplog.records if "and no more" in r.getMessage()] == ["WARNING"] * 2
    assert [[one.token_ids for one in each] for each in found] == [
        [one.token_ids for one in each] for each in expected
    ]


def test_each_thread_captures_its_own(bundle: Path, cuda: EmulatedCuda) -> None:
    found: dict[int, Answers] = {}
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        expected = answer(model)
        captures = count_captures(cuda)
        threads = [threading.Thread(target=lambda i=i: found.update({i: answer(model)})) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(found.values()) == [expected] * 3
        assert count_captures(cuda) > captures


def test_two_models_in_two_threads(bundle: Path, cuda: EmulatedCuda) -> None:
    """A capture of one fails where the other calls CUDA meanwhile."""
    with TextGenerator.load(bundle, backend="ort-cpu", precision="fp16") as model:
        expected = answer(model)
    found: list[Answers] = []
    with (
        TextGenerator.load(bundle, backend="ort-cuda") as one,
        TextGenerator.load(bundle, backend="ort-cuda") as other,
    ):
        threads = [threading.Thread(target=lambda m=m: found.append(answer(m))) for m in (one, other) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [expected] * 4


def test_who_captures_waits_for_nobody_and_lets_no_turn_begin() -> None:
    turns = Turns()
    seen: list[str] = []

    def take() -> None:
        with turns.take():
            seen.append("taken")

    def try_alone() -> None:
        with turns.try_alone() as is_alone:
            seen.append(f"alone: {is_alone}")

    def in_another_thread(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work)
        thread.start()
        return thread

    with turns.take():
        in_another_thread(try_alone).join(PATIENCE)
        with turns.try_alone() as is_alone:
            assert is_alone
            in_another_thread(try_alone).join(PATIENCE)
            waiting = in_another_thread(take)
            waiting.join(0.05)  # it goes on waiting however long this is
            with turns.take():
                seen.append("nested")
        waiting.join(PATIENCE)
    in_another_thread(try_alone).join(PATIENCE)
    assert seen == ["alone: False", "alone: False", "nested", "taken", "alone: True"]
    assert not turns.depths and turns.alone is None


def test_a_device_is_opened_in_a_turn(cuda: EmulatedCuda) -> None:
    found: list[object] = []
    with TURNS.try_alone() as is_alone, cuda.capturing():
        assert is_alone
        opening = threading.Thread(target=lambda: found.append(Device()))
        opening.start()
        opening.join(0.05)  # it goes on waiting however long this is; a call would be an error in its thread
        assert not found
    opening.join(PATIENCE)
    assert len(found) == 1


def test_while_another_thread_has_a_turn_a_step_runs_without(bundle: Path, cuda: EmulatedCuda) -> None:
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        expected = answer(model)
    captures = count_captures(cuda)
    taken, done = threading.Event(), threading.Event()

    def keep_a_turn() -> None:
        with TURNS.take():
            taken.set()
            done.wait(PATIENCE)

    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        other = threading.Thread(target=keep_a_turn)
        other.start()
        taken.wait(PATIENCE)
        assert answer(model) == expected
        assert count_captures(cuda) == captures
        done.set()
        other.join(PATIENCE)
        assert answer(model) == expected
        assert count_captures(cuda) > captures


def test_a_number_is_never_given_twice(
    bundle: Path, cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupt leaves of a capture must not be replayed for another batch."""
    with TextGenerator.load(bundle, backend="ort-cpu", precision="fp16") as model:
        expected = answer(model)
    add = CapturedGraphs.add

    def interrupt(*arguments: Any) -> None:
        monkeypatch.setattr(CapturedGraphs, "add", add)
        raise KeyboardInterrupt

    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        monkeypatch.setattr(CapturedGraphs, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            answer(model, 2)
        assert answer(model) == expected
        assert answer(model, 2) == expected[:2]
        assert count_replays(cuda) > 20


def test_a_model_that_is_dropped_is_gone_without_the_garbage_collector(
    bundle: Path, cuda: EmulatedCuda
) -> None:
    gc.collect()
    gc.disable()
    try:
        model = TextGenerator.load(bundle, backend="ort-cuda")
        answer(model)
        program: Any = model.decoder.program
        gone = [weakref.ref(each) for each in (program, program.choice.step.program)]
        del program
        del model
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_nothing_is_widened_under_a_memory_limit(
    bundle: Path, head_bundle: Callable[[str], Path], marian_bundle: Path, cuda: EmulatedCuda
) -> None:
    """A limit counts with what is asked for."""
    for limit, capacity, width, shape in ((None, 192, 6, (3, 8)), (10**9, 130, 5, None)):
        with TextGenerator.load(bundle, backend="ort-cuda", memory_limit=limit) as model:
            assert model.decoder.widen(1, 130) == capacity
            assert model.decoder.widen(1, 130, 150) == min(capacity, 150)
            rows = answer(model)
            assert len(rows) == 3
        with Translator.load(marian_bundle, backend="ort-cuda", memory_limit=limit) as other:
            assert other.encoder.find_width([[1] * 5]) == width
        with TextEncoder.load(
            head_bundle("classifier"), backend="ort-cuda", precision="fp16", memory_limit=limit
        ) as encoder:
            assert encoder.encoder.find_captured_shape(3, 7) == shape


def test_what_is_asked_for_is_what_a_limit_counts(bundle: Path, cuda: EmulatedCuda) -> None:
    with TextGenerator.load(bundle, backend="ort-cpu", precision="fp16") as model:
        prompt = len(model.tokenizer.encode(PROMPTS[0]))
        needed = model.decoder.count_bytes(1, prompt + 130 - 1)
        expected = model.generate(PROMPTS[0], max_new_tokens=130).token_ids
        limit = Bundle.open(bundle).manifest.count_weight_bytes(model.artifact) + needed
    with TextGenerator.load(bundle, backend="ort-cuda", memory_limit=limit) as model:
        assert model.generate(PROMPTS[0], max_new_tokens=130).token_ids == expected


def test_encoders_are_padded_to_a_captured_shape_where_little_is_added(
    head_bundle: Callable[[str], Path], cuda: EmulatedCuda
) -> None:
    with TextEncoder.load(head_bundle("classifier"), backend="ort-cuda", precision="fp16") as model:
        find = model.encoder.find_captured_shape
        longest = model.encoder.artifact.axis("tokens").max
        most = model.encoder.max_batch
        assert most >= 16 and longest >= 64
        assert find(5, 5) == (6, 6) and find(7, 49) == (8, 64)  # 512 tokens with padding at most
        assert find(16, 64) == (16, 64)
        assert find(15, 60) == (16, 64) and find(16, 52) == (16, 64)  # 1.14 and 1.23 times as many
        assert find(16, 51) is None and find(13, 63) is None  # 1.255 and 1.2503 times


def test_none_is_captured_where_the_gpu_is_nearly_full(cuda: EmulatedCuda) -> None:
    """What only this process could use again counts as taken."""
    device = Device()
    device.allocate(10**8, "a buffer")  # and give it back
    free = cuda.memory - cuda.used
    assert (device.count_free(), device.free_memory()) == (free, free + 10**8)
    graphs = CapturedGraphs("a graph")
    for wanted in (False, True):  # a step must come again
        assert graphs.is_due("a step", device) is wanted
    cuda.memory -= free - captured_step.MIN_FREE + 1
    assert not graphs.is_due("a step", device)


def test_what_was_captured_is_told(bundle: Path, cuda: EmulatedCuda) -> None:
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        placement = model.placements[model.artifact.id]
        assert "captured" not in str(placement) and placement.to_json()["captured"] == 0
        answer(model, 1)
        assert str(placement).endswith("; 1 CUDA graph captured, 0.0 MB")
        assert placement.to_json()["captured_bytes"] == GRAPH_BYTES
        answer(model)
        graphs = placement.graphs
        graphs.byte_count = 1_234_567
        assert str(placement).endswith(f"; {graphs.count} CUDA graphs captured, 1.2 MB") and graphs.count > 1
        told = placement.to_json()
        assert (told["captured"], told["captured_bytes"]) == (graphs.count, 1_234_567)


def test_candidates_are_chosen_on_the_host_where_the_graph_cannot_be_opened(
    bundle: Path,
    cuda: EmulatedCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "seed": 3}
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        expected = [answer(model), answer(model, **options)]
    onnx.save(onnx.parser.parse_model(UNKNOWN), tmp_path / "candidates.onnx")
    monkeypatch.setattr(token_choice, "GRAPHS", tmp_path)
    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        assert [answer(model), answer(model, **options)] == expected
    said = [r.levelname for r in caplog.records if "so all logits leave it" in r.getMessage()]
    assert said == ["WARNING"]


def test_results_of_unknown_shapes_are_computed_without_graphs(
    bundle: Path, cuda: EmulatedCuda, tmp_path: Path
) -> None:
    def forget(_: Any, graph: onnx.GraphProto) -> None:
        (logits,) = (value for value in graph.output if value.name == "logits")
        logits.type.tensor_type.shape.dim[0].dim_param = "unknown"

    with TextGenerator.load(bundle, backend="ort-cuda") as model:
        expected = answer(model)
    captures = count_captures(cuda)
    with TextGenerator.load(rewrite_ort_graphs(bundle, tmp_path / "b", forget), backend="ort-cuda") as model:
        assert not model.decoder.captures_steps
        assert answer(model) == expected
    assert count_captures(cuda) == captures


def test_alignments_have_the_lengths_of_their_texts(tmp_path: Path, cuda: EmulatedCuda) -> None:
    """Though sources are padded to the lengths that a graph is captured for."""
    wanted: dict[str, Any] = {"precision": ["fp16"], "outputs": ["cross_attentions"]}
    export("transformer-demo", tmp_path / "b", target=["cuda"], verify="quick", **wanted)
    text = "the 3rd of May, 1998"
    found = []
    for backend in ("ort-cpu", "ort-cuda"):
        with Translator.load(tmp_path / "b", backend=backend, precision="fp16") as model:
            found.append(model.align(text))
            length = len(found[-1].source)
            if backend == "ort-cuda":
                assert model.encoder.find_width([[1] * length]) > length
    assert found[1].weights.shape[2:] == (len(found[0].target), length)
    np.testing.assert_allclose(found[1].weights, found[0].weights, atol=1e-3)


def test_a_row_that_keeps_a_prompt_is_not_computed_along_where_that_drops_it(
    tmp_path: Path, cuda: EmulatedCuda
) -> None:
    shallow_llama(tmp_path / "checkpoint", "gemma 3", max_position_embeddings=1024)
    export(tmp_path / "checkpoint", tmp_path / "b", target=["cuda"], precision=["fp16"], verify="quick")
    with TextGenerator.load(tmp_path / "b", backend="ort-cuda", precision="fp16") as model:
        slots = make_slots(model.decoder, 6, 0, 1024)
        assert isinstance(slots, SharedSlots) and isinstance(slots.run.cache, GroupQueryCache)
        acquired = [slots.acquire([1, 2, 3]) for _ in range(6)]
        taken = [each[0] for each in acquired if each is not None]
        for slot in taken[:5]:
            slots.prefill(slot, [1, 2])
        full = count_recent_slots(WINDOW)
        slots.prefill(taken[5], [3] * full)
        slots.release(taken[5])
        slots.decode(taken[:5], [4] * 5)
        assert slots.run.cache.starts.tolist() == [0] * 6 and slots.run.find_kept(5, 2) == 2
