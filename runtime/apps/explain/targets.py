"""What explanations of a written answer have in common: of a continuation, and of a translation.

A tokens of the answer, L layers, E hidden size
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...backends.backend import Array, Arrays
from ...text.tokenizer import Tokenizer
from .explanation import Target, Token
from .gradients import Score
from .graphs import ExplanationGraphs
from .layers import LensResults, list_layers, look
from .objectives import LOGIT, SOFTMAX
from .options import ResolvedOptions
from .saliency import Saliency
from .tokens import find_watched


def look_at_targets(
    graphs: ExplanationGraphs,
    tokenizer: Tokenizer,
    outputs: Arrays,
    rows: Array,
    targets: Array,
    choices: ResolvedOptions,
) -> LensResults:
    """Return what the lens says of the states at `rows` (A,): of targets' ids (A,), then of watched words.

    Of all layers where the lens was chosen, else of the last one alone, which has the probabilities.
    """
    hidden = list_layers(outputs, "hidden.")
    if "lens" not in choices:
        hidden = hidden[-1:]
    watched = [np.full(len(targets), word) for word in find_watched(tokenizer, choices.watch)]
    return look(graphs, np.stack([states[rows] for states in hidden]), np.column_stack([targets, *watched]))


def make_score(
    graphs: ExplanationGraphs, names: Sequence[str], row: int, target: int, choices: ResolvedOptions
) -> Score:
    """Return the score of a target behind the token at `row`, of the inputs that have these names."""
    objective = SOFTMAX if choices.objective == "probability" else LOGIT

    def score(given: Sequence[Array]) -> tuple[list[Array], Array]:
        count = len(given[0])
        inputs = dict(zip(names, given, strict=True))
        inputs["row"] = np.full(count, row)
        inputs["target"] = np.full(count, target)
        inputs["objective"] = np.array([objective])
        outputs = graphs.run("gradient", inputs)
        return [outputs[f"gradient.{name}"] for name in names], outputs["score"]

    return score


def describe_targets(
    tokenizer: Tokenizer,
    tokens: Sequence[Token],
    first: int,
    choices: ResolvedOptions,
    saliency: Saliency,
    reading: LensResults | None,
    base: Array | None,
) -> tuple[Target, ...]:
    """Return an answer's tokens, of which the first is token `first` of all, with what is known of them.

    Their log-probabilities are the lens's, or without it `base`.
    """
    logprobs = base if reading is None else reading.logprobs[-1, :, 0]
    likeliest = [()] * len(tokens) if reading is None else reading.name_likeliest(tokenizer)
    logits = saliency.scores if choices.objective == "logit" else None
    return tuple(
        Target(
            text=token.text,
            token=first + number,
            logit=None if logits is None else float(logits[number]),
            probability=None if logprobs is None else float(np.exp(logprobs[number])),
            likeliest=likeliest[number],
        )
        for number, token in enumerate(tokens)
    )
