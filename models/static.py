"""Encoders without layers: a row for each token, of which texts are the mean (model2vec), or a weight.

B batch, T tokens, F numbers of a row
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .attention import AttentionCache
from .config_checks import check_whole
from .encoder import Encoder, EncoderConfig

LONGEST = 65536  # tokens of a text: there is no other limit


@dataclass(frozen=True)
class StaticConfig(EncoderConfig):
    """The settings of a table of rows: `hidden_size` is F, and there is nothing else.

    With `sentence` a text is the mean of its tokens' rows; with `sparse` a row is a token's weight.
    """

    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    intermediate_size: int = 0
    max_position_embeddings: int = LONGEST

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "hidden_size", "max_position_embeddings")
        self.list_vectors()


class StaticEncoder(Encoder):
    """A table of rows."""

    config: StaticConfig

    def __init__(self, config: StaticConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.heads = nn.ModuleDict()
        self.add_vectors()

    def tie_weights(self) -> None:
        """Do nothing: no weight is shared."""

    def hidden_states(
        self, input_ids: Tensor, token_type_ids: Tensor | None, attention: AttentionCache
    ) -> list[Tensor]:
        """Return the tokens' rows (B, T, F)."""
        return [self.words(input_ids)]

    def pool(self, x: Tensor, attention_mask: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return the mean of the rows (B, F): zeros of a text without tokens."""
        is_read = attention_mask.to(x.dtype)
        weights = is_read / is_read.sum(1, keepdim=True).clamp(min=1)  # (B, T)
        return (weights[:, None] @ x)[:, 0]

    def make_vectors(self, x: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return a text's vector (B, F), or its tokens' weights (B, T), of their rows x (B, T, F)."""
        if self.config.sparse is not None:
            return {"token_weights": x.squeeze(-1) * attention_mask}
        return {"sentence_embedding": self.sentence.apply_layers(self.pool(x, attention_mask))}
