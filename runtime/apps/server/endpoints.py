"""The routes that models answer, as a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from ...encode.results import Answer, Answers, Classification, FilledMask, Tags
from . import answers, bodies, explanations, text, translations, vectors
from .answers import ListOf, list_results
from .calls import Call


@dataclass(frozen=True)
class Endpoint:
    """A route that a model answers.

    Attributes:
        capability: what the model must be able to do; "" is anything.
        body: the type of a request's parameters.
        handle: makes the answer.
        answer: the type of an answer, of `answers`.
        event: the type of a stream's events, where the route has streams.
        names: of its parameters, by those of the options or arguments of ours that get them, where the two
            differ: errors are about ours.
    """

    path: str
    capability: str
    body: type[bodies.Body]
    handle: Callable[[Call[Any]], Awaitable[Response]]
    answer: Any
    event: Any = None
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
        bodies.ChatRequest,
        text.chat,
        answers.ChatAnswer,
        answers.ChatEvent,
        names=text.NAMES,
    ),
    Endpoint(
        "/v1/completions",
        "completions",
        bodies.CompletionRequest,
        text.complete,
        answers.CompletionAnswer,
        answers.CompletionEvent,
        names=text.NAMES,
    ),
    Endpoint(
        "/v1/embeddings",
        "embeddings",
        bodies.EmbeddingsRequest,
        vectors.embed,
        ListOf[answers.EmbeddingEntry],
        names={**INPUT, "truncate_dim": "dimensions"},
    ),
    Endpoint(
        "/v1/rerank",
        "rerank",
        bodies.RerankRequest,
        vectors.rerank,
        answers.RerankAnswer,
        names={"first": "query", "texts": "documents", **CUT},
    ),
    Endpoint(
        "/v1/classify",
        "classify",
        bodies.ClassifyRequest,
        vectors.classify,
        list_results(Classification),
        names={**INPUT, "first": "input"},
    ),
    Endpoint("/v1/tags", "tags", bodies.TagsRequest, vectors.tag, list_results(Tags), names=INPUT),
    Endpoint(
        "/v1/answers",
        "answers",
        bodies.AnswersRequest,
        vectors.answer,
        list_results(Answers, best=Answer | None),
        names={"first": "question", "texts": "context", **CUT},
    ),
    Endpoint(
        "/v1/fill-mask",
        "fill-mask",
        bodies.FillMaskRequest,
        vectors.fill_mask,
        list_results(FilledMask),
        names=INPUT,
    ),
    Endpoint(
        "/v1/translations",
        "translations",
        bodies.TranslationsRequest,
        translations.translate,
        ListOf[answers.TranslationEntry],
        names=INPUT,
    ),
    Endpoint(
        "/v1/explanations",
        "explanations",
        bodies.ExplanationsRequest,
        explanations.explain,
        answers.ExplanationAnswer,
        names={
            **INPUT,
            "text": "input",
            "prompt": "input",
            "label": "answer",
            "translation": "answer",
        },
    ),
    Endpoint("/tokenize", "", bodies.TokenizeRequest, translations.tokenize, answers.TokenizeAnswer),
    Endpoint("/detokenize", "", bodies.DetokenizeRequest, translations.detokenize, answers.DetokenizeAnswer),
)
