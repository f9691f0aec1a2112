"""The parts that all encoders share: the last hidden state, heads on top of it, and one vector for a text.

B batch, T tokens, N chosen rows, E hidden size, V vocabulary, C classes, F features of a sentence's vector
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention import AttentionCache, PaddedAttention
from .config_checks import check_activation, check_bool, check_multiple, check_whole
from .sentence import SentenceConfig, SentenceEmbedding

# In the order of a graph's outputs. A model can have both of the first two, as BERT was trained.
HEADS = (
    "masked_lm",
    "next_sentence",
    "sequence_classification",
    "token_classification",
    "question_answering",
)
POOLED_HEADS = {"next_sentence", "sequence_classification"}  # read one vector for a text


@dataclass(frozen=True)
class EncoderConfig:
    """The settings that all encoders share, by the names of Hugging Face's config.json.

    Attributes:
        type_vocab_size: kinds of segment; 0 where there are none.
        pooler: the activation after the pooler, "tanh" (BERT) or "relu" (DistilBERT's
            pre_classifier); None without a pooler.
        heads: some of `HEADS`.
        num_labels: classes of the classification head.
        sentence: how a sentence-transformers folder makes one vector of a text.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 0
    tie_word_embeddings: bool = True
    pooler: str | None = None
    heads: tuple[str, ...] = ()
    num_labels: int = 2
    sentence: SentenceConfig | None = None

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        check_whole(self, "intermediate_size", "max_position_embeddings", "num_labels")
        check_whole(self, "type_vocab_size", least=0)
        check_multiple(self, "hidden_size", of="num_attention_heads")
        check_activation(self, "hidden_act")
        check_bool(self, "tie_word_embeddings")
        if unknown := set(self.heads) - set(HEADS):
            raise ValueError(f"heads {sorted(unknown)} are not among {list(HEADS)}")
        if self.sentence is not None:
            self.sentence.measure_vector(self.hidden_size)


class Encoder(nn.Module, ABC):
    """The part of an encoder on top of its layers; a model adds `hidden_states` and `pool`.

    Attributes:
        heads: by their names, each a module that reads (..., E).
    """

    config: EncoderConfig
    heads: nn.ModuleDict

    def add_sentence(self) -> None:
        """Add the pooling that makes one vector of a text, where the config has it."""
        if self.config.sentence is not None:
            self.sentence = SentenceEmbedding(self.config.sentence)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the last hidden state and every head's output.

        Args:
            input_ids: (B, T) int64; rows of unequal length are padded on the right.
            attention_mask: (B, T), 0 at padding, and 2 at a prompt that a sentence's vector leaves out; None
                when there is none.
            token_type_ids: (B, T), the segment of each token; all 0 when None.

        Returns:
            "last_hidden_state" (B, T, E), and by head: masked_lm (B, T, V), next_sentence (B, 2),
            sequence_classification (B, C), token_classification (B, T, C), question_answering
            (B, T, 2: logits of the answer's first and last token); "pooler_output" (B, E) and
            "sentence_embedding" (B, F) where the model has them.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None and self.config.type_vocab_size:
            token_type_ids = torch.zeros_like(input_ids)
        x = self.hidden_states(input_ids, token_type_ids, PaddedAttention(attention_mask))[-1]
        return {"last_hidden_state": x, **self.head_outputs(x, attention_mask)}

    @abstractmethod
    def tie_weights(self) -> None:
        """Make the weights that the config ties share one tensor."""

    @abstractmethod
    def hidden_states(
        self, input_ids: Tensor, token_type_ids: Tensor | None, attention: AttentionCache
    ) -> list[Tensor]:
        """Return the embeddings and every layer's output, each (B, T, E); the heads read the last."""

    @abstractmethod
    def pool(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one vector (B, E) for each text, which classifiers of texts read."""

    def head_outputs(
        self, x: Tensor, attention_mask: Tensor, rows: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """Return the outputs of pooler and heads for the last hidden state x (B, T, E).

        Args:
            rows: (N,) flat indices into B * T: the masked-word head then gives (N, V), for these alone.
        """
        outputs: dict[str, Tensor] = {}
        if self.config.pooler is not None:
            outputs["pooler_output"] = self.pool(x, attention_mask)
        for name, head in self.heads.items():
            if name in POOLED_HEADS:
                pooled = outputs.get("pooler_output")
                outputs[name] = head(self.pool(x, attention_mask) if pooled is None else pooled)
            elif name == "masked_lm" and rows is not None:
                outputs[name] = head(x.flatten(0, 1)[rows])  # (N, V): the vocabulary is wide
            else:
                outputs[name] = head(x)
        if self.config.sentence is not None:
            outputs["sentence_embedding"] = self.sentence(x, attention_mask)
        return outputs
