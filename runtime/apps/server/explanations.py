"""/v1/explanations: why a model answered so, as the page draws it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from ...errors import ContextLengthError
from ..explain.explanation import Explanation
from ..explain.options import USUAL_NEW_TOKENS, Request
from ..explain.tasks import TASKS
from ..explain.tasks import explain as explain_model
from .answers import ExplanationAnswer
from .bodies import ExplanationsRequest
from .calls import Call, make_step
from .text_sizes import measure_texts

MAX_TOKENS = 512  # of texts and answer: attention grows with their square, and nobody else explains meanwhile


async def explain(call: Call[ExplanationsRequest]) -> Response:
    """Return why a model answered so: which tokens counted, and what each layer would have said."""
    measure_texts(call, call.take("input", "pair", "answer").values())
    explanation = await call.explain(lambda on_step: compute(call.served.model, call, on_step))
    return await call.write(
        make_step(lambda: ExplanationAnswer(**{**explanation.to_json(), "model": call.served.name}))
    )


def compute(model: Any, call: Call[ExplanationsRequest], on_step: Callable[[], None]) -> Explanation:
    """Explain, in a thread of its own; refuse texts that would take it too long."""
    task = TASKS[model.task]
    options = call.take("pair", "methods", "objective", "watch", "factors", "max_new_tokens")
    task.check_use(options)
    read = sum(map(model.count_tokens, call.take("input", "pair").values()))
    check_tokens(read)
    if task.min_room is not None:
        check_context(read, model.max_length - task.min_room)
    most = options.get("max_new_tokens", USUAL_NEW_TOKENS)
    answer, length = task.measure(model, Request(call.body.input, call.body.answer, max_new_tokens=most))
    check_tokens(read + length)
    return explain_model(model, call.body.input, answer, **options, on_step=on_step)


def check_context(tokens: int, most: int) -> None:
    """Refuse a text that is too long for the model, without the advice to truncate it."""
    if tokens > most:
        raise ContextLengthError(
            f"the input has {tokens} tokens; the model reads at most {most}; explain a shorter one",
            tokens=tokens,
            limit=most,
            option="input",
        )


def check_tokens(tokens: int) -> None:
    if tokens > MAX_TOKENS:
        raise ContextLengthError(
            f"texts and answer have {tokens} tokens; this server explains at most {MAX_TOKENS}. Shorten them,"
            " or use `planforge explain`, which has no such limit",
            tokens=tokens,
            limit=MAX_TOKENS,
            option="input",
        )
