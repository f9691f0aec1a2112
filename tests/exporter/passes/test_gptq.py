"""GPTQ, held against the published algorithm, written plainly.

M rows of activations, K columns of them, N results
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch

from planforge.exporter.number_formats import INT4, INT8, ROW_INT8, NumberFormat, sum_pairs
from planforge.exporter.passes import gptq
from planforge.exporter.passes.gptq import round_weight, round_with_gptq

from ...helpers.graphs import normal

Array = npt.NDArray[np.float32]
DAMPING = 0.01  # as published


def make_rows(M: int, K: int, seed: int) -> Array:
    """Rows whose columns go together, and of which some are far larger than others."""
    mixed = normal(M, K, seed=seed) @ (np.eye(K, dtype=np.float32) + 0.3 * normal(K, K, seed=seed + 1))
    return np.asarray(mixed * np.exp(normal(K, seed=seed + 2)), np.float32)


def round_plainly(weight: Array, scale: Array, low: int, top: int, x: Array) -> npt.NDArray[np.int8]:
    """Return what the paper's algorithm gives in float64: errors move on through the inverse of x^T x."""
    K = len(weight)
    rows = x.astype(np.float64)
    hessian = rows.T @ rows
    hessian += (DAMPING * np.trace(hessian) / K + 1e-12) * np.eye(K)
    order = np.argsort(-np.diag(hessian), kind="stable")
    inverse = np.linalg.inv(hessian[np.ix_(order, order)])
    rest = weight[order].astype(np.float64)
    steps = scale[order // (K // len(scale))]
    rounded = np.empty(weight.shape, np.int8)
    for i in range(K):
        q = np.clip(np.rint(rest[i] / steps[i]), low, top)
        rounded[order[i]] = q
        error = (rest[i] - q * steps[i]) / inverse[i, i]
        rest[i + 1 :] -= np.outer(inverse[i + 1 :, i], error)
        # What is rounded leaves the problem.
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return rounded


@pytest.mark.parametrize(
    ("M", "K", "N", "groups"),
    [
        (200, 64, 5, 2),
        (40, 96, 7, 3),  # fewer rows than columns
        (300, 1, 3, 1),
        (400, 300, 4, 3),  # no whole number of blocks, nor of groups
        (700, 544, 2, 17),  # more than a strip of x^T x
    ],
)
def test_it_rounds_as_published(M: int, K: int, N: int, groups: int) -> None:
    x = make_rows(M, K, seed=K)
    weight = normal(K, N, seed=7)
    scale = np.abs(weight).reshape(groups, -1, N).max(axis=1) / 7
    found = round_with_gptq(weight, scale, INT4, x)
    plain = round_plainly(weight, scale, -8, 7, x)
    # float32 and float64 may part where a number is half-way between two integers.
    assert (found != plain).mean() <= 0.01

    def lost(rounded: npt.NDArray[np.int8]) -> float:
        return float(np.square(x @ (rounded * np.repeat(scale, K // groups, 0) - weight)).sum())

    assert lost(found) == pytest.approx(lost(plain), rel=0.02)
    if K > 1:
        nearest = INT4.round(weight / np.repeat(scale, K // groups, 0))
        assert lost(found) < 0.5 * lost(nearest)


def test_blocks_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_rows(100, 50, seed=1)
    weight = normal(50, 6, seed=2)
    scale = np.full((1, 6), 0.3, np.float32)
    found = round_with_gptq(weight, scale, INT8, x)
    for block, group in ((50, 50), (7, 3), (1, 1)):
        monkeypatch.setattr(gptq, "BLOCK", block)
        monkeypatch.setattr(gptq, "GROUP", group)
        np.testing.assert_array_equal(round_with_gptq(weight, scale, INT8, x), found)


def test_a_column_that_no_row_has_and_rows_all_alike_are_rounded_too() -> None:
    x = np.repeat(make_rows(1, 64, seed=3), 30, axis=0)
    x[:, 5] = 0
    weight = normal(64, 4, seed=4)
    scale = np.full((2, 4), 0.2, np.float32)
    found = round_with_gptq(weight, scale, INT4, x)
    np.testing.assert_array_equal(found[5], INT4.round(weight[5] / scale[0]))
    assert np.abs(x[0] @ (found * 0.2 - weight)).max() < 0.2 * np.abs(x[0]).max()


def test_what_float32_cannot_factorize_is_factorized_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    factorize = torch.linalg.cholesky_ex
    rows = torch.from_numpy(make_rows(100, 40, seed=5))
    expected = gptq.factorize(rows, DAMPING)

    def fail(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(factorize(matrix)[0], torch.nan), torch.tensor(1)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fail)
    torch.testing.assert_close(gptq.factorize(rows, DAMPING), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("K", [64, 65])
@pytest.mark.parametrize("with_rows", [True, False])
def test_pairs_of_codes_fit_into_16_bits(K: int, with_rows: bool) -> None:
    """Beside 7 bits, which fit as well and which ONNX Runtime's own quantizer has for such processors."""
    x = make_rows(200, K, seed=K)
    weight = normal(300, K, seed=8)
    weight[0] = np.resize([0.5, 0.5, -0.5, -0.5], K)  # of which all pairs are the largest
    rows = x if with_rows else None

    def measure_loss(format: NumberFormat) -> tuple[npt.NDArray[np.int64], float]:
        rounded = round_weight(weight, format.find_row_scales(weight), format, rows)
        lost = x @ (rounded.dequantize() - weight).T
        return rounded.codes.astype(np.int64), float(np.square(lost).sum())

    codes, lost = measure_loss(dataclasses.replace(ROW_INT8, damping=DAMPING))
    pairs = sum_pairs(codes)
    assert pairs.shape == (300, K // 2)
    assert pairs.max() == 128 and np.abs(codes).max() <= 127
    assert 255 * pairs.max() < 2**15
    assert (np.abs(codes[0, : K // 2 * 2]) == 64).all()
    seven = dataclasses.replace(INT8, low=-63, top=63)
    assert lost < 0.7 * measure_loss(seven)[1]
    free, most = measure_loss(INT8)
    assert sum_pairs(free).max() > 128 and lost < 2.5 * most
