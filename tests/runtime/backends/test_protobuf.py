"""Protobuf's wire format, as the onnx package writes it."""

from __future__ import annotations

import contextlib

import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime.backends import graph_file, ort_prepared, protobuf
from planforge.runtime.backends.protobuf import Span, find_fields, find_numbers, read_fields, read_varint
from planforge.runtime.errors import BackendError

NUMBERS = st.integers(min_value=0, max_value=2**63 - 1)


def make_model(name: str = "a graph", count: int = 3) -> onnx.ModelProto:
    """Return a model with fields of each wire type, in several layers."""
    node = onnx.helper.make_node("Gemm", ["x"], ["y"], alpha=0.5, transA=1, sizes=[1, 2**40])
    weights = [
        onnx.TensorProto(name=f"w{number}", dims=[2], double_data=[0.5, 2.0], raw_data=b"\x00" * 200 * number)
        for number in range(count)
    ]
    graph = onnx.GraphProto(name=name, node=[node], initializer=weights)
    return onnx.ModelProto(ir_version=10, producer_name="test", graph=graph)


def read_all(data: bytes) -> list[tuple[int, bytes]]:
    return [(number, data[start:end]) for number, (start, end) in read_fields(data, Span(0, len(data)))]


@given(name=st.text(max_size=300), count=st.integers(0, 4), version=NUMBERS)
def test_fields_are_those_that_onnx_wrote(name: str, count: int, version: int) -> None:
    model = make_model(name, count)
    model.ir_version = version
    data = model.SerializeToString()
    assert read_all(data) == [(2, b"test"), (7, model.graph.SerializeToString())]
    nested = [data[start:end] for start, end in find_fields(data, Span(0, len(data)), 7, 5, 8)]
    assert nested == [f"w{number}".encode() for number in range(count)]
    assert list(find_numbers(data, Span(0, len(data)), 1)) == [version]


@given(value=NUMBERS)
def test_numbers_are_those_that_onnx_wrote(value: int) -> None:
    data = onnx.ModelProto(ir_version=value).SerializeToString()
    assert read_varint(data, 1, len(data)) == (value, len(data))


@pytest.mark.parametrize(
    ("message", "field", "number"),
    [
        (onnx.ModelProto, "graph", ort_prepared.MODEL_GRAPH),
        (onnx.GraphProto, "node", ort_prepared.GRAPH_NODE),
        (onnx.GraphProto, "initializer", ort_prepared.GRAPH_INITIALIZER),
        (onnx.NodeProto, "attribute", ort_prepared.NODE_ATTRIBUTE),
        (onnx.AttributeProto, "g", ort_prepared.ATTRIBUTE_GRAPH),
        (onnx.AttributeProto, "graphs", ort_prepared.ATTRIBUTE_GRAPHS),
        (onnx.TensorProto, "external_data", ort_prepared.TENSOR_EXTERNAL_DATA),
        (onnx.StringStringEntryProto, "key", protobuf.ENTRY_KEY),
        (onnx.StringStringEntryProto, "value", protobuf.ENTRY_VALUE),
        (onnx.NodeProto, "input", graph_file.NODE_INPUT),
        (onnx.NodeProto, "output", graph_file.NODE_OUTPUT),
        (onnx.NodeProto, "name", graph_file.NODE_NAME),
        (onnx.NodeProto, "op_type", graph_file.NODE_OPERATOR),
        (onnx.NodeProto, "domain", graph_file.NODE_DOMAIN),
        (onnx.NodeProto, "metadata_props", graph_file.NODE_METADATA),
        (onnx.GraphProto, "input", graph_file.GRAPH_VALUES[0]),
        (onnx.GraphProto, "output", graph_file.GRAPH_VALUES[1]),
        (onnx.GraphProto, "value_info", graph_file.GRAPH_VALUES[2]),
        (onnx.ValueInfoProto, "name", graph_file.VALUE_NAME),
        (onnx.ValueInfoProto, "type", graph_file.VALUE_TYPE),
        (onnx.TypeProto, "tensor_type", graph_file.TYPE_TENSOR),
        (onnx.TypeProto.Tensor, "elem_type", graph_file.TENSOR_TYPE),
        (onnx.TypeProto.Tensor, "shape", graph_file.TENSOR_SHAPE),
        (onnx.TensorShapeProto, "dim", graph_file.SHAPE_AXIS),
        (onnx.TensorProto, "data_type", graph_file.WEIGHT_TYPE),
        (onnx.TensorProto, "name", graph_file.WEIGHT_NAME),
    ],
)
def test_field_numbers_are_those_of_onnx(message: type, field: str, number: int) -> None:
    assert message.DESCRIPTOR.fields_by_name[field].number == number  # type: ignore[attr-defined]


def test_a_cut_message_is_refused_where_onnx_refuses_it() -> None:
    """Cut between two fields it is a message, too."""
    data = make_model().SerializeToString()
    refused = 0
    for end in range(len(data)):
        cut = data[:end]
        try:
            onnx.ModelProto.FromString(cut)
        except DecodeError:
            refused += 1
            with pytest.raises(BackendError, match="damaged protobuf message"):
                read_all(cut)
        else:
            read_all(cut)
    assert 0 < refused < len(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00\x01", "no field has the tag 0 of byte 0"),
        (b"\x10\x01" + b"\xff" * 5 + b"\x01\x01", "no field has the tag .* of byte 2"),
        (b"\x0b\x0c", "wire type 3 at byte 0"),
        (b"\x3a\x7f\x00", "it ends at byte 3, its field 7 at 129"),
        (b"\x09\x00", "it ends at byte 2, its field 1 at 9"),
        (b"\x0d\x00", "it ends at byte 2, its field 1 at 5"),
        (b"\x08\x80", "it ends at byte 2, within a number"),
        (b"\x08" + b"\x80" * 11, "a number at byte 11 is too long"),
    ],
)
def test_a_damaged_message_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BackendError, match=f"damaged protobuf message: {reason}"):
        read_all(data)


def test_a_field_does_not_go_over_the_end_of_its_message() -> None:
    outer = b"\x3a\x03\x2a\x05w" + b"beyond"  # field 5 has five bytes, one of them in field 7
    with pytest.raises(BackendError, match="it ends at byte 5, its field 5 at 9"):
        list(find_fields(outer, Span(0, len(outer)), 7, 5))


@given(data=st.data())
def test_damage_never_ends_otherwise(data: st.DataObject) -> None:
    changed = bytearray(make_model().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BackendError):
        ort_prepared.pass_over_unaligned(bytes(changed))
