"""/v1/translations, and the tokens of texts."""

from __future__ import annotations

from functools import partial
from typing import cast

from msgspec import UNSET
from starlette.responses import Response

from ...errors import InputError
from ...translate.results import Alignment, Translation
from ...translate.translator import Translator
from .answers import (
    AlignmentEntry,
    CandidateEntry,
    DetokenizeAnswer,
    TokenizeAnswer,
    TranslationEntry,
)
from .bodies import DetokenizeRequest, TokenizeRequest, TranslationsRequest
from .calls import SHORT, Call, cancel_when_gone, make_step, wait_for_all
from .forms import FINISH_REASONS
from .json_text import JsonResponse
from .text_sizes import measure_texts
from .vectors import answer_list, list_texts

LEAST = -1e30  # JSON has no number below all others, which a search that found nothing gives
SEARCH = (
    "num_beams",
    "n_best",
    "length_penalty",
    "max_new_tokens",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "truncation",
)


async def translate(call: Call[TranslationsRequest]) -> Response:
    """Translate each text; what is not given of the search is the checkpoint's."""
    translator = cast(Translator, call.served.model)  # the capabilities say so
    texts = list_texts(call.body.input)
    options = call.take(*SEARCH, "alignment")
    steps = translator.submit_in_steps(texts, client=call.client, deadline=call.deadline, **options)
    future = await call.read(steps, measure_texts(call, texts))
    async with cancel_when_gone(call.request, future.cancel):
        (results,) = await wait_for_all([future])
    return await answer_list(call, write_translation, results, future.tokens)


def write_translation(index: int, result: Translation) -> TranslationEntry:
    return TranslationEntry(
        index=index,
        text=result.text,
        score=max(result.score, LEAST),
        finish_reason=FINISH_REASONS[result.finish_reason],
        candidates=[CandidateEntry(one.text, max(one.score, LEAST)) for one in result.candidates],
        dropped=result.dropped,
        alignment=UNSET if result.alignment is None else write_alignment(result.alignment),
    )


def write_alignment(alignment: Alignment) -> AlignmentEntry:
    """Return the tokens of a text and of its translation, and how much each of these looked at those."""
    weights = [[round(float(share), 4) for share in row] for row in alignment.averaged()]
    return AlignmentEntry(list(alignment.source), list(alignment.target), weights)


async def tokenize(call: Call[TokenizeRequest]) -> Response:
    """Return the token ids of a text, without those that a model puts before or behind it."""
    tokenizer = call.served.model.input_tokenizer
    special = bool(call.body.parse_special)
    content = call.body.content
    steps = make_step(partial(tokenizer.encode, content, parse_special=special))
    tokens = await call.read(steps, measure_texts(call, [content], ("content", "")))
    answer = TokenizeAnswer(call.served.name, tokens, len(tokens))
    return await call.write(make_step(lambda: answer), few=len(tokens) <= SHORT)


async def detokenize(call: Call[DetokenizeRequest]) -> Response:
    """Return the text of token ids."""
    tokenizer = call.served.model.input_tokenizer
    tokens = call.body.tokens
    if tokens and max(tokens) >= tokenizer.vocab_size:
        raise InputError(
            f"tokens has an id that is not in the vocabulary; ids are 0 to {tokenizer.vocab_size - 1}",
            option="tokens",
        )
    content = await call.run(partial(tokenizer.decode, tokens))
    return JsonResponse(DetokenizeAnswer(call.served.name, content))
