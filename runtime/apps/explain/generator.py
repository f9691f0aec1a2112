"""Explains each token of a language model's answer.

P tokens of the prompt, A of the answer, T = P + A
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...backends.backend import Array
from ...decoding.sampling import compute_logprobs
from ...errors import ContextLengthError, InputError
from .explanation import Explanation
from .gradients import Score
from .graphs import ExplanationGraphs
from .layers import LensResults, attend, find_factors, run_layers
from .options import Request, ResolvedOptions, advising_shorter_texts, check_not_empty
from .saliency import measure_saliency
from .targets import describe_targets, look_at_targets, make_score
from .tokens import describe_ids, encode_alone

if TYPE_CHECKING:
    from ...generate.text_generator import TextGenerator


def explain_generation(
    model: TextGenerator, request: Request, graphs: ExplanationGraphs, choices: ResolvedOptions
) -> Explanation:
    """Explain the tokens of an answer to a prompt."""
    check_not_empty(request.text, "prompt")
    prompt = model.encode_prompt(request.text, parse_special=request.parse_special)
    with advising_shorter_texts():
        answer = read_answer(model, prompt, request.answer, request.max_new_tokens)
    ids = np.array([*prompt, *answer])
    check_length(len(ids), model.max_length)
    P = len(prompt)
    T = len(ids)
    rows = np.arange(P - 1, T - 1)  # each predicts the token behind it
    outputs: dict[str, Array] = {}
    reading: LensResults | None = None
    if choices.needs_graphs:
        outputs = run_layers(graphs, {"input_ids": ids[None]}, choices)
        reading = look_at_targets(graphs, model.tokenizer, outputs, rows, ids[P:], choices)
    base = score_answer(model, ids.tolist(), T - P) if "occlusion" in choices else None

    def prepare(number: int) -> tuple[Score, list[Array]]:
        """Return a target's score, and the embeddings up to the token before it: it reads no later ones."""
        row = int(rows[number])
        score = make_score(graphs, ["embeddings"], row, int(ids[row + 1]), choices)
        return score, [outputs["embeddings"][: row + 1]]

    saliency = measure_saliency(
        T - P, T, choices, prepare, lambda: occlude(model, ids, T - P, base, choices.on_step)
    )
    tokens = (
        *describe_ids(model.tokenizer, prompt, "prompt"),
        *describe_ids(model.tokenizer, answer, "answer", continues=True),
    )
    whole = range(T)
    return Explanation(
        kind="generation",
        model=graphs.name,
        tokens=tokens,
        targets=describe_targets(model.tokenizer, tokens[P:], P, choices, saliency, reading, base),
        saliency=saliency.rows,
        missing=saliency.missing,
        lens=reading.make_lens(model.tokenizer, choices) if reading and "lens" in choices else None,
        attention={"self": attend(outputs, "attentions.", whole, whole)} if "attention" in choices else {},
        neurons=find_factors(outputs, choices),
    )


def check_length(length: int, most: int) -> None:
    if length > most:
        raise ContextLengthError(
            f"prompt and answer have {length} tokens, the context holds {most}; shorten them",
            tokens=length,
            limit=most,
            option="answer",
        )


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
    prefix = model.defaults.prefix
    kept = len(prefix) if tuple(ids[: len(prefix)]) == prefix else 0
    for place in range(kept, len(ids) - 1):
        on_step()
        later = min(targets, len(ids) - 1 - place)  # targets behind it
        without = [*ids[:place].tolist(), *ids[place + 1 :].tolist()]
        if place == 0 and first == 1:
            continue  # the first target would be the first token, of which no probability is known
        falls[targets - later :, place] = base[targets - later :] - score_answer(model, without, later)
    return falls


def read_answer(model: TextGenerator, prompt: Sequence[int], answer: Any, max_new_tokens: int) -> list[int]:
    """Return an answer's tokens: of a text, ids as they are, or those of the model's own greedy answer."""
    if answer is None:
        tokens = list(model.generate(list(prompt), max_new_tokens=max_new_tokens).token_ids)
    elif isinstance(answer, str):
        tokens = encode_alone(model.tokenizer, answer)
    else:
        tokens = model.encode_prompt(answer)
    if not tokens:
        raise InputError("the answer is empty: there is nothing to explain", option="answer")
    return tokens


def measure_answer(model: TextGenerator, request: Request) -> tuple[Any, int]:
    """Return the answer as it is asked for, and how many tokens it has, or may get."""
    if request.answer is None:
        return None, request.max_new_tokens
    return request.answer, len(encode_alone(model.tokenizer, request.answer))
