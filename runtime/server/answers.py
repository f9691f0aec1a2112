"""What routes answer, as types: by them the writers are checked, and /openapi.json is made of them.

Those of what encoders find are in `encode/results.py`; `ListOf` says how a route lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]
State = Literal["loading", "ready", "failed"]


class Usage(TypedDict):
    """Tokens that a model read."""

    prompt_tokens: int
    total_tokens: int


class PromptDetails(TypedDict):
    """Tokens of a prompt that earlier requests had computed."""

    cached_tokens: int


class GenerationUsage(TypedDict):
    """Tokens that a model read and wrote."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CalledFunction(TypedDict):
    """The function that an answer calls; the arguments are JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class StreamedToolCall(ToolCall):
    """A call of a tool in a stream, which has it whole."""

    index: int


class TokenLogprob(TypedDict):
    """A token and its log-probability; one that is part of a character reads as its bytes.

    The bytes are what it adds to the text: a special token adds none.
    """

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of an answer, beside those that were likeliest."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """The log-probabilities of a chat's tokens."""

    content: list[ChosenLogprob]
    refusal: None


class TextMessage(TypedDict):
    """An answer's text; null beside calls of tools, where there is none."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]


class Message(TextMessage, total=False):
    """An answer."""

    tool_calls: list[ToolCall]


class ChatChoice(TypedDict):
    """One answer to a conversation."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(TypedDict):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: GenerationUsage


class Delta(TypedDict, total=False):
    """What an event adds to an answer."""

    role: Literal["assistant"]
    content: str
    refusal: None
    tool_calls: list[StreamedToolCall]


class StreamedChatChoice(TypedDict):
    """A piece of one answer to a conversation."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatPiece(TypedDict):
    """What every event of a chat's stream has."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[StreamedChatChoice]


class ChatEvent(ChatPiece, total=False):
    """An event of a chat's stream; with include_usage the last one has the usage."""

    usage: GenerationUsage | None


class CompletionLogprobs(TypedDict):
    """The log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One continuation of a prompt, or in a stream a piece of it, whose last one has the finish reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionPiece(TypedDict):
    """What answers and events of /v1/completions have."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]


class CompletionAnswer(CompletionPiece):
    """The answer of /v1/completions."""

    usage: GenerationUsage


class CompletionEvent(CompletionPiece, total=False):
    """An event of a completion's stream; with include_usage the last one has the usage."""

    usage: GenerationUsage | None


@dataclass(frozen=True)
class ListOf:
    """The answer of a route that has an entry for each text.

    Attributes:
        entry: what an entry is; of a result of an encoder, its fields and which text's it is.
        more: members that a result of an encoder has beside its fields, with their types.
    """

    entry: type
    more: Mapping[str, Any] = field(default_factory=dict)


class EmbeddingEntry(TypedDict):
    """A text's vector, as numbers or in base64, and how many of the text's tokens were dropped."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    dropped: int


class DocumentText(TypedDict):
    """A document."""

    text: str


class RankedEntry(TypedDict):
    """A document's place among those given, its score, and how many of their tokens were dropped."""

    index: int
    relevance_score: float
    dropped: int


class RankedDocument(RankedEntry, total=False):
    """The same, with its text."""

    document: DocumentText


class RerankAnswer(TypedDict):
    """The answer of /v1/rerank: the best documents first."""

    model: str
    results: list[RankedDocument]
    usage: Usage


class CandidateEntry(TypedDict):
    """One of a text's translations."""

    text: str
    score: float


class AlignmentEntry(TypedDict):
    """How much each token of a translation looked at each of the text."""

    source: list[str]
    target: list[str]
    weights: list[list[float]]


class PlainTranslationEntry(TypedDict):
    """A text's translations, the best one first."""

    index: int
    text: str
    score: float
    finish_reason: FinishReason
    candidates: list[CandidateEntry]
    dropped: int


class TranslationEntry(PlainTranslationEntry, total=False):
    """The same, with what its tokens looked at."""

    alignment: AlignmentEntry


class ExplainedToken(TypedDict):
    """A token that was read or written."""

    text: str
    id: int
    part: str
    start: int
    end: int


class ExplanationAnswer(TypedDict):
    """The answer of /v1/explanations, as `Explanation.to_json` gives it."""

    kind: str
    model: str
    tokens: list[ExplainedToken]
    targets: list[dict[str, Any]]
    saliency: dict[str, list[list[float | None]]]
    missing: list[float] | None
    lens: dict[str, Any] | None
    attention: list[dict[str, Any]]
    neurons: dict[str, Any] | None
    other: str | None


class TokenizeAnswer(TypedDict):
    """The answer of /tokenize."""

    model: str
    tokens: list[int]
    count: int


class DetokenizeAnswer(TypedDict):
    """The answer of /detokenize."""

    model: str
    content: str


class ListedModel(TypedDict):
    """What /v1/models says of a model that loads too."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    capabilities: list[str]
    status: State


class ModelEntry(ListedModel, total=False):
    """A model; what it can be asked for are the last words of the routes that it answers."""

    family: str
    precision: str
    backend: str
    context_length: int
    labels: list[str]
    mask_token: str
    tools: bool
    languages: list[str]
    alignments: bool


class ModelList(TypedDict):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class Health(TypedDict):
    """The answer of /health."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """The answer of /ready."""

    status: Literal["ready", "not ready"]
    models: dict[str, State]


class ErrorFields(TypedDict):
    """What was wrong: the parameter and the code are null where there is none."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """The answer to what was refused or failed."""

    error: ErrorFields
