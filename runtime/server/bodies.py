"""The bodies of requests as JSON Schema: by these tables they are checked, and /openapi.json shows them."""

from __future__ import annotations

from typing import Any

from ..explain.options import METHODS, MOST_WATCHED, OBJECTIVES
from .schema import Schema

LONGEST_TEXT = 2**20  # characters
MOST_TEXTS = 2048  # of a request, as OpenAI has it
MOST_TOKENS = 2**20
MOST_ANSWERS = 128
MOST_BIASES = 16_384
MOST_LABELS = 256  # of a zero-shot request
UNSUPPORTED = "this server does not support other values"
LANGCHAIN = "check_embedding_ctx_length=False"
TOKEN_IDS = f"token ids of another tokenizer would mean other texts; with LangChain set {LANGCHAIN}"
LIMITS = {"array": "maxItems", "object": "maxProperties", "string": "maxLength"}
HINTS = {  # where to put what is looked for at the wrong place
    "json_schema": 'a schema goes into response_format={"type": "json_schema", "json_schema": {"name": ...,'
    ' "schema": ...}}',
    "functions": "give them as tools",
    "function_call": "give it as tool_choice",
}


def maybe(schema: Schema) -> Schema:
    """Return the schema of a value that may be null, which is as good as leaving it out."""
    return {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}


def number(least: float, most: float, text: str = "") -> Schema:
    return maybe({"type": "number", "minimum": least, "maximum": most, "description": text})


def share(text: str) -> Schema:
    """Return the schema of a probability that is not 0."""
    return maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 1, "description": text})


def whole(least: int, most: int, text: str = "") -> Schema:
    return maybe({"type": "integer", "minimum": least, "maximum": most, "description": text})


def switch(text: str) -> Schema:
    return maybe({"type": "boolean", "description": text})


def choice(*values: str, text: str = "") -> Schema:
    return maybe({"type": "string", "enum": list(values), "description": text})


def only(value: Any, kind: str) -> Schema:
    """Return the schema of a parameter of OpenAI's whose effect there is not: its neutral value is fine."""
    return maybe({"type": kind, "enum": [value], "x-refusal": UNSUPPORTED})


def unused(schema: Schema) -> Schema:
    """Return the schema of a parameter of OpenAI's that changes no answer."""
    return maybe({**schema, "description": "Has no effect on the answer."})


def nothing(kind: str) -> Schema:
    """Return the schema of what OpenAI's clients send back of an answer although it is null or empty."""
    return maybe({"type": kind, LIMITS[kind]: 0, "x-refusal": UNSUPPORTED})


def array(items: Schema, least: int = 1, most: int = MOST_TEXTS) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def body(required: tuple[str, ...], **properties: Schema) -> Schema:
    """Return the schema of a request's body, which has these parameters and no others."""
    return {
        "type": "object",
        "properties": {"model": MODEL, **properties, "user": USER, "timeout": TIMEOUT},
        "required": list(required),
        "additionalProperties": False,
        "x-hints": HINTS,
    }


TEXT: Schema = {"type": "string", "maxLength": LONGEST_TEXT}
TEXTS: Schema = {"anyOf": [TEXT, array(TEXT)]}
PAIR: Schema = array(TEXT, least=2, most=2)
TOKENS = array({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, most=MOST_TOKENS)
MODEL = maybe({"type": "string", "description": "Its name; may be left out where one model alone fits."})
USER = maybe(
    {"type": "string", "maxLength": 512, "description": "Has no effect: keys take turns, not users."}
)
TIMEOUT = number(0.1, 86_400, "Seconds after which the request fails.")

SAMPLING: dict[str, Schema] = {
    "temperature": number(0, 100, "0 takes the likeliest token always."),
    "top_p": number(
        0, 1, "Draw from the likeliest tokens that together reach this probability; 0 is the likeliest."
    ),
    "top_k": whole(1, 2**31 - 1, "Draw from so many likeliest tokens."),
    "min_p": share("Draw from tokens with this share of the likeliest one's probability."),
    "repetition_penalty": number(0.01, 100, "Above 1 makes tokens less likely that are there already."),
    "no_repeat_ngram_size": whole(1, 2**20),
    "seed": whole(-(2**63), 2**63 - 1, "Makes the draws repeatable."),
    "n": whole(1, MOST_ANSWERS, "How many answers."),
    "stop": maybe(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 1024},
                array({"type": "string", "minLength": 1, "maxLength": 1024}, least=0, most=16),
            ]
        }
    ),
    "logit_bias": maybe(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MOST_BIASES,
            "description": "Is added to the logits of token ids; -100 forbids one.",
        }
    ),
    "truncation": choice(
        "tail", text="Drop the beginning of a prompt, or a conversation's oldest turns, that is too long."
    ),
    "parse_special": switch("Read special tokens that a prompt or a message spells as such."),
    "ignore_eos": switch("Go on behind end tokens."),
    "stream": switch("Send the answer as it comes, as server-sent events."),
    "stream_options": maybe(
        {
            "type": "object",
            "properties": {
                "include_usage": switch("Let a chunk with the usage come last."),
                "include_obfuscation": switch("Has no effect: nothing is padded."),
            },
            "additionalProperties": False,
        }
    ),
    "frequency_penalty": number(-2, 2, "Is taken off a token's logit for each time that the answer has it."),
    "presence_penalty": number(-2, 2, "Is taken off a token's logit once the answer has it."),
    "metadata": unused({"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string"}}),
    "service_tier": unused({"type": "string", "enum": ["auto", "default", "flex", "scale", "priority"]}),
    "store": unused({"type": "boolean"}),
    "prompt_cache_key": unused({"type": "string", "maxLength": 512}),
    "safety_identifier": unused({"type": "string", "maxLength": 512}),
}
FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 64},
                "description": maybe({"type": "string"}),
                "parameters": maybe({"type": "object"}),
                "strict": switch(""),
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
NAMED_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = maybe(
    {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "description": maybe({"type": "string"}),
                    "schema": maybe({"type": "object"}),
                    "strict": switch(""),
                },
                "required": ["schema"],
                "additionalProperties": False,
            },
        },
        "required": ["type"],
        "additionalProperties": False,
    }
)
STRUCTURE: dict[str, Schema] = {
    "response_format": RESPONSE_FORMAT,
    "regex": maybe({"type": "string", "maxLength": 65_536, "description": "The answer matches it."}),
    "grammar": maybe(
        {"type": "string", "maxLength": 65_536, "description": "Of llguidance, in Lark's form."}
    ),
    "choices": maybe(array({"type": "string", "minLength": 1}, most=1024)),
}
CONTENT: Schema = {
    "anyOf": [
        {"type": "string", "maxLength": LONGEST_TEXT},
        array(
            {
                "type": "object",
                "properties": {
                    "type": {
                        "type": "string",
                        "enum": ["text"],
                        "x-refusal": "this server's models read text, no images, audio or files",
                    },
                    "text": TEXT,
                },
                "required": ["type", "text"],
                "additionalProperties": False,
            }
        ),
        {"type": "null"},
    ]
}
CALLED: Schema = {
    "type": "object",
    "properties": {
        "id": maybe({"type": "string"}),
        "type": choice("function"),
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 64},
                "arguments": {"type": "string", "description": "A JSON object."},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
    },
    "required": ["function"],
    "additionalProperties": False,
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": CONTENT,
        "name": maybe(
            {
                "type": "string",
                "maxLength": 64,
                "description": "Whose it is, for chat templates that word it.",
            }
        ),
        "tool_calls": maybe(array(CALLED, least=0, most=128)),
        "tool_call_id": maybe({"type": "string", "description": "Which call a tool's message answers."}),
        "refusal": nothing("string"),
        "annotations": nothing("array"),
        "audio": nothing("object"),
        "function_call": nothing("object"),
    },
    "required": ["role"],
    "additionalProperties": False,
}
CHAT = body(
    ("messages",),
    messages=array(MESSAGE),
    max_tokens=whole(1, 2**31 - 1, "As max_completion_tokens; unless given, what the context holds."),
    max_completion_tokens=whole(1, 2**31 - 1, "The most new tokens."),
    logprobs=switch("Give each token's log-probability."),
    top_logprobs=whole(0, 20, "And those of so many likeliest tokens."),
    **SAMPLING,
    **STRUCTURE,
    tools=maybe(array(FUNCTION, least=0, most=128)),
    tool_choice=maybe({"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, NAMED_TOOL]}),
    parallel_tool_calls=switch("Whether one answer may call several tools."),
    modalities=maybe(
        array(
            {
                "type": "string",
                "enum": ["text"],
                "x-refusal": "this server's models write text",
            },
            most=1,
        )
    ),
)
COMPLETION = body(
    ("prompt",),
    prompt={"anyOf": [TEXT, array(TEXT, most=MOST_ANSWERS), TOKENS, array(TOKENS, most=MOST_ANSWERS)]},
    max_tokens=whole(1, 2**31 - 1, "The most new tokens; 16 unless given, as OpenAI has it."),
    logprobs=whole(0, 5, "Give log-probabilities, and those of so many likeliest tokens."),
    **SAMPLING,
    **STRUCTURE,
    best_of=only(1, "integer"),
    echo=only(False, "boolean"),
    suffix=only("", "string"),
)
LONG_TEXTS: dict[str, Schema] = {
    "truncation": choice(
        "head", "tail", "head+tail", "windows", text="Of a text that is too long, which is refused otherwise."
    ),
    "truncate_prompt_tokens": whole(
        -1,
        2**20,
        "Keep so many tokens of a text, its beginning unless truncation says; -1: what the model takes.",
    ),
    "stride": whole(0, 2**20, "Tokens that neighbouring windows share."),
}
ENCODED: dict[str, Schema] = {
    **LONG_TEXTS,
    "parse_special": switch("Read special tokens that a text spells as such."),
}
EMBEDDINGS = body(
    ("input",),
    input={"anyOf": [TEXT, array({**TEXT, "x-other-type": TOKEN_IDS})]},
    dimensions=whole(1, 2**20, "Keep so many of a vector's first numbers."),
    encoding_format=choice("float", "base64"),
    prompt_name=maybe(
        {"type": "string", "description": "A prompt of the checkpoint to put before each text."}
    ),
    normalize=switch("To length 1; the checkpoint's choice unless given."),
    **ENCODED,
)
DOCUMENT: Schema = {
    "anyOf": [
        TEXT,
        {"type": "object", "properties": {"text": TEXT}, "required": ["text"], "additionalProperties": False},
    ]
}
RERANK = body(
    ("query", "documents"),
    query=TEXT,
    documents=array(DOCUMENT),
    top_n=whole(1, 2**20, "Return only so many documents."),
    return_documents=switch("Return their texts too."),
    **ENCODED,
)
CLASSIFY = body(
    ("input",),
    input={"anyOf": [TEXT, array({"anyOf": [TEXT, PAIR]})]},
    logits=switch("Give the logits too."),
    candidate_labels=maybe(
        {
            **array({"type": "string", "minLength": 1, "maxLength": 1024}, most=MOST_LABELS),
            "description": "Labels of your own, which a model of natural language inference judges by.",
        }
    ),
    hypothesis_template=maybe(
        {"type": "string", "maxLength": 1024, "description": "What is said of a text, with {} for the label."}
    ),
    multi_label=switch("Judge each of the labels by itself."),
    **ENCODED,
)
TAGS = body(("input",), input=TEXTS, **ENCODED)
ANSWERS = body(
    ("question", "context"),
    question=TEXT,
    context=TEXTS,
    n_best=whole(1, 100, "How many answers of each context."),
    max_answer_tokens=whole(1, 512),
    **ENCODED,
)
FILL_MASK = body(("input",), input=TEXTS, top_k=whole(1, 1000, "Words for each place."), **LONG_TEXTS)
TRANSLATIONS = body(
    ("input",),
    input=TEXTS,
    num_beams=whole(1, 64),
    n_best=whole(1, 64),
    length_penalty=number(-10, 10),
    max_new_tokens=whole(1, 2**20),
    min_new_tokens=whole(0, 2**20),
    no_repeat_ngram_size=whole(1, 2**20),
    repetition_penalty=number(0.01, 100, "Above 1 makes tokens less likely that are there already."),
    truncation=choice("head", "tail"),
    alignment=switch("Return what each token looked at; of a bundle exported with cross_attentions."),
)
EXPLANATIONS = body(
    ("input",),
    input=TEXT,
    pair=maybe({**TEXT, "description": "The other text, of models that read or compare two."}),
    answer=maybe({**TEXT, "description": "What to explain; the model's own answer unless given."}),
    methods=maybe(array({"type": "string", "enum": list(METHODS)}, most=len(METHODS))),
    objective=choice(*OBJECTIVES, text="What gradients are of."),
    watch=maybe(array({"type": "string", "minLength": 1, "maxLength": 256}, most=MOST_WATCHED)),
    factors=whole(1, 64, "Groups of neurons."),
    max_new_tokens=whole(1, 64, "Of the model's own answer."),
)
TOKENIZE = body(("content",), content=TEXT, parse_special=switch("Read special tokens as such."))
DETOKENIZE = body(
    ("tokens",), tokens=array({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, 0, MOST_TOKENS)
)
