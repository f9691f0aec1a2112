"""BERT (Devlin et al., 2018) and DistilBERT (Sanh et al., 2019), with the heads of their papers.

B batch, T tokens, N chosen rows, E hidden size, H heads, D = E / H head size, V vocabulary, C classes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .activations import ACTIVATIONS
from .attention import AttentionCache, PaddedAttention
from .config_checks import check_activation, check_bool, check_epsilon, check_multiple, check_whole
from .sentence import SentenceConfig, SentenceEmbedding

# In the order of a graph's outputs. The first two can stand beside each other, as BERT was trained.
HEADS = (
    "masked_lm",
    "next_sentence",
    "sequence_classification",
    "token_classification",
    "question_answering",
)
POOLED_HEADS = {"next_sentence", "sequence_classification"}  # read the first token alone


@dataclass(frozen=True)
class BertConfig:
    """Names and defaults of Hugging Face's config.json; the defaults are BERT base.

    Attributes:
        type_vocab_size: kinds of segment; 0 for DistilBERT, which has none.
        pooler: the activation after the pooler, "tanh" (BERT) or "relu" (DistilBERT's
            pre_classifier); None without a pooler.
        heads: some of `HEADS`.
        num_labels: classes of the classification head.
        sentence: how a sentence-transformers folder makes one vector of a text.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
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
        check_epsilon(self, "layer_norm_eps")
        check_bool(self, "tie_word_embeddings")
        if unknown := set(self.heads) - set(HEADS):
            raise ValueError(f"heads {sorted(unknown)} are not among {list(HEADS)}")
        if POOLED_HEADS & set(self.heads) and self.pooler is None:
            raise ValueError(f"the heads {list(self.heads)} need a pooler, which has no weights here")
        if self.sentence is not None:
            self.sentence.check_widths(self.hidden_size)


class Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        if config.type_vocab_size:
            self.segments = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None) -> Tensor:
        x = self.words(input_ids) + self.positions(positions)  # (B, T, E)
        if token_type_ids is not None:
            x = x + self.segments(token_type_ids)
        return self.norm(x)  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, layer: int, attention: AttentionCache) -> Tensor:
        B, T, E = x.shape
        q, k, v = (self.split(linear(x)) for linear in (self.query, self.key, self.value))
        context = attention.attend(layer, q, k, v)  # (B, H, T, D)
        return self.output(context.transpose(1, 2).reshape(B, T, E))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> Tensor:
        B, T, E = x.shape
        return x.view(B, T, self.heads, E // self.heads).transpose(1, 2)  # (B, H, T, D)


class Layer(nn.Module):
    """Attention and feed-forward, each added to what it read and normalized after (post-LayerNorm)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, layer: int, attention: AttentionCache) -> Tensor:
        x = self.attention_norm(x + self.attention(x, layer, attention))
        return self.output_norm(x + self.output(self.activation(self.intermediate(x))))  # type: ignore[no-any-return]


class MaskedLMHead(nn.Module):
    """The word at each position; its weight is the word embeddings' unless the config unties them."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.activation(self.dense(x))))  # type: ignore[no-any-return]


class Pooler(nn.Module):
    """One vector for a text: its first token's, once more through a layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        assert config.pooler is not None
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.pooler]()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x[:, 0]))  # type: ignore[no-any-return]  # (B, E)


class Bert(nn.Module):
    """BERT base, large and any size between, and DistilBERT, by config."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        if config.pooler is not None:
            self.pooler = Pooler(config)
        E = config.hidden_size
        sizes = {"next_sentence": 2, "question_answering": 2}
        self.heads = nn.ModuleDict(
            {
                head: MaskedLMHead(config)
                if head == "masked_lm"
                else nn.Linear(E, sizes.get(head, config.num_labels))
                for head in config.heads
            }
        )
        if config.sentence is not None:
            self.sentence = SentenceEmbedding(config.sentence)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the masked-word head's weight to the word embeddings, where the config says so."""
        if self.config.tie_word_embeddings and "masked_lm" in self.heads:
            self.heads["masked_lm"].decoder.weight = self.embeddings.words.weight  # type: ignore[union-attr]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the last hidden state and every head's output.

        Args:
            input_ids: (B, T) int64; rows of unequal length are padded on the right.
            attention_mask: (B, T), 0 at padding; None when there is none.
            token_type_ids: (B, T), the segment of each token; all 0 when None.

        Returns:
            "last_hidden_state" (B, T, E), and by head: masked_lm (B, T, V), next_sentence (B, 2),
            sequence_classification (B, C), token_classification (B, T, C), question_answering
            (B, T, 2: logits of the answer's first and last token); "pooler_output" (B, E) and
            "sentence_embedding" where the model has them.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None and self.config.type_vocab_size:
            token_type_ids = torch.zeros_like(input_ids)
        x = self.hidden_states(input_ids, token_type_ids, PaddedAttention(attention_mask))[-1]
        return {"last_hidden_state": x, **self.head_outputs(x, attention_mask)}

    def hidden_states(
        self, input_ids: Tensor, token_type_ids: Tensor | None, attention: AttentionCache
    ) -> list[Tensor]:
        """Return the embeddings and every layer's output, each (B, T, E)."""
        states = [self.embeddings(input_ids, attention.positions(input_ids), token_type_ids)]
        for index, layer in enumerate(self.layers):
            states.append(layer(states[-1], index, attention))
        return states

    def head_outputs(
        self, x: Tensor, attention_mask: Tensor, rows: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """Return the outputs of pooler and heads for the last hidden state x (B, T, E).

        Args:
            rows: (N,) flat indices into B * T: the masked-word head then gives (N, V), for these alone.
        """
        outputs: dict[str, Tensor] = {}
        if self.config.pooler is not None:
            outputs["pooler_output"] = self.pooler(x)
        for name, head in self.heads.items():
            if name in POOLED_HEADS:
                outputs[name] = head(outputs["pooler_output"])
            elif name == "masked_lm" and rows is not None:
                outputs[name] = head(x.flatten(0, 1)[rows])  # (N, V): the vocabulary is wide
            else:
                outputs[name] = head(x)
        if self.config.sentence is not None:
            outputs["sentence_embedding"] = self.sentence(x, attention_mask)
        return outputs
