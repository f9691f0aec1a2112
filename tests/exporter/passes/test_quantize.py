"""Weights in integers, held against numpy.

N rows of a weight, K columns, b columns of a block, M rows of activations
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.exporter.number_formats import CPU_INTEGERS, INT4, INT8
from planforge.exporter.passes import gptq
from planforge.exporter.passes import quantize as quantize_module
from planforge.exporter.passes.quantize import quantize
from planforge.exporter.passes.quantized_weight import QuantizedWeight
from planforge.exporter.passes.store_blocks import pack, unpack

from ...helpers.blocks import RANGE, Array, by_block, unpacked
from ...helpers.graphs import normal

BITS = pytest.mark.parametrize("bits", [8, 4])
fast = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def weights(draw: st.DrawFn) -> tuple[Array, int]:
    """A weight whose blocks are alike, far apart in size, empty, or constant; and the size of a block."""
    size = draw(st.sampled_from(INT8.block_sizes))
    rows = draw(st.integers(1, 6))
    blocks = draw(st.integers(1, 3))
    random = np.random.default_rng(draw(seeds))
    values = random.standard_normal((rows, blocks, size)) ** draw(st.sampled_from([1, 3]))
    values *= 10.0 ** random.integers(*draw(st.sampled_from([(0, 1), (-4, 5), (-38, 15)])), (rows, blocks, 1))
    values[random.random((rows, blocks)) < draw(st.sampled_from([0, 0.5]))] = draw(st.sampled_from([0, -0.3]))
    return values.reshape(rows, -1).astype(np.float32), size


@fast
@given(given=weights())
def test_int8_is_at_most_half_a_step_off(given: tuple[Array, int]) -> None:
    weight, size = given
    found = quantize(weight, INT8, size)
    assert found.size == size and found.scale.shape == (len(weight), weight.shape[1] // size)
    assert found.codes.shape == weight.shape and found.scale.dtype == np.float32
    assert found.codes.min() >= RANGE[8][0] and found.codes.max() <= RANGE[8][1]
    # A quotient of up to 127 carries an error of 127 * 2^-23 steps itself.
    off = np.abs(by_block(found.dequantize(), size) - by_block(weight, size))
    assert (off <= np.abs(found.scale[..., None]) * (0.5 + 127 * 2.0**-22) + 1e-44).all()


@fast
@given(given=weights())
def test_int4_loses_no_more_than_the_step_of_the_largest_number(given: tuple[Array, int]) -> None:
    weight, size = given
    found = quantize(weight, INT4, size)
    assert found.codes.min() >= RANGE[4][0] and found.codes.max() <= RANGE[4][1]
    blocks = by_block(weight, size)
    step = np.maximum(np.abs(blocks).max(-1, keepdims=True) / 7, 1e-45)
    plain = np.square(np.rint(blocks / step) * step - blocks).sum(-1)
    own = np.square(by_block(found.dequantize(), size) - blocks).sum(-1)
    assert (own <= plain + 1e-6 * np.square(step[..., 0]) * size).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_large_weight_is_rounded_some_rows_at_a_time(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(33, 64)
    rows = normal(100, 64, seed=1)
    format = CPU_INTEGERS[bits]
    whole = [quantize(weight, format, 32), quantize(weight, format, 32, rows)]
    for module in (quantize_module, gptq):
        monkeypatch.setattr(module, "PIECE_NUMBERS", 64 * 5)
    pieces = [quantize(weight, format, 32), quantize(weight, format, 32, rows)]
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one.codes, other.codes)
        np.testing.assert_array_equal(one.scale, other.scale)


def test_int4_gains_by_clipping_a_little() -> None:
    blocks = np.random.default_rng(0).standard_normal((64, 4, 128))
    step = np.abs(blocks).max(-1, keepdims=True) / 7
    plain = np.square(np.rint(blocks / step) * step - blocks).sum()
    found = quantize(blocks.reshape(64, -1).astype(np.float32), INT4, 128).dequantize()
    assert np.square(found.reshape(blocks.shape) - blocks).sum() < 0.95 * plain


@BITS
def test_zeros_stay_zeros_and_a_constant_stays_itself(bits: int) -> None:
    weight = np.zeros((3, 128), np.float32)
    weight[1] = -0.7
    weight[2, :64] = 1e-30
    found = quantize(weight, CPU_INTEGERS[bits], 64).dequantize()
    assert (found[0] == 0).all() and (found[2, 64:] == 0).all()
    np.testing.assert_allclose(found, weight, rtol=1e-6)


@BITS
def test_one_huge_number_costs_its_own_block_only(bits: int) -> None:
    weight = np.random.default_rng(1).standard_normal((2, 128)).astype(np.float32)
    without = quantize(weight, CPU_INTEGERS[bits], 32).dequantize()
    weight[0, 40] = 1e6
    found = quantize(weight, CPU_INTEGERS[bits], 32).dequantize()
    others = np.ones_like(weight, bool)
    others[0, 32:64] = False
    np.testing.assert_array_equal(found[others], without[others])
    assert found[0, 40] == pytest.approx(1e6, rel=1e-6)  # clipping it would cost more than all the rest
    assert (np.delete(found[0, 32:64], 8) == 0).all()


@BITS
@fast
@given(given=weights())
def test_packed_numbers_lie_as_the_operator_reads_them(bits: int, given: tuple[Array, int]) -> None:
    weight, size = given
    found = quantize(weight, CPU_INTEGERS[bits], size)
    packed = pack(found.codes, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (len(weight), weight.shape[1] * bits // 8)
    np.testing.assert_array_equal(unpacked(packed, bits), found.codes)
    np.testing.assert_array_equal(unpack(packed, bits), found.codes)


def test_a_width_that_no_block_divides_is_named() -> None:
    with pytest.raises(ValueError, match="width of 96 is not a multiple of the block of 64"):
        quantize(np.zeros((4, 96), np.float32), INT8, 64)


def correlated(rows: int, width: int) -> Array:
    """Rows (rows, width) whose columns are mixtures of a few, as activations are, of unlike size."""
    mixed = normal(rows, 12, seed=5) @ normal(12, width, seed=6) + 0.3 * normal(rows, width, seed=7)
    return np.asarray(mixed * np.exp(normal(width, seed=8)), np.float32)


@BITS
def test_with_rows_that_it_will_see_a_weights_products_stay_closer(bits: int) -> None:
    weight = normal(48, 192, seed=1)
    x = correlated(500, 192)
    unseen = correlated(900, 192)[500:]
    plain = quantize(weight, CPU_INTEGERS[bits], 64)
    better = quantize(weight, CPU_INTEGERS[bits], 64, x)
    np.testing.assert_array_equal(better.scale, plain.scale)
    assert better.codes.min() >= RANGE[bits][0] and better.codes.max() <= RANGE[bits][1]

    def lost(found: QuantizedWeight, rows: Array) -> float:
        return float(np.square(rows @ (found.dequantize() - weight).T).sum())

    assert lost(better, x) < 0.5 * lost(plain, x)
    assert lost(better, unseen) < 0.6 * lost(plain, unseen)


@BITS
def test_rows_without_correlation_change_nothing(bits: int) -> None:
    """Where a column says nothing of the others, its error cannot be made good there."""
    weight = normal(8, 128)
    x = np.diag(np.exp(normal(128, seed=1))).astype(np.float32)
    np.testing.assert_array_equal(
        quantize(weight, CPU_INTEGERS[bits], 32, x).codes, quantize(weight, CPU_INTEGERS[bits], 32).codes
    )


@pytest.mark.parametrize("x", [np.zeros((5, 128), np.float32), correlated(3, 128), correlated(1, 128) * 1e4])
def test_few_rows_and_columns_that_are_never_used_are_no_harm(x: Array) -> None:
    weight = normal(8, 128)
    x[:, 7] = 0
    found = quantize(weight, INT4, 32, x).dequantize()
    assert np.isfinite(found).all()
    assert np.abs(found - weight).max() < np.abs(weight).max()
