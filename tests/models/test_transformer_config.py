from __future__ import annotations

import math

import pytest

from planforge.models import TransformerConfig

SIZES, SWITCHES = (
    [name for name, value in vars(TransformerConfig()).items() if type(value) is kind] for kind in (int, bool)
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in SIZES for value in (0, -1, 1.5, "8", None, True)),
        *((name, value) for name in SWITCHES for value in ("false", 0, None)),
        ("encoder_heads", 5),  # does not divide d_model
        ("decoder_heads", 5),
        *(("activation", value) for value in ("mish", ["gelu"], None)),
        *(("positions", value) for value in ("rotary", ["learned"], None, "Learned")),
        *(("final_norms", value) for value in ("encoder", 1)),
        *(("layer_norm_eps", value) for value in (-1e-5, math.nan, math.inf, "1e-5", None, True)),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        TransformerConfig(**{"d_model": 32, name: value})  # type: ignore[arg-type]


def test_one_embedding_needs_one_vocabulary() -> None:
    with pytest.raises(ValueError, match="source_vocab_size=60 and target_vocab_size=50 must be equal"):
        TransformerConfig(source_vocab_size=60, target_vocab_size=50, share_embeddings=True)


def test_a_residual_from_the_norm_needs_norms_that_come_first() -> None:
    with pytest.raises(ValueError, match="residual_from_norm is for norm_first, which is false"):
        TransformerConfig(residual_from_norm=True)
