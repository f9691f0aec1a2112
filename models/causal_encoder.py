"""Decoders that read whole texts: classifiers, taggers and readers of GPT and of the Llama family.

B batch, T tokens, E hidden size, C classes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .attention import AttentionCache, CausalAttention, PaddedAttention
from .encoder import Encoder, EncoderConfig
from .gpt2 import GPT2, GPT2Config
from .language_model import LanguageModel
from .llama import Llama, LlamaConfig

DecoderConfig: TypeAlias = GPT2Config | LlamaConfig
DECODERS: Mapping[type[DecoderConfig], Callable[[Any], LanguageModel]] = {
    GPT2Config: GPT2,
    LlamaConfig: Llama,
}


@dataclass(frozen=True)
class CausalEncoderConfig(EncoderConfig):
    """The settings of a decoder that reads whole texts.

    Attributes:
        decoder: the settings of its layers.
        pad_token: the token that pads texts: a classifier reads the last other token, as in transformers.
            None: it reads the last token of the attention mask.
        head_bias: whether the head has a bias.
        bidirectional: whether tokens see those behind them too.
        score_tokens: where the classification head is made of the decoder's own output: the token whose logit
            is the score, and one whose logit is taken from it, or None.
    """

    decoder: DecoderConfig = field(kw_only=True)
    pad_token: int | None = None
    head_bias: bool = False
    bidirectional: bool = False
    score_tokens: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for token in self.score_tokens or ():
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"score token {token} is not one of the vocabulary's {self.vocab_size}")

    @property
    def reads_choice_token(self) -> bool:
        """Return whether a choice ends with a token of its own, which the head reads."""
        return self.chooses

    @property
    def computes_positions(self) -> bool:
        """Return whether there are positions beyond those that the model was trained with."""
        return bool(getattr(self.decoder, "computes_positions", False))

    @property
    def num_experts(self) -> int:
        """Return the number of experts of an MLP that is a mixture of them; 0 where none is."""
        return int(getattr(self.decoder, "num_experts", 0))

    @staticmethod
    def from_decoder(decoder: DecoderConfig, **others: Any) -> CausalEncoderConfig:
        """Return the settings for a decoder, whose sizes are the encoder's."""
        return CausalEncoderConfig(
            vocab_size=decoder.vocab_size,
            hidden_size=decoder.hidden_size,
            num_hidden_layers=decoder.cache_sizes[0],
            num_attention_heads=decoder.num_attention_heads,
            intermediate_size=decoder.intermediate_size,
            max_position_embeddings=decoder.context,
            decoder=decoder,
            **others,
        )


class LastToken(nn.Module):
    """Picks each text's last token that is not padding, which is told by its id, or by the mask alone."""

    def __init__(self, pad_token: int | None) -> None:
        super().__init__()
        self.pad_token = pad_token

    def forward(self, x: Tensor, attention_mask: Tensor, input_ids: Tensor | None) -> Tensor:
        """Return the vectors (B, E) of x (B, T, E)."""
        is_read = attention_mask.bool()
        if input_ids is not None and self.pad_token is not None:
            is_read = is_read & (input_ids != self.pad_token)
        position = torch.arange(x.shape[1], device=x.device)
        last = (position * is_read).amax(1, keepdim=True)  # (B, 1): 0 where all is padding
        return ((position == last).to(x.dtype)[:, None] @ x)[:, 0]  # (B, E)


class TokenScore(nn.Module):
    """The logit of one token after a text, or how far it is above another's."""

    def __init__(self, config: CausalEncoderConfig) -> None:
        super().__init__()
        assert config.score_tokens is not None
        count = sum(token is not None for token in config.score_tokens)
        self.rows = nn.Linear(config.hidden_size, count, bias=False)  # of the decoder's output
        self.scale = float(getattr(config.decoder, "logits_scale", 1.0))
        self.softcap: float | None = getattr(config.decoder, "logits_softcap", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (B, 1) of texts whose last token's vectors are x (B, E)."""
        logits: Tensor = self.rows(x)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits if logits.shape[-1] == 1 else logits[:, :1] - logits[:, 1:]


class CausalEncoder(Encoder):
    """GPT-2, its relatives or a decoder of the Llama family, with heads on its last hidden states."""

    config: CausalEncoderConfig

    def __init__(self, config: CausalEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = DECODERS[type(config.decoder)](config.decoder)
        del self.decoder.lm_head  # nothing is written
        self.heads = nn.ModuleDict({head: self.make_head(head) for head in config.heads})
        self.last_token = LastToken(config.pad_token)
        self.add_vectors()

    def make_head(self, head: str) -> nn.Module:
        """Return the module of one of `HEADS`."""
        config = self.config
        if config.score_tokens is not None:
            return TokenScore(config)
        size = 2 if head == "question_answering" else config.num_labels
        return nn.Linear(config.hidden_size, size, bias=config.head_bias)

    def make_attention(self, attention_mask: Tensor) -> PaddedAttention:
        """Return the attention over texts with this mask (B, T)."""
        kind = PaddedAttention if self.config.bidirectional else CausalAttention
        return kind(attention_mask)

    def limit_context(self, length: int) -> None:
        """Compute the values that depend on the longest text, for up to `length` tokens."""
        self.decoder.limit_context(length)

    def tie_weights(self) -> None:
        """Do nothing: without an output layer no weight is shared."""

    def hidden_states(
        self, input_ids: Tensor, token_type_ids: Tensor | None, attention: AttentionCache
    ) -> list[Tensor]:
        """Return the embeddings and every layer's output, each (B, T, E), the last one normalized."""
        return list(self.decoder.layer_states(input_ids, attention))

    def pool(self, x: Tensor, attention_mask: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return the vector (B, E) of each text's last token."""
        return self.last_token(x, attention_mask, input_ids)  # type: ignore[no-any-return]
