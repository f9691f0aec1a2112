"""The settings of RETRO.

M tokens of a chunk, K neighbours of a chunk, R tokens of a neighbour, E hidden size, D head size
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .config_checks import check_activation, check_bool, check_epsilon, check_whole
from .llama import RMSNorm
from .rotary import Rotary, RotaryTables

NORMS = ("rms", "layer")


@dataclass(frozen=True)
class RetroConfig:
    """RETRO's settings; the defaults are the paper's smallest model.

    Attributes:
        max_positions: the longest text, in tokens.
        hidden_size: E of the decoder.
        head_size: D of the decoder, an even number.
        intermediate_size: the inner size of the decoder's feed-forward parts.
        cross_layers: numbers of the decoder's layers that attend to neighbours, from 0.
        chunk_length: M.
        neighbours: K.
        neighbour_length: R, a neighbour's chunk and what follows it.
        encoder_size: the width of the encoder of neighbours; its layers, heads, size of a head and inner size
            are the `encoder_` settings that follow.
        encoder_cross_layers: numbers of the encoder's layers that attend to the chunk.
        encoder_words: the encoder has embeddings of its own; else it reads the decoder's, of its width.
        activation: of the feed-forward parts, one of `ACTIVATIONS`.
        norm: "rms" as in the paper, or "layer".
        norm_eps: added to a norm's variance.
        bias: linear layers have a bias.
        final_norm: a norm before the output.
        cross_positions: queries and keys of the attention between decoder and encoder have positions.
        tie_word_embeddings: the output has the embedding's weights.
        output_bias: the output has a bias.
    """

    vocab_size: int = 128000
    max_positions: int = 2048
    hidden_size: int = 896
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    head_size: int = 64
    intermediate_size: int = 3584
    cross_layers: tuple[int, ...] = (5, 8, 11)
    chunk_length: int = 64
    neighbours: int = 2
    neighbour_length: int = 128
    encoder_size: int = 896
    encoder_layers: int = 2
    encoder_heads: int = 16
    encoder_head_size: int = 64
    encoder_intermediate_size: int = 3584
    encoder_cross_layers: tuple[int, ...] = (0,)
    encoder_words: bool = False
    activation: str = "gelu_new"
    norm: str = "rms"
    norm_eps: float = 1e-6
    bias: bool = False
    final_norm: bool = True
    cross_positions: bool = True
    tie_word_embeddings: bool = True
    output_bias: bool = False

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "max_positions", "hidden_size", "num_hidden_layers")
        check_whole(self, "num_attention_heads", "intermediate_size", "neighbours", "neighbour_length")
        check_whole(self, "encoder_size", "encoder_layers", "encoder_heads", "encoder_intermediate_size")
        check_whole(self, "chunk_length", least=2)
        check_whole(self, "head_size", "encoder_head_size")
        if self.head_size % 2 or self.encoder_head_size % 2:
            raise ValueError(
                f"head_size={self.head_size} and encoder_head_size={self.encoder_head_size} must be even: a"
                " position turns pairs"
            )
        if not self.chunk_length <= self.neighbour_length:
            raise ValueError(
                f"neighbour_length={self.neighbour_length} must be at least chunk_length={self.chunk_length}:"
                " a neighbour is a chunk and what follows it"
            )
        if self.max_positions < 2 * self.chunk_length:
            raise ValueError(
                f"max_positions={self.max_positions} must be at least two chunks of {self.chunk_length}"
                " tokens"
            )
        check_activation(self, "activation")
        check_epsilon(self, "norm_eps")
        check_bool(self, "encoder_words", "bias", "final_norm", "cross_positions")
        check_bool(self, "tie_word_embeddings", "output_bias")
        for name, layers in (
            ("cross_layers", "num_hidden_layers"),
            ("encoder_cross_layers", "encoder_layers"),
        ):
            object.__setattr__(self, name, check_layers(self, name, getattr(self, layers)))
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm!r} is not one of {', '.join(NORMS)}")
        if not self.encoder_words and self.encoder_size != self.hidden_size:
            raise ValueError(
                f"encoder_size={self.encoder_size} must be hidden_size={self.hidden_size}, as encoder_words"
                " is false: the encoder reads the decoder's embeddings"
            )

    @property
    def context(self) -> int:
        """Return the longest text, in tokens."""
        return self.max_positions

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Return the layers, heads and head size of the keys and values that are cached."""
        return self.num_hidden_layers, self.num_attention_heads, self.head_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return how many tokens each layer sees: all."""
        return (None,) * self.num_hidden_layers

    @property
    def computes_positions(self) -> bool:
        """Return whether there are positions beyond those that the model was trained with."""
        return True

    def make_norm(self, width: int) -> nn.Module:
        """Return a norm of vectors of a width."""
        if self.norm == "rms":
            return RMSNorm(width, self.norm_eps)
        return nn.LayerNorm(width, eps=self.norm_eps)

    def make_tables(self, head_size: int, length: int) -> RotaryTables:
        """Return the rotations of heads at so many positions."""
        return RotaryTables(Rotary(), head_size, length)


def check_layers(config: RetroConfig, name: str, count: int) -> tuple[int, ...]:
    """Return the numbers of some layers, ascending; refuse those that there are not, and none."""
    numbers = getattr(config, name)
    if not isinstance(numbers, list | tuple) or not all(type(number) is int for number in numbers):
        raise ValueError(f"{name}={numbers!r:.60} must be a list of layers' numbers")
    if not numbers or len(set(numbers)) != len(numbers) or not all(0 <= n < count for n in numbers):
        raise ValueError(
            f"{name}={numbers!r:.60} must name different layers from 0 to {count - 1}, at least one"
        )
    return tuple(sorted(numbers))
