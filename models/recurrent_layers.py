"""The layers of a recurrent encoder-decoder: GRU and LSTM, over whole sources and a step at a time.

B sources, S source tokens, R rows of the decoder, D directions, E width of what a layer reads, H width of a
state, G gates
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

# The gates of a cell in ONNX's order, in which all weights are kept, and PyTorch's. g is an LSTM's new cell.
GATES = {"gru": "zrn", "lstm": "iofg"}
TORCH_GATES = {"gru": "rzn", "lstm": "ifgo"}
TORCH_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
# Each (R, 1, H): hidden, and cell of an LSTM, layer by layer; then what is fed.
States: TypeAlias = list[Tensor]


def order_gates(rows: Tensor, cell: str) -> Tensor:
    """Return weights or biases (G * H, ...) in PyTorch's order of gates in that of `GATES`."""
    gates = dict(zip(TORCH_GATES[cell], rows.chunk(len(GATES[cell])), strict=True))
    return torch.cat([gates[gate] for gate in GATES[cell]])


def step_gru(x: Tensor, h: Tensor, state: Tensor) -> Tensor:
    """Return the next state (..., H) of the gates' products with the input and with the state, (..., 3H).

    PyTorch's formula: the reset gate multiplies the product by the state, not the state.
    """
    H = state.shape[-1]
    x_gates, x_new = torch.split(x, [2 * H, H], dim=-1)
    h_gates, h_new = torch.split(h, [2 * H, H], dim=-1)
    update, reset = torch.sigmoid(x_gates + h_gates).chunk(2, dim=-1)
    new = torch.tanh(x_new + reset * h_new)
    return new + update * (state - new)


def step_lstm(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next hidden state and the next cell (..., H) of the sum of the gates' products (..., 4H)."""
    H = cell.shape[-1]
    opening, g = torch.split(gates, [3 * H, H], dim=-1)
    i, o, f = torch.sigmoid(opening).chunk(3, dim=-1)
    cell = f * cell + i * torch.tanh(g)
    return o * torch.tanh(cell), cell


class Recurrence(Protocol):
    """The way a layer's recurrence is computed. The exporter has another one, which writes one ONNX node."""

    def run(self, layer: RecurrentLayer, x: Tensor, lengths: Tensor) -> Tensor:
        """Return states (B, S, D * H) of x (B, S, E), 0 from a row's length (B,) on; keep the last ones."""
        ...

    @property
    def last(self) -> list[States]:
        """The last states (B, 1, D * H) of each layer that was run: hidden, and cell of an LSTM."""
        ...


@dataclass
class PlainRecurrence:
    """The recurrence in PyTorch, a token after the other."""

    last: list[States] = field(default_factory=list)

    def run(self, layer: RecurrentLayer, x: Tensor, lengths: Tensor) -> Tensor:
        both = [self.run_direction(layer, x, lengths, d) for d in range(layer.directions)]
        self.last.append(
            [torch.cat(parts, dim=-1) for parts in zip(*(ends for _, ends in both), strict=True)]
        )
        return torch.cat([states for states, _ in both], dim=-1)

    def run_direction(
        self, layer: RecurrentLayer, x: Tensor, lengths: Tensor, direction: int
    ) -> tuple[Tensor, States]:
        """Return the states (B, S, H) of one direction, and the last ones (B, 1, H)."""
        input_bias, hidden_bias = layer.bias[direction].chunk(2)
        products = functional.linear(x, layer.weight_input[direction], input_bias)  # (B, S, G * H)
        hidden = cell = products.new_zeros(len(x), 1, layer.size)
        places = range(x.shape[1])
        states: dict[int, Tensor] = {}
        for place in reversed(places) if direction else places:
            product = functional.linear(hidden, layer.weight_hidden[direction], hidden_bias)
            step = products[:, place : place + 1]
            if layer.cell == "gru":
                new, new_cell = step_gru(step, product, hidden), cell
            else:
                new, new_cell = step_lstm(step + product, cell)
            inside = (place < lengths)[:, None, None]
            hidden = torch.where(inside, new, hidden)
            cell = torch.where(inside, new_cell, cell)
            states[place] = torch.where(inside, new, torch.zeros_like(new))
        ends = [hidden] if layer.cell == "gru" else [hidden, cell]
        return torch.cat([states[place] for place in places], dim=1), ends


class RecurrentLayer(nn.Module):
    """A layer of the encoder, whose weights have ONNX's layout.

    Attributes:
        weight_input: (D, G * H, E), the gates one below the other in the order of `GATES`.
        weight_hidden: (D, G * H, H).
        bias: (D, 2 * G * H), those of the input's products, then those of the state's.
    """

    def __init__(self, cell: str, width: int, size: int, directions: int) -> None:
        super().__init__()
        self.cell = cell
        self.size = size
        self.directions = directions
        rows = len(GATES[cell]) * size
        self.weight_input = nn.Parameter(torch.empty(directions, rows, width))
        self.weight_hidden = nn.Parameter(torch.empty(directions, rows, size))
        self.bias = nn.Parameter(torch.empty(directions, 2 * rows))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(size**-0.5), size**-0.5)  # as torch.nn.GRU

    def forward(self, x: Tensor, lengths: Tensor, recurrence: Recurrence) -> Tensor:
        return recurrence.run(self, x, lengths)

    @torch.no_grad()
    def copy_from(self, rnn: nn.GRU | nn.LSTM, layer: int = 0) -> None:
        """Take the weights of a layer of PyTorch's own module, which has biases and these sizes."""
        for d, end in enumerate(("", "_reverse")[: self.directions]):
            own = {name: getattr(rnn, f"{name}_l{layer}{end}") for name in TORCH_NAMES}
            input_weight, hidden_weight, *biases = (order_gates(part, self.cell) for part in own.values())
            self.weight_input[d] = input_weight
            self.weight_hidden[d] = hidden_weight
            self.bias[d] = torch.cat(biases)


class Cell(nn.Module):
    """A layer of the decoder: one step of a GRU or an LSTM, whose gates have the order of `GATES`."""

    def __init__(self, cell: str, width: int, size: int) -> None:
        super().__init__()
        rows = len(GATES[cell]) * size
        self.cell = cell
        self.input = nn.Linear(width, rows)
        self.hidden = nn.Linear(size, rows)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(size**-0.5), size**-0.5)

    @torch.no_grad()
    def copy_from(self, cell: nn.GRUCell | nn.LSTMCell) -> None:
        """Take the weights of PyTorch's own module, which has biases and these sizes."""
        own = (self.input.weight, self.hidden.weight, self.input.bias, self.hidden.bias)
        for parameter, name in zip(own, TORCH_NAMES, strict=True):
            parameter.copy_(order_gates(getattr(cell, name), self.cell))


class GRUCell(Cell):
    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return step_gru(self.input(x), self.hidden(state), state)


class LSTMCell(Cell):
    def forward(self, x: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        return step_lstm(self.input(x) + self.hidden(state), cell)
