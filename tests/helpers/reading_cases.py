"""The faults that reading must show, for each model and precision that they are planted in."""

from __future__ import annotations

from typing import Any

from .faults import epsilon
from .reading_faults import (
    ReadFault,
    attribute,
    behind,
    changed_codes,
    changed_unsmoothing,
    doubled_scales,
    exact_gelu,
    exchanged_columns,
    exchanged_rows,
    other_epsilon,
    other_id,
    other_rotary_base,
    own_vector,
    reads,
    scaled_number,
    summed_epsilon,
    word_is_nan,
    zero_points,
)

GROUP = "GroupQueryAttention"
ATTENDS = ("(GroupQueryAttention) of h.1.attn gives", "which 'h.1.attn.c_proj' reads")
OFF = "more than half a step off"
SCALES = "scales that do not follow from the checkpoint"
MIDDLE = "are not the middle of its values"


def a_step_off(codes: Any) -> None:
    codes.reshape(-1)[7] ^= 1


def forgotten_block(codes: Any) -> None:
    """A row's block is all zeros, in the place of a hundredth of the row."""
    codes[3, 0] = 0x88


def exchanged_halves(codes: Any) -> None:
    """The two int4 of every byte the wrong way round."""
    codes[...] = (codes >> 4) | (codes << 4)


def wrong_rows(codes: Any) -> None:
    codes[[0, 1]] = codes[[1, 0]]


INT8 = [
    ReadFault(
        "a block's scale doubled in c_fc",
        doubled_scales("h.1.mlp.c_fc"),
        ("of h.1.mlp.c_fc", SCALES),
        missed=True,
    ),
    ReadFault(
        "a block's scale doubled in c_proj",
        doubled_scales("h.2.mlp.c_proj"),
        ("h.2.mlp", "1 of 1024"),
        missed=True,
    ),
    ReadFault(
        "1 % of a weight's blocks doubled",
        doubled_scales("h.0.mlp.c_proj", 0.01),
        ("10 of 1024",),
        missed=True,
    ),
    ReadFault(
        "two rare rows exchanged", exchanged_rows(1990, 2001), ("wte.weight", "2 of 2048 scales"), missed=True
    ),
    ReadFault("a rare word NaN", word_is_nan(1999), ("not finite, the first at [1999, 0]",), missed=True),
    ReadFault("one number a step off", changed_codes("h.3.attn.c_attn", a_step_off), ("1 of 196608", OFF)),
    ReadFault("two outputs exchanged", changed_codes("h.1.attn.c_proj", wrong_rows), (OFF, "first in row 0")),
    ReadFault("a window", attribute(GROUP, "local_window_size", 250), ATTENDS, missed=True),
    ReadFault(
        "other heads", attribute(GROUP, "kv_num_heads", 2), ("(GroupQueryAttention) fails: ", "past_key")
    ),
    ReadFault("rotated", attribute(GROUP, "do_rotary", 1), ("(GroupQueryAttention) fails: ",)),
    ReadFault("a cap", attribute(GROUP, "softcap", 50.0), ATTENDS),
    ReadFault("smooth", attribute(GROUP, "smooth_softmax", 1), ATTENDS),
    ReadFault("scale 0.2 % off", attribute(GROUP, "scale", 0.12525), ATTENDS),
    ReadFault(
        "the exact GELU", exact_gelu, ("node 'exact' (Gelu)", "which 'h.0.mlp.c_proj' reads"), missed=True
    ),
    ReadFault("epsilon 1e-6", epsilon("h.1.ln_1", 1e-6), ("(LayerNormalization) of h.1.ln_1 gives",)),
    ReadFault(
        "a bias 0.4 % off", own_vector("h.2.attn.c_attn", ("MatMulNBits",), 5), ("'mine'", "is not a tensor")
    ),
    ReadFault(
        "a rare word's zero points", zero_points("wte", 118, slice(1990, 1992)), ("wte", MIDDLE), missed=True
    ),
    ReadFault(
        "zero points of a product",
        zero_points("h.1.mlp.c_fc", 100, slice(0, 20)),
        ("h.1.mlp.c_fc", MIDDLE),
        missed=True,
    ),
    ReadFault(
        "another layer's norm",
        reads("h.1.ln_1", 1, "h.2.ln_1.weight", "LayerNormalization"),
        ("(LayerNormalization) of h.1.ln_1 gives",),
        missed=True,
    ),
    ReadFault(
        "0.01 added to a norm's result",
        behind("h.1.ln_2", "LayerNormalization", "Add", 0.01),
        ("node 'extra' (Add) gives", "which 'h.1.mlp.c_fc' reads"),
        missed=True,
    ),
]
INT4 = [
    ReadFault(
        "a block's zero point 7",
        zero_points("h.1.attn.c_proj", 0x77, slice(5, 6)),
        ("h.1.attn.c_proj", MIDDLE),
        missed=True,
    ),
    ReadFault(
        "another module's bias",
        reads("h.2.mlp.c_proj", 5, "h.1.attn.c_proj.bias", "MatMulNBits"),
        ("(MatMulNBits) of h.2.mlp.c_proj gives",),
        missed=True,
    ),
    ReadFault(
        "no bias",
        reads("h.0.attn.c_attn", 5, None, "MatMulNBits"),
        ("(MatMulNBits) of h.0.attn.c_attn gives",),
        missed=True,
    ),
    ReadFault(
        "clipped to 2",
        behind("h.1.ln_2", "LayerNormalization", "Clip", -2.0, 2.0),
        ("node 'extra' (Clip) gives",),
        missed=True,
    ),
    ReadFault("a block's scale doubled", doubled_scales("h.1.mlp.c_proj"), ("of h.1.mlp.c_proj", SCALES)),
    ReadFault(
        "1 % of a weight's blocks doubled",
        doubled_scales("h.3.mlp.c_proj", 0.01),
        ("10 of 1024",),
        missed=True,
    ),
    ReadFault("a block of zeros", changed_codes("h.1.mlp.c_proj", forgotten_block), ("row 3", "real text")),
    ReadFault(
        "halves exchanged", changed_codes("h.0.attn.c_attn", exchanged_halves), ("in 768 of 768 rows",)
    ),
    ReadFault("two outputs exchanged", changed_codes("h.0.attn.c_proj", wrong_rows), ("first in row 0",)),
    ReadFault("two rare rows exchanged", exchanged_rows(1990, 2001), ("wte.weight", "2 of 2048 scales")),
    ReadFault("a rare word NaN", word_is_nan(1999), ("not finite",)),
]
FP16 = [
    ReadFault("a rare word as another", other_id(1999, 1998), ("reads ids that", "(Where)"), missed=True),
    ReadFault(
        "0.002 behind a GELU",
        behind("h.1.mlp.activation", "Gelu", "Add", 0.002),
        ("node 'extra' (Add) gives",),
        missed=True,
    ),
    ReadFault(
        "a bias 0.4 % off",
        own_vector("h.2.ln_2", ("LayerNormalization",), 2),
        ("'mine'", "not a tensor"),
        missed=True,
    ),
    ReadFault(
        "the exact GELU", exact_gelu, ("node 'exact' (Gelu) of h.0.mlp.activation gives",), missed=True
    ),
    ReadFault("epsilon 1e-6", epsilon("h.3.ln_2", 1e-6), ("(LayerNormalization) of h.3.ln_2 gives",)),
]
BERT = [
    ReadFault(
        "zero points of three columns",
        zero_points("layers.0.intermediate", 6, slice(3, 6)),
        ("of layers.0.intermediate", MIDDLE),
        missed=True,
    ),
    ReadFault(
        "a column's scale doubled", doubled_scales("layers.0.intermediate"), (SCALES, "layers.0"), missed=True
    ),
    ReadFault("two results exchanged", exchanged_columns("layers.0.output"), (SCALES, "2 of ")),
    ReadFault("smoothing 2 % off", changed_unsmoothing("layers.0.attention.query"), ("layers.0.attention",)),
    ReadFault(
        "joined biases 0.4 % off",
        own_vector("layers.0.attention.query", ("MatMulIntegerToFloat",), 6),
        ("'mine'", "is not a tensor of the checkpoint"),
    ),
    ReadFault(
        "epsilon 1e-5",
        epsilon("layers.0.attention_norm", 1e-5),
        ("(LayerNormalization) of layers.0.attention_norm gives",),
    ),
]
TWO_NORMS = ("model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm")
LLAMA = [
    ReadFault(
        "attention's scale 0.5 % off",
        scaled_number("model.layers.1.self_attn", "Mul", 1.005),
        ("of model.layers.1.self_attn gives", "which 'model.layers.1.self_attn.o_proj' reads"),
        missed=True,
    ),
    ReadFault(
        "epsilon",
        other_epsilon("model.layers.1.input_layernorm"),
        ("of model.layers.1.input_layernorm gives",),
        missed=True,
    ),
    ReadFault(
        "one epsilon in two layers",
        other_epsilon(*TWO_NORMS),
        (f" of {TWO_NORMS[0]} gives",),
        missed=True,
    ),
    ReadFault(
        "rotary base 10,100", other_rotary_base, ("rotary_emb", "inv_freq", "off by up to"), missed=True
    ),
]


GEMMA = [
    ReadFault("final cap 3.015", scaled_number("", "Div", 1.005), ("gives 'logits'",), missed=True),
    ReadFault(
        "attention's cap 5.1",
        scaled_number("layers.1.self_attn", "Div", 1.02),
        ("of layers.1.self_attn gives", "which 'layers.1.self_attn.o_proj' reads"),
        missed=True,
    ),
    ReadFault(
        "embeddings times 1.002",
        scaled_number("", "Mul", 1.002),
        ("of layers.0.mlp_norm gives",),
        missed=True,
    ),
    ReadFault(
        "epsilon as a sum", summed_epsilon("layers.1.mlp_norm"), ("of layers.1.mlp_norm gives",), missed=True
    ),
]
