"""Explains the label of a text, the score of a pair, or how alike two texts are.

T tokens, C labels, A of them explained, L layers, F numbers of a text's vector
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...backends.backend import Array
from ...encode.pooling import normalize_vector, pool_tokens, sigmoid, softmax
from ...errors import InputError
from ...text.long_text import Piece, build_piece, fit
from ...text.reading import check_text
from ...text.tokenizer import Encoding
from .explanation import Explanation, Lens, Likely, Target, Token
from .gradients import Score
from .graphs import ExplanationGraphs
from .layers import attend, find_factors, list_layers, run_layers
from .objectives import COSINE, LOGIT, SIGMOID, SOFTMAX
from .options import Request, ResolvedOptions, advising_shorter_texts, check_not_empty
from .saliency import measure_saliency
from .tokens import describe_encoding

if TYPE_CHECKING:
    from ...encode.text_encoder import TextEncoder

HEAD = "sequence_classification"
MAX_LABELS = 10  # that are explained, the likeliest first


@dataclass(frozen=True, eq=False)
class Head:
    """What is on top of an encoder: its labels, and the linear head if the graphs have none of their own.

    Attributes:
        labels: their names.
        activation: how logits become probabilities, `SOFTMAX` or `SIGMOID`; `LOGIT` where they are numbers.
        weight, bias: (C, F) and (C,) on top of a text's vector; None where the graphs have the head. Of one
            that was fitted they are less their mean, which leaves all probabilities as they are: else a
            label of two would have no weights at all, as scikit-learn keeps the other's alone.
        is_likeness: whether it is another text's vector, and reads those of length 1.
    """

    labels: tuple[str, ...]
    activation: int
    weight: Array | None = None
    bias: Array | None = None
    is_likeness: bool = False

    def find_objective(self, wanted: str) -> int:
        """Return what the gradient graph differentiates of it: of likeness the cosine, whatever is wanted."""
        if self.is_likeness:
            return COSINE
        return self.activation if wanted == "probability" else LOGIT

    def compute_probabilities(self, logits: Array) -> Array:
        """Return the probabilities of logits (..., C)."""
        if self.activation == LOGIT:
            return logits
        if self.activation == SIGMOID:
            return sigmoid(logits)
        return softmax(logits)

    def read(self, answers: Array) -> Array:
        """Return the logits of what a lens gives: itself, or a text's vector (..., F)."""
        if self.weight is None:
            return answers
        assert self.bias is not None
        if self.is_likeness:
            answers = normalize_vector(answers)
        logits: Array = answers @ self.weight.T + self.bias
        return logits


def find_head(model: TextEncoder, other: str | None) -> Head:
    """Return the head that answers; of an encoder without one, the likeness to another text."""
    defaults = model.defaults
    if HEAD not in defaults.heads:
        if defaults.heads:
            raise InputError(
                f"explain supports labels, scores and the similarity of texts; this model has other heads:"
                f" {', '.join(defaults.heads)}"
            )
        if other is None:
            raise InputError(
                "pair=TEXT is missing: this model has no labels, and explains how similar two texts are",
                option="pair",
            )
        check_not_empty(other, "pair")
        with advising_shorter_texts("pair"):
            vector = model.embed(other, normalize=True, prompt="", truncation=None)
        return Head(("likeness",), LOGIT, vector[None], np.zeros(1, np.float32), is_likeness=True)
    activation = SOFTMAX
    if defaults.problem_type == "regression":
        activation = SIGMOID if defaults.score_activation == "sigmoid" else LOGIT
    elif defaults.problem_type == "multi_label_classification" or len(defaults.labels) == 1:
        activation = SIGMOID
    if defaults.fitted is None:
        return Head(defaults.labels, activation)
    if defaults.fitted.features != "embedding":
        raise InputError(
            f"the head was fitted on features={defaults.fitted.features!r}; only a head on embeddings can be"
            " explained: fit it with fit-head --features embedding"
        )
    with np.load(model.bundle.path(defaults.fitted.file), allow_pickle=False) as file:
        weight = file["weight"] - file["weight"].mean(0)
        bias = file["bias"] - file["bias"].mean()
        return Head(defaults.labels, activation, weight, bias)


@dataclass(frozen=True, eq=False)
class Text:
    """A text or a pair as the encoder reads it."""

    piece: Piece
    first: Encoding
    second: Encoding | None
    tokens: tuple[Token, ...]


def read_text(model: TextEncoder, text: str, pair: str | None, kind: str) -> Text:
    """Return a text's sequence and tokens; refuse one that is too long, and a pair of a chat template."""
    if pair is not None and model.defaults.pairs is not None:
        raise InputError(
            "explanations are of models that read a query and a text, and this model's chat template writes"
            " both as one text; rank gives its scores"
        )
    first = model.tokenizer.encode_batch([check_text(text)])[0]
    second = None if pair is None else model.tokenizer.encode_batch([check_text(pair)])[0]
    defaults = model.defaults
    special_tokens = defaults.make_special_tokens(is_pair=second is not None)
    with advising_shorter_texts():
        fitted = fit(
            first.ids,
            None if second is None else second.ids,
            max_length=defaults.max_length,
            special_tokens=special_tokens,
            truncation=None,
        )
    piece = fitted.pieces[0]
    names = ("query", "text") if kind == "ranking" else ("text", "pair")
    special = [
        Token(model.tokenizer.spell(token), token, "special", 0, 0) for token in defaults.tokens.values()
    ]
    by_id = {token.id: token for token in special}
    tokens = [by_id[token] for token in special_tokens.prefix]
    tokens += describe_encoding(first, text, names[0], set(piece.first))
    if second is not None and pair is not None and piece.second is not None:
        tokens += [by_id[token] for token in piece.ids[len(tokens) : piece.body[0]]]
        tokens += describe_encoding(second, pair, names[1], set(piece.second))
    tokens += [by_id[token] for token in special_tokens.suffix]
    return Text(piece, first, second, tuple(tokens))


def explain_text(
    model: TextEncoder, request: Request, graphs: ExplanationGraphs, choices: ResolvedOptions
) -> Explanation:
    """Explain the labels of a text, the score of a pair, or the likeness of two texts."""
    text = request.text
    pair = request.pair
    check_not_empty(text, "text")
    head = find_head(model, pair)
    kind = "similarity" if head.is_likeness else "ranking" if len(head.labels) == 1 else "classification"
    read = read_text(model, text, None if head.is_likeness else pair, kind)
    logits = answer_pieces(model, [read.piece], head)[0]  # (C,)
    chosen = choose_labels(head, logits, request.answer)
    outputs: dict[str, Array] = {}
    if choices.needs_graphs:
        inputs = add_segments(graphs, "layers", {"input_ids": np.array([read.piece.ids])}, read.piece)
        outputs = run_layers(graphs, inputs, choices)
    objective = head.find_objective(choices.objective)
    saliency = measure_saliency(
        len(chosen),
        len(read.tokens),
        choices,
        lambda number: prepare_score(
            graphs, outputs["embeddings"], read.piece, head, chosen[number], objective
        ),
        lambda: occlude(model, read, head, chosen, logits, choices.objective),
    )
    whole = range(len(read.tokens))
    return Explanation(
        kind=kind,
        model=graphs.name,
        tokens=read.tokens,
        targets=describe_labels(head, logits, chosen),
        saliency=saliency.rows,
        missing=saliency.missing,
        lens=look_at_labels(graphs, outputs, head, chosen) if "lens" in choices else None,
        attention={"self": attend(outputs, "attentions.", whole, whole)} if "attention" in choices else {},
        neurons=find_factors(outputs, choices),
        other=pair if head.is_likeness else None,
    )


def choose_labels(head: Head, logits: Array, label: str | None) -> list[int]:
    """Return the labels that are explained: one that was named, else the likeliest, the likeliest first."""
    if label is None:
        return [int(number) for number in np.argsort(-logits, kind="stable")[:MAX_LABELS]]
    if head.is_likeness:
        raise InputError(
            f"answer={label!r}: this model has no labels; leave answer out to explain how similar two texts"
            " are",
            option="answer",
        )
    if label not in head.labels:
        raise InputError(f"answer={label!r} is not one of {', '.join(head.labels)}", option="answer")
    return [head.labels.index(label)]


def describe_labels(head: Head, logits: Array, chosen: Sequence[int]) -> tuple[Target, ...]:
    """Return the labels with their logits and probabilities, and all labels by their probabilities."""
    shares = head.compute_probabilities(logits)
    known = head.activation != LOGIT
    order = np.argsort(-shares, kind="stable")[:MAX_LABELS]
    likeliest = tuple(Likely(head.labels[i], float(shares[i])) for i in order)
    return tuple(
        Target(
            text=head.labels[number],
            token=None,
            logit=float(logits[number]),
            probability=float(shares[number]) if known else None,
            likeliest=likeliest if len(head.labels) > 1 else (),
        )
        for number in chosen
    )


def answer_pieces(model: TextEncoder, pieces: Sequence[Piece], head: Head) -> Array:
    """Return the logits (N, C) of sequences, by the graph that answers."""
    answers: dict[int, Array] = {}
    roles = [spec.role for spec in model.artifact.outputs]
    role = HEAD
    if head.is_likeness:
        role = "sentence_embedding" if "sentence_embedding" in roles else find_last_state(roles)
    for outputs in model.encoder.run_batches(pieces, [role]):
        for index, (array,) in outputs.items():
            is_vector = not role.startswith("hidden.")
            answers[index] = array if is_vector else pool_tokens(array, "mean")
    logits = np.stack([answers[index] for index in range(len(pieces))])
    if head.is_likeness:
        return head.read(logits)
    return logits if head.weight is None else logits - logits.mean(-1, keepdims=True)


def find_last_state(roles: Sequence[str]) -> str:
    return max((r for r in roles if r.startswith("hidden.")), key=lambda r: int(r.partition(".")[2]))


def add_segments(
    graphs: ExplanationGraphs, graph: str, inputs: dict[str, Array], piece: Piece
) -> dict[str, Array]:
    """Return a graph's inputs with the tokens' segments, if it takes them."""
    if graphs.has_input(graph, "token_type_ids"):
        count = len(next(iter(inputs.values())))
        inputs["token_type_ids"] = np.broadcast_to(np.array(piece.segments), (count, len(piece))).copy()
    return inputs


def prepare_score(
    graphs: ExplanationGraphs, embeddings: Array, piece: Piece, head: Head, label: int, objective: int
) -> tuple[Score, list[Array]]:
    """Return the score of a label, and the embeddings that it reads."""

    def score(given: Sequence[Array]) -> tuple[list[Array], Array]:
        inputs = add_segments(graphs, "gradient", {"embeddings": given[0]}, piece)
        if head.weight is not None and head.bias is not None:
            inputs |= {"weight": head.weight, "bias": head.bias}
        inputs |= {"target": np.full(len(given[0]), label), "objective": np.array([objective])}
        outputs = graphs.run("gradient", inputs)
        return [outputs["gradient.embeddings"]], outputs["score"]

    return score, [embeddings]


def occlude(
    model: TextEncoder, read: Text, head: Head, chosen: Sequence[int], logits: Array, objective: str
) -> Array:
    """Return by how much (A, T) each label's score falls when a token is taken out; special ones stay."""
    piece = read.piece
    places: list[int] = []
    pieces: list[Piece] = []
    begin = piece.body[0]
    for place, token in enumerate(read.tokens):
        if token.part == "special":
            continue
        of_first = list(piece.first)
        of_second = None if piece.second is None else list(piece.second)
        if of_second is not None and place >= begin:
            del of_second[place - begin]
        else:
            del of_first[place - piece.prefix]
        second = None if read.second is None else read.second.ids
        special_tokens = model.defaults.make_special_tokens(is_pair=second is not None)
        pieces.append(build_piece(read.first.ids, second, of_first, of_second, special_tokens))
        places.append(place)
    falls = np.full((len(chosen), len(read.tokens)), np.nan, np.float32)
    if pieces:
        change = head.compute_probabilities if objective == "probability" else np.asarray
        others = change(answer_pieces(model, pieces, head))[:, chosen]  # (N, A)
        falls[:, places] = (change(logits)[chosen] - others).T
    return falls


def look_at_labels(
    graphs: ExplanationGraphs, outputs: dict[str, Array], head: Head, chosen: Sequence[int]
) -> Lens:
    """Return what each layer would answer, by the head on top of it."""
    hidden = np.stack(list_layers(outputs, "hidden."))
    (answers,) = graphs.run("lens", {"hidden": hidden}).values()
    logits = head.read(answers)  # (L + 1, C)
    own = logits[:, chosen]  # (L + 1, A)
    ranks = (logits[:, None] > own[:, :, None]).sum(-1) + 1
    shares = np.clip(head.compute_probabilities(logits)[:, chosen], 1e-30, None)
    best = tuple((head.labels[int(row.argmax())],) * len(chosen) for row in logits)
    return Lens(ranks, np.log(shares) if head.activation != LOGIT else own, best)
