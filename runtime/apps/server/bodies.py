"""The bodies of requests as types: msgspec decodes and checks them, and /openapi.json is made of them.

A parameter that is null is as good as left out. In the schema of a place, `x-refusal` is the end of every
error about it, and `x-other-type` of one about a value of another type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import Meta, Struct

from ..explain.options import MAX_WATCHED, METHODS, OBJECTIVES
from .errors import refuse

LONGEST_TEXT = 2**20  # characters
MAX_TEXTS = 2048  # of a request, as OpenAI has it
MAX_TOKENS = 2**18
MAX_ANSWERS = 128
MAX_BIASES = 16_384
MAX_OPTION_BYTES = 2**20  # of JSON, of all parameters together that are none of INPUTS
INPUTS = (
    "messages",
    "prompt",
    "negative_prompt",
    "input",
    "inputs",
    "query",
    "documents",
    "texts",
    "text_1",
    "text_2",
    "question",
    "context",
    "pair",
    "answer",
    "content",
    "tokens",
    "candidate_labels",
    "image",
)
MAX_LABELS = 256  # of a zero-shot request
UNSUPPORTED = "this server does not support other values"
TOKEN_IDS = (
    "send texts: token ids of another tokenizer would be read as other texts; with LangChain set"
    " check_embedding_ctx_length=False"
)
TRUNCATED = "Drop the beginning of a prompt, or a conversation's oldest turns, that is too long."
KEPT = "Keep this many tokens of a text, from its beginning unless truncation is given; -1: all that fit."


def limits(least: float, most: float, text: str | None = None) -> Meta:
    """Return the least and the most that a number may be, and what it says."""
    return Meta(ge=least, le=most, description=text)


def sizes(least: int, most: int) -> Meta:
    """Return how many characters, items or members there may be."""
    return Meta(min_length=least, max_length=most)


def says(text: str) -> Meta:
    return Meta(description=text)


def refusal(text: str, kind: str = "x-refusal") -> Meta:
    """Return the end of errors about a place."""
    return Meta(extra_json_schema={kind: text})


TEMPLATE_OPTIONS = Meta(max_length=64, description="Variables of the chat template, by name.")

T = TypeVar("T")
Text = Annotated[str, sizes(0, LONGEST_TEXT)]
Name = Annotated[str, sizes(1, 64)]
Stop = Annotated[str, sizes(1, 1024)]
Key = Annotated[str, sizes(0, 512), says("Has no effect on the answer.")]
Many = Annotated[list[T], sizes(1, MAX_TEXTS)]
Few = Annotated[list[T], sizes(0, 128)]
Texts: TypeAlias = Text | Many[Text]
Pair = Annotated[list[Text], sizes(2, 2)]
Token = Annotated[int, limits(0, 2**31 - 1)]
Tokens = Annotated[list[Token], sizes(1, MAX_TOKENS)]
Count = Annotated[int, limits(1, 2**31 - 1)]
Size = Annotated[int, limits(1, 2**20)]
Penalty = Annotated[float, limits(0.01, 100, "Above 1 makes tokens less likely that are there already.")]
Biases = Annotated[
    dict[Token, Annotated[float, limits(-100, 100)]],
    sizes(0, MAX_BIASES),
    Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}}),
]
Special = Annotated[bool, says("Read special tokens in a text as such.")]
Unused = Annotated[T, says("Has no effect on the answer.")]
NoText = Annotated[Literal[""], refusal(UNSUPPORTED)]
NoList = Annotated[list[Any], sizes(0, 0), refusal(UNSUPPORTED)]
NoObject = Annotated[dict[str, Any], sizes(0, 0), refusal(UNSUPPORTED)]
Modality = Annotated[Literal["text"], refusal("this server only generates text")]
Method: TypeAlias = Literal[METHODS]  # type: ignore[valid-type]
Objective: TypeAlias = Literal[OBJECTIVES]  # type: ignore[valid-type]


class Part(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An object of a request, which has these members and no others."""


class Body(Part):
    """What every request may have; clients take turns by their keys, not by `user`."""

    model: Annotated[str, says("May be left out where one model alone fits.")] | None = None
    user: Key | None = None
    timeout: Annotated[float, limits(0.1, 86_400, "Seconds after which the request fails.")] | None = None


class StreamOptions(Part):
    """What a stream has beside the answer."""

    include_usage: Annotated[bool, says("Let a chunk with the usage come last.")] | None = None
    include_obfuscation: Annotated[bool, says("Has no effect: nothing is padded.")] | None = None


class JsonSchema(Part):
    """The JSON schema of an answer."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Part):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(Body):
    """What chats and completions may have."""

    temperature: Annotated[float, limits(0, 100, "0 takes the likeliest token always.")] | None = None
    top_p: (
        Annotated[float, limits(0, 1, "Sample from the likeliest tokens that have this total probability.")]
        | None
    ) = None
    top_k: Annotated[Count, says("Sample from this many likeliest tokens.")] | None = None
    min_p: (
        Annotated[float, Meta(gt=0, le=1), says("Least share of the likeliest token's probability.")] | None
    ) = None
    repetition_penalty: Penalty | None = None
    no_repeat_ngram_size: Size | None = None
    seed: Annotated[int, limits(-(2**63), 2**63 - 1, "Makes sampling repeatable.")] | None = None
    n: Annotated[int, limits(1, MAX_ANSWERS, "How many answers.")] | None = None
    stop: Stop | Annotated[list[Stop], sizes(0, 16)] | None = None
    logit_bias: Annotated[Biases, says("Is added to logits of token ids; -100 forbids one.")] | None = None
    truncation: Annotated[Literal["tail"], says(TRUNCATED)] | None = None
    parse_special: Special | None = None
    ignore_eos: Annotated[bool, says("Continue after end tokens.")] | None = None
    stream: Annotated[bool, says("Send the answer as it comes, as server-sent events.")] | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, limits(-2, 2, "Subtracted per occurrence.")] | None = None
    presence_penalty: Annotated[float, limits(-2, 2, "Subtracted once.")] | None = None
    response_format: ResponseFormat | None = None
    regex: Annotated[str, sizes(0, 65_536), says("The answer matches it.")] | None = None
    grammar: Annotated[str, sizes(0, 65_536), says("A Lark grammar for llguidance.")] | None = None
    choices: Annotated[list[Annotated[str, Meta(min_length=1)]], sizes(1, 1024)] | None = None
    metadata: Unused[Annotated[dict[str, str], sizes(0, 16)]] | None = None
    service_tier: Unused[Literal["auto", "default", "flex", "scale", "priority"]] | None = None
    store: Unused[bool] | None = None
    prompt_cache_key: Key | None = None
    safety_identifier: Key | None = None


class Function(Part):
    """A function that a model may call."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], says("A JSON schema.")] | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool that a model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Part):
    """The name of a function."""

    name: str


class ToolChoice(Part):
    """The tool that a model must call."""

    type: Literal["function"]
    function: FunctionName


class TextPart(Part):
    """A part of a message."""

    type: Annotated[Literal["text"], refusal("this server only reads text, not images, audio or files")]
    text: Text


class FunctionCall(Part):
    """A function that an earlier answer called."""

    name: Name
    arguments: Annotated[str, says("A JSON object.")]


class MessageCall(Part):
    """A call of a tool in an earlier answer."""

    function: FunctionCall
    type: Literal["function"] | None = None
    id: str | None = None


class ChatMessage(Part):
    """A message of a conversation; what must be empty is sent back by OpenAI's clients nevertheless."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Many[TextPart] | None = None
    name: Annotated[str, sizes(0, 64), says("The author, if the template uses it.")] | None = None
    tool_calls: Few[MessageCall] | None = None
    tool_call_id: Annotated[str, says("Which call a tool's message answers.")] | None = None
    refusal: NoText | None = None
    annotations: NoList | None = None
    audio: NoObject | None = None
    function_call: NoObject | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Many[ChatMessage]
    max_tokens: Annotated[Count, says("As max_completion_tokens.")] | None = None
    max_completion_tokens: Annotated[Count, says("Unless given, what the context holds.")] | None = None
    logprobs: Annotated[bool, says("Give each token's log-probability.")] | None = None
    top_logprobs: Annotated[int, limits(0, 20, "And those of so many likeliest tokens.")] | None = None
    tools: Few[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, says("Whether one answer may call several tools.")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], TEMPLATE_OPTIONS] | None = None
    continue_final_message: Annotated[bool, says("Go on with the assistant's last message.")] | None = None
    add_generation_prompt: Annotated[bool, says("False goes with continue_final_message=true.")] | None = None
    modalities: Annotated[list[Modality], sizes(1, 1)] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of /v1/completions; an array has prompts of one kind, or the token ids of one."""

    prompt: Text | Annotated[list[Text | Token | Tokens], sizes(1, MAX_TOKENS)]
    max_tokens: Annotated[Count, says("16 unless given, as OpenAI has it.")] | None = None
    logprobs: Annotated[int, limits(0, 5, "And those of so many likeliest tokens.")] | None = None
    best_of: Annotated[Literal[1], refusal(UNSUPPORTED)] | None = None
    echo: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    suffix: NoText | None = None

    def __post_init__(self) -> None:
        """Refuse, in an ApiError, what types cannot."""
        if self.echo:
            refuse("echo", f"must be false, not true ({UNSUPPORTED})")
        kinds = set(map(type, self.prompt)) if isinstance(self.prompt, list) else {str}
        if len(kinds) > 1:
            refuse("prompt", "must be texts, or token ids, or arrays of token ids, not some of each")
        if kinds != {int} and isinstance(self.prompt, list) and len(self.prompt) > MAX_ANSWERS:
            refuse("prompt", f"must have at most {MAX_ANSWERS} items, not {len(self.prompt)}")


class LongTextsRequest(Body):
    """What becomes of texts that are too long, which are refused otherwise."""

    truncation: Literal["head", "tail", "head+tail", "windows"] | None = None
    truncate_prompt_tokens: Annotated[int, limits(-1, 2**20, KEPT)] | None = None
    stride: Annotated[int, limits(0, 2**20, "Tokens that neighbouring windows share.")] | None = None


class EncodeRequest(LongTextsRequest):
    """What most routes of encoders may have."""

    parse_special: Special | None = None


class ClassifyRequest(EncodeRequest, kw_only=True):
    """The body of /v1/classify; labels of one's own are judged by a model of natural language inference."""

    input: Text | Many[Text | Pair]
    logits: Annotated[bool, says("Give the logits too.")] | None = None
    candidate_labels: Annotated[list[Annotated[str, sizes(1, 1024)]], sizes(1, MAX_LABELS)] | None = None
    hypothesis_template: Annotated[str, sizes(0, 1024), says("{} stands for a label.")] | None = None
    multi_label: Annotated[bool, says("Judge each of the labels by itself.")] | None = None


class TagsRequest(EncodeRequest, kw_only=True):
    """The body of /v1/tags."""

    input: Texts


class AnswersRequest(EncodeRequest, kw_only=True):
    """The body of /v1/answers."""

    question: Text
    context: Texts
    n_best: Annotated[int, limits(1, 100, "How many answers of each context.")] | None = None
    max_answer_tokens: Annotated[int, limits(1, 512)] | None = None


class FillMaskRequest(LongTextsRequest, kw_only=True):
    """The body of /v1/fill-mask."""

    input: Texts
    top_k: Annotated[int, limits(1, 1000, "Words for each place.")] | None = None


class TranslationsRequest(Body, kw_only=True):
    """The body of /v1/translations."""

    input: Texts
    num_beams: Annotated[int, limits(1, 64)] | None = None
    n_best: Annotated[int, limits(1, 64)] | None = None
    length_penalty: Annotated[float, limits(-10, 10)] | None = None
    max_new_tokens: Size | None = None
    min_new_tokens: Annotated[int, limits(0, 2**20)] | None = None
    no_repeat_ngram_size: Size | None = None
    repetition_penalty: Penalty | None = None
    truncation: Literal["head", "tail"] | None = None
    alignment: Annotated[bool, says("What each token looked at, if exported so.")] | None = None


class ExplanationsRequest(Body, kw_only=True):
    """The body of /v1/explanations."""

    input: Text
    pair: Annotated[Text, says("The other text, of models that read or compare two.")] | None = None
    answer: Annotated[Text, says("What to explain; the model's own answer unless given.")] | None = None
    methods: Annotated[list[Method], sizes(1, len(METHODS))] | None = None
    objective: Annotated[Objective, says("What gradients are of.")] | None = None
    watch: Annotated[list[Annotated[str, sizes(1, 256)]], sizes(1, MAX_WATCHED)] | None = None
    factors: Annotated[int, limits(1, 64, "Groups of neurons.")] | None = None
    max_new_tokens: Annotated[int, limits(1, 64, "Of the model's own answer.")] | None = None


class TokenizeRequest(Body, kw_only=True):
    """The body of /tokenize."""

    content: Text
    parse_special: Special | None = None


class DetokenizeRequest(Body, kw_only=True):
    """The body of /detokenize."""

    tokens: Annotated[list[Token], sizes(0, MAX_TOKENS)]
