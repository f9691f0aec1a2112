"""BERT (Devlin et al., 2018) and DistilBERT (Sanh et al., 2019), with the heads of their papers.

B batch, T tokens, E hidden size, H heads, D = E / H head size
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .activations import ACTIVATIONS
from .attention import AttentionCache
from .config_checks import check_epsilon, check_multiple
from .encoder import Encoder, EncoderConfig


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The settings of a BERT; the defaults are BERT base."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_multiple(self, "hidden_size", of="num_attention_heads")
        check_epsilon(self, "layer_norm_eps")
        if self.pooled_heads and self.pooler is None:
            raise ValueError(f"the heads {list(self.heads)} need a pooler, but the weights have none")


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
    """A layer of attention and feed-forward, each added to its input and then normalized (post-LayerNorm)."""

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
    """A head that predicts the word at each position; its weight is tied to the embeddings by default."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.activation(self.dense(x))))  # type: ignore[no-any-return]


class Pooler(nn.Module):
    """A layer over the first token, which gives one vector for a text."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        assert config.pooler is not None
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.pooler]()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x[:, 0]))  # type: ignore[no-any-return]  # (B, E)


class Bert(Encoder):
    """BERT base, large and any size between, DistilBERT and RoBERTa, by config."""

    config: BertConfig

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
        self.add_vectors()
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the masked-word head's weight to the word embeddings, where the config says so."""
        if self.config.tie_word_embeddings and "masked_lm" in self.heads:
            self.heads["masked_lm"].decoder.weight = self.embeddings.words.weight  # type: ignore[union-attr]

    def hidden_states(
        self, input_ids: Tensor, token_type_ids: Tensor | None, attention: AttentionCache
    ) -> list[Tensor]:
        """Return the embeddings and every layer's output, each (B, T, E)."""
        states = [self.embeddings(input_ids, attention.positions(input_ids), token_type_ids)]
        for index, layer in enumerate(self.layers):
            states.append(layer(states[-1], index, attention))
        return states

    def pool(self, x: Tensor, attention_mask: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return the pooler's vector (B, E) for each text."""
        return self.pooler(x)  # type: ignore[no-any-return]
