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
from .config_checks import check_activation, check_bool, check_whole
from .retrieval_vectors import (
    Splade,
    SpladeConfig,
    TokenVectorConfig,
    TokenVectors,
    TokenWeightConfig,
    TokenWeights,
)
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
        chooses: whether the classification head gives a logit to each of several choices, which are texts, or
            seconds of a pair: multiple choice.
        sentence: how a sentence-transformers folder makes one vector of a text.
        sparse: how it makes weights: of the vocabulary's words, by the masked-word head, or of a text's
            tokens.
        token_vectors: how it makes a vector of each token.
        pair_scores: how a CrossEncoder makes the scores of a pair by pooling and layers, in place of a
            classification head on the pooler.
        query: the settings of another encoder, which reads queries.
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
    chooses: bool = False
    sentence: SentenceConfig | None = None
    sparse: SpladeConfig | TokenWeightConfig | None = None
    token_vectors: TokenVectorConfig | None = None
    pair_scores: SentenceConfig | None = None
    query: EncoderConfig | None = None

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        check_whole(self, "intermediate_size", "max_position_embeddings", "num_labels")
        check_whole(self, "type_vocab_size", least=0)
        check_activation(self, "hidden_act")
        check_bool(self, "tie_word_embeddings")
        if unknown := set(self.heads) - set(HEADS):
            raise ValueError(f"heads {sorted(unknown)} are not among {list(HEADS)}")
        if self.chooses and self.num_labels != 1:
            raise ValueError(f"num_labels={self.num_labels} must be 1 where the head rates choices")
        if isinstance(self.sparse, SpladeConfig) and "masked_lm" not in self.heads:
            raise ValueError(f"SPLADE's weights come of a masked_lm head; there are {list(self.heads)}")
        if self.pair_scores is not None:
            self.pair_scores.measure_vector(self.hidden_size)
        self.list_vectors()

    @property
    def num_experts(self) -> int:
        """Return the number of experts of an MLP that is a mixture of them; 0 where none is."""
        return 0

    @property
    def pooled_heads(self) -> tuple[str, ...]:
        """Return the heads that read the pooler's vector."""
        return tuple(head for head in self.heads if head in POOLED_HEADS and self.pair_scores is None)

    @property
    def output_heads(self) -> tuple[str, ...]:
        """Return the heads whose logits are given out: not that of masked words where SPLADE reads it."""
        is_read = isinstance(self.sparse, SpladeConfig)
        return tuple(head for head in self.heads if not (is_read and head == "masked_lm"))

    def list_vectors(self) -> dict[str, tuple[str | int, ...]]:
        """Return the axes of what a text becomes beside the heads' outputs, by name.

        Raises:
            ValueError: two layers do not fit each other.
        """
        found: dict[str, tuple[str | int, ...]] = {}
        if self.sentence is not None:
            found["sentence_embedding"] = ("batch", self.sentence.measure_vector(self.hidden_size))
        if isinstance(self.sparse, SpladeConfig):
            found["sparse_embedding"] = ("batch", self.vocab_size)
        elif self.sparse is not None:
            found["token_weights"] = ("batch", "tokens")
        if self.token_vectors is not None:
            width = self.token_vectors.measure_vector(self.hidden_size)
            found["token_vectors"] = ("batch", "tokens", width)
        return found

    @property
    def reads_choice_token(self) -> bool:
        """Return whether a choice ends with a token of its own, which the head reads."""
        return False


class Encoder(nn.Module, ABC):
    """The part of an encoder on top of its layers; a model adds `hidden_states` and `pool`.

    Attributes:
        heads: by their names, each a module that reads (..., E).
        query: reads queries, where it is another model.
    """

    config: EncoderConfig
    heads: nn.ModuleDict
    query: Encoder | None

    def add_vectors(self) -> None:
        """Add what makes vectors and weights of a text, where the config has it.

        The encoder of queries, `query`, is added by whoever makes both.
        """
        config = self.config
        self.query = None
        if config.sentence is not None:
            self.sentence = SentenceEmbedding(config.sentence)
        if isinstance(config.sparse, SpladeConfig):
            self.sparse: Splade | TokenWeights = Splade(config.sparse)
        elif config.sparse is not None and config.num_hidden_layers:
            self.sparse = TokenWeights(config.hidden_size)
        if config.token_vectors is not None:
            self.token_vectors = TokenVectors(config.token_vectors)
        if config.pair_scores is not None:
            self.heads["sequence_classification"] = SentenceEmbedding(config.pair_scores)

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
            (B, T, 2: logits of the answer's first and last token); "pooler_output" (B, E),
            "sentence_embedding" (B, F), "sparse_embedding" (B, V), "token_weights" (B, T) and "token_vectors"
            (B, T, F) where the model has them.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None and self.config.type_vocab_size:
            token_type_ids = torch.zeros_like(input_ids)
        x = self.hidden_states(input_ids, token_type_ids, self.make_attention(attention_mask))[-1]
        return {"last_hidden_state": x, **self.head_outputs(x, attention_mask, input_ids)}

    def make_attention(self, attention_mask: Tensor) -> PaddedAttention:
        """Return the attention over texts with this mask (B, T)."""
        return PaddedAttention(attention_mask)

    def limit_context(self, length: int) -> None:
        """Compute the values that depend on the longest text, for up to `length` tokens."""

    @abstractmethod
    def tie_weights(self) -> None:
        """Make the weights that the config ties share one tensor."""

    @abstractmethod
    def hidden_states(
        self, input_ids: Tensor, token_type_ids: Tensor | None, attention: AttentionCache
    ) -> list[Tensor]:
        """Return the embeddings and every layer's output, each (B, T, E); the heads read the last."""

    @abstractmethod
    def pool(self, x: Tensor, attention_mask: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return one vector (B, E) for each text, which classifiers of texts read."""

    def head_outputs(
        self,
        x: Tensor,
        attention_mask: Tensor,
        input_ids: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Mapping[str, Tensor]:
        """Return the outputs of pooler and heads for the last hidden state x (B, T, E).

        Args:
            input_ids: (B, T), which tell padding where a model goes by its token; None where there is none.
            rows: (N,) flat indices into B * T: the masked-word head then gives (N, V), for these alone.
        """
        outputs: dict[str, Tensor] = {}
        if self.config.pooler is not None:
            outputs["pooler_output"] = self.pool(x, attention_mask, input_ids)
        for name in self.config.output_heads:
            head = self.heads[name]
            if name in self.config.pooled_heads:
                pooled = outputs.get("pooler_output")
                outputs[name] = head(self.pool(x, attention_mask, input_ids) if pooled is None else pooled)
            elif name == "masked_lm" and rows is not None:
                outputs[name] = head(x.flatten(0, 1)[rows])  # (N, V): the vocabulary is wide
            elif isinstance(head, SentenceEmbedding):
                outputs[name] = head(x, attention_mask)
            else:
                outputs[name] = head(x)
        return {**outputs, **self.make_vectors(x, attention_mask)}

    def make_vectors(self, x: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return what `EncoderConfig.list_vectors` names, of the last hidden state x (B, T, E)."""
        config = self.config
        vectors: dict[str, Tensor] = {}
        if config.sentence is not None:
            vectors["sentence_embedding"] = self.sentence(x, attention_mask)
        if isinstance(config.sparse, SpladeConfig):
            vectors["sparse_embedding"] = self.sparse(self.heads["masked_lm"], x, attention_mask)
        elif config.sparse is not None:
            vectors["token_weights"] = self.sparse(x)
        if config.token_vectors is not None:
            vectors["token_vectors"] = self.token_vectors(x)
        return vectors
