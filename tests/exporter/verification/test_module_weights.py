"""Modules of a tied weight get what a graph stores for each: codes for one, floats for the other."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from planforge.exporter.number_formats import INT8
from planforge.exporter.passes.quantized_weight import QuantizedWeight, StoredWeight
from planforge.exporter.verification.module_weights import StoredValues, store_weights

from ...helpers.models import random_transformer

NAME = "target.words.weight"


def make_weight(shape: tuple[int, int], is_table: bool) -> StoredWeight:
    """Return a weight in int8 that a lookup reads, or a product."""
    codes = np.arange(shape[0] * shape[1]).reshape(shape) % 255 - 127
    weight = QuantizedWeight(codes.astype(np.int8), np.full((shape[0], 1), 0.01, np.float32), INT8)
    value = ir.Value(name="codes")
    node = ir.node("Gather", [value, value])
    return StoredWeight(node, (NAME,), INT8, value, value, shape, lambda rows: weight, is_table=is_table)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize("is_table", [True, False])
def test_codes_go_to_one_module_and_floats_to_the_other(is_table: bool, dtype: ir.DataType) -> None:
    model = random_transformer(tie_word_embeddings=True)
    table, product = model.target.words, model.output
    tied = model.get_parameter(NAME)
    assert table.weight is product.weight is tied
    floats = tied.detach().clone()
    weight = make_weight((tied.shape[0], tied.shape[1]), is_table)
    codes = torch.from_numpy(weight.read(slice(None)).dequantize())
    types = {NAME: dtype, "output.weight": dtype}
    stored = StoredValues([weight], types, {tied: torch.nn.Linear if is_table else torch.nn.Embedding})
    with store_weights(model, stored):
        quantized, other = (table, product) if is_table else (product, table)
        assert torch.equal(quantized.weight, codes)
        rounded = floats.half().float() if dtype == ir.DataType.FLOAT16 else floats
        assert torch.equal(other.weight, rounded)
    assert table.weight is product.weight is tied
    assert torch.equal(tied, floats)
