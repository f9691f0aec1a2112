"""What a row can be asked for: the columns that each task reads, those that it writes, and who answers."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypedDict

import pyarrow as pa

from ...encode.results import MultiVector, SparseEmbedding
from ...encode.text_encoder import TextEncoder
from ...errors import InputError, MemoryLimitError
from ...generate.generation import Generation
from ...generate.pending import PendingGeneration
from ...generate.text_generator import TextGenerator
from ...option_checks import check_choice
from ...options import (
    AnswerOptions,
    BatchGenerationOptions,
    BatchTranslationOptions,
    ClassifyOptions,
    EmbedOptions,
    EncoderOptions,
    FillMaskOptions,
    PromptOptions,
    SparseOptions,
)
from ...options import ScoreOptions as PairOptions
from ...translate.translator import Translator

Item: TypeAlias = Any  # a text, a pair of texts, or the messages of a conversation
Output: TypeAlias = dict[str, Any]  # a value for each output column, and "tokens"
Answer: TypeAlias = Callable[[Any, Sequence[Item], Mapping[str, Any]], Iterator[Output]]

TEXT = pa.string()
NUMBER = pa.float32()
COUNT = pa.int64()
VECTOR = pa.list_(NUMBER)
# The numbers of a vector of another precision than float32.
SHORT_NUMBERS = {"int8": pa.int8(), "uint8": pa.uint8(), "binary": pa.int8(), "ubinary": pa.uint8()}
WEIGHTS = pa.struct({"indices": pa.list_(COUNT), "values": VECTOR, "tokens": pa.list_(TEXT)})
VECTORS = pa.struct({"vectors": pa.list_(VECTOR), "tokens": pa.list_(TEXT)})
ENTITIES = pa.list_(pa.struct({"label": TEXT, "score": NUMBER, "text": TEXT, "start": COUNT, "end": COUNT}))
WORDS = pa.list_(pa.list_(pa.struct({"token": TEXT, "token_id": COUNT, "score": NUMBER})))
PROBABILITIES = pa.map_(TEXT, NUMBER)

ERROR = "error"  # the column that says why a row has no answer
TOKENS = "tokens"  # the column that says how many tokens a row had
OF_ONE_ROW = (InputError, MemoryLimitError)  # what another row need not meet

PROBE = "a b c"  # three tokens or more, of every tokenizer
# Options that would hold up a batch, or say nothing there.
NOT_IN_BATCHES = (
    "progress",
    "on_token",
    "alignment",
    "reuse_prompt",
    "top_logprobs",
    "logits_processor",
    "logits",
)


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        model: the task of the bundles whose models do it.
        inputs: the columns that it reads, unless others are named.
        outputs: the columns that it writes, with their types.
        options: those of the method that answers.
        answer: yields the outputs of items, in their order.
        optional: a column that it also reads where one is named for it.
        probe: an item that every model of the task can answer, from the model.
        rows_per_part: of a job, unless told otherwise.
    """

    model: str
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    options: type
    answer: Answer
    optional: str | None = None
    probe: Callable[[Any], Item] = lambda model: PROBE
    rows_per_part: int = 1000


def find_task(name: str) -> Task:
    """Return the task of a name; refuse another."""
    check_choice("task", name, tuple(TASKS))
    return TASKS[name]


def check_task_options(task: Task, options: Mapping[str, Any]) -> None:
    """Refuse options that the task does not have in a batch."""
    known = list_task_options(task)
    for name in options:
        check_choice("option", name, known)


def list_task_options(task: Task) -> tuple[str, ...]:
    """Return the names of the options that a task has in a batch."""
    return tuple(name for name in task.options.__annotations__ if name not in NOT_IN_BATCHES)


def list_output_types(task: Task, options: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """Return a task's output columns with their types, which the precision of vectors changes."""
    number = SHORT_NUMBERS.get(options.get("precision", ""))
    return {**task.outputs} if number is None else {**task.outputs, "embedding": pa.list_(number)}


def encode(task: str, read: Callable[[Any], Output]) -> Answer:
    """Return what asks an encoder; `read` takes the output columns from one of its results."""

    def answer(model: TextEncoder, items: Sequence[Item], options: Mapping[str, Any]) -> Iterator[Output]:
        results = model.iterate(task, items, **options)  # type: ignore[call-overload]  # a task by its name
        for item, result in zip(items, results, strict=True):
            tokens = count_encoder_tokens(model, item) - result.dropped
            yield {**read(result), "dropped": result.dropped, "tokens": tokens}

    return answer


def count_encoder_tokens(model: TextEncoder, item: str | tuple[str, str]) -> int:
    """Return how many tokens a text or a pair has."""
    if isinstance(item, str):
        return model.count_tokens(item)
    return sum(map(model.count_tokens, item)) - 1  # a pair has one [SEP] between the two, and one [CLS]


def read_weights(result: SparseEmbedding) -> Output:
    """Return a text's weights."""
    return {"indices": result.indices, "values": result.values, "tokens": result.tokens}


def read_vectors(result: MultiVector) -> Output:
    """Return the vectors of a text's tokens."""
    return {"vectors": list(result.vectors), "tokens": result.tokens}


def read_answer(result: Any) -> Output:
    """Return the best answer; nulls where there is none."""
    best = result.best
    values = {"answer": None, "score": None, "start": None, "end": None}
    if best is not None:
        values = {"answer": best.text, "score": best.score, "start": best.start, "end": best.end}
    return {**values, "no_answer_score": result.no_answer_score}


def translate(model: Translator, items: Sequence[str], options: Mapping[str, Any]) -> Iterator[Output]:
    for item, result in zip(items, model.translate(items, **options), strict=True):
        read = len(model.source_tokenizer.encode(item)) - result.dropped
        yield {
            "translation": result.text,
            "score": result.score,
            "finish_reason": result.finish_reason,
            "dropped": result.dropped,
            "tokens": read + len(result.token_ids),
        }


def generate(model: TextGenerator, items: Sequence[str], options: Mapping[str, Any]) -> Iterator[Output]:
    yield from map(read_generation, model.generate(items, **{"logprobs": False, **options}))


def chat(model: TextGenerator, items: Sequence[Any], options: Mapping[str, Any]) -> Iterator[Output]:
    """Yield the answers to conversations, which share the engine as a server's requests do."""
    options = {"logprobs": False, **options}
    waiting: deque[PendingGeneration] = deque()
    try:
        for number, messages in enumerate(items):
            if len(waiting) >= model.max_batch:
                yield wait_for_answer(waiting.popleft())
            try:
                waiting.append(model.submit_chat(messages, number=number, **options))
            except OF_ONE_ROW as error:
                while waiting:
                    yield wait_for_answer(waiting.popleft())
                yield {ERROR: describe_error(error)}
        while waiting:
            yield wait_for_answer(waiting.popleft())
    finally:
        for pending in waiting:
            pending.cancel()


def wait_for_answer(pending: PendingGeneration) -> Output:
    """Return the answer to a conversation, or why it has none."""
    try:
        return read_generation(pending.result())
    except OF_ONE_ROW as error:
        return {ERROR: describe_error(error)}


def describe_error(error: Exception) -> str:
    """Return what was wrong with the only item of a call, without its number there."""
    return str(error).removeprefix(f"{getattr(error, 'option', None)}: ")


def read_generation(result: Generation) -> Output:
    usage = result.usage
    return {
        "generated_text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def score(model: TextGenerator, items: Sequence[str], options: Mapping[str, Any]) -> Iterator[Output]:
    for item in items:
        result = model.score(item, **options)
        yield {
            "logprob": result.total,
            "perplexity": result.perplexity,
            "tokens": len(result.token_ids),
        }


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation: a list of them, also as JSON, or one user's text."""
    if isinstance(value, str):
        if not re.match(r"\s*\[\s*\{", value):
            return [{"role": "user", "content": value}]
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the messages are not JSON: {error}") from error
    messages = list(value)
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise InputError('messages must be a list of {"role", "content"}, or a text')
    return [dict(message) for message in messages]


def spell_mask(model: TextEncoder) -> str:
    """Return a text with one masked place."""
    token = model.defaults.tokens.get("mask")
    return PROBE if token is None else f"a {model.tokenizer.spell(token)}"


class ScoreOptions(TypedDict, total=False):
    """The options of `TextGenerator.score`."""

    parse_special: bool


DROPPED = {"dropped": COUNT}
GENERATED = {
    "generated_text": TEXT,
    "finish_reason": TEXT,
    "prompt_tokens": COUNT,
    "completion_tokens": COUNT,
}

TASKS: Mapping[str, Task] = {
    "embed": Task(
        "text-encoding",
        ("text",),
        {"embedding": VECTOR, **DROPPED},
        EmbedOptions,
        encode("embed", lambda result: {"embedding": result.vector}),
    ),
    "embed_sparse": Task(
        "text-encoding",
        ("text",),
        {"sparse": WEIGHTS, **DROPPED},
        SparseOptions,
        encode("embed_sparse", lambda result: {"sparse": read_weights(result)}),
    ),
    "embed_multi": Task(
        "text-encoding",
        ("text",),
        {"multi": VECTORS, **DROPPED},
        PromptOptions,
        encode("embed_multi", lambda result: {"multi": read_vectors(result)}),
        rows_per_part=100,
    ),
    "embed_hybrid": Task(
        "text-encoding",
        ("text",),
        {"embedding": VECTOR, "sparse": WEIGHTS, "multi": VECTORS, **DROPPED},
        PromptOptions,
        encode(
            "embed_hybrid",
            lambda result: {
                "embedding": result.vector,
                "sparse": read_weights(result.sparse),
                "multi": read_vectors(result.multi),
            },
        ),
        rows_per_part=100,
    ),
    "classify": Task(
        "text-encoding",
        ("text",),
        {"label": TEXT, "score": NUMBER, "probabilities": PROBABILITIES, **DROPPED},
        ClassifyOptions,
        encode(
            "classify",
            lambda result: {
                "label": result.label,
                "score": result.score,
                "probabilities": list(result.probabilities.items()),
            },
        ),
        optional="pair",
    ),
    "rank": Task(
        "text-encoding",
        ("query", "text"),
        {"score": NUMBER, **DROPPED},
        PairOptions,
        encode("rank", lambda result: {"score": result.score}),
        probe=lambda model: (PROBE, PROBE),
    ),
    "tag": Task(
        "text-encoding",
        ("text",),
        {"entities": ENTITIES, **DROPPED},
        EncoderOptions,
        encode("tag", lambda result: {"entities": list(map(asdict, result.entities))}),
    ),
    "answer": Task(
        "text-encoding",
        ("question", "context"),
        {"answer": TEXT, "score": NUMBER, "start": COUNT, "end": COUNT, "no_answer_score": NUMBER, **DROPPED},
        AnswerOptions,
        encode("answer", read_answer),
        probe=lambda model: (PROBE, PROBE),
    ),
    "fill_mask": Task(
        "text-encoding",
        ("text",),
        {"masks": WORDS, **DROPPED},
        FillMaskOptions,
        encode("fill_mask", lambda result: {"masks": [list(map(asdict, words)) for words in result.masks]}),
        probe=spell_mask,
    ),
    "translate": Task(
        "translation",
        ("text",),
        {"translation": TEXT, "score": NUMBER, "finish_reason": TEXT, **DROPPED},
        BatchTranslationOptions,
        translate,
        rows_per_part=200,
    ),
    "generate": Task(
        "text-generation",
        ("prompt",),
        GENERATED,
        BatchGenerationOptions,
        generate,
        rows_per_part=100,
    ),
    "chat": Task(
        "text-generation",
        ("messages",),
        GENERATED,
        BatchGenerationOptions,
        chat,
        probe=lambda model: read_messages(PROBE),
        rows_per_part=100,
    ),
    "score": Task(
        "text-generation",
        ("text",),
        {"logprob": NUMBER, "perplexity": NUMBER},
        ScoreOptions,
        score,
        rows_per_part=200,
    ),
}
