"""What an encoder must reproduce, computed in PyTorch.

T tokens, E hidden size
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check import encoders as golden
from ...runtime.apps.check.encoders import Golden, Outputs, Sample, is_per_token
from ...runtime.apps.check.files import Arrays, choose_evenly
from ...runtime.backends.backend import Array
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import EncoderDefaults
from ...runtime.bundle.manifest import TensorSpec
from ...runtime.progress import PartCounter, Report, report_nothing
from ...runtime.text.long_text import Piece, fit
from ...runtime.text.tokenizer import Tokenizer
from ..errors import VerificationError
from ..levels import FULL, Level
from .draw import Random, count_alike, count_tokens, count_weights, draw_rows, draw_text, list_sizes
from .fitted_head import HEAD, LinearHead

if TYPE_CHECKING:
    from torch import Tensor

    from .model import ReferenceModel

TEXT_TOKENS = 48  # at most; several lengths below that are used
JUDGED = 1 / 3  # of a long text; the rest is to calibrate with
CALIBRATION_TOKENS = 64  # of a sequence
DRAWN = 12  # sequences of random lengths
POSITIONS = 12  # compared in each sequence, the first and last among them


@dataclass(frozen=True)
class Expectation(Golden):
    """What every engine must reproduce."""

    texts: tuple[Piece, ...] = ()  # beside the samples', to calibrate with; golden data does without
    left_out: tuple[str, ...] = ()  # what the level of verification does without, in words


@dataclass(frozen=True)
class Questions:
    """What PyTorch is asked: besides the model, all that its answers depend on."""

    pieces: tuple[Piece, ...]  # of real text
    drawn: tuple[Piece, ...]
    batches: tuple[tuple[int, ...], ...]  # of the drawn ones
    seed: int  # that decided what is drawn
    outputs: tuple[TensorSpec, ...]  # of the graph
    head: LinearHead | None  # that was fitted to the model
    problem_type: str  # of a classifier
    texts: tuple[Piece, ...]  # as in an `Expectation`
    left_out: tuple[str, ...]


def choose_questions(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> Questions:
    """Choose sequences of real text, and draw some of any length, and padded batches of them, from a seed.

    A level below "full" has fewer of them.
    """
    manifest = bundle.manifest
    assert manifest.encoder is not None
    tokenizer = Tokenizer.from_file(bundle.path(str(manifest.tokenizer["files"][0])))
    has_segments = any(spec.role == "segments" for spec in manifest.artifacts[0].inputs)
    encoded = [tokenizer.encode(text) for text in texts]
    weights = count_weights(model)
    every = cut_pieces(encoded, manifest.encoder, has_segments)
    pieces = thin_pieces(every, level.count_samples(weights, TEXT_TOKENS))
    random = np.random.default_rng(seed)
    drawn: list[Piece] = []
    if level.draw_work:
        drawn = draw_pieces(random, encoded, manifest.encoder, has_segments, weights, level)
    lengths = [len(piece) for piece in (*drawn, *pieces[-2:])]
    rows = max(artifact.axis("batch").max for artifact in manifest.artifacts)
    sizes = list_sizes(rows)[1:]
    return Questions(
        pieces=tuple(pieces),
        drawn=tuple(drawn),
        batches=draw_rows(random, lengths, sizes, weights, level) if drawn else (),
        seed=seed,
        outputs=tuple(manifest.artifacts[0].outputs),
        head=LinearHead.load(bundle),
        problem_type=read_problem_type(bundle),
        texts=tuple(cut_calibration_pieces(encoded, manifest.encoder)),
        left_out=tuple(describe_left_out(len(pieces), len(every), bool(drawn), weights, sizes, level)),
    )


def read_problem_type(bundle: Bundle) -> str:
    """Return what a classifier's logits mean."""
    defaults = bundle.manifest.encoder
    assert defaults is not None
    return defaults.problem_type or golden.ONE_LABEL


def answer(model: ReferenceModel, questions: Questions, report: Report = report_nothing) -> Expectation:
    """Compute every output of the bundle's graph in PyTorch; report the sequences."""
    parts = PartCounter(report, len(questions.pieces) + len(questions.drawn))
    specs = questions.outputs

    def compute(piece: Piece) -> Sample:
        positions = choose_evenly(len(piece), POSITIONS)
        sample = Sample(piece, positions, compute_outputs(model, piece, positions, specs, questions.head))
        parts.finish_one()
        return sample

    return Expectation(
        samples=tuple(map(compute, questions.pieces)),
        per_token=tuple(spec.name for spec in specs if is_per_token(spec)),
        texts=questions.texts,
        drawn=tuple(map(compute, questions.drawn)),
        batches=questions.batches,
        seed=questions.seed,
        problem_type=questions.problem_type,
        left_out=questions.left_out,
    )


def thin_pieces(pieces: list[Piece], count: float) -> list[Piece]:
    """Return about so many of the texts, and the pair, the token and the full sequence behind them."""
    texts = pieces[:-3]
    if len(texts) <= count:
        return pieces
    return [*(texts[i] for i in choose_evenly(len(texts), int(count))), *pieces[-3:]]


def describe_left_out(
    compared: int, every: int, drawn: bool, weights: int, sizes: Sequence[int], level: Level
) -> Iterator[str]:
    """Yield what the level leaves out of the cases that "full" has."""
    if compared < every:
        yield f"{every - compared} of {every} texts"
    if not drawn:
        yield "drawn sequences and batches"
        return
    if count_tokens(weights, level) < count_tokens(weights, FULL):
        yield f"drawn sequences beyond {count_tokens(weights, level):,} tokens together"
    if count_alike(weights, sizes, level) < count_alike(weights, sizes, FULL):
        yield "a second drawn batch of each size"


def draw_pieces(
    random: Random,
    encoded: Sequence[Sequence[int]],
    defaults: EncoderDefaults,
    has_segments: bool,
    weights: int,
    level: Level,
) -> list[Piece]:
    """Return sequences of all lengths, evenly spread by their logarithm, every third of them a pair."""
    real = [token for ids in encoded for token in ids]
    steps = np.linspace(0, math.log(defaults.max_length), DRAWN + 1)
    lengths = np.exp(random.uniform(steps[:-1], steps[1:]))
    lengths *= min(1.0, count_tokens(weights, level) / 2 / float(lengths.sum()))
    pieces = []
    for number, length in enumerate(lengths.round().astype(int).tolist()):
        first = draw_text(random, real, length)
        second = draw_text(random, real, length) if has_segments and number % 3 == 2 else None
        pieces.append(cut_piece(defaults, first, second, length))
    return pieces


def cut_pieces(
    encoded: Sequence[Sequence[int]], defaults: EncoderDefaults, has_segments: bool
) -> list[Piece]:
    """Return sequences of unequal length from real text; the last are a pair, a token, a full sequence."""
    texts = [window for ids in encoded for window in split_text(ids)[0]]
    if not texts:
        raise VerificationError("the texts to verify with have no tokens that this model knows")
    pieces = [cut_piece(defaults, text, None, TEXT_TOKENS // (1 + i % 3)) for i, text in enumerate(texts)]
    if has_segments:
        pieces.append(cut_piece(defaults, texts[0], texts[-1], TEXT_TOKENS))
    pieces.append(Piece([defaults.tokens["cls"]], [0], range(0), None))
    joined = [token for text in texts for token in text]
    full = (joined * (defaults.max_length // len(joined) + 1))[: defaults.max_length]
    return [*pieces, cut_piece(defaults, full, None, defaults.max_length)]


def cut_piece(
    defaults: EncoderDefaults, first: Sequence[int], second: Sequence[int] | None, most: int
) -> Piece:
    """Return one sequence of a text's beginning, or of a pair's, of about `most` tokens."""
    frame = defaults.make_frame(is_pair=second is not None)
    length = max(3 + defaults.separators, min(most, defaults.max_length))
    fitted = fit(first, second, max_length=length, frame=frame, truncation="head")
    return fitted.pieces[0]


def split_text(ids: Sequence[int]) -> tuple[list[Sequence[int]], Sequence[int]]:
    """Return a text's beginning, cut into windows to judge, and the rest, to calibrate with."""
    end = max(TEXT_TOKENS, round(JUDGED * len(ids)))
    cuts = [ids[start : min(start + TEXT_TOKENS, end)] for start in range(0, end, TEXT_TOKENS)]
    return [window for window in cuts if len(window) > 1], ids[end:]


def cut_calibration_pieces(encoded: Sequence[Sequence[int]], defaults: EncoderDefaults) -> list[Piece]:
    """Return sequences to calibrate with, from what `split_text` leaves; if nothing, from all texts."""
    rest = [token for ids in encoded for token in split_text(ids)[1]]
    rest = rest or [token for ids in encoded for token in ids]
    length = min(CALIBRATION_TOKENS, defaults.max_length) - 2
    cuts = [rest[start : start + length] for start in range(0, len(rest), length)]
    return [cut_piece(defaults, ids, None, defaults.max_length) for ids in cuts]


def run_model(model: ReferenceModel, piece: Piece) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return every layer's hidden states (1, T, E) of one sequence, and the heads' results."""
    import torch

    from ...models import PaddedAttention
    from ...models.encoder import Encoder

    if not isinstance(model, Encoder):
        from .transformers_reference import run_encoder

        return run_encoder(model, piece)
    with torch.no_grad():
        ids = torch.tensor([piece.ids])
        segments = torch.tensor([piece.segments])
        mask = torch.ones_like(ids)
        kinds = segments if model.config.type_vocab_size else None
        states = model.hidden_states(ids, kinds, PaddedAttention(mask))
        return states, dict(model.head_outputs(states[-1], mask))


def compute_outputs(
    model: ReferenceModel,
    piece: Piece,
    positions: Sequence[int],
    specs: Sequence[TensorSpec],
    head: LinearHead | None,
) -> Outputs:
    """Compute every output for one sequence in PyTorch, and a fitted head's logits."""
    states, results = run_model(model, piece)
    outputs = {}
    for spec in specs:
        kind, _, detail = spec.role.partition(".")
        if head is not None and spec.role == HEAD:
            vector = results.get("sentence_embedding")
            embedding = None if vector is None else vector[0].numpy()
            outputs[spec.name] = head.compute_logits([state[0].numpy() for state in states], embedding)
            continue
        if kind == "hidden":
            tensor = states[int(detail)]
        elif kind == "question_answering":
            tensor = results[kind][..., ("start", "end").index(detail)]
        else:
            tensor = results[spec.role]
        array = tensor[0].numpy()
        outputs[spec.name] = array[list(positions)] if is_per_token(spec) else array
    return outputs


def to_arrays(expected: Expectation, whole: bool = False) -> dict[str, Array]:
    return golden.to_arrays(expected, whole)


def from_arrays(arrays: Arrays) -> Expectation:
    return Expectation(**vars(golden.from_arrays(arrays)))


def restore(model: ReferenceModel, questions: Questions, arrays: Arrays) -> Expectation:
    """Return what `answer` does, from whole arrays of an earlier run."""
    del model
    return replace(from_arrays(arrays), texts=questions.texts, left_out=questions.left_out)
