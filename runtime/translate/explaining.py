"""Explains each token of a translation, by the source's tokens and by those that were written before.

S tokens of the source, A of the translation, T = S + 1 + A with the start token between, L decoder layers
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.backend import Array
from ..decoding.sampling import compute_logprobs
from ..errors import ContextLengthError, InputError
from ..explain.explanation import Attention, Explanation, Target, Token
from ..explain.gradients import Score
from ..explain.graphs import ExplanationGraphs
from ..explain.layers import Reading, attend, group_neurons, list_layers, look, run_layers
from ..explain.neurons import Factors
from ..explain.options import Choices
from ..explain.saliency import LOGIT, SOFTMAX, Saliency, measure_saliency
from ..explain.tokens import describe_ids, find_watched

if TYPE_CHECKING:
    from .translator import Translator


def explain_translation(
    model: Translator, source: Sequence[int], translation: Sequence[int], choices: Choices
) -> Explanation:
    """Explain the tokens of a translation; the decoder reads its start token and all but the last of them."""
    graphs = model.explanations
    S = len(source)
    A = len(translation)
    check_length(A, model.max_length)
    read = np.array([model.start, *translation[:-1]])  # the token before each target
    outputs: dict[str, Array] = {}
    reading: Reading | None = None
    if choices.needs_graphs:
        last = graphs.list_outputs("layers", "hidden.")[-1]
        inputs = {"source_ids": np.array([source]), "input_ids": read[None]}
        outputs = run_layers(graphs, inputs, choices, [last], ["", "source_"])
        hidden = list_layers(outputs, "hidden.") if "lens" in choices else [outputs[last]]
        watched = find_watched(model.target_tokenizer, choices.watch)
        asked = np.column_stack([translation, *[np.full(A, word) for word in watched]])
        reading = look(graphs, np.stack(hidden), asked)
    base = score_translation(model, source, translation) if "occlusion" in choices else None
    saliency = measure_saliency(
        A,
        S + 1 + A,
        choices,
        lambda number: prepare_score(graphs, outputs, translation, number, choices),
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
        targets=describe_targets(model, tokens[S + 1 :], S + 1, choices, saliency, reading, base),
        saliency=saliency.rows,
        missing=saliency.missing,
        lens=reading.make_lens(model.target_tokenizer, choices) if reading and "lens" in choices else None,
        attention=attention,
        neurons=place_factors(group_neurons(outputs, choices), S),
    )


def check_length(length: int, most: int) -> None:
    if not length:
        raise InputError("the translation is empty: there is nothing to explain", option="translation")
    if length > most:
        raise ContextLengthError(
            f"the translation has {length} tokens, the model writes {most} at most; explain a shorter one",
            tokens=length,
            limit=most,
            option="translation",
        )


def describe_targets(
    model: Translator,
    tokens: Sequence[Token],
    first: int,
    choices: Choices,
    saliency: Saliency,
    reading: Reading | None,
    base: Array | None,
) -> tuple[Target, ...]:
    """Return the translation's tokens, of which the first is token `first` of all."""
    logprobs = reading.logprobs[-1, :, 0] if reading is not None else base
    likeliest = reading.name_likeliest(model.target_tokenizer) if reading is not None else [()] * len(tokens)
    scores = saliency.scores if choices.objective == "logit" else None
    return tuple(
        Target(
            text=token.text,
            token=first + number,
            logit=None if scores is None else float(scores[number]),
            probability=None if logprobs is None else float(np.exp(logprobs[number])),
            likeliest=likeliest[number],
        )
        for number, token in enumerate(tokens)
    )


def place_factors(factors: Factors | None, S: int) -> Factors | None:
    """Return factors of what the decoder read as those of all tokens; the source has none of its neurons."""
    if factors is None:
        return None
    none = np.zeros((len(factors.activations), 1), factors.activations.dtype)
    placed = [np.repeat(none, S, axis=1), factors.activations, none]
    return replace(factors, activations=np.concatenate(placed, axis=1))


def prepare_score(
    graphs: ExplanationGraphs,
    outputs: dict[str, Array],
    translation: Sequence[int],
    number: int,
    choices: Choices,
) -> tuple[Score, list[Array]]:
    """Return the score of a target, and the embeddings of the source and of what was written before."""
    objective = SOFTMAX if choices.objective == "probability" else LOGIT

    def score(given: Sequence[Array]) -> tuple[list[Array], Array]:
        count = len(given[0])
        found = graphs.run(
            "gradient",
            {
                "source_embeddings": given[0],
                "embeddings": given[1],
                "row": np.full(count, number),
                "target": np.full(count, translation[number]),
                "objective": np.array([objective]),
            },
        )
        return [found["gradient.source_embeddings"], found["gradient.embeddings"]], found["score"]

    return score, [outputs["source_embeddings"], outputs["embeddings"][: number + 1]]


def score_translation(model: Translator, source: Sequence[int], translation: Sequence[int]) -> Array:
    """Return the log-probabilities of a translation's tokens, by the graphs that answer."""
    run = model.decoder.start(1, len(translation), model.encoder.prepare([source]))
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


def read_translation(model: Translator, text: str, translation: Any, parse_special: bool) -> list[int]:
    """Return a translation's tokens: of a text, ids as they are, or those of the model's own."""
    if translation is None:
        tokens = list(model.translate(text, parse_special=parse_special).token_ids)
    elif isinstance(translation, str):
        tokens = model.target_tokenizer.encode(translation)
    else:
        tokens = check_ids(translation, model.target_tokenizer.vocab_size)
    return tokens


def check_ids(given: Any, vocabulary: int) -> list[int]:
    """Return token ids as integers; refuse what is none, and those that the vocabulary does not have."""
    try:
        tokens = [operator.index(token) for token in given]
    except TypeError as error:
        raise InputError(
            f"translation={given!r:.80} must be a text or token ids", option="translation"
        ) from error
    if any(not 0 <= token < vocabulary for token in tokens):
        raise InputError(
            f"a token id of the translation is not from 0 to {vocabulary - 1}", option="translation"
        )
    return tokens
