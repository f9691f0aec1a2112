"""A worker's answers are those of the model, and a row that it cannot answer says why."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest

from planforge.runtime import GenerationOptions, TextEncoder, TextGenerator, Translator, load
from planforge.runtime.apps.batch import BatchWorker
from planforge.runtime.apps.batch.tasks import TASKS, list_task_options, read_messages
from planforge.runtime.apps.batch.values import Unreadable
from planforge.runtime.apps.batch.worker import ask_ray
from planforge.runtime.errors import BackendError, BundleNotFoundError, InputError, MemoryLimitError

Head = Callable[[str], Path]
MESSAGES = [{"role": "user", "content": "Who made the light?"}]


@pytest.fixture(scope="module")
def worker(head_bundle: Head) -> Iterator[BatchWorker]:
    worker = BatchWorker(head_bundle("pretrained"), "embed")
    yield worker
    worker.close()


def ask_encoder(model: TextEncoder) -> dict[str, Any]:
    """What a model's own methods say of the rows that test_every_task asks of."""
    mask = model.tokenizer.spell(model.defaults.tokens["mask"])
    return {
        "embed": lambda: [("embedding", vector) for vector in model.embed(["wings lift", "bread"])],
        "classify": lambda: [("label", model.classify(text).label) for text in ("wings lift", "bread")],
        "rank": lambda: [("score", model.rank("food", [text])[0].score) for text in ("wings lift", "bread")],
        "tag": lambda: [("entities", model.tag(text).entities) for text in ("wings lift", "bread")],
        "answer": lambda: [("answer", model.answer("food", text).best) for text in ("wings lift", "bread")],
        "fill_mask": lambda: [
            ("masks", model.fill_mask(f"{text} {mask}").masks) for text in ("wings lift", "bread")
        ],
    }


ENCODER_TASKS = {
    "embed": "pretrained",
    "classify": "classifier",
    "rank": "ranker",
    "tag": "tagger",
    "answer": "reader",
    "fill_mask": "pretrained",
}


@pytest.mark.parametrize("task", ENCODER_TASKS)
def test_an_encoders_task(head_bundle: Head, task: str) -> None:
    bundle = head_bundle(ENCODER_TASKS[task])
    with TextEncoder.load(bundle) as model:
        wanted = ask_encoder(model)[task]()
        mask = model.tokenizer.spell(model.defaults.tokens["mask"])
        texts = ["wings lift", "bread"]
        rows: dict[str, list[str]] = {"text": texts}
        if task == "rank":
            rows["query"] = ["food", "food"]
        elif task == "answer":
            rows = {"question": ["food", "food"], "context": texts}
        elif task == "fill_mask":
            rows = {"text": [f"{text} {mask}" for text in texts]}
        tokens = [len(model.tokenizer.encode(text)) + 2 for text in rows.get("text", [])]
    worker = BatchWorker(bundle, task)
    answers = worker.answer(rows).to_pylist()
    worker.close()
    assert [row["error"] for row in answers] == [None, None]
    for row, (name, value) in zip(answers, wanted, strict=True):
        if task == "embed":
            np.testing.assert_array_equal(np.float32(row[name]), value)
        elif task in ("tag", "fill_mask"):
            assert flatten(row[name]) == flatten(value)
        elif task == "answer":
            assert row[name] == (None if value is None else value.text)
        else:
            assert row[name] == (np.float32(value) if isinstance(value, float) else value)
    if task in ("embed", "classify", "tag"):
        assert [row["tokens"] for row in answers] == tokens


def flatten(value: Any) -> list[Any]:
    """The leaves of nested results, in their order; numbers as float32."""
    if isinstance(value, dict):
        return flatten(list(value.values()))
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in flatten(part)]
    if hasattr(value, "__dict__"):
        return flatten(list(vars(value).values()))
    return [float(np.float32(value)) if isinstance(value, float) else value]


def test_pairs_are_classified_where_a_column_is_named(head_bundle: Head) -> None:
    bundle = head_bundle("classifier")
    worker = BatchWorker(bundle, "classify", columns={"pair": "other"})
    answer = worker.answer({"text": ["wings"], "other": ["bread"]}).to_pylist()[0]
    worker.close()
    with TextEncoder.load(bundle) as model:
        wanted = model.classify("wings", "bread")
    assert answer["label"] == wanted.label
    assert dict(answer["probabilities"]) == pytest.approx(dict(wanted.probabilities))


def test_generate_score_and_chat(demo_bundle: Path, llama_demo_bundle: Path) -> None:
    prompts = ["In the beginning", "And it came to pass that the man", "God"]
    options: GenerationOptions = {"max_new_tokens": 8}
    with TextGenerator.load(demo_bundle) as model:
        wanted = [model.generate(prompt, **options) for prompt in prompts]
        scores = [model.score(prompt).total for prompt in prompts[:2]]
    worker = BatchWorker(demo_bundle, "generate", options=options)
    answers = worker.answer({"prompt": prompts}).to_pylist()
    worker.close()
    assert [row["generated_text"] for row in answers] == [one.text for one in wanted]
    assert [row["completion_tokens"] for row in answers] == [one.usage.completion_tokens for one in wanted]
    scorer = BatchWorker(demo_bundle, "score")
    assert scorer.answer({"text": prompts[:2]}).column("logprob").to_pylist() == pytest.approx(
        scores, rel=1e-5
    )
    scorer.close()
    with TextGenerator.load(llama_demo_bundle) as model:
        wanted_chat = model.chat(MESSAGES, **options).text
    chat = BatchWorker(llama_demo_bundle, "chat", options=options)
    rows = [
        MESSAGES,
        "Who made the light?",
        [],
        '[{"role": "user", "content": "Who made the light?"}]',
        "[{",
        5,
    ]
    answers = chat.answer({"messages": rows}).to_pylist()
    chat.close()
    assert [row["generated_text"] for row in answers] == [
        wanted_chat,
        wanted_chat,
        None,
        wanted_chat,
        None,
        None,
    ]
    assert "messages are not JSON" in answers[4]["error"]
    assert "must be a text, not int 5" in answers[5]["error"]


def test_translate(dates_bundle: Path) -> None:
    sources = ["the 3rd of May, 1998", "June 4, 2001", "word " * 100]
    worker = BatchWorker(dates_bundle, "translate")
    answers = worker.answer({"text": sources}).to_pylist()
    worker.close()
    with Translator.load(dates_bundle) as model:
        assert [row["translation"] for row in answers[:2]] == [
            one.text for one in model.translate(sources[:2])
        ]
    assert answers[2]["translation"] is None
    assert answers[2]["error"].startswith("the text 'word word")  # without its number in a call of our own


def test_a_conversation_that_fails_keeps_its_place(
    llama_demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More conversations than run together; one cannot be asked, and one fails while it is answered."""
    worker = BatchWorker(llama_demo_bundle, "chat", options={"max_new_tokens": 2})
    rows = ["word " * (number + 1) for number in range(14)]
    wanted = worker.answer({"messages": rows}).column("prompt_tokens").to_pylist()
    assert wanted == sorted(set(wanted))
    submit = worker.model.submit_chat
    failing = MemoryLimitError("more than there is", needed=2, limit=1)

    def submit_or_fail(messages: Any, **options: Any) -> Any:
        if messages[0]["content"] == rows[11]:
            raise InputError("not this one")
        pending = submit(messages, **options)
        if messages[0]["content"] == rows[0]:
            pending.result()
            monkeypatch.setattr(pending, "result", lambda: (_ for _ in ()).throw(failing))
        return pending

    monkeypatch.setattr(worker.model, "submit_chat", submit_or_fail)
    answers = worker.answer({"messages": rows}).to_pylist()
    worker.close()
    assert answers[0]["error"] == "more than there is" and answers[11]["error"] == "not this one"
    kept = [row["prompt_tokens"] for row in answers if row["error"] is None]
    assert kept == wanted[1:11] + wanted[12:]


@pytest.mark.parametrize("indent", [None, 2])
def test_messages_as_json(indent: int | None) -> None:
    assert read_messages(json.dumps(MESSAGES, indent=indent)) == MESSAGES
    assert read_messages("[one] and [two]") == [{"role": "user", "content": "[one] and [two]"}]


BAD_ROWS = {
    "missing": (None, "text is missing"),
    "nan": (float("nan"), "text is missing"),
    "number": (3.5, "text must be a text, not float 3.5"),
    "megabyte": ("y" * 1_000_000, "text has 1,000,000 bytes; at most"),
    "bytes": (b"ab\xff", "text is not UTF-8: byte 3 is 0xff"),
    "surrogate": ("a\ud800", "text has a lone surrogate at character 2"),
    "list": (["a"], "text must be a text, not list"),
    "pandas": (pandas.NA, "text is missing"),
    "time": (pandas.NaT, "text is missing"),
    "array": (np.zeros(3), "text must be a text, not ndarray"),
    "huge": (10**5000, "text must be a text, not int"),
    "unreadable": (Unreadable("no UTF-8"), "text cannot be read: no UTF-8"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_is_no_text_leaves_the_others_alone(worker: BatchWorker, name: str) -> None:
    value, message = BAD_ROWS[name]
    column = np.empty(3, dtype=object)
    column[:] = ["wings", value, "bread"]
    answers = worker.answer({"text": column})
    assert message in answers["error"][1].as_py()
    assert answers["error"].is_null().to_pylist() == [True, False, True]
    assert answers["embedding"].is_null().to_pylist() == [False, True, False]
    alone = worker.answer({"text": ["wings", "bread"]})
    np.testing.assert_array_equal(answers["embedding"].to_pylist()[0], alone["embedding"].to_pylist()[0])
    np.testing.assert_array_equal(answers["embedding"].to_pylist()[2], alone["embedding"].to_pylist()[1])


def test_rows_that_the_model_refuses_are_found_among_many(head_bundle: Head) -> None:
    """Where truncation is off, long texts are refused; the others are answered as they are alone."""
    worker = BatchWorker(head_bundle("pretrained"), "embed", options={"truncation": None})
    texts = ["wings " * (500 if number in (3, 17, 18) else number + 1) for number in range(20)]
    answers = worker.answer({"text": texts})
    refused = [number for number, error in enumerate(answers["error"].to_pylist()) if error is not None]
    assert refused == [3, 17, 18]
    for number in (0, 19):
        alone = np.float32(worker.answer({"text": [texts[number]]})["embedding"].to_pylist()[0])
        np.testing.assert_allclose(answers["embedding"].to_pylist()[number], alone, atol=1e-5)
    worker.close()


def test_what_one_row_does_not_explain_is_raised(
    worker: BatchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that fails is no property of a row: the batch ends, and no row is called faulty."""

    def fail(*_: object, **options: object) -> Any:
        raise BackendError("the engine is gone")

    monkeypatch.setattr(worker.model, "iterate", fail)
    with pytest.raises(BackendError, match="the engine is gone"):
        worker.answer({"text": ["a", "b"]})


def test_a_row_that_needs_too_much_memory_is_an_error(
    worker: BatchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = worker.model.iterate

    def refuse(task: str, texts: Any, **options: Any) -> Any:
        if "large" in texts:
            raise MemoryLimitError("more than there is", needed=2, limit=1)
        return iterate(task, texts, **options)

    monkeypatch.setattr(worker.model, "iterate", refuse)
    errors = worker.answer({"text": ["a", "large", "b"]})["error"].to_pylist()
    assert errors == [None, "more than there is", None]


def test_arrow_numpy_and_lists_are_read_alike(worker: BatchWorker) -> None:
    texts = ["wings", "bread", None]
    wanted = worker.answer({"text": texts})
    assert worker.answer({"text": np.array(texts, dtype=object)}).equals(wanted)
    assert worker.answer(pa.table({"text": texts})).equals(wanted)
    assert worker.answer({"text": pa.array(texts).dictionary_encode()}).equals(wanted)
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"a\xff")]
    )
    assert worker.answer({"text": broken})["error"].to_pylist() == ["text is not UTF-8: byte 2 is 0xff"]


def test_a_copy_loads_the_model_itself(worker: BatchWorker) -> None:
    copy = pickle.loads(pickle.dumps(worker))
    assert copy.model is not worker.model
    assert copy.answer({"text": ["wings"]}).equals(worker.answer({"text": ["wings"]}))
    copy.close()


def test_what_cannot_be_done_is_said_when_it_is_made(
    head_bundle: Head, demo_bundle: Path, tmp_path: Path
) -> None:
    bundle = head_bundle("pretrained")
    for arguments, options, message in (
        ((bundle, "embedd"), {}, "did you mean 'embed'"),
        ((bundle, "generate"), {}, "does not support the task 'generate'"),
        ((bundle, "tag"), {}, "needs the head"),
        ((demo_bundle, "chat"), {}, "chat template"),
        ((bundle, "embed"), {"options": {"poling": "cls"}}, "did you mean 'pooling'"),
        ((bundle, "embed"), {"options": {"pooling": "middle"}}, "pooling='middle' is not one of"),
        ((bundle, "embed"), {"options": {"batch_size": 10**6}}, "rows"),
        ((bundle, "embed"), {"options": {"progress": True}}, "option='progress' is not one of"),
        ((bundle, "embed"), {"columns": {"body": "text"}}, "has no input 'body'; its inputs: text"),
        ((bundle, "embed"), {"load_options": {"thread": 1}}, "thread"),
        ((demo_bundle, "generate"), {"options": {"max_new_tokens": -1}}, "max_new_tokens=-1"),
        ((demo_bundle, "generate"), {"options": {"max_new_tokens": "forty"}}, "max_new_tokens='forty'"),
    ):
        with pytest.raises(InputError, match=message):
            BatchWorker(*arguments, **options)
    with pytest.raises(BundleNotFoundError):
        BatchWorker(tmp_path / "none", "embed")


def test_a_column_that_is_not_there_is_named(worker: BatchWorker) -> None:
    with pytest.raises(InputError, match="there is no column 'text'; there are: body"):
        worker.answer({"body": ["a"]})


def test_a_batch_of_no_rows(worker: BatchWorker) -> None:
    answers = worker.answer({"text": []})
    assert len(answers) == 0
    assert answers.schema.field("embedding").type == pa.list_(pa.float32())


def test_a_task_takes_the_options_of_its_method() -> None:
    assert {"pooling", "normalize", "truncation"} <= set(list_task_options(TASKS["embed"]))
    assert {"max_new_tokens", "json_schema"} <= set(list_task_options(TASKS["generate"]))
    for task in TASKS.values():
        assert not {"progress", "on_token", "reuse_prompt"} & set(list_task_options(task))


def test_models_are_closed_where_a_worker_cannot_be_made(
    head_bundle: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def remember(*arguments: Any, **options: Any) -> Any:
        opened.append(load(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr("planforge.runtime.apps.batch.worker.load", remember)
    with pytest.raises(InputError):
        BatchWorker(head_bundle("pretrained"), "embed", options={"pooling": "middle"})
    with pytest.raises(Exception, match="closed"):
        opened[0].embed("a")


def fake_ray(mode: int, **resources: float) -> SimpleNamespace:
    """What Ray tells a process of itself."""
    context = SimpleNamespace(worker=SimpleNamespace(mode=mode), get_assigned_resources=lambda: resources)
    return SimpleNamespace(WORKER_MODE=1, is_initialized=lambda: True, get_runtime_context=lambda: context)


@pytest.mark.parametrize(
    ("ray", "wanted"),
    [
        (fake_ray(1, CPU=3.0), {"threads": 3, "backend": "ort-cpu"}),
        (fake_ray(1, CPU=0.5), {"threads": 1, "backend": "ort-cpu"}),
        (
            fake_ray(1, CPU=4.0, GPU=1.0),
            {"threads": 4},
        ),  # the best engine that is there: the plan, then ort-cuda
        (fake_ray(0, CPU=3.0), {}),  # the process that drives them
    ],
)
def test_a_worker_takes_what_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, ray: SimpleNamespace, wanted: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert ask_ray() == wanted


def test_what_the_caller_says_counts_more_than_ray(
    monkeypatch: pytest.MonkeyPatch, head_bundle: Head
) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray(1, CPU=3.0))
    worker = BatchWorker(head_bundle("pretrained"), "embed", load_options={"threads": 2})
    assert (worker.model.threads, worker.model.backend) == (2, "ort-cpu")
    worker.close()
