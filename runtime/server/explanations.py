"""/v1/explanations: why a model answered so, as the page draws it."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from ..encode.text_encoder import TextEncoder
from ..errors import InputError
from ..explain.explanation import Explanation
from ..generate.text_generator import TextGenerator
from .calls import Call
from .text_sizes import measure_texts

MOST_TOKENS = (
    512  # of texts and answer: attention grows with their square, and nobody else explains meanwhile
)
USUAL_NEW_TOKENS = 20
CHOICES = ("methods", "objective", "factors")


async def explain(call: Call) -> Response:
    """Return why a model answered so: which tokens counted, and what each layer would have said."""
    texts = [call.body[name] for name in ("input", "pair", "answer") if name in call.body]
    measure_texts(call, texts)
    explanation = await call.explain(lambda: compute(call.served.model, call))
    value = explanation.to_json()
    value["model"] = call.served.name
    return JSONResponse(value)


def compute(model: Any, call: Call) -> Explanation:
    """Explain, in a thread of its own; refuse texts that would take it too long."""
    body = call.body
    options = call.take(*CHOICES)
    tokens = sum(model.count_tokens(body[name]) for name in ("input", "pair") if name in body)
    if not isinstance(model, TextEncoder):
        tokens += count_answer(model, body.get("answer"), body.get("max_new_tokens", USUAL_NEW_TOKENS))
    if tokens > MOST_TOKENS:
        raise InputError(
            f"texts and answer have {tokens} tokens, and this server explains at most {MOST_TOKENS};"
            " `planforge explain` explains longer ones",
            option="input",
        )
    result: Explanation
    if isinstance(model, TextEncoder):
        result = model.explain(body["input"], body.get("pair"), label=body.get("answer"), **options)
    elif isinstance(model, TextGenerator):
        options |= call.take("watch", "max_new_tokens")
        result = model.explain(body["input"], body.get("answer"), **options)
    else:
        options |= call.take("watch")
        result = model.explain(body["input"], body.get("answer"), **options)
    return result


def count_answer(model: Any, answer: str | None, new_tokens: int) -> int:
    """Return how many tokens an answer has, or may have."""
    if answer is None:
        return new_tokens if isinstance(model, TextGenerator) else int(model.max_length)
    tokenizer = model.tokenizer if isinstance(model, TextGenerator) else model.target_tokenizer
    return len(tokenizer.encode(answer))
