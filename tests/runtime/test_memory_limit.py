"""memory_limit counts what an encoder reads ahead and all calls that run at one time.

What is alive is measured where it is made: the vectors of results, the buffers of caches.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime import TextEncoder, TextGenerator, Translator
from planforge.runtime.activations import count_batch_bytes
from planforge.runtime.backends.ort_program import OrtProgram
from planforge.runtime.bundle.manifest import Axis, TensorSpec
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.decoding.state import Context
from planforge.runtime.encode.encoder import Outputs, count_section_bytes, split_into_sections
from planforge.runtime.encode.results import Features
from planforge.runtime.errors import MemoryLimitError
from planforge.runtime.memory_budget import MemoryBudget
from planforge.runtime.text.batching import TOKEN_BUDGET

from ..helpers.plans import PROMPT
from ..helpers.translation import SENTENCES


class Alive:
    """Counts bytes of arrays until they are collected.

    Attributes:
        most: that were alive at one time.
    """

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.lock = threading.RLock()

    def add(self, array: Any) -> None:
        with self.lock:
            self.now += array.nbytes
            self.most = max(self.most, self.now)
        weakref.finalize(array, self.take, array.nbytes)

    def take(self, count: int) -> None:
        with self.lock:
            self.now -= count


def of_results(monkeypatch: pytest.MonkeyPatch) -> Alive:
    """Measures the vectors of results, from when they are computed."""
    alive = Alive()
    make = Features.__init__

    def measured(result: Features, *arguments: Any, **named: Any) -> None:
        make(result, *arguments, **named)
        alive.add(result.vectors)

    monkeypatch.setattr(Features, "__init__", measured)
    return alive


def of_caches(monkeypatch: pytest.MonkeyPatch) -> Alive:
    """Measures what is allocated."""
    alive = Alive()
    allocate = OrtProgram.allocate

    def measured(*arguments: Any) -> Any:
        buffer = allocate(*arguments)
        alive.add(buffer.array)
        return buffer

    monkeypatch.setattr(OrtProgram, "allocate", measured)
    return alive


def test_a_limit_above_the_machines_memory_is_no_limit(demo_bundle: Path) -> None:
    with TextGenerator.load(demo_bundle, memory_limit=2**60) as model:
        assert model.generate(PROMPT, max_new_tokens=2).token_ids


def test_an_encoders_outputs_that_wait_for_their_turn_are_counted(
    head_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = head_bundle("classifier")
    # The first sixty have sixty lengths, each in a batch with later texts, whose outputs have to wait.
    texts = ["bread " * (1 + number % 60) for number in range(1000)]

    def lengths(model: TextEncoder) -> list[int]:
        return [len(features.vectors) for features in model.iterate("features", texts)]

    alive = of_results(monkeypatch)
    with TextEncoder.load(bundle) as model:
        expected = lengths(model)
        room = 600_000
        assert alive.most > room  # what waits at one time without a limit
        alive.most = 0
        model.encoder.budget = MemoryBudget(room)
        assert lengths(model) == expected
        assert 0 < alive.most <= room
        assert model.encoder.budget.count_held() == 0
        model.encoder.budget = MemoryBudget(100)
        with pytest.raises(
            MemoryLimitError,
            match=r"for 1 text of \d+ tokens with .* outputs; memory_limit is 0\.0 MB\. No text fits",
        ):
            lengths(model)


def test_an_encoders_iterator_holds_nothing_while_its_caller_has_the_turn(
    head_bundle: Callable[[str], Path],
) -> None:
    texts = ["bread " * (1 + number % 60) for number in range(60)]
    with TextEncoder.load(head_bundle("classifier")) as model:
        expected = [model.classify(text).label for text in texts]
        model.encoder.budget = MemoryBudget(600_000)
        for place, result in enumerate(model.iterate("classify", texts)):
            assert model.encoder.budget.count_held() == 0
            assert result.label == model.classify(texts[place]).label == expected[place]


def test_sections_hold_as_many_sequences_as_the_memory_allows() -> None:
    config = {"intermediate_size": 40, "hidden_size": 10, "num_attention_heads": 2}
    batch = Axis("batch", 1, 1, 8)
    tokens = Axis("tokens", 1, 8, 64)
    hidden = TensorSpec("h", "hidden.1", "float16", (batch, tokens, 10))
    logits = TensorSpec("l", "masked_lm", "float32", (Axis("rows", 1, 1, 8), 100))
    assert count_batch_bytes(config, 20, 10) == 4 * 20 * (3 * 40 + 9 * 10 + 2 * 2 * 10)
    assert count_section_bytes(config, Outputs([hidden]), 3, 10, 0) == 3 * 10 * 10 * 2 + count_batch_bytes(
        config, 30, 10
    )
    assert count_section_bytes(config, Outputs([logits]), 3, 10, 4) == 4 * 100 * 4 + count_batch_bytes(
        config, 30, 10
    )
    # Of an output that nobody asked for there is one batch's at a time.
    dropped = math.ceil(TOKEN_BUDGET / 10) * 10 * 10 * 2
    assert count_section_bytes(config, Outputs([], [hidden]), 500, 10, 0) == dropped + count_batch_bytes(
        config, TOKEN_BUDGET, 10
    )
    lengths = [10, 4, 30, 2, 2, 2]
    rows = [0] * 6
    room = count_section_bytes(config, Outputs([hidden]), 3, 10, 0)
    found = list(split_into_sections(config, Outputs([hidden]), lengths, rows, room))
    assert [list(section) for section, _ in found] == [[0, 1], [2], [3, 4, 5]]
    assert found[1][1] > room  # alone, and too much: who reserves it is refused
    assert list(split_into_sections(config, Outputs([hidden]), [], [], room)) == []


def small_limit(bundle: Path) -> tuple[int, int]:
    """A limit with room for a run of 1 x 40 tokens and half a cache more; and what its cache takes."""
    with TextGenerator.load(bundle, precision="fp32") as model:
        cache = count_cache_bytes(model.artifact, 1, 40)
        return model.decoder.budget.weight_bytes + model.decoder.count_bytes(1, 40) + cache // 2, cache


def answer(model: TextGenerator) -> tuple[int, ...]:
    prompt = model.tokenizer.encode(PROMPT)
    return model.generate(PROMPT, max_new_tokens=41 - len(prompt)).token_ids


def test_calls_at_one_time_share_the_limit(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, cache = small_limit(demo_bundle)
    with TextGenerator.load(demo_bundle, precision="fp32") as model:
        expected = answer(model)
    alive = of_caches(monkeypatch)
    with (
        TextGenerator.load(demo_bundle, precision="fp32", memory_limit=limit) as model,
        ThreadPoolExecutor(4) as pool,
    ):
        found = [pool.submit(answer, model) for _ in range(8)]
        assert [one.result(timeout=60) for one in found] == [expected] * 8
    assert alive.most == cache


def test_beams_share_the_limit(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, cache = small_limit(demo_bundle)
    alive = of_caches(monkeypatch)
    with TextGenerator.load(demo_bundle, precision="fp32", memory_limit=limit) as model:
        prompt = model.tokenizer.encode(PROMPT)
        with pytest.raises(MemoryLimitError, match="for a cache of 2 x 40 tokens"):
            model.generate(PROMPT, num_beams=2, max_new_tokens=41 - len(prompt))
        assert alive.most == 0
        assert model.generate([PROMPT] * 3, num_beams=2, max_new_tokens=8)
        assert 0 < alive.most <= cache * 3 // 2
        stream = model.stream(PROMPT, max_new_tokens=41 - len(prompt))
        next(stream)
        with pytest.raises(MemoryLimitError, match="that an unfinished call of this thread holds"):
            model.generate(PROMPT, num_beams=3, max_new_tokens=8)
        stream.close()


def test_a_model_with_a_limit_is_freed_without_close(demo_bundle: Path) -> None:
    model = TextGenerator.load(demo_bundle, memory_limit=2**40)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("bundle", "texts"), [("marian_bundle", SENTENCES[:2]), ("recurrent_bundle", ["sutskever", "cho"])]
)
def test_a_sources_memory_is_held_before_it_is_encoded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, bundle: str, texts: list[str]
) -> None:
    with Translator.load(request.getfixturevalue(bundle), memory_limit=2**40) as model:
        encode = model.encoder.encode
        budget = model.decoder.budget
        held: list[int] = []
        taken: list[int] = []

        def recording(sources: Sequence[Sequence[int]]) -> Context:
            held.append(budget.count_held())
            context = encode(sources)
            tokens = max(map(len, sources))
            kept = sum(buffer.numpy().nbytes for buffer in context.buffers.values())
            taken.append(kept + count_batch_bytes(model.encoder.config, len(sources) * tokens, tokens))
            return context

        monkeypatch.setattr(model.encoder, "encode", recording)
        model.translate(texts, num_beams=2, max_new_tokens=9, batch_size=2)
        rows = 2 * (2 if len(held) == 1 else 1)
        step = count_batch_bytes(model.decoder.config, rows, 9, "decoder")
        logits = 4 * rows * model.decoder.config["target_vocab_size"]
        assert step > 0
        assert held == [count + count_cache_bytes(model.artifact, rows, 9) + step + logits for count in taken]
        monkeypatch.setattr(model.encoder, "encode", fail)
        with pytest.raises(ZeroDivisionError):
            model.translate("hello")
        assert budget.count_held() == 0


def fail(sources: Sequence[Sequence[int]]) -> Context:
    raise ZeroDivisionError
