"""What routes answer, as types: by them the writers are checked, and /openapi.json is made of them.

Those of what encoders find are in `encode/results.py`; `list_results` says how a route lists them.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar, get_type_hints

from msgspec import UNSET, Struct, UnsetType, defstruct

FinishReason = Literal["stop", "length", "tool_calls"]
State = Literal["loading", "ready", "failed"]
T = TypeVar("T")


class Record(Struct, forbid_unknown_fields=True):
    """An object of an answer, which has these members and no others; those that are UNSET are left out."""


class Usage(Record):
    """Tokens that a model read."""

    prompt_tokens: int
    total_tokens: int


class PromptDetails(Record):
    """Tokens of a prompt that earlier requests had computed."""

    cached_tokens: int


class GenerationUsage(Record):
    """Tokens that a model read and wrote."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CalledFunction(Record):
    """The function that an answer calls; the arguments are JSON."""

    name: str
    arguments: str


class ToolCall(Record, tag_field="type", tag="function"):
    """A call of a tool."""

    id: str
    function: CalledFunction


class StreamedToolCall(ToolCall):
    """A call of a tool in a stream, which has it whole."""

    index: int


class TokenLogprob(Record):
    """A token and its log-probability; one that is part of a character reads as its bytes.

    The bytes are what it adds to the text: a special token adds none.
    """

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of an answer, beside those that were likeliest."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Record):
    """The log-probabilities of a chat's tokens."""

    content: list[ChosenLogprob]
    refusal: None


class Message(Record, tag_field="role", tag="assistant"):
    """An answer; its text is null beside calls of tools, where there is none."""

    content: str | None
    refusal: None
    annotations: list[Any]
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Record):
    """One answer to a conversation."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(Record, tag_field="object", tag="chat.completion"):
    """The answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: GenerationUsage


class Delta(Record):
    """What an event adds to an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[StreamedToolCall] | UnsetType = UNSET


class StreamedChatChoice(Record):
    """A piece of one answer to a conversation."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatEvent(Record, tag_field="object", tag="chat.completion.chunk"):
    """An event of a chat's stream; with include_usage the last one has the usage."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[StreamedChatChoice]
    usage: GenerationUsage | UnsetType | None = UNSET


class CompletionLogprobs(Record):
    """The log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ReadNeighbour(Record):
    """A neighbour that was read: its text's name, its first token, and 1 less the cosine of the keys."""

    document: str
    start: int
    distance: float
    text: str


class CompletionChoice(Record):
    """One continuation of a prompt, or in a stream a piece of it, whose last one has the finish reason.

    Where a model reads neighbours of its text, `neighbours` has those of each chunk of prompt and answer.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    neighbours: list[list[ReadNeighbour]] | UnsetType = UNSET


class CompletionAnswer(Record, tag_field="object", tag="text_completion"):
    """The answer of /v1/completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: GenerationUsage


class CompletionEvent(Record, tag_field="object", tag="text_completion"):
    """An event of a completion's stream; with include_usage the last one has the usage."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: GenerationUsage | UnsetType | None = UNSET


class ListOf(Record, Generic[T], tag_field="object", tag="list"):
    """The answer of a route that has an entry for each text."""

    data: list[T]
    model: str
    usage: Usage


def list_results(result: type, **more: Any) -> Any:
    """Return the type of an answer that lists results of an encoder, each with the index of its text.

    `more` are the types of members that a result has beside its fields.
    """
    fields = {"index": int, **get_type_hints(result), **more}
    entry = defstruct(
        result.__name__, list(fields.items()), bases=(Record,), namespace={"__doc__": result.__doc__}
    )
    return ListOf[entry]  # type: ignore[valid-type]


class EmbeddingEntry(Record, tag_field="object", tag="embedding"):
    """A text's vector, as numbers or in base64, and how many of the text's tokens were dropped."""

    index: int
    embedding: list[float] | str
    dropped: int


class DocumentText(Record):
    """A document."""

    text: str


class RankedDocument(Record):
    """A document's place among those given, its score, and how many of their tokens were dropped."""

    index: int
    relevance_score: float
    dropped: int
    document: DocumentText | UnsetType = UNSET


class RerankAnswer(Record):
    """The answer of /v1/rerank: the best documents first."""

    model: str
    results: list[RankedDocument]
    usage: Usage


class WeightEntry(Record):
    """A token's id and its weight."""

    index: int
    value: float


class RankedText(Record):
    """A text's place among those given, and its score."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class ScoreEntry(Record, tag_field="object", tag="score"):
    """The score of a pair of texts."""

    index: int
    score: float


class CandidateEntry(Record):
    """One of a text's translations."""

    text: str
    score: float


class AlignmentEntry(Record):
    """How much each token of a translation looked at each of the text."""

    source: list[str]
    target: list[str]
    weights: list[list[float]]


class TranslationEntry(Record):
    """A text's translations, the best one first, and what its tokens looked at."""

    index: int
    text: str
    score: float
    finish_reason: FinishReason
    candidates: list[CandidateEntry]
    dropped: int
    alignment: AlignmentEntry | UnsetType = UNSET


class ExplainedToken(Record):
    """A token that was read or written."""

    text: str
    id: int
    part: str
    start: int
    end: int


class ExplanationAnswer(Record):
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


class ImageEntry(Record):
    """A picture in base64, the seed that makes it again, and how many tokens of the prompt were dropped."""

    b64_json: str
    seed: int
    dropped: int


class ImagesAnswer(Record):
    """The answer of routes that make pictures."""

    created: int
    data: list[ImageEntry]
    output_format: str
    size: str


class ImageEvent(Record):
    """An event of a stream: a step, a picture on its way, or a picture that is complete."""

    type: Literal[
        "image_generation.step",
        "image_generation.partial_image",
        "image_generation.completed",
        "image_edit.step",
        "image_edit.partial_image",
        "image_edit.completed",
    ]
    created_at: int
    step: int | UnsetType = UNSET
    steps: int | UnsetType = UNSET
    seconds_left: float | UnsetType = UNSET
    b64_json: str | UnsetType = UNSET
    size: str | UnsetType = UNSET
    output_format: str | UnsetType = UNSET
    index: int | UnsetType = UNSET
    partial_image_index: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    dropped: int | UnsetType = UNSET


class TokenizeAnswer(Record):
    """The answer of /tokenize."""

    model: str
    tokens: list[int]
    count: int


class DetokenizeAnswer(Record):
    """The answer of /detokenize."""

    model: str
    content: str


class ModelEntry(Record, tag_field="object", tag="model"):
    """A model; what it can be asked for are the last words of the routes that it answers.

    While it loads, no more is known than these members without a default.
    """

    id: str
    created: int
    owned_by: str
    capabilities: list[str]
    status: State
    family: str | UnsetType = UNSET
    precision: str | UnsetType = UNSET
    backend: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    labels: list[str] | UnsetType = UNSET
    mask_token: str | UnsetType = UNSET
    matches: list[str] | UnsetType = UNSET
    tools: bool | UnsetType = UNSET
    languages: list[str] | UnsetType = UNSET
    alignments: bool | UnsetType = UNSET
    image_size: str | UnsetType = UNSET


class ModelList(Record, tag_field="object", tag="list"):
    """The answer of /v1/models."""

    data: list[ModelEntry]


class Health(Record):
    """The answer of /health."""

    status: Literal["ok"]


class Readiness(Record):
    """The answer of /ready."""

    status: Literal["ready", "not ready"]
    models: dict[str, State]


class ErrorFields(Record):
    """What was wrong: the parameter and the code are null where there is none."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Record):
    """The answer to what was refused or failed."""

    error: ErrorFields
