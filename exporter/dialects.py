"""The ONNX dialects: one PyTorch model, several ways to write its attention and cache.

B batch, T new tokens, P cached tokens, S slots, N logit rows, H heads, D head size, V vocabulary

`portable`  grows a decoder's cache by Concat. Rows padded on the left. Operators that every consumer
            knows. Encoders cache nothing and have this dialect alone, rows padded on the right.
`inplace`   writes into fixed slots with TensorScatter. Rows padded on the right. The output has the
            input's address, so no step copies the cache. For TensorRT >= 10.15 and TensorRT-RTX.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..models import GPT2, Bert, GrowingCache, KeyValue, PaddedAttention
from ..models.attention import MASKED


class SlotCache:
    """The `inplace` dialect's attention: fixed slots, written at each row's own position."""

    def __init__(self, slots: list[KeyValue], past_lengths: Tensor) -> None:
        self.slots = slots  # each (B, H, S, D)
        self.past_lengths = past_lengths.to(torch.int64)  # (B,)
        self.present: list[KeyValue] = []
        self.bias: Tensor | None = None

    def positions(self, input_ids: Tensor) -> Tensor:
        T, S = input_ids.shape[1], self.slots[0][0].shape[2]
        positions = self.past_lengths[:, None] + torch.arange(T)  # (B, T)
        visible = torch.arange(S) <= positions[:, :, None]  # (B, T, S)
        self.bias = torch.where(visible, 0.0, MASKED)[:, None]  # (B, 1, T, S)
        return positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (self.write(slots, new) for slots, new in zip(self.slots[layer], (k, v), strict=True))
        self.present.append((keys, values))
        # The scale is an attribute: without it TensorRT's parser computes it with 16 layers each time.
        return torch.onnx.ops.symbolic(
            "Attention",
            (q, keys, values, self.bias),
            attrs={"scale": q.shape[-1] ** -0.5, "is_causal": 0},
            dtype=q.dtype,
            shape=q.shape,
            version=24,
        )

    def write(self, slots: Tensor, new: Tensor) -> Tensor:
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            (slots, new, self.past_lengths),
            attrs={"axis": -2, "mode": "linear"},
            dtype=slots.dtype,
            shape=slots.shape,
            version=24,
        )


class Decoder(nn.Module):
    """A decoder whose cache is flat tensors in and out, as a graph needs it."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def outputs(
        self, input_ids: Tensor, cache: GrowingCache | SlotCache, logit_rows: Tensor
    ) -> tuple[Tensor, ...]:
        x = self.model.hidden_states(input_ids, cache)  # (B, T, E)
        # Rows are gathered before the head: the vocabulary is wide, and one row per sequence is read.
        logits = self.model.lm_head(x.flatten(0, 1)[logit_rows])  # (N, V)
        return (logits, *(tensor for pair in cache.present for tensor in pair))


class PortableDecoder(Decoder):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        logit_rows: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        cache = GrowingCache(pairs(past), attention_mask, position_ids)
        return self.outputs(input_ids, cache, logit_rows)


class InplaceDecoder(Decoder):
    def forward(
        self, input_ids: Tensor, past_lengths: Tensor, logit_rows: Tensor, *slots: Tensor
    ) -> tuple[Tensor, ...]:
        return self.outputs(input_ids, SlotCache(pairs(slots), past_lengths), logit_rows)


class PortableEncoder(nn.Module):
    """An encoder whose results are flat tensors, as a graph needs it.

    Args:
        layers: whose hidden states are outputs beside the last one; 0 is the embeddings.
        pooler_output: whether the pooler's result is an output too.
    """

    def __init__(self, model: Bert, layers: tuple[int, ...], pooler_output: bool) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.pooler_output = pooler_output

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """The recipe's outputs in order; `rest` is token_type_ids and logit_rows, if the model has them."""
        config, others = self.model.config, list(rest)
        segments = others.pop(0) if config.type_vocab_size else None
        rows = others.pop(0) if "masked_lm" in config.heads else None
        states = self.model.hidden_states(input_ids, segments, PaddedAttention(attention_mask))
        results = self.model.head_outputs(states[-1], attention_mask, rows)
        outputs = [states[-1]]
        for head in config.heads:
            both_ends = head == "question_answering"
            outputs += results[head].unbind(-1) if both_ends else [results[head]]
        if config.sentence is not None:
            outputs.append(results["sentence_embedding"])
        outputs += [states[layer] for layer in self.layers]
        if self.pooler_output:
            outputs.append(results["pooler_output"])
        return tuple(outputs)


def pairs(flat: tuple[Tensor, ...]) -> list[KeyValue]:
    """key, value, key, value, ... as a list of pairs."""
    return list(zip(flat[::2], flat[1::2], strict=True))
