"""Which sequences run together, by brute force; and that it makes no difference to any of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planforge.runtime import TextEncoder
from planforge.runtime.backends.backend import Array
from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec
from planforge.runtime.encode.encoder import Encoder
from planforge.runtime.errors import ClosedError
from planforge.runtime.text.batching import BATCH_COST, TOKEN_BUDGET, group_by_length
from planforge.runtime.text.long_text import Piece

from ...helpers.fake_program import FakeProgram

fast = settings(deadline=None, max_examples=150)
PAD = 7


def cost_of(groups: Sequence[Sequence[int]], lengths: Sequence[int], batch_cost: int) -> int:
    padded = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    return padded + batch_cost * len(groups)


def allowed(group: Sequence[int], lengths: Sequence[int], max_batch: int, budget: int) -> bool:
    padded = len(group) * max(lengths[i] for i in group)
    return len(group) <= max_batch and (padded <= budget or len(group) == 1)


def contiguous(order: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Every way to cut a sequence into runs."""
    for cuts in itertools.product((False, True), repeat=max(0, len(order) - 1)):
        ends = [*(i + 1 for i, cut in enumerate(cuts) if cut), len(order)]
        yield [order[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def run_all(
    encoder: Encoder, pieces: Sequence[Any], roles: Sequence[str], rows: Sequence[Sequence[int]] | None = None
) -> list[list[Any]]:
    """Return the outputs of all sequences, in their order."""
    results: dict[int, list[Any]] = {}
    for outputs in encoder.run_batches(pieces, roles, rows):
        results |= outputs
    return [results[i] for i in range(len(pieces))]


@fast
@given(
    st.lists(st.integers(1, 300), max_size=80),
    st.integers(1, 32),
    st.integers(1, 1100),
    st.integers(0, 64),
)
def test_each_index_once_within_the_limits(
    lengths: list[int], max_batch: int, budget: int, batch_cost: int
) -> None:
    groups = group_by_length(lengths, max_batch, budget, batch_cost)
    assert sorted(itertools.chain(*groups)) == [*range(len(lengths))]
    assert all(allowed(group, lengths, max_batch, budget) for group in groups)
    flat = [lengths[i] for group in groups for i in group]
    assert flat == sorted(flat)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for size in range(1, max_batch + 1):
        fixed = [order[i : i + size] for i in range(0, len(order), size)]
        if all(allowed(group, lengths, max_batch, budget) for group in fixed):
            assert cost_of(groups, lengths, batch_cost) <= cost_of(fixed, lengths, batch_cost)


@fast
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 200),
    st.integers(0, 40),
)
@example([3, 3, 3, 50], 4, 1024, 16)
@example([10, 10, 10, 10, 10, 11], 5, 55, 0)
def test_no_grouping_of_neighbours_costs_less(
    lengths: list[int], max_batch: int, budget: int, batch_cost: int
) -> None:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    possible = [
        cost_of(groups, lengths, batch_cost)
        for groups in contiguous(order)
        if all(allowed(group, lengths, max_batch, budget) for group in groups)
    ]
    groups = group_by_length(lengths, max_batch, budget, batch_cost)
    assert cost_of(groups, lengths, batch_cost) == min(possible)


def test_the_usual_budget_and_cost() -> None:
    assert group_by_length([], 32) == []
    assert group_by_length([TOKEN_BUDGET + 1, 5], 32) == [[1], [0]]  # too long for the budget: alone
    assert [len(group) for group in group_by_length([TOKEN_BUDGET // 8] * 16, 32)] == [8, 8]
    assert [len(group) for group in group_by_length([2] * 70, 32)] == [6, 32, 32]
    assert group_by_length([10, 10 + BATCH_COST - 1], 32) == [
        [0, 1]
    ]  # padding costs less than one more batch
    assert group_by_length([10, 10 + BATCH_COST + 1], 32) == [[0], [1]]


def fake_artifact(max_batch: int = 4, segments: bool = True) -> Artifact:
    batch = Axis("batch", 1, 1, max_batch)
    tokens = Axis("tokens", 1, 8, 64)
    rows = Axis("rows", 1, 1, 64)
    inputs = {"the_ids": "ids", "the_mask": "mask", "the_segments": "segments"}
    if not segments:
        del inputs["the_segments"]
    return Artifact(
        *("encoder", "portable", "fp32", 20, "x.onnx", ("x.data",), "right"),
        inputs=(
            *(TensorSpec(name, role, "int64", (batch, tokens)) for name, role in inputs.items()),
            TensorSpec("the_rows", "logit_rows", "int64", (rows,)),
        ),
        outputs=(
            TensorSpec("states", "hidden.2", "float32", (batch, tokens, 2)),
            TensorSpec("words", "masked_lm", "float32", (rows, 3)),
            TensorSpec("classes", "sequence_classification", "float32", (batch, 2)),
            TensorSpec("starts", "question_answering.start", "float32", (batch, tokens)),
        ),
    )


class FakeGraph:
    """What a graph could compute: each cell of its own row alone, and nothing that padding holds."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        ids = inputs["the_ids"]
        mask = inputs["the_mask"]
        segments = inputs.get("the_segments", np.zeros_like(ids))
        self.shapes.append(ids.shape)
        assert all(array.dtype == np.int64 for array in inputs.values())
        assert (ids[mask == 0] == PAD).all() and (segments[mask == 0] == 0).all()
        total = (ids * mask).sum(1, keepdims=True)
        cells = np.where(mask == 1, 100.0 * ids + 10 * segments + total, np.nan)
        states = np.stack([cells, np.broadcast_to(np.arange(ids.shape[1]), ids.shape)], -1)
        flat = cells.reshape(-1)[inputs["the_rows"]]
        return {
            "states": states,
            "words": flat[:, None] + np.arange(3),
            "classes": np.concatenate([total, mask.sum(1, keepdims=True)], 1),
            "starts": cells,
        }


ROLES = ["question_answering.start", "sequence_classification", "hidden.2"]


def pieces_of(lengths: Sequence[int], seed: int = 0) -> list[Piece]:
    generator = np.random.default_rng(seed)
    return [
        Piece(generator.integers(8, 90, n).tolist(), generator.integers(0, 2, n).tolist(), range(n - 2), None)
        for n in lengths
    ]


@fast
@given(st.lists(st.integers(2, 60), max_size=20), st.booleans())
def test_results_come_in_order_without_padding(lengths: list[int], segments: bool) -> None:
    graph = FakeGraph()
    encoder = Encoder(FakeProgram(graph), fake_artifact(segments=segments), PAD)
    pieces = pieces_of(lengths)
    results = run_all(encoder, pieces, ROLES)
    assert len(results) == len(pieces)
    for piece, (starts, classes, states) in zip(pieces, results, strict=True):
        total = sum(piece.ids)
        kinds = piece.segments if segments else [0] * len(piece)
        cells = [100 * token + 10 * kind + total for token, kind in zip(piece.ids, kinds, strict=True)]
        assert starts.tolist() == cells
        assert classes.tolist() == [total, len(piece)]
        assert states.tolist() == [[cell, t] for t, cell in enumerate(cells)]
    assert sum(shape[0] for shape in graph.shapes) == len(pieces)
    assert all(shape[0] <= 4 for shape in graph.shapes)


def test_sequences_do_run_together() -> None:
    graph = FakeGraph()
    run_all(Encoder(FakeProgram(graph), fake_artifact(), PAD), pieces_of([5, 9, 5, 9, 5, 9, 5, 9]), ROLES)
    assert graph.shapes == [(4, 5), (4, 9)]


@fast
@given(st.lists(st.tuples(st.integers(2, 30), st.integers(0, 5)), min_size=1, max_size=12), st.randoms())
def test_each_sequence_gets_the_rows_of_its_own(cases: list[tuple[int, int]], random: Any) -> None:
    encoder = Encoder(FakeProgram(FakeGraph()), fake_artifact(), PAD)
    pieces = pieces_of([length for length, _ in cases])
    rows = [[random.randrange(length) for _ in range(count)] for length, count in cases]
    results = run_all(encoder, pieces, ["masked_lm"], rows)
    for piece, wanted, (words,) in zip(pieces, rows, results, strict=True):
        cells = [100 * piece.ids[t] + 10 * piece.segments[t] + sum(piece.ids) for t in wanted]
        assert words.shape == (len(wanted), 3)
        assert words.tolist() == [[cell, cell + 1, cell + 2] for cell in cells]


def test_a_closed_encoder_runs_nothing() -> None:
    program = FakeProgram(FakeGraph())
    encoder = Encoder(program, fake_artifact(), PAD)
    encoder.close()
    encoder.close()
    assert program.closed
    with pytest.raises(ClosedError, match=r"load\(\) it again"):
        run_all(encoder, pieces_of([4]), ROLES)


def test_the_real_graph_gives_each_sequence_the_same_alone_and_in_a_batch(minilm_bundle: Path) -> None:
    with TextEncoder.load(minilm_bundle) as model:
        encoder = model.encoder
        generator = np.random.default_rng(5)
        pieces = pieces_of(generator.integers(2, 60, 24).tolist(), seed=6)
        roles = ["hidden.6", "hidden.1", "sentence_embedding"]
        groups = group_by_length([len(piece) for piece in pieces], encoder.max_batch)
        assert any(len({len(pieces[i]) for i in group}) > 1 for group in groups)  # some are padded
        together = run_all(encoder, pieces, roles)
        assert np.ptp([vector[:5] for _, _, vector in together], axis=0).min() > 0.01  # they do differ
        for piece, arrays in zip(pieces, together, strict=True):
            (alone,) = run_all(encoder, [piece], roles)
            assert alone[0].shape == (len(piece), 384)
            for got, expected in zip(arrays, alone, strict=True):
                np.testing.assert_allclose(got, expected, atol=2e-5)
