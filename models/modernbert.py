"""ModernBERT (Warner et al., 2024): an encoder with rotary positions, local attention and gated MLPs.

B batch, T tokens, E hidden size, M inner size of the MLP, H heads, D = E / H head size
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from .activations import ACTIVATIONS
from .attention import FULL, SLIDING, AttentionCache, AttentionKind
from .config_checks import check_activation, check_bool, check_epsilon, check_multiple, check_whole
from .encoder import Encoder, EncoderConfig
from .rotary import Rotary, RotaryTables
from .sentence import POOLINGS


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """The settings of a ModernBERT; the defaults are ModernBERT base.

    Attributes:
        layer_types: for each layer whether it sees all tokens (`FULL`) or those near it (`SLIDING`).
        local_attention: how many tokens a local layer sees, half of them on either side.
        rotary: the rotation of queries and keys in global layers.
        local_rotary: that in local layers.
        classifier_pooling: what a classifier of texts reads, "cls" or "mean".
    """

    vocab_size: int = 50368
    hidden_size: int = 768
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    intermediate_size: int = 1152
    max_position_embeddings: int = 8192
    layer_types: tuple[str, ...] = ()
    local_attention: int = 128
    rotary: Rotary = field(default_factory=lambda: Rotary(rope_theta=160_000.0))
    local_rotary: Rotary = field(default_factory=Rotary)
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_pooling: str = "cls"
    classifier_activation: str = "gelu"
    classifier_bias: bool = False
    decoder_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_multiple(self, "hidden_size", of="num_attention_heads")
        check_whole(self, "local_attention")
        check_epsilon(self, "norm_eps")
        check_activation(self, "classifier_activation")
        check_bool(self, "norm_bias", "attention_bias", "mlp_bias", "classifier_bias", "decoder_bias")
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"classifier_pooling={self.classifier_pooling!r} is not cls or mean")
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - {FULL, SLIDING}:
            raise ValueError(
                f"layer_types={list(self.layer_types)} must be {FULL} or {SLIDING} for each of"
                f" {self.num_hidden_layers} layers"
            )

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def computes_positions(self) -> bool:
        """Return whether there are positions beyond those that the model was trained with."""
        return self.rotary.is_fixed and self.local_rotary.is_fixed

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return how many tokens a layer sees."""
        is_local = self.layer_types[layer] == SLIDING
        return AttentionKind(window=self.local_attention // 2 + 1 if is_local else None)

    def make_norm(self) -> nn.Module:
        """Return a LayerNorm."""
        return nn.LayerNorm(self.hidden_size, eps=self.norm_eps, bias=self.norm_bias)


class SelfAttention(nn.Module):
    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.kind = config.attention_kind(layer)
        self.head_size = config.head_dim
        E = config.hidden_size
        self.query_key_value = nn.Linear(E, 3 * E, bias=config.attention_bias)
        self.output = nn.Linear(E, E, bias=config.attention_bias)

    def forward(self, x: Tensor, tables: RotaryTables, attention: AttentionCache) -> Tensor:
        B, T, E = x.shape
        q, k, v = (self.split_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        q = attention.rotate(q, tables)
        k = attention.rotate(k, tables)
        context = attention.attend(self.layer, q, k, v, self.kind)  # (B, H, T, D)
        return self.output(context.transpose(1, 2).reshape(B, T, E))  # type: ignore[no-any-return]

    def split_heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, -1, self.head_size).transpose(1, 2)  # (B, H, T, D)


class GatedMLP(nn.Module):
    """GeGLU (Shazeer, 2020), with its input and its gate side by side."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.output = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.input(x).chunk(2, dim=-1)  # each (B, T, M)
        return self.output(self.activation(inner) * gate)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A layer of attention and MLP, each of its normalized input (pre-LayerNorm) and added to it."""

    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        # The first layer reads the embeddings, which are normalized already.
        self.attention_norm = nn.Identity() if layer == 0 else config.make_norm()
        self.attention = SelfAttention(config, layer)
        self.mlp_norm = config.make_norm()
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, tables: RotaryTables, attention: AttentionCache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables, attention)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Head(nn.Module):
    """A head: a layer, and the logits of words or classes."""

    def __init__(self, config: ModernBertConfig, outputs: int, bias: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.activation = ACTIVATIONS[config.classifier_activation]()
        self.norm = config.make_norm()
        self.decoder = nn.Linear(config.hidden_size, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.activation(self.dense(x))))  # type: ignore[no-any-return]


class ModernBert(Encoder):
    """ModernBERT base, large and any size between, by config."""

    config: ModernBertConfig

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = config.make_norm()
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = config.make_norm()
        self.rotary = RotaryTables(config.rotary, config.head_dim, config.max_position_embeddings)
        self.local_rotary = RotaryTables(config.local_rotary, config.head_dim, config.max_position_embeddings)
        self.heads = nn.ModuleDict({head: self.make_head(head) for head in config.heads})
        self.add_vectors()
        self.tie_weights()

    def make_head(self, head: str) -> Head:
        """Return the module of one of `HEADS`."""
        config = self.config
        if head == "masked_lm":
            return Head(config, config.vocab_size, config.decoder_bias)
        return Head(config, 2 if head == "question_answering" else config.num_labels, bias=True)

    def limit_context(self, length: int) -> None:
        """Compute the rotary tables for texts of up to `length` tokens."""
        self.rotary.fill(length)
        self.local_rotary.fill(length)

    def tie_weights(self) -> None:
        """Tie the masked-word head's weight to the word embeddings, where the config says so."""
        if self.config.tie_word_embeddings and "masked_lm" in self.heads:
            self.heads["masked_lm"].decoder.weight = self.words.weight  # type: ignore[union-attr]

    def hidden_states(
        self, input_ids: Tensor, token_type_ids: Tensor | None, attention: AttentionCache
    ) -> list[Tensor]:
        """Return the embeddings and every layer's output, each (B, T, E), the last one normalized."""
        config = self.config
        windows = {config.attention_kind(layer).window for layer in range(config.num_hidden_layers)}
        attention.positions(input_ids, sorted(windows, key=str))
        states = [self.embedding_norm(self.words(input_ids))]
        for layer, kind in zip(self.layers, config.layer_types, strict=True):
            tables = self.local_rotary if kind == SLIDING else self.rotary
            states.append(layer(states[-1], tables, attention))
        return [*states[:-1], self.norm(states[-1])]

    def pool(self, x: Tensor, attention_mask: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return the first token's vector (B, E), or the mean of all, by the config."""
        return POOLINGS[self.config.classifier_pooling](x, attention_mask)
