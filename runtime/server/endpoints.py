"""The routes that models answer, as a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.responses import Response

from . import bodies, text, translations, vectors
from .calls import Call
from .schema import Schema


@dataclass(frozen=True)
class Endpoint:
    """A route that a model answers.

    Attributes:
        capability: what the model must be able to do; "" is anything.
        body: the schema of a request's parameters.
        handle: makes the answer.
        answer: the members that an answer always has.
    """

    path: str
    capability: str
    body: Schema
    handle: Callable[[Call], Awaitable[Response]]
    answer: tuple[str, ...]

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (self.handle.__doc__ or "").partition("\n")[0]


ANSWER = ("id", "object", "created", "model", "choices", "usage")
LIST = ("object", "data", "model", "usage")
ENDPOINTS = (
    Endpoint("/v1/chat/completions", "chat", bodies.CHAT, text.chat, ANSWER),
    Endpoint("/v1/completions", "completions", bodies.COMPLETION, text.complete, ANSWER),
    Endpoint("/v1/embeddings", "embeddings", bodies.EMBEDDINGS, vectors.embed, LIST),
    Endpoint("/v1/rerank", "rerank", bodies.RERANK, vectors.rerank, ("model", "results", "usage")),
    Endpoint("/v1/classify", "classify", bodies.CLASSIFY, vectors.classify, LIST),
    Endpoint("/v1/tags", "tags", bodies.TAGS, vectors.tag, LIST),
    Endpoint("/v1/answers", "answers", bodies.ANSWERS, vectors.answer, LIST),
    Endpoint("/v1/fill-mask", "fill-mask", bodies.FILL_MASK, vectors.fill_mask, LIST),
    Endpoint("/v1/translations", "translations", bodies.TRANSLATIONS, translations.translate, LIST),
    Endpoint("/tokenize", "", bodies.TOKENIZE, translations.tokenize, ("model", "tokens", "count")),
    Endpoint("/detokenize", "", bodies.DETOKENIZE, translations.detokenize, ("model", "content")),
)
