"""A decoder of one layer computed by numpy, as the two dialects of a cache call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec

Numbers: TypeAlias = npt.NDArray[Any]


Given: TypeAlias = Mapping[str, Any]


Returned: TypeAlias = dict[str, Any]


V = 11
H = 2
D = 4
CONTEXT = 64


random = np.random.default_rng(0)


WTE, WPE = (random.standard_normal((n, H * D)).astype(np.float32) for n in (V, CONTEXT))


WQ, WK, WV, HEAD = (
    (random.standard_normal((H * D, n)) / np.sqrt(H * D)).astype(np.float32) for n in (8, 8, 8, V)
)


def heads(x: Numbers) -> Numbers:
    """(B, T, H * D) as (B, H, T, D)."""
    split: Numbers = x.reshape(*x.shape[:2], H, D).swapaxes(1, 2)
    return split


def attention(q: Numbers, k: Numbers, v: Numbers, visible: npt.NDArray[np.bool_]) -> Numbers:
    scores = np.where(visible, q @ k.swapaxes(-1, -2), -1e4)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ v  # (B, H, T, D)
    joined: Numbers = out.swapaxes(1, 2).reshape(len(q), q.shape[2], H * D)
    return joined


def expected(tokens: Sequence[int]) -> Numbers:
    """Logits (T, V) of one row in one pass, without cache, padding or batch: the reference."""
    x = (WTE[list(tokens)] + WPE[: len(tokens)])[None]
    causal = np.tri(len(tokens), dtype=bool)
    logits: Numbers = attention(heads(x @ WQ), heads(x @ WK), heads(x @ WV), causal)[0] @ HEAD
    return logits


def portable(given: Given) -> Returned:
    """The same model as a graph of the portable dialect."""
    ids, mask, positions = (given[n] for n in ("input_ids", "attention_mask", "position_ids"))
    T = ids.shape[1]
    S = mask.shape[1]
    x = WTE[ids] + WPE[positions]
    assert given["past_key_values.0.key"].shape == (len(ids), H, S - T, D)
    k = np.concatenate([given["past_key_values.0.key"], heads(x @ WK)], axis=2)
    v = np.concatenate([given["past_key_values.0.value"], heads(x @ WV)], axis=2)
    visible = np.tri(S, dtype=bool)[S - T :] & (mask == 1)[:, None, None, :]
    out = attention(heads(x @ WQ), k, v, visible).reshape(-1, H * D)
    return {"logits": out[given["logit_rows"]] @ HEAD, "present.0.key": k, "present.0.value": v}


def inplace(given: Given) -> Returned:
    """The same model as a graph of the inplace dialect."""
    ids = given["input_ids"]
    lengths = given["past_lengths"]
    assert lengths.dtype == np.int32
    positions = lengths[:, None] + np.arange(ids.shape[1])  # (B, T)
    x = WTE[ids] + WPE[positions]
    k, v = (given[f"cache.0.{kind}"].copy() for kind in ("key", "value"))
    for b, where in enumerate(positions):
        k[b, :, where], v[b, :, where] = ((x @ w)[b].reshape(-1, H, D) for w in (WK, WV))
    visible = np.arange(k.shape[2]) <= positions[:, None, :, None]  # (B, 1, T, S)
    out = attention(heads(x @ WQ), k, v, visible).reshape(-1, H * D)
    return {"logits": out[given["logit_rows"]] @ HEAD, "present.0.key": k, "present.0.value": v}


def artifact(dialect: str, dtype: str = "float32") -> Artifact:
    grows = dialect == "portable"
    batch = Axis("batch", 1, 1, 8)
    past = Axis("past" if grows else "slots", 0, 1, CONTEXT)
    total = Axis("total", 1, 1, CONTEXT) if grows else past
    name = "past_key_values.0." if grows else "cache.0."

    def specs(name: str, role: str, axis: Axis) -> tuple[TensorSpec, ...]:
        axes = (batch, H, axis, D)
        return tuple(TensorSpec(name + x, role + x, dtype, axes) for x in ("key", "value"))

    side = "left" if grows else "right"
    own = ("input_ids", "attention_mask", "position_ids") if grows else ("input_ids", "past_lengths")
    read = tuple(TensorSpec(n, n, "int64", (batch, total)) for n in (*own, "logit_rows"))
    ins = specs(name, "past.0.", past)
    outs = specs("present.0.", "present.0.", total)
    return Artifact("decoder", dialect, "fp32", 20, "x.onnx", (), side, (*read, *ins), outs)


def assert_close(got: Any, want: Numbers) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


tokens = st.integers(0, V - 1)
