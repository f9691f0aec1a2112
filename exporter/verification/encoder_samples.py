"""What an encoder must reproduce, and how it is kept as golden data.

T tokens, R chosen positions, E hidden size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import EncoderDefaults
from ...runtime.bundle.manifest import TensorSpec
from ...runtime.text.long_text import Piece, fit
from ...runtime.text.tokenizer import Tokenizer
from ..errors import VerificationError
from .evenly import evenly
from .fitted_head import LinearHead
from .gate import (
    Gaps,
    Metrics,
    VectorMetrics,
    limits_for,
    measure,
    measure_vectors,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ...models import Bert
    from .rounding import Rounding

Array: TypeAlias = npt.NDArray[Any]
Outputs: TypeAlias = dict[str, Array]  # by the name of the graph's output

TEXT_TOKENS = 48  # at most; several lengths below that are used
JUDGED = 1 / 3  # of a long text; the rest is to calibrate with
CALIBRATION_TOKENS = 64  # of a sequence
POSITIONS = 12  # compared in each sequence, the first and last among them
GOLDEN_POSITIONS = 3
DISTRIBUTIONS = {"masked_lm", "next_sentence", "sequence_classification", "token_classification"}


@dataclass(frozen=True)
class Sample:
    """A sequence, and what PyTorch makes of it alone, without padding.

    Attributes:
        piece: the sequence.
        positions: of the tokens whose results are known.
        outputs: by output name; of a result per token (R, ...), the chosen positions only.
    """

    piece: Piece
    positions: tuple[int, ...]
    outputs: Outputs

    def thinned(self, per_token: Iterable[str]) -> Sample:
        """With `GOLDEN_POSITIONS` of the positions, the first and last among them."""
        count = len(self.positions)
        keep = list(evenly(count, GOLDEN_POSITIONS))
        thin = {name: self.outputs[name][keep] for name in per_token}
        return Sample(self.piece, tuple(self.positions[i] for i in keep), self.outputs | thin)


@dataclass(frozen=True)
class Expectation:
    """What every engine must reproduce.

    Attributes:
        samples: texts, a pair, a single token and a full sequence.
        per_token: names of the outputs that have a result per token.
        texts: real text beside the samples', to calibrate with; golden data does without.
    """

    samples: tuple[Sample, ...]
    per_token: tuple[str, ...]
    texts: tuple[Piece, ...] = ()


def expect(model: Bert, bundle: Bundle, texts: Sequence[str]) -> Expectation:
    """Asks PyTorch for every output of the bundle's graph."""
    manifest = bundle.manifest
    assert manifest.encoder is not None
    tokenizer = Tokenizer.from_file(bundle.path(str(manifest.tokenizer["files"][0])))
    specs = manifest.artifacts[0].outputs
    has_segments = any(spec.role == "segments" for spec in manifest.artifacts[0].inputs)
    head = LinearHead.of(bundle)
    samples = []
    encoded = [tokenizer.encode(text) for text in texts]
    for piece in pieces_from(encoded, manifest.encoder, has_segments):
        positions = evenly(len(piece), POSITIONS)
        samples.append(Sample(piece, positions, reference(model, piece, positions, specs, head)))
    per_token = tuple(spec.name for spec in specs if is_per_token(spec))
    return Expectation(tuple(samples), per_token, tuple(pieces_behind(encoded, manifest.encoder)))


def is_per_token(spec: TensorSpec) -> bool:
    return bool({"tokens", "rows"} & set(spec.axis_names()))


def pieces_from(
    encoded: Sequence[Sequence[int]], defaults: EncoderDefaults, has_segments: bool
) -> list[Piece]:
    """Sequences of unequal length from real text; last come a pair, a single token, a full sequence."""
    texts = [window for ids in encoded for window in windows(ids)[0]]
    if not texts:
        raise VerificationError("the texts to verify with have no tokens that this model knows")

    def cut(first: Sequence[int], second: Sequence[int] | None, length: int) -> Piece:
        length = max(4, min(length, defaults.max_length))
        fitted = fit(first, second, max_length=length, tokens=defaults.tokens, truncation="head")
        return fitted.pieces[0]

    pieces = [cut(text, None, TEXT_TOKENS // (1 + i % 3)) for i, text in enumerate(texts)]
    if has_segments:
        pieces.append(cut(texts[0], texts[-1], TEXT_TOKENS))
    pieces.append(Piece([defaults.tokens["cls"]], [0], range(0), None))
    joined = [token for text in texts for token in text]
    full = (joined * (defaults.max_length // len(joined) + 1))[: defaults.max_length]
    return [*pieces, cut(full, None, defaults.max_length)]


def windows(ids: Sequence[int]) -> tuple[list[Sequence[int]], Sequence[int]]:
    """A text's beginning, cut into what is judged, and the rest, to calibrate with."""
    end = max(TEXT_TOKENS, round(JUDGED * len(ids)))
    cuts = [ids[start : min(start + TEXT_TOKENS, end)] for start in range(0, end, TEXT_TOKENS)]
    return [window for window in cuts if len(window) > 1], ids[end:]


def pieces_behind(encoded: Sequence[Sequence[int]], defaults: EncoderDefaults) -> list[Piece]:
    """Sequences from what `windows` leaves to calibrate with; where it leaves nothing, the texts are both."""
    rest = [token for ids in encoded for token in windows(ids)[1]]
    rest = rest or [token for ids in encoded for token in ids]
    length = min(CALIBRATION_TOKENS, defaults.max_length) - 2
    cuts = [rest[start : start + length] for start in range(0, len(rest), length)]
    return [whole(ids, defaults) for ids in cuts]


def whole(ids: Sequence[int], defaults: EncoderDefaults) -> Piece:
    """Tokens that fit into one sequence."""
    fitted = fit(ids, None, max_length=defaults.max_length, tokens=defaults.tokens, truncation="head")
    return fitted.pieces[0]


def run_model(model: Bert, piece: Piece) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Every layer's hidden states (1, T, E) of one sequence, and the heads' results."""
    import torch

    from ...models import PaddedAttention

    with torch.no_grad():
        ids, segments = torch.tensor([piece.ids]), torch.tensor([piece.segments])
        mask = torch.ones_like(ids)
        states = model.hidden_states(
            ids, segments if model.config.type_vocab_size else None, PaddedAttention(mask)
        )
        return states, dict(model.head_outputs(states[-1], mask))


def reference(
    model: Bert,
    piece: Piece,
    positions: Sequence[int],
    specs: Sequence[TensorSpec],
    head: LinearHead | None = None,
) -> Outputs:
    """What PyTorch computes for one sequence, and what a fitted head makes of it."""
    states, results = run_model(model, piece)
    outputs = {}
    for spec in specs:
        kind, _, detail = spec.role.partition(".")
        if head is not None and spec.role == "sequence_classification":
            vector = results.get("sentence_embedding")
            outputs[spec.name] = head.logits(
                [state[0].numpy() for state in states], None if vector is None else vector[0].numpy()
            )
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


def gaps(model: Bert, bundle: Bundle, expected: Expectation, rounding: Rounding) -> Gaps:
    """What rounding does in PyTorch to each output."""
    specs = bundle.manifest.artifacts[0].outputs
    with rounding.applied(model):
        head = LinearHead.of(bundle)
        got = [reference(model, s.piece, s.positions, specs, head) for s in expected.samples]
    want = [sample.outputs for sample in expected.samples]
    found: Gaps = dict(measure_all(got, want, specs))
    # A case has some of the samples: its mean is at most the largest of any sample.
    alone = [measure_all([a], [b], specs) for a, b in zip(got, want, strict=True)]
    for name, gap in found.items():
        if isinstance(gap, Metrics):
            kls = [m.mean_kl for metrics in alone if isinstance(m := metrics[name], Metrics)]
            found[name] = replace(gap, mean_kl=max(kls))
    return found


def run_texts(model: Bert, expected: Expectation) -> None:
    """Runs PyTorch over the texts to calibrate with."""
    for piece in expected.texts:
        run_model(model, piece)


def limits(bundle: Bundle, expected: Expectation, precision: str, gaps: Gaps) -> dict[str, float]:
    """The limits of each output's metrics, from the one table and from what rounding does in PyTorch.

    Raises:
        ValueError: the rounded model is not finite.
    """
    del expected
    specs = bundle.manifest.artifacts[0].outputs
    return {
        f"{spec.name}.{metric}": limit
        for spec in specs
        for metric, limit in limits_for(precision, gaps.get(spec.name), metrics_of(spec).LIMITED).items()
    }


def metrics_of(spec: TensorSpec) -> type[Metrics] | type[VectorMetrics]:
    """Logits over classes or words are compared as distributions, everything else as vectors."""
    return Metrics if spec.role in DISTRIBUTIONS else VectorMetrics


def measure_all(
    got: Sequence[Outputs], want: Sequence[Outputs], specs: Sequence[TensorSpec]
) -> dict[str, Metrics | VectorMetrics]:
    """The metrics of each output over all sequences."""
    found: dict[str, Metrics | VectorMetrics] = {}
    for spec in specs:
        sides = [[outputs[spec.name] for outputs in side] for side in (got, want)]
        if spec.axis_names()[-1] == "tokens":  # a logit per token: one vector of all
            a, b = (np.concatenate(arrays)[None] for arrays in sides)
            found[spec.name] = measure_vectors(a, b, least_scale=1.0)
            continue
        a, b = (np.concatenate([np.atleast_2d(array) for array in arrays]) for arrays in sides)
        found[spec.name] = (
            measure(a, b)
            if metrics_of(spec) is Metrics
            else measure_vectors(a, b, of_texts=not is_per_token(spec))
        )
    return found


def to_arrays(expected: Expectation) -> dict[str, Array]:
    """Sequences and some of PyTorch's results, as golden data keeps them."""
    arrays: dict[str, Array] = {"per_token": np.array(expected.per_token)}
    for i, sample in enumerate(expected.samples):
        thin = sample.thinned(expected.per_token)
        arrays |= {
            f"sample.{i}.ids": np.array(thin.piece.ids),
            f"sample.{i}.segments": np.array(thin.piece.segments),
            f"sample.{i}.positions": np.array(thin.positions),
        }
        arrays |= {f"sample.{i}.output.{name}": array for name, array in thin.outputs.items()}
    return arrays


def from_arrays(arrays: Mapping[str, Array]) -> Expectation:
    """What `to_arrays` made."""
    samples = []
    for i in range(sum(name.endswith(".ids") for name in arrays)):
        ids, segments, positions = (
            [int(number) for number in arrays[f"sample.{i}.{what}"]]
            for what in ("ids", "segments", "positions")
        )
        stem = f"sample.{i}.output."
        outputs = {name.removeprefix(stem): a for name, a in arrays.items() if name.startswith(stem)}
        samples.append(Sample(Piece(ids, segments, range(0), None), tuple(positions), outputs))
    return Expectation(tuple(samples), tuple(str(name) for name in arrays["per_token"]))
