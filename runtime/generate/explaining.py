"""Explains each token of a language model's answer.

P tokens of the prompt, A of the answer, T = P + A, L layers, W watched words
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..backends.backend import Array
from ..decoding.sampling import compute_logprobs
from ..errors import ContextLengthError, InputError
from ..explain.explanation import Explanation, Likely, Target
from ..explain.gradients import Score
from ..explain.graphs import ExplanationGraphs
from ..explain.layers import Reading, attend, group_neurons, list_layers, look, run_layers
from ..explain.options import Choices
from ..explain.saliency import LOGIT, SOFTMAX, measure_saliency
from ..explain.tokens import describe_ids, find_watched

if TYPE_CHECKING:
    from .text_generator import TextGenerator


def explain_generation(
    model: TextGenerator, prompt: Sequence[int], answer: Sequence[int], choices: Choices
) -> Explanation:
    """Explain the tokens of an answer to a prompt, both in tokens."""
    graphs = model.explanations
    ids = np.array([*prompt, *answer])
    check_length(len(ids), model.max_length)
    rows = np.arange(len(prompt) - 1, len(ids) - 1)  # each predicts the token behind it
    outputs: dict[str, Array] = {}
    reading: Reading | None = None
    if choices.needs_graphs:
        last = graphs.list_outputs("layers", "hidden.")[-1]
        outputs = run_layers(graphs, {"input_ids": ids[None]}, choices, [last], [""])
        hidden = list_layers(outputs, "hidden.") if "lens" in choices else [outputs[last]]
        watched = find_watched(model.tokenizer, choices.watch)
        asked = np.column_stack([ids[rows + 1], *[np.full(len(rows), word) for word in watched]])
        reading = look(graphs, np.stack([states[rows] for states in hidden]), asked)
    base = score_answer(model, ids.tolist(), len(rows)) if "occlusion" in choices else None
    saliency = measure_saliency(
        len(rows),
        len(ids),
        choices,
        lambda number: prepare_score(graphs, outputs["embeddings"], ids, int(rows[number]), choices),
        lambda: occlude(model, ids, len(rows), base, choices.on_step),
    )
    whole = range(len(ids))
    return Explanation(
        kind="generation",
        model=graphs.name,
        tokens=(
            *describe_ids(model.tokenizer, prompt, "prompt"),
            *describe_ids(model.tokenizer, answer, "answer"),
        ),
        targets=describe_targets(model, ids, rows, choices, saliency.scores, reading, base),
        saliency=saliency.rows,
        missing=saliency.missing,
        lens=reading.make_lens(model.tokenizer, choices) if reading and "lens" in choices else None,
        attention={"self": attend(outputs, "attentions.", whole, whole)} if "attention" in choices else {},
        neurons=group_neurons(outputs, choices),
    )


def check_length(length: int, most: int) -> None:
    if length > most:
        raise ContextLengthError(
            f"prompt and answer have {length} tokens, the context holds {most}; explain a shorter one",
            tokens=length,
            limit=most,
            option="answer",
        )


def prepare_score(
    graphs: ExplanationGraphs, embeddings: Array, ids: Array, row: int, choices: Choices
) -> tuple[Score, list[Array]]:
    """Return the score of the token behind `row`, and the embeddings up to there: it reads no later ones."""
    objective = SOFTMAX if choices.objective == "probability" else LOGIT

    def score(given: Sequence[Array]) -> tuple[list[Array], Array]:
        count = len(given[0])
        outputs = graphs.run(
            "gradient",
            {
                "embeddings": given[0],
                "row": np.full(count, row),
                "target": np.full(count, ids[row + 1]),
                "objective": np.array([objective]),
            },
        )
        return [outputs["gradient.embeddings"]], outputs["score"]

    return score, [embeddings[: row + 1]]


def score_answer(model: TextGenerator, ids: Sequence[int], count: int) -> Array:
    """Return the log-probabilities of the last `count` tokens, by the graph that answers.

    Logits are computed where they are needed alone: the vocabulary is wide.
    """
    run = model.decoder.start(1, len(ids))
    scores = [run.prefill([ids[:-count]]), *run.extend(ids[len(ids) - count : -1])]
    return compute_logprobs(np.concatenate(scores), np.asarray(ids[-count:]))


def occlude(
    model: TextGenerator, ids: Array, targets: int, base: Array | None, on_step: Callable[[], None]
) -> Array:
    """Return by how much (A, T) each target's log-probability falls when a token before it is taken out.

    What the model puts before every text stays; of a prompt of one token nothing can be taken out.
    """
    assert base is not None
    first = len(ids) - targets
    falls = np.full((targets, len(ids)), np.nan, np.float32)
    kept = (
        len(model.defaults.prefix) if tuple(ids[: len(model.defaults.prefix)]) == model.defaults.prefix else 0
    )
    for place in range(kept, len(ids) - 1):
        on_step()
        later = min(targets, len(ids) - 1 - place)  # targets behind it
        without = [*ids[:place].tolist(), *ids[place + 1 :].tolist()]
        if place == 0 and first == 1:
            continue  # the first target would be the first token, of which no probability is known
        falls[targets - later :, place] = base[targets - later :] - score_answer(model, without, later)
    return falls


def describe_targets(
    model: TextGenerator,
    ids: Array,
    rows: Array,
    choices: Choices,
    scores: Array | None,
    reading: Reading | None,
    base: Array | None,
) -> tuple[Target, ...]:
    """Return the answer's tokens with their logits and probabilities."""
    tokens = describe_ids(model.tokenizer, ids[rows + 1], "answer")
    logprobs = reading.logprobs[-1, :, 0] if reading is not None else base
    likeliest: Sequence[tuple[Likely, ...]] = [()] * len(rows)
    if reading is not None:
        likeliest = reading.name_likeliest(model.tokenizer)
    has_logits = scores is not None and choices.objective == "logit"
    return tuple(
        Target(
            text=token.text,
            token=int(rows[number]) + 1,
            logit=float(scores[number]) if scores is not None and has_logits else None,
            probability=None if logprobs is None else float(np.exp(logprobs[number])),
            likeliest=likeliest[number],
        )
        for number, token in enumerate(tokens)
    )


def read_answer(
    model: TextGenerator, prompt: Sequence[int], answer: object, max_new_tokens: int
) -> list[int]:
    """Return an answer's tokens: of a text, ids as they are, or those of the model's own greedy answer."""
    if answer is None:
        tokens = list(model.generate(list(prompt), max_new_tokens=max_new_tokens).token_ids)
    elif isinstance(answer, str):
        tokens = model.tokenizer.encode(answer)
    else:
        tokens = model._rows.encode_prompt(answer, parse_special=False)
    if not tokens:
        raise InputError("the answer is empty: there is nothing to explain", option="answer")
    return tokens
