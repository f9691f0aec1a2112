"""/v1/explanations: why a model answered so, as the page draws it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from ...encode.text_encoder import TextEncoder
from ...errors import ContextLengthError, InputError
from ...generate.text_generator import TextGenerator
from ...translate.translator import Translator
from ..explain.explanation import Explanation
from ..explain.options import USUAL_NEW_TOKENS
from ..explain.tokens import encode_alone
from .answers import ExplanationAnswer
from .bodies import ExplanationsRequest
from .calls import Call, make_step
from .text_sizes import measure_texts

MOST_TOKENS = (
    512  # of texts and answer: attention grows with their square, and nobody else explains meanwhile
)
CHOICES = ("methods", "objective", "factors")
# Of what else may be asked, what each kind of model has no use for.
UNUSED = {
    TextGenerator: {"pair": "models that read two texts"},
    Translator: {
        "pair": "models that read two texts",
        "max_new_tokens": "text generators: a translation is explained as a whole",
    },
    TextEncoder: {"watch": "models that write text", "max_new_tokens": "models that write text"},
}


async def explain(call: Call[ExplanationsRequest]) -> Response:
    """Return why a model answered so: which tokens counted, and what each layer would have said."""
    measure_texts(call, call.take("input", "pair", "answer").values())
    explanation = await call.explain(lambda on_step: compute(call.served.model, call, on_step))
    return await call.write(
        make_step(lambda: ExplanationAnswer(**{**explanation.to_json(), "model": call.served.name}))
    )


def compute(model: Any, call: Call[ExplanationsRequest], on_step: Callable[[], None]) -> Explanation:
    """Explain, in a thread of its own; refuse texts that would take it too long."""
    body = call.body
    check_use(model, body)
    options = {**call.take(*CHOICES), "on_step": on_step}
    answer = body.answer
    read = sum(map(model.count_tokens, call.take("input", "pair").values()))
    check_tokens(read)
    result: Explanation
    if isinstance(model, TextEncoder):
        result = model.explain(body.input, body.pair, label=answer, **options)
    elif isinstance(model, TextGenerator):
        options |= call.take("watch", "max_new_tokens")
        check_context(read, model.max_length - 1)
        most = options.get("max_new_tokens", USUAL_NEW_TOKENS)
        check_tokens(read + (most if answer is None else len(encode_alone(model.tokenizer, answer))))
        result = model.explain(body.input, answer, **options)
    else:
        options |= call.take("watch")
        check_context(read, model.max_length)
        if answer is None:  # how long it gets is not known before
            translation = list(model.translate(body.input).token_ids)
        else:
            translation = encode_alone(model.target_tokenizer, answer)
        check_tokens(read + len(translation))
        result = model.explain(body.input, translation, **options)
    return result


def check_use(model: Any, body: ExplanationsRequest) -> None:
    """Refuse what would have no effect."""
    for kind, unused in UNUSED.items():
        for name, whose in unused.items():
            if isinstance(model, kind) and getattr(body, name) is not None:
                raise InputError(f"{name} is for {whose}", option=name)


def check_context(tokens: int, most: int) -> None:
    """Refuse a text that is too long for the model, without the advice to truncate it."""
    if tokens > most:
        raise ContextLengthError(
            f"the input has {tokens} tokens, of which the model reads {most} at most; explain a shorter one",
            tokens=tokens,
            limit=most,
            option="input",
        )


def check_tokens(tokens: int) -> None:
    if tokens > MOST_TOKENS:
        raise ContextLengthError(
            f"texts and answer have {tokens} tokens, and this server explains at most {MOST_TOKENS};"
            " `planforge explain` explains longer ones",
            tokens=tokens,
            limit=MOST_TOKENS,
            option="input",
        )
