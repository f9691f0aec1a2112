"""Explains each token of a translation, by the source's tokens and by those that were written before.

S tokens of the source, A of the translation, between them the start token
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...backends.backend import Array
from ...decoding.decoder import SCORE_CHUNK
from ...decoding.sampling import compute_logprobs
from ...errors import ContextLengthError, InputError
from .explanation import Attention, Explanation
from .gradients import Score
from .graphs import ExplanationGraphs
from .layers import LensResults, attend, find_factors, run_layers
from .neurons import Factors
from .options import Request, ResolvedOptions, advising_shorter_texts, check_not_empty
from .saliency import measure_saliency
from .targets import describe_targets, look_at_targets, make_score
from .tokens import describe_ids, encode_alone

if TYPE_CHECKING:
    from ...translate.translator import Translator


def explain_translation(
    model: Translator, request: Request, graphs: ExplanationGraphs, choices: ResolvedOptions
) -> Explanation:
    """Explain the tokens of a translation; the decoder reads its start token and all but the last of them."""
    check_not_empty(request.text, "text")
    with advising_shorter_texts():
        source = model.encode_source(request.text, parse_special=request.parse_special)
    translation = read_translation(model, request)
    S = len(source)
    A = len(translation)
    check_length(A, model.max_length)
    read = np.array([model.start, *translation[:-1]])  # the token before each target
    outputs: dict[str, Array] = {}
    reading: LensResults | None = None
    if choices.needs_graphs:
        inputs = {"source_ids": np.array([source]), "input_ids": read[None]}
        outputs = run_layers(graphs, inputs, choices)
        tokenizer = model.target_tokenizer
        reading = look_at_targets(graphs, tokenizer, outputs, np.arange(A), np.array(translation), choices)
    base = score_translation(model, source, translation) if "occlusion" in choices else None

    def prepare(number: int) -> tuple[Score, list[Array]]:
        """Return a target's score, and the embeddings of the source and of what was written before."""
        names = ["source_embeddings", "embeddings"]
        score = make_score(graphs, names, number, translation[number], choices)
        return score, [outputs["source_embeddings"], outputs["embeddings"][: number + 1]]

    saliency = measure_saliency(
        A,
        S + 1 + A,
        choices,
        prepare,
        lambda: occlude(model, source, translation, base, choices.on_step),
    )
    tokens = (
        *describe_ids(model.source_tokenizer, source, "source"),
        replace(describe_ids(model.target_tokenizer, [model.start], "special")[0], part="special"),
        *describe_ids(model.target_tokenizer, translation, "translation"),
    )
    target_tokens = range(S, S + A)  # that the decoder reads
    attention: dict[str, Attention] = {}
    if "attention" in choices:
        attention["cross"] = attend(outputs, "cross_attentions.", target_tokens, range(S))
        attention["self"] = attend(outputs, "attentions.", target_tokens, target_tokens)
        attention["source"] = attend(outputs, "source_attentions.", range(S), range(S))
    return Explanation(
        kind="translation",
        model=graphs.name,
        tokens=tokens,
        targets=describe_targets(
            model.target_tokenizer, tokens[S + 1 :], S + 1, choices, saliency, reading, base
        ),
        saliency=saliency.rows,
        missing=saliency.missing,
        lens=reading.make_lens(model.target_tokenizer, choices) if reading and "lens" in choices else None,
        attention=attention,
        neurons=place_factors(find_factors(outputs, choices), S),
    )


def check_length(length: int, most: int) -> None:
    if not length:
        raise InputError("the translation is empty: there is nothing to explain", option="answer")
    if length > most:
        raise ContextLengthError(
            f"the translation has {length} tokens, the model generates at most {most}; explain a shorter one",
            tokens=length,
            limit=most,
            option="answer",
        )


def place_factors(factors: Factors | None, S: int) -> Factors | None:
    """Return factors of what the decoder read as those of all tokens; the source has none of its neurons."""
    if factors is None:
        return None
    sides = ((0, 0), (S, 1))
    return replace(
        factors, activations=np.pad(factors.activations, sides), firing=np.pad(factors.firing, sides)
    )


def score_translation(model: Translator, source: Sequence[int], translation: Sequence[int]) -> Array:
    """Return the log-probabilities of a translation's tokens, by the graphs that answer."""
    context = model.encoder.prepare([source])
    step = min(SCORE_CHUNK, len(translation))
    run = model.decoder.start(1, len(translation), context, reading=step, logit_rows=step)
    logprobs: list[float] = []
    for logits in run.extend([model.start, *translation[:-1]]):
        following = np.asarray(translation[len(logprobs) :][: len(logits)])
        logprobs += compute_logprobs(logits, following).tolist()
    return np.array(logprobs)


def occlude(
    model: Translator,
    source: Sequence[int],
    translation: Sequence[int],
    base: Array | None,
    on_step: Callable[[], None],
) -> Array:
    """Return by how much (A, T) each target's log-probability falls without a token of source or translation.

    What begins and ends every source stays, and the start token.
    """
    assert base is not None
    S = len(source)
    falls = np.full((len(translation), S + 1 + len(translation)), np.nan, np.float32)
    for place in range(len(model.defaults.prefix), S - 1):
        on_step()
        without = [*source[:place], *source[place + 1 :]]
        if len(without) > len(model.defaults.prefix) + 1:
            falls[:, place] = base - score_translation(model, without, translation)
    for place in range(len(translation) - 1):
        on_step()
        without = [*translation[:place], *translation[place + 1 :]]
        falls[place + 1 :, S + 1 + place] = (
            base[place + 1 :] - score_translation(model, source, without)[place:]
        )
    return falls


def read_translation(model: Translator, request: Request) -> list[int]:
    """Return a translation's tokens: of a text, ids as they are, or those of the model's own."""
    if request.answer is None:
        return list(model.translate(request.text, parse_special=request.parse_special).token_ids)
    if isinstance(request.answer, str):
        return encode_alone(model.target_tokenizer, request.answer)
    return check_ids(request.answer, model.target_tokenizer.vocab_size)


def measure_translation(model: Translator, request: Request) -> tuple[list[int], int]:
    """Return the translation's tokens, and how many there are: of the model's own nobody knows before."""
    tokens = read_translation(model, request)
    return tokens, len(tokens)


def check_ids(given: Any, vocabulary: int) -> list[int]:
    """Return token ids as integers; refuse what is none, and those that the vocabulary does not have."""
    try:
        tokens = [operator.index(token) for token in given]
    except TypeError as error:
        raise InputError(f"answer={given!r:.80} must be a text or token ids", option="answer") from error
    if any(not 0 <= token < vocabulary for token in tokens):
        raise InputError(f"a token id of the translation is not from 0 to {vocabulary - 1}", option="answer")
    return tokens
