"""The routes that models answer, as a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from ...encode.results import Answer, Answers, Classification, FilledMask, Tags
from .answers import (
    ChatAnswer,
    ChatEvent,
    CompletionAnswer,
    CompletionEvent,
    DetokenizeAnswer,
    EmbeddingEntry,
    ExplanationAnswer,
    ImageEvent,
    ImagesAnswer,
    ListOf,
    RankedText,
    RerankAnswer,
    ScoreEntry,
    TokenizeAnswer,
    TranslationEntry,
    WeightEntry,
    list_results,
)
from .bodies import (
    AnswersRequest,
    Body,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    ExplanationsRequest,
    FillMaskRequest,
    TagsRequest,
    TokenizeRequest,
    TranslationsRequest,
)
from .calls import Call
from .explanations import explain
from .image_bodies import ImageEditsRequest, ImagesRequest
from .images import NAMES as IMAGE_NAMES
from .images import edit_images, generate_images
from .matches import MatchesEntry, MatchesRequest, find_matches
from .text import NAMES, chat, complete
from .translations import detokenize, tokenize, translate
from .vector_bodies import EmbeddingsRequest, RerankRequest, ScoreRequest, SparseRequest, TextsRankRequest
from .vectors import answer, classify, embed, embed_sparse, fill_mask, rerank, rerank_texts, score, tag


@dataclass(frozen=True)
class Endpoint:
    """A route that a model answers.

    Attributes:
        capability: what the model must be able to do; "" is anything.
        body: the type of a request's parameters.
        handle: makes the answer.
        answer: the type of an answer, of `answers`.
        event: the type of a stream's events, where the route has streams.
        takes_form: whether a body may be multipart/form-data too.
        names: of its parameters, by those of the options or arguments of ours that get them, where the two
            differ: errors are about ours.
    """

    path: str
    capability: str
    body: type[Body]
    handle: Callable[[Call[Any]], Awaitable[Response]]
    answer: Any
    event: Any = None
    takes_form: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (self.handle.__doc__ or "").partition("\n")[0]


CUT = {"max_tokens": "truncate_prompt_tokens"}
INPUT = {"texts": "input", **CUT}
ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions",
        "chat",
        ChatRequest,
        chat,
        ChatAnswer,
        ChatEvent,
        names=NAMES,
    ),
    Endpoint(
        "/v1/completions",
        "completions",
        CompletionRequest,
        complete,
        CompletionAnswer,
        CompletionEvent,
        names=NAMES,
    ),
    Endpoint(
        "/v1/embeddings",
        "embeddings",
        EmbeddingsRequest,
        embed,
        ListOf[EmbeddingEntry],
        names={**INPUT, "truncate_dim": "dimensions"},
    ),
    Endpoint(
        "/v1/rerank",
        "rerank",
        RerankRequest,
        rerank,
        RerankAnswer,
        names={"first": "query", "texts": "documents", **CUT},
    ),
    Endpoint(
        "/rerank",
        "rerank",
        TextsRankRequest,
        rerank_texts,
        list[RankedText],
        names={"first": "query", **CUT},
    ),
    Endpoint(
        "/v1/score",
        "rerank",
        ScoreRequest,
        score,
        ListOf[ScoreEntry],
        names={"first": "text_1", "texts": "text_2", **CUT},
    ),
    Endpoint(
        "/embed_sparse",
        "embed_sparse",
        SparseRequest,
        embed_sparse,
        list[list[WeightEntry]],
        names={**CUT, "texts": "inputs"},
    ),
    Endpoint(
        "/v1/matches",
        "matches",
        MatchesRequest,
        find_matches,
        ListOf[MatchesEntry],
        names={"texts": "documents", **CUT},
    ),
    Endpoint(
        "/v1/classify",
        "classify",
        ClassifyRequest,
        classify,
        list_results(Classification),
        names={**INPUT, "first": "input"},
    ),
    Endpoint("/v1/tags", "tags", TagsRequest, tag, list_results(Tags), names=INPUT),
    Endpoint(
        "/v1/answers",
        "answers",
        AnswersRequest,
        answer,
        list_results(Answers, best=Answer | None),
        names={"first": "question", "texts": "context", **CUT},
    ),
    Endpoint(
        "/v1/fill-mask",
        "fill-mask",
        FillMaskRequest,
        fill_mask,
        list_results(FilledMask),
        names=INPUT,
    ),
    Endpoint(
        "/v1/translations",
        "translations",
        TranslationsRequest,
        translate,
        ListOf[TranslationEntry],
        names=INPUT,
    ),
    Endpoint(
        "/v1/explanations",
        "explanations",
        ExplanationsRequest,
        explain,
        ExplanationAnswer,
        names={
            **INPUT,
            "text": "input",
            "prompt": "input",
        },
    ),
    Endpoint(
        "/v1/images/generations",
        "images/generations",
        ImagesRequest,
        generate_images,
        ImagesAnswer,
        ImageEvent,
        names=IMAGE_NAMES,
    ),
    Endpoint(
        "/v1/images/edits",
        "images/edits",
        ImageEditsRequest,
        edit_images,
        ImagesAnswer,
        ImageEvent,
        takes_form=True,
        names=IMAGE_NAMES,
    ),
    Endpoint("/tokenize", "", TokenizeRequest, tokenize, TokenizeAnswer),
    Endpoint("/detokenize", "", DetokenizeRequest, detokenize, DetokenizeAnswer),
)
