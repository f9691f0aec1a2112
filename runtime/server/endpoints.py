"""The routes that models answer, as a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from ..encode.results import Answer, Answers, Classification, FilledMask, Tags
from . import answers, bodies, explanations, text, translations, vectors
from .answers import ListOf
from .calls import Call
from .schema import Schema


@dataclass(frozen=True)
class Endpoint:
    """A route that a model answers.

    Attributes:
        capability: what the model must be able to do; "" is anything.
        body: the schema of a request's parameters.
        handle: makes the answer.
        answer: the type of an answer, of `answers`.
        event: the type of a stream's events, where the route has streams.
        names: of its parameters, by those of the options or arguments of ours that get them, where the two
            differ: errors are about ours.
    """

    path: str
    capability: str
    body: Schema
    handle: Callable[[Call], Awaitable[Response]]
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
        bodies.CHAT,
        text.chat,
        answers.ChatAnswer,
        answers.ChatEvent,
        names=text.NAMES,
    ),
    Endpoint(
        "/v1/completions",
        "completions",
        bodies.COMPLETION,
        text.complete,
        answers.CompletionAnswer,
        answers.CompletionEvent,
        names=text.NAMES,
    ),
    Endpoint(
        "/v1/embeddings",
        "embeddings",
        bodies.EMBEDDINGS,
        vectors.embed,
        ListOf(answers.EmbeddingEntry),
        names={**INPUT, "truncate_dim": "dimensions"},
    ),
    Endpoint(
        "/v1/rerank",
        "rerank",
        bodies.RERANK,
        vectors.rerank,
        answers.RerankAnswer,
        names={"first": "query", "texts": "documents", **CUT},
    ),
    Endpoint(
        "/v1/classify",
        "classify",
        bodies.CLASSIFY,
        vectors.classify,
        ListOf(Classification),
        names={**INPUT, "first": "input"},
    ),
    Endpoint("/v1/tags", "tags", bodies.TAGS, vectors.tag, ListOf(Tags), names=INPUT),
    Endpoint(
        "/v1/answers",
        "answers",
        bodies.ANSWERS,
        vectors.answer,
        ListOf(Answers, {"best": Answer | None}),
        names={"first": "question", "texts": "context", **CUT},
    ),
    Endpoint(
        "/v1/fill-mask", "fill-mask", bodies.FILL_MASK, vectors.fill_mask, ListOf(FilledMask), names=INPUT
    ),
    Endpoint(
        "/v1/translations",
        "translations",
        bodies.TRANSLATIONS,
        translations.translate,
        ListOf(answers.TranslationEntry),
        names=INPUT,
    ),
    Endpoint(
        "/v1/explanations",
        "explanations",
        bodies.EXPLANATIONS,
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
    Endpoint("/tokenize", "", bodies.TOKENIZE, translations.tokenize, answers.TokenizeAnswer),
    Endpoint("/detokenize", "", bodies.DETOKENIZE, translations.detokenize, answers.DetokenizeAnswer),
)
