"""What encoders do: embeddings, ranks, classes, tags, answers to questions, words for masks."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Raw
from starlette.responses import Response

from ...encode.results import (
    Answers,
    Classification,
    Embedding,
    FilledMask,
    Ranked,
    Result,
    SparseEmbedding,
    Tags,
)
from ...errors import BackendError, InputError
from ...scheduling.batcher import PendingResults
from ...scheduling.steps import Steps
from .answers import (
    DocumentText,
    EmbeddingEntry,
    ListOf,
    RankedDocument,
    RankedText,
    RerankAnswer,
    ScoreEntry,
    Usage,
    WeightEntry,
)
from .bodies import (
    MAX_TEXTS,
    AnswersRequest,
    Body,
    ClassifyRequest,
    EncodeRequest,
    FillMaskRequest,
    LongTextsRequest,
    TagsRequest,
)
from .calls import Call, cancel_when_gone, make_step, wait_for_all
from .errors import ApiError
from .json_text import encode_pieces
from .text_sizes import measure_texts
from .vector_bodies import EmbeddingsRequest, RerankRequest, ScoreRequest, SparseRequest, TextsRankRequest

T = TypeVar("T")
FEW = 4  # vectors that are written in less time than it takes to wake another thread
# Tasks that would leave out a long text's end; others read in windows.
INSTRUCTIONS = ("prompt_name", "prompt")  # of models that score pairs
CUTTING = ("embed", "embed_sparse", "embed_multi", "rank", "classify")


async def run_task(
    call: Call[LongTextsRequest],
    task: str,
    items: Sequence[Any],
    names: tuple[str, str] = ("input", "input"),
    **options: Any,
) -> tuple[list[Any], int]:
    """Return the results of a task in the order of its texts or pairs, and how many tokens were read.

    `names` are those of the parameters that have the texts; of pairs, the first and the second ones.
    """
    encoder: Any = call.served.model  # a TextEncoder, as its capabilities say
    options = read_length(call, task) | options
    steps: Steps[PendingResults[Any]] = encoder.submit_in_steps(
        task, items, client=call.client, deadline=call.deadline, **options
    )
    future = await call.read(steps, measure_texts(call, items, names))
    async with cancel_when_gone(call.request, future.cancel):
        (results,) = await wait_for_all([future])
    return results, future.tokens


def read_length(call: Call[LongTextsRequest], task: str) -> dict[str, Any]:
    """Return the options that say what becomes of long texts: none is cut unless the client asks for it."""
    options: dict[str, Any] = {"truncation": None} if task in CUTTING else {}
    most = call.body.truncate_prompt_tokens
    if most == 0:
        raise InputError(
            "truncate_prompt_tokens=0 leaves no text; give at least 1, or leave it out",
            option="truncate_prompt_tokens",
        )
    if most is not None:
        options["truncation"] = "head"
        if most > 0:
            options["max_tokens"] = most
    names = ("parse_special",) if isinstance(call.body, EncodeRequest) else ()
    return options | call.take("truncation", "stride", *names)


def list_texts(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


async def answer_list(
    call: Call[Body], write: Callable[[int, T], Any], results: Sequence[T], tokens: int
) -> Response:
    """Return the answer of a route with an entry for each text, which `write` makes of index and result."""

    def make() -> Steps[ListOf[Raw]]:
        data = yield from encode_pieces(write, results)
        return ListOf(data, call.served.name, Usage(tokens, tokens))

    return await call.write(make(), few=len(results) <= FEW and all(map(is_short, results)))


def is_short(result: Any) -> bool:
    """Return whether a result is written in less time than it takes to wake another thread."""
    return isinstance(result, Embedding | Ranked)


async def embed(call: Call[EmbeddingsRequest]) -> Response:
    """Return a vector for each text."""
    options = call.take("prompt_name", "input_type", "normalize", truncate_dim="dimensions")
    results, tokens = await run_task(call, "embed", list_texts(call.body.input), **options)
    write_vector = write_base64 if call.body.encoding_format == "base64" else write_floats

    def write(index: int, result: Embedding) -> EmbeddingEntry:
        return EmbeddingEntry(index, write_vector(result), result.dropped)

    return await answer_list(call, write, results, tokens)


def write_floats(result: Embedding) -> list[float]:
    check_finite(result.vector)
    floats: list[float] = result.vector.tolist()
    return floats


def write_base64(result: Embedding) -> str:
    """Return the vector's numbers as little-endian float32 in base64, as OpenAI's clients read them."""
    return base64.b64encode(result.vector.astype("<f4").tobytes()).decode()


async def rerank(call: Call[RerankRequest]) -> Response:
    """Score documents against a query, the best first; the scores are sentence-transformers'."""
    query = call.body.query
    documents = [each if isinstance(each, str) else each.text for each in call.body.documents]
    results: list[Ranked]
    pairs = [(query, document) for document in documents]
    results, tokens = await run_task(call, "rank", pairs, ("query", "documents"), **call.take(*INSTRUCTIONS))
    check_finite([result.score for result in results])
    order = sorted(range(len(results)), key=lambda index: -results[index].score)[: call.body.top_n]
    rows = [RankedDocument(index, results[index].score, results[index].dropped) for index in order]
    if call.body.return_documents:
        for row in rows:
            row.document = DocumentText(documents[row.index])
    answer = RerankAnswer(call.served.name, rows, Usage(tokens, tokens))
    return await call.write(make_step(lambda: answer), few=not call.body.return_documents)


def cut_if_asked(call: Call[SparseRequest] | Call[TextsRankRequest]) -> dict[str, Any]:
    """Return the option of TEI's `truncate`."""
    return {"truncation": "head"} if call.body.truncate else {}


async def embed_sparse(call: Call[SparseRequest]) -> Response:
    """Return the weights of each text's tokens, and of words like them."""
    texts = list_texts(call.body.inputs)
    options = call.take("prompt_name", "input_type", "max_active_dims") | cut_if_asked(call)
    results: list[SparseEmbedding]
    results, _ = await run_task(call, "embed_sparse", texts, ("inputs", "inputs"), **options)

    def write(index: int, result: SparseEmbedding) -> list[WeightEntry]:
        check_finite(result.values)
        pairs = zip(result.indices.tolist(), result.values.tolist(), strict=True)
        return [WeightEntry(token, weight) for token, weight in pairs]

    return await call.write(encode_pieces(write, results))


async def rerank_texts(call: Call[TextsRankRequest]) -> Response:
    """Score texts against a query, the best first, in TEI's form."""
    texts = call.body.texts
    pairs = [(call.body.query, text) for text in texts]
    results: list[Ranked]
    results, _ = await run_task(
        call, "rank", pairs, ("query", "texts"), **call.take(*INSTRUCTIONS), **cut_if_asked(call)
    )
    check_finite([result.score for result in results])
    rows = [RankedText(index, result.score) for index, result in enumerate(results)]
    rows.sort(key=lambda row: -row.score)
    if call.body.return_text:
        for row in rows:
            row.text = texts[row.index]
    return await call.write(make_step(lambda: rows), few=not call.body.return_text)


async def score(call: Call[ScoreRequest]) -> Response:
    """Score pairs of texts, in their order."""
    firsts, seconds = list_texts(call.body.text_1), list_texts(call.body.text_2)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        reason = f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}; give one, or as many"
        raise ApiError(400, reason, param="text_1", code="invalid_value")
    pairs = list(zip(firsts, seconds, strict=True))
    results, tokens = await run_task(call, "rank", pairs, ("text_1", "text_2"), **call.take(*INSTRUCTIONS))

    def write(index: int, result: Ranked) -> ScoreEntry:
        check_finite([result.score])
        return ScoreEntry(index, result.score)

    return await answer_list(call, write, results, tokens)


async def run_and_list(
    call: Call[LongTextsRequest],
    task: str,
    items: Sequence[Any],
    names: tuple[str, str] = ("input", "input"),
    **options: Any,
) -> Response:
    """Return the results of a task in their own form; the arguments are those of `run_task`."""
    results, tokens = await run_task(call, task, items, names, **options)
    return await answer_list(call, write_result, results, tokens)


def write_result(index: int, result: Result) -> dict[str, Any]:
    """Return a result's fields as JSON, with `best` of the answers to a question."""
    assert isinstance(result, Answers | Classification | FilledMask | Tags)
    fields = {"index": index, **result.to_json()}
    if isinstance(result, Classification):
        check_finite([result.score])
    if isinstance(result, Answers):
        fields["best"] = None if result.best is None else vars(result.best)
    return fields


def check_finite(numbers: Any) -> None:
    """Refuse numbers that JSON does not have, which would become null."""
    if not np.isfinite(numbers).all():
        raise BackendError(
            "the engine computed NaN or infinity; run `planforge verify` on the bundle, and try"
            " --precision fp32 if this is fp16"
        )


async def classify(call: Call[ClassifyRequest]) -> Response:
    """Return the class of each text or pair."""
    given = call.body.input
    items = (
        [given] if isinstance(given, str) else [one if isinstance(one, str) else tuple(one) for one in given]
    )
    labels = call.body.candidate_labels or ()
    if (count := len(items) * len(labels)) > MAX_TEXTS:
        reason = (
            f"{len(items)} texts with {len(labels)} labels each are {count} sequences; a request may have"
            f" {MAX_TEXTS}: send fewer texts"
        )
        raise ApiError(400, reason, param="input", code="invalid_value")
    options = call.take("logits", "candidate_labels", "hypothesis_template", "multi_label")
    return await run_and_list(call, "classify", items, **options)


async def tag(call: Call[TagsRequest]) -> Response:
    """Return the tagged stretches of each text."""
    return await run_and_list(call, "tag", list_texts(call.body.input))


async def answer(call: Call[AnswersRequest]) -> Response:
    """Return the stretches of each context that answer a question."""
    pairs = [(call.body.question, context) for context in list_texts(call.body.context)]
    options = call.take("n_best", "max_answer_tokens")
    return await run_and_list(call, "answer", pairs, ("question", "context"), **options)


async def fill_mask(call: Call[FillMaskRequest]) -> Response:
    """Return the likeliest words for each mask token."""
    return await run_and_list(call, "fill_mask", list_texts(call.body.input), **call.take("top_k"))
