"""Explains each token of a translation, by the source's tokens and by those that were written before.

S tokens of the source, A of the translation, T = S + A, L layers of the decoder
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..backends.backend import Array
from ..decoding.sampling import compute_logprobs
from .explanation import Attention, Explanation, Target
from .gradients import Score
from .graphs import ExplanationGraphs
from .layers import Reading, attend, group_neurons, list_layers, look, run_layers
from .neurons import Factors
from .options import Choices
from .saliency import LOGIT, SOFTMAX, measure_saliency
from .tokens import describe_ids, find_watched

if TYPE_CHECKING:
    from ..translate.translator import Translator


def explain_translation(
    model: Translator, source: Sequence[int], translation: Sequence[int], choices: Choices
) -> Explanation:
    """Explain the tokens of a translation; the decoder reads its start token and all but the last of them."""
    graphs = model.explanations
    S = len(source)
    read = np.array([model.start, *translation[:-1]])  # what the decoder reads, a token before each target
    inputs = {"source_ids": np.array([source]), "input_ids": read[None]}
    outputs: dict[str, Array] = {}
    reading: Reading | None = None
    if graphs:
        last = graphs.list_outputs("layers", "hidden.")[-1]
        outputs = run_layers(graphs, inputs, choices, [last], ["", "source_"])
        hidden = list_layers(outputs, "hidden.") if "lens" in choices else [outputs[last]]
        watched = find_watched(model.target_tokenizer, choices.watch)
        asked = np.column_stack([translation, *[np.full(len(translation), word) for word in watched]])
        reading = look(graphs, np.stack(hidden), asked)
    base = score_translation(model, source, translation) if "occlusion" in choices else None
    saliency = measure_saliency(
        len(translation),
        S + len(translation),
        choices,
        lambda number: prepare_score(graphs, outputs, translation, number, choices),
        lambda: occlude(model, source, translation, base),
    )
    rows = {name: place_tokens(values, S) for name, values in saliency.rows.items() if name != "occlusion"}
    if "occlusion" in saliency.rows:
        rows["occlusion"] = saliency.rows["occlusion"]
    tokens = (
        *describe_ids(model.source_tokenizer, source, "source"),
        *describe_ids(model.target_tokenizer, translation, "translation"),
    )
    logprobs = reading.logprobs[-1, :, 0] if reading is not None else base
    likeliest = reading.name_likeliest(model.target_tokenizer) if reading is not None else None
    has_logits = saliency.scores is not None and choices.objective == "logit"
    targets = tuple(
        Target(
            text=tokens[S + number].text,
            token=S + number,
            logit=float(saliency.scores[number]) if saliency.scores is not None and has_logits else None,
            probability=None if logprobs is None else float(np.exp(logprobs[number])),
            likeliest=() if likeliest is None else likeliest[number],
        )
        for number in range(len(translation))
    )
    return Explanation(
        kind="translation",
        model=graphs.name,
        tokens=tokens,
        targets=targets,
        saliency=rows,
        missing=saliency.missing,
        lens=reading.make_lens(model.target_tokenizer, choices) if reading and "lens" in choices else None,
        attention=collect_attention(outputs, S, len(translation)) if "attention" in choices else {},
        neurons=place_factors(group_neurons(outputs, choices), S),
    )


def place_tokens(rows: Array, S: int) -> Array:
    """Return what was measured of source, start token and translation without the start token.

    A translation's last token is read by none.
    """
    unread = np.full((len(rows), 1), np.nan, rows.dtype)
    return np.concatenate([rows[:, :S], rows[:, S + 1 :], unread], axis=1)


def place_factors(factors: Factors | None, S: int) -> Factors | None:
    """Return factors of what the decoder read as those of all tokens; the source has none of its neurons."""
    if factors is None:
        return None
    none = np.zeros((len(factors.activations), 1), factors.activations.dtype)
    own = [np.repeat(none, S, axis=1), factors.activations[:, 1:], none]
    return replace(factors, activations=np.concatenate(own, axis=1))


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
    model: Translator, source: Sequence[int], translation: Sequence[int], base: Array | None
) -> Array:
    """Return by how much (A, T) each target's log-probability falls without a token of source or translation.

    The tokens that begin and end every source stay.
    """
    assert base is not None
    S = len(source)
    falls = np.full((len(translation), S + len(translation)), np.nan, np.float32)
    for place in range(len(model.defaults.prefix), S - 1):
        without = [*source[:place], *source[place + 1 :]]
        if len(without) > len(model.defaults.prefix) + 1:
            falls[:, place] = base - score_translation(model, without, translation)
    for place in range(len(translation) - 1):
        without = [*translation[:place], *translation[place + 1 :]]
        falls[place + 1 :, S + place] = base[place + 1 :] - score_translation(model, source, without)[place:]
    return falls


def collect_attention(outputs: dict[str, Array], S: int, A: int) -> dict[str, Attention]:
    """Return who looks at whom: inside the source, inside the translation, and from it at the source.

    The decoder reads a token before each target, so that the row of a target shows what it was written by.
    """
    source = range(S)
    target = range(S, S + A)
    own = attend(outputs, "attentions.", target, target)
    return {
        "cross": attend(outputs, "cross_attentions.", target, source),
        "self": Attention(shift_keys(own.weights), target, target),
        "source": attend(outputs, "source_attentions.", source, source),
    }


def shift_keys(weights: Array) -> Array:
    """Return weights over what the decoder read as those over the translation: (L, H, A, A)."""
    return np.concatenate([weights[..., 1:], np.zeros_like(weights[..., :1])], axis=-1)
