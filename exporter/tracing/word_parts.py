"""Word vectors as a module with the inputs and outputs of their graph.

B questions, T words of a question, D dimensions, K neighbours
"""

from __future__ import annotations

from torch import Tensor, nn

from ...models import WordVectors


class Words(nn.Module):
    """The nearest words to others, as one graph finds them."""

    def __init__(self, model: WordVectors) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, signs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return vectors (B, T, D), similarity and nearest (B, K) of ids and signs (B, T)."""
        return self.model(input_ids, signs)  # type: ignore[no-any-return]
