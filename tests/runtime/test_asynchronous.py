"""The models for an event loop: they give what the others give, and end requests that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime import (
    AsyncImageGenerator,
    AsyncTextEncoder,
    AsyncTextGenerator,
    AsyncTranslator,
    ClosedError,
    ImageGenerator,
    InputError,
    TextGenerator,
    Translator,
)
from planforge.runtime.asynchronous.loop_calls import get_loop_calls
from planforge.runtime.asynchronous.model import run_in_thread

from ..helpers.event_loop import run, wait_until
from ..helpers.patience import PATIENCE
from ..helpers.results import assert_equal
from ..helpers.serving import HeldTokens

TEXTS = ["hello world", "the plan is it", "a friend"]
PAIRS = [("hello", "world"), ("the plan", "is it")]


async def wait_until_idle(model: AsyncTextGenerator) -> None:
    await wait_until(lambda: model.model.count_requests() == (0, 0))


async def wait_until_running(model: AsyncTextGenerator) -> None:
    await wait_until(lambda: model.model.count_requests() == (0, 1))


def test_answers_are_those_of_a_text_generator(demo_bundle: Path) -> None:
    prompts = ["In the", "And it came to pass", "O my God"]
    with TextGenerator.load(demo_bundle) as model:
        want = [model.generate(prompt, max_new_tokens=8) for prompt in prompts]

    async def main() -> None:
        async with await AsyncTextGenerator.load(demo_bundle) as model:
            answers = await asyncio.gather(*(model.generate(one, max_new_tokens=8) for one in prompts))
            assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in want]
            chunks = [chunk async for chunk in model.stream(prompts[0], max_new_tokens=8)]
            assert "".join(map(str, chunks)) == want[0].text
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            assert repr(model).startswith("AsyncTextGenerator(TextGenerator(gpt2, ")
        with pytest.raises(ClosedError):
            await model.generate("In the")
        await model.close()

    run(main())


def test_conversations(llama_demo_bundle: Path) -> None:
    messages = [{"role": "user", "content": "Who made the light?"}]
    with TextGenerator.load(llama_demo_bundle) as model:
        want = model.chat(messages, max_new_tokens=8)

    async def main() -> None:
        async with await AsyncTextGenerator.load(llama_demo_bundle) as model:
            assert (await model.chat(messages, max_new_tokens=8)).text == want.text
            chunks = [str(chunk) async for chunk in model.stream_chat(messages, max_new_tokens=8)]
            assert "".join(chunks) == want.text

    run(main())


def test_a_request_ends_with_the_task_that_waits_for_it(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = HeldTokens(monkeypatch, most=5)

    async def main() -> None:
        async with await AsyncTextGenerator.load(demo_bundle) as model:
            task = asyncio.create_task(model.generate("In the", max_new_tokens=500, ignore_eos=True))
            await wait_until_running(model)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until_idle(model)

            async def read() -> None:
                async for _ in model.stream("In the", max_new_tokens=500, ignore_eos=True):
                    pass

            tokens.cancelled.clear()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(read(), 0.05)
            await wait_until_idle(model)
            assert (await model.generate("In the", max_new_tokens=2)).finish_reason == "length"

    run(main())


def test_a_stream_may_be_left_closed_or_cancelled(demo_bundle: Path) -> None:
    options: Any = {"max_new_tokens": 500, "ignore_eos": True}

    async def main() -> None:
        async with await AsyncTextGenerator.load(demo_bundle) as model:
            async for _ in model.stream("In the", **options):
                break
            gc.collect()
            await wait_until_idle(model)
            closed = model.stream("In the", **options)
            await anext_of(closed)
            await closed.aclose()
            await closed.aclose()
            assert [chunk async for chunk in closed] == []
            await wait_until_idle(model)
            cancelled = model.stream("In the", **options)
            await anext_of(cancelled)
            cancelled.cancel()
            assert [chunk async for chunk in cancelled][-1].finish_reason == "cancelled"
            early = model.stream("In the", **options)
            early.cancel()
            assert [chunk async for chunk in early][-1].finish_reason == "cancelled"
            model.stream("In the", **options)  # never read, never submitted
            assert model.model.count_requests() == (0, 0)

    run(main())


async def anext_of(stream: Any) -> Any:
    return await stream.__anext__()


def test_a_wrapped_future_that_is_cancelled_disturbs_nobody(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = HeldTokens(monkeypatch, most=5)

    async def main() -> None:
        async with await AsyncTextGenerator.load(demo_bundle) as model:
            pending = model.model.submit("In the", max_new_tokens=500, ignore_eos=True)
            waiting = asyncio.wrap_future(pending.future)
            await wait_until_running(model)
            waiting.cancel()
            assert not pending.future.cancel()
            tokens.let(100)
            assert (await model.generate("In the", max_new_tokens=2)).finish_reason == "length"
            pending.cancel()
            await wait_until_idle(model)
            assert pending.result().finish_reason == "cancelled"

    run(main())


def test_errors_come_where_they_are_awaited(demo_bundle: Path) -> None:
    async def main() -> None:
        async with await AsyncTextGenerator.load(demo_bundle) as model:
            with pytest.raises(InputError, match="unknown option 'temprature'"):
                await model.generate("In the", temprature=1)  # type: ignore[call-arg]
            stream = model.stream("In the", max_new_tokens=0)
            with pytest.raises(InputError, match="max_new_tokens"):
                await anext_of(stream)
            assert [chunk async for chunk in stream] == []
        open_stream = model.stream("In the")
        with pytest.raises(ClosedError):
            await anext_of(open_stream)
        with pytest.raises(InputError, match="TextGenerator"):
            await AsyncTextEncoder.load(demo_bundle)

    run(main())


def test_closing_ends_a_stream_with_an_error(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HeldTokens(monkeypatch, most=5)

    async def main() -> None:
        model = await AsyncTextGenerator.load(demo_bundle)
        stream = model.stream("In the", max_new_tokens=500, ignore_eos=True)
        await anext_of(stream)
        await model.close()
        with pytest.raises(ClosedError):
            async for _ in stream:
                pass

    run(main())


ONE = "hello"
# Bundles by their names, each with tasks and what they are given.
TASKS: dict[str, list[tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    "pretrained": [
        ("embed", (TEXTS,), {}),
        ("embed", (TEXTS[0],), {}),
        ("features", (TEXTS,), {}),
        ("features", (TEXTS[0],), {}),
        ("fill_mask", ("the [MASK] is",), {"top_k": 2}),
        ("next_sentence", (PAIRS,), {}),
        ("next_sentence", PAIRS[0], {}),
    ],
    "ranker": [("rank", (ONE, TEXTS), {"top_k": 2})],
    "classifier": [("classify", (ONE,), {"pair": "world"}), ("classify", ([*TEXTS, *PAIRS],), {})],
    "tagger": [("tag", (TEXTS,), {})],
    "reader": [("answer", ("the plan", "hello world is it"), {"n_best": 2})],
}


@pytest.mark.parametrize("name", TASKS)
def test_an_encoder_s_tasks(head_bundle: Callable[[str], Path], name: str) -> None:
    async def main() -> None:
        async with await AsyncTextEncoder.load(head_bundle(name)) as encoder:
            for task, given, options in TASKS[name]:
                want = getattr(encoder.model, task)(*given, **options)
                read_on = [iter(each) if isinstance(each, list) else each for each in given]
                for arguments in (given, read_on):
                    assert_equal(await getattr(encoder, task)(*arguments, **options), want)

    run(main())


def test_what_an_encoder_refuses(head_bundle: Callable[[str], Path]) -> None:
    async def main() -> None:
        async with await AsyncTextEncoder.load(head_bundle("ranker")) as encoder:
            with pytest.raises(InputError, match="needs the head"):
                await encoder.tag(ONE)
            with pytest.raises(InputError, match="top_k"):
                await encoder.rank(ONE, TEXTS, top_k=0)
        async with await AsyncTextEncoder.load(head_bundle("pretrained")) as encoder:
            assert (await encoder.embed([])).shape == (0, len(await encoder.embed(ONE)))

    run(main())


def test_a_waiting_encoder_s_task_can_be_cancelled(head_bundle: Callable[[str], Path]) -> None:
    async def main() -> None:
        async with await AsyncTextEncoder.load(head_bundle("pretrained")) as encoder:
            encoder.model.schedule(turn_tokens=1)
            tasks = [asyncio.create_task(encoder.embed(TEXTS * 100)) for _ in range(3)]
            await wait_until(lambda: sum(encoder.model.count_requests()) == 3)
            tasks[1].cancel()
            await asyncio.gather(tasks[0], tasks[2])
            assert tasks[1].cancelled()

    run(main())


def test_translations(marian_bundle: Path) -> None:
    with Translator.load(marian_bundle) as model:
        want = [model.translate(text, num_beams=2).text for text in TEXTS]

    async def main() -> None:
        async with await AsyncTranslator.load(marian_bundle) as translator:
            one_by_one = await asyncio.gather(*(translator.translate(text, num_beams=2) for text in TEXTS))
            assert [result.text for result in one_by_one] == want
            assert [result.text for result in await translator.translate(TEXTS, num_beams=2)] == want

    run(main())


def test_pictures(picture_bundle: Path) -> None:
    with ImageGenerator.load(picture_bundle) as model:
        want = [model.generate("one", steps=2, seed=seed)[0].pixels for seed in range(3)]

    async def main() -> None:
        async with await AsyncImageGenerator.load(picture_bundle) as model:
            asked = [model.generate("one", steps=2, seed=seed) for seed in range(3)]
            for (picture,), pixels in zip(await asyncio.gather(*asked), want, strict=True):
                assert np.array_equal(picture.pixels, pixels)

    run(main())


def test_clients_are_told_apart(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[str] = []
    submit = TextGenerator.submit

    def note(self: TextGenerator, *arguments: Any, client: str = "", **options: Any) -> Any:
        clients.append(client)
        return submit(self, *arguments, client=client, **options)

    monkeypatch.setattr(TextGenerator, "submit", note)

    async def main() -> None:
        async with await AsyncTextGenerator.load(demo_bundle) as model:
            await AsyncTextGenerator(model.model, "alice").generate("In the", max_new_tokens=1)
            await model.generate("In the", max_new_tokens=1)

    run(main())
    assert clients == ["alice", ""]


def test_what_nobody_waits_for_is_undone() -> None:
    undone: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = asyncio.Event()
        may_end = asyncio.Event()

        def work() -> str:
            loop.call_soon_threadsafe(began.set)
            asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(PATIENCE)
            return "a model"

        task = asyncio.create_task(run_in_thread(work, undone.append))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_end.set()
        await wait_until(lambda: undone == ["a model"])

    run(main())


def test_calls_from_threads_keep_their_order_when_one_raises() -> None:
    seen: list[int] = []
    troubles: list[BaseException] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: troubles.append(context["exception"]))
        calls = get_loop_calls()
        ended = asyncio.Event()
        for number in range(5):
            calls.call(partial(seen.append, number))
            if number == 1:
                calls.call(partial(int, "no number"))
        calls.call(ended.set)
        await ended.wait()
        assert get_loop_calls() is calls

    asyncio.run(run())
    assert seen == [0, 1, 2, 3, 4]
    assert [type(trouble) for trouble in troubles] == [ValueError]
