"""The recurrent encoder-decoder as graphs: a layer of the encoder is one node, the decoder's step no loop.

B sources, S source tokens, R rows of the decoder, N logit rows, D directions, H width of a state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...models.recurrent import Recurrent, SourceMemory
from ...models.recurrent_layers import RecurrentLayer, States


@dataclass
class RecurrenceNodes:
    """Writes each layer's recurrence as ONNX's GRU or LSTM, which reads no row beyond its length.

    torch.onnx itself fixes batch and time of two directions to the example's lengths, and refuses packed
    sequences (https://github.com/pytorch/pytorch/issues/191855).
    """

    last: list[States] = field(default_factory=list)

    def run(self, layer: RecurrentLayer, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the states of a layer over x, as one node; remember the last ones."""
        B, S, _ = x.shape
        D = layer.directions
        H = layer.size
        attributes: dict[str, Any] = {"hidden_size": H, "direction": "bidirectional" if D == 2 else "forward"}
        if layer.cell == "gru":
            attributes["linear_before_reset"] = 1  # PyTorch's formula
        ends = 1 if layer.cell == "gru" else 2
        states, *last = torch.onnx.ops.symbolic_multi_out(
            layer.cell.upper(),
            (x.transpose(0, 1), layer.weight_input, layer.weight_hidden, layer.bias, lengths),
            attrs=attributes,
            dtypes=(x.dtype,) * (1 + ends),
            shapes=((S, D, B, H), *((D, B, H),) * ends),
            version=20,
        )
        self.last.append([end.transpose(0, 1).reshape(B, 1, D * H) for end in last])
        return states.permute(2, 0, 1, 3).reshape(B, S, D * H)


class RecurrentEncoder(nn.Module):
    """The encoder; it returns what the decoder reads of a source, and the states that it begins with."""

    def __init__(self, model: Recurrent) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        # Lengths are an input: ONNX Runtime reads them on the host, where what a GPU computes comes too late.
        source, states = self.model.encode(input_ids, lengths, RecurrenceNodes())
        count = len(states) - self.model.config.input_feeding  # what is fed begins with zeros
        return (*source.list_tensors(), *states[:count])


class RecurrentDecoder(nn.Module):
    """One step of the decoder over one token of each row. Rows whose token is padding keep their states."""

    def __init__(self, model: Recurrent, weights: bool) -> None:
        super().__init__()
        self.model = model
        self.weights = weights  # whether the attention over the source is an output too

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, logit_rows: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the recipe's outputs; `rest` is what the encoder returns, with the source's mask first."""
        count = len(self.model.config.state_names)
        states = rest[-count:]
        source = self.read_source(rest[:-count])
        x, new = self.model.step(input_ids, states, source)
        is_token = attention_mask.bool()[:, :, None]  # (R, 1, 1)
        kept = [torch.where(is_token, after, before) for after, before in zip(new, states, strict=True)]
        outputs = (self.model.output(x.flatten(0, 1).index_select(0, logit_rows)), *kept)
        if not self.weights:
            return outputs
        assert source.weights is not None
        R = input_ids.shape[0]
        S = source.weights.shape[-1]
        return (*outputs, source.weights.reshape(R, 1, 1, S))

    def read_source(self, tensors: Sequence[Tensor]) -> SourceMemory:
        if self.model.attention is not None:
            return SourceMemory(*tensors)
        return SourceMemory(context=tensors[0] if tensors else None)
