"""Number formats of quantized weights, held against ONNX's own lists of values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, numpy_helper

from planforge.exporter.number_formats import (
    FP8,
    INT4,
    INT8,
    NVFP4,
    PLAN_INT4,
    PLAN_INT8,
    NumberFormat,
    find_unit,
)

FORMATS = pytest.mark.parametrize("format", [INT8, INT4, PLAN_INT8, PLAN_INT4, FP8, NVFP4])
FLOATS = {FP8: TensorProto.FLOAT8E4M3FN, NVFP4: TensorProto.FLOAT4E2M1}


def list_values(format: NumberFormat) -> npt.NDArray[np.float64]:
    """Return all finite values of a format, in order."""
    if format not in FLOATS:
        return np.arange(format.low, format.top + 1)
    tensor = TensorProto(data_type=FLOATS[format], dims=[256 if format.bits == 8 else 16])
    codes = np.arange(tensor.dims[0], dtype=np.uint8)
    tensor.raw_data = (codes if format.bits == 8 else codes[::2] | codes[1::2] << 4).tobytes()
    values = numpy_helper.to_array(tensor).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@FORMATS
@given(x=hnp.arrays(np.float32, 50, elements=st.floats(-600, 600, width=32)))
def test_the_nearest_value_is_taken(format: NumberFormat, x: npt.NDArray[np.float32]) -> None:
    values = list_values(format)
    found = format.round(x).astype(np.float64)
    assert np.isin(found, values).all()
    nearest = np.abs(values[:, None] - x.astype(np.float64)).min(axis=0)
    np.testing.assert_array_equal(np.abs(found - x), nearest)


@FORMATS
def test_its_type_in_a_graph_is_taken_from_its_first_opset_on(format: NumberFormat) -> None:
    name = f"tensor({TensorProto.DataType.Name(format.element_type).lower()})"

    def takes(opset: int) -> bool:
        schema = onnx.defs.get_schema("DequantizeLinear", opset)
        types = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
        return name in types[schema.inputs[0].type_str] and "axis" in schema.attributes

    assert takes(format.opset) and not takes(format.opset - 1)
    assert format.bits == (4 if name.endswith(("4)", "e2m1)")) else 8)
    if format in FLOATS:
        assert format.element_type == FLOATS[format]


@FORMATS
def test_a_gap_is_the_distance_of_the_values_around(format: NumberFormat) -> None:
    values = list_values(format)
    between = (values[1:] + values[:-1]) / 2
    np.testing.assert_array_equal(format.measure_gaps(between.astype(np.float32)), np.diff(values))
    gaps = format.measure_gaps(values.astype(np.float32))  # of a code itself the wider one, of zero both
    np.testing.assert_array_equal(gaps[1:-1], np.maximum(np.diff(values)[1:], np.diff(values)[:-1]))


@pytest.mark.parametrize("format", [PLAN_INT8, PLAN_INT4, FP8, NVFP4])
def test_no_scale_is_beyond_fp16(format: NumberFormat) -> None:
    blocks = np.full((1, 2, 16), 1e9, np.float32)
    scales = format.list_scales(blocks)
    assert np.isfinite(scales.astype(np.float16)).all() and (scales > 0).all()


@given(
    scale=hnp.arrays(np.float32, (4, 3), elements=st.floats(2.0**-40, 1000, width=32)),
    factor=st.integers(-10, 10),
)
def test_scales_of_nvfp4_are_fp8_numbers_times_a_unit_that_fp16_holds(
    scale: npt.NDArray[np.float32], factor: int
) -> None:
    rounded = NVFP4.round_scales(np.ldexp(scale, factor) if factor < 0 else scale)
    rounded = np.maximum(rounded, np.float32(NVFP4.find_smallest_scale(rounded)))
    unit = find_unit(rounded)
    assert unit == np.float16(unit) and np.log2(unit) == round(np.log2(unit))
    codes = rounded / np.float32(unit)
    assert codes.max() <= 448 and np.isin(codes, list_values(FP8)).all()
    np.testing.assert_array_equal(rounded, rounded.astype(np.float16))


def test_onnx_names_the_types() -> None:
    for format, number in FLOATS.items():
        assert onnx.helper.tensor_dtype_to_np_dtype(number) == format.dtype
