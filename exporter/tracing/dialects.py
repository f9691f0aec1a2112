"""The ONNX dialects: several ways to write the attention and cache of one PyTorch model.

B batch, T new tokens, P cached tokens, S slots, N logit rows, H heads of queries, K heads of keys and values,
D head size, V vocabulary

`portable`  grows a decoder's cache by Concat. Rows padded on the left. Operators that every consumer
            knows. Encoders cache nothing, and are padded on the right.
`inplace`   writes into fixed slots with TensorScatter. Rows padded on the right. The output has the
            input's address, so no step copies the cache. For TensorRT >= 10.15 and TensorRT-RTX.
`ort`       keeps the same slots, in ONNX Runtime's own attention. How many slots are read is an input, as a
            GPU's kernel reads it on the host, before what the GPU computes has arrived there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...models import (
    DynamicCache,
    KeyValue,
    PaddedAttention,
    SourceAttention,
    Transformer,
)
from ...models.attention import PLAIN, AttentionKind, Windows, scaled_dot_product_attention
from ...models.encoder import Encoder
from ...models.language_model import LanguageModel
from ...models.masked import MASKED
from ...models.rotary import RotaryTables
from .experts import choose_experts


class StaticCache:
    """The `inplace` dialect's attention: fixed slots, written at each row's own position."""

    def __init__(self, slots: list[KeyValue], past_lengths: Tensor) -> None:
        self.slots = slots  # each (B, K, S, D)
        self.past_lengths = past_lengths.to(torch.int64)  # (B,)
        self.present: list[KeyValue] = []
        self.biases: dict[int | None, Tensor] = {}  # by window
        self.position_ids: Tensor | None = None

    def positions(self, input_ids: Tensor, windows: Windows = (None,)) -> Tensor:
        """Return position ids (B, T), and make this step's masks, which `attend` needs."""
        T = input_ids.shape[1]
        S = self.slots[0][0].shape[2]
        positions = self.past_lengths[:, None] + torch.arange(T)  # (B, T)
        for window in windows:
            visible = torch.arange(S) <= positions[:, :, None]  # (B, T, S)
            if window is not None:
                visible = visible & (torch.arange(S) > positions[:, :, None] - window)
            self.biases[window] = torch.where(visible, 0.0, MASKED)[:, None]  # (B, 1, T, S)
        self.position_ids = positions
        return positions

    def rotate(self, x: Tensor, tables: RotaryTables) -> Tensor:
        assert self.position_ids is not None, "positions() comes first"
        return tables.rotate(x, self.position_ids)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = PLAIN) -> Tensor:
        if not self.biases:
            raise ValueError("call positions() before attend(): it makes the mask")
        keys, values = (self.write(slots, new) for slots, new in zip(self.slots[layer], (k, v), strict=True))
        self.present.append((keys, values))
        bias = self.biases[kind.window]
        if kind.softcap is not None:  # TensorRT's parser takes no Attention with one
            return scaled_dot_product_attention(q, keys, values, bias, kind)
        return add_attention_node(q, keys, values, bias, kind)

    def write(self, slots: Tensor, new: Tensor) -> Tensor:
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            (slots, new, self.past_lengths),
            attrs={"axis": -2, "mode": "linear"},
            dtype=slots.dtype,
            shape=slots.shape,
            version=24,
        )


class GroupQueryCache(StaticCache):
    """The `ort` dialect's attention: GroupQueryAttention, which reads no slot behind a row's own tokens.

    For more than one row its kernel refuses several tokens on top of a past. It tells a step without a past
    by total = T.

    Args:
        total: () how many slots the longest row has filled behind this step.
    """

    tables: RotaryTables | None = None  # that the next node turns queries and keys by

    def __init__(self, slots: list[KeyValue], past_lengths: Tensor, total: Tensor) -> None:
        super().__init__(slots, past_lengths)
        self.total = total

    def positions(self, input_ids: Tensor, windows: Windows = (None,)) -> Tensor:
        T = input_ids.shape[1]
        self.position_ids = self.past_lengths[:, None] + torch.arange(T)  # (B, T)
        # From a GPU's own results: what is computed from T on the host would have to be copied there, and a
        # step with such a copy cannot be captured in a CUDA graph.
        self.last = self.position_ids[:, -1]  # (B,) the slot that the last token fills
        self.places = (self.last.to(torch.int32), self.total)
        return self.position_ids

    def find_places(self, kind: AttentionKind) -> tuple[Tensor, Tensor]:
        """Return each row's last slot (B,) of a layer's cache, and how many slots are read ()."""
        return self.places

    def rotate(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """Leave the rotation to GroupQueryAttention, which turns whole heads of a multiple of 16."""
        D = x.shape[-1]
        if 2 * tables.cos.shape[1] != D or D % 16:
            return super().rotate(x, tables)
        self.tables = tables
        return x

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = PLAIN) -> Tensor:
        B, H, T, D = q.shape
        joined = [x.transpose(1, 2).reshape(B, T, x.shape[1] * D) for x in (q, k, v)]
        keys, values = self.slots[layer]
        attributes: dict[str, Any] = {"num_heads": H, "kv_num_heads": k.shape[1]}
        attributes["scale"] = D**-0.5 if kind.scale is None else kind.scale
        if kind.window is not None:
            attributes["local_window_size"] = kind.window
        if kind.softcap is not None:
            attributes["softcap"] = kind.softcap
        rotation: tuple[Tensor, ...] = ()
        if self.tables is not None:
            rotation = (self.tables.cos, self.tables.sin, *self.own_positions(kind))
            attributes["do_rotary"] = 1
            self.tables = None
        context, *present = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (*joined, keys, values, *self.find_places(kind), *rotation),
            attrs=attributes,
            dtypes=(q.dtype,) * 3,
            shapes=(joined[0].shape, keys.shape, values.shape),
            version=1,
        )
        self.present.append((present[0], present[1]))
        return context.view(B, T, H, D).transpose(1, 2)

    def own_positions(self, kind: AttentionKind) -> tuple[Tensor, ...]:
        """Return positions (B, T) for a layer's rotation if they differ from those of its slots."""
        return ()


class RecentCache(GroupQueryCache):
    """The `ort` dialect where layers that see a window keep a text's newest tokens alone.

    Args:
        starts: (B,) the position of the token in the first slot of these layers.
        recent_total: () as `total`, of these layers.
    """

    def __init__(
        self, slots: list[KeyValue], past_lengths: Tensor, total: Tensor, starts: Tensor, recent_total: Tensor
    ) -> None:
        super().__init__(slots, past_lengths, total)
        self.starts = starts.to(torch.int64)
        self.recent_total = recent_total

    def positions(self, input_ids: Tensor, windows: Windows = (None,)) -> Tensor:
        positions = super().positions(input_ids, windows)
        self.recent_places = ((self.last - self.starts).to(torch.int32), self.recent_total)
        return positions

    def find_places(self, kind: AttentionKind) -> tuple[Tensor, Tensor]:
        return self.places if kind.window is None else self.recent_places

    def own_positions(self, kind: AttentionKind) -> tuple[Tensor, ...]:
        assert self.position_ids is not None, "positions() comes first"
        return () if kind.window is None else (self.position_ids,)


class SourceNode(SourceAttention):
    """The `inplace` dialect's attention over the source, as one node."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        # ONNX Runtime takes no mask that is broadcast along the queries.
        bias = self.bias.expand(-1, -1, q.shape[2], -1)
        return add_attention_node(q, *self.pair(layer), bias)


def add_attention_node(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kind: AttentionKind = PLAIN
) -> Tensor:
    """Return the result of the operator Attention-24."""
    # The scale is an attribute: without it TensorRT's parser computes it with 16 layers each time.
    scale = q.shape[-1] ** -0.5 if kind.scale is None else kind.scale
    return torch.onnx.ops.symbolic(
        "Attention",
        (q, k, v, bias),
        attrs={"scale": scale, "is_causal": 0},
        dtype=q.dtype,
        shape=q.shape,
        version=24,
    )


class Decoder(nn.Module):
    """A decoder with its cache as flat tensors in its inputs and outputs, as a graph needs it."""

    computes_all_experts = True  # of a mixture

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        choose_experts(model, self.computes_all_experts)

    def take_adapters(self, rest: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Take the rows' adapters from the inputs, where they stand before the cache; return the others."""
        choice = self.model.adapters
        if choice is None:
            return rest
        layers, _, _ = self.model.config.cache_sizes
        place = len(rest) - 2 * layers - 1
        choice.slots = rest[place]
        return (*rest[:place], *rest[place + 1 :])

    def outputs(
        self, input_ids: Tensor, cache: DynamicCache | StaticCache, logit_rows: Tensor
    ) -> tuple[Tensor, ...]:
        x = self.model.hidden_states(input_ids, cache)  # (B, T, E)
        # Rows are gathered before the head: the vocabulary is wide, and one row per sequence is read.
        logits = self.model.logits(x.flatten(0, 1)[logit_rows])  # (N, V)
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
        pairs = pair_up(self.take_adapters(past))
        cache = DynamicCache(pairs, attention_mask, position_ids)
        return self.outputs(input_ids, cache, logit_rows)


class InplaceDecoder(Decoder):
    def forward(
        self, input_ids: Tensor, past_lengths: Tensor, logit_rows: Tensor, *slots: Tensor
    ) -> tuple[Tensor, ...]:
        pairs = pair_up(self.take_adapters(slots))
        return self.outputs(input_ids, StaticCache(pairs, past_lengths), logit_rows)


class OrtDecoder(Decoder):
    computes_all_experts = False

    def forward(self, input_ids: Tensor, past_lengths: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Return the recipe's outputs.

        `rest` has the total of slots unless every layer sees a window, the start and the total of windows if
        layers keep the newest tokens alone, logit_rows, and the slots of each layer.
        """
        rest = self.take_adapters(rest)
        layers, _, _ = self.model.config.cache_sizes
        *places, logit_rows = rest[: -2 * layers]
        slots = pair_up(rest[-2 * layers :])
        if len(places) == 1:
            return self.outputs(input_ids, GroupQueryCache(slots, past_lengths, places[0]), logit_rows)
        starts, recent_total = places[-2:]
        total = places[0] if len(places) == 3 else recent_total
        cache = RecentCache(slots, past_lengths, total, starts, recent_total)
        return self.outputs(input_ids, cache, logit_rows)


class SourceEncoder(nn.Module):
    """The Transformer's encoder; it returns the source's keys and values for the decoder's layers."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = refuse_custom_parts(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        memory = self.model.encode(input_ids, PaddedAttention(attention_mask))
        return tuple(tensor for pair in self.model.decoder.keys_values(memory) for tensor in pair)  # type: ignore[operator]


class TargetDecoder(nn.Module):
    """One step of the Transformer's decoder, as a graph needs it."""

    def __init__(self, model: Transformer, weights: bool) -> None:
        super().__init__()
        self.model = refuse_custom_parts(model)
        self.weights = weights  # whether the attention over the source is an output too
        self.crosses = model.config.cross_layers

    def outputs(
        self,
        input_ids: Tensor,
        cache: DynamicCache | StaticCache,
        source: SourceAttention,
        logit_rows: Tensor,
    ) -> tuple[Tensor, ...]:
        x = self.model.hidden_states(input_ids, cache, source)  # (R, T, E)
        logits = self.model.output(x.flatten(0, 1)[logit_rows])  # (N, V)
        present = [tensor for pair in cache.present for tensor in pair]
        return (logits, *present, *self.unfold_weights(source, input_ids))

    def unfold_weights(self, source: SourceAttention, input_ids: Tensor) -> list[Tensor]:
        """Return each layer's weights (B, H, K * T, S) as (R, H, T, S)."""
        R, T = input_ids.shape
        unfolded = []
        for weights in source.weights.values() if self.weights else ():
            B, H, _, S = weights.shape
            by_beam = weights.reshape(B, H, -1, T, S).transpose(1, 2)  # (B, K, H, T, S)
            unfolded.append(by_beam.reshape(R, H, T, S))
        return unfolded


class PortableTargetDecoder(TargetDecoder):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        logit_rows: Tensor,
        encoder_attention_mask: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        pairs = pair_up(rest)
        source = SourceAttention(pairs[: self.crosses], encoder_attention_mask)
        cache = DynamicCache(pairs[self.crosses :], attention_mask, position_ids)
        return self.outputs(input_ids, cache, source, logit_rows)


class PortableTargetWithoutPositions(PortableTargetDecoder):
    """The same of a target without positions."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        logit_rows: Tensor,
        encoder_attention_mask: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        return super().forward(input_ids, attention_mask, None, logit_rows, encoder_attention_mask, *rest)


class InplaceTargetDecoder(TargetDecoder):
    def forward(
        self,
        input_ids: Tensor,
        past_lengths: Tensor,
        logit_rows: Tensor,
        encoder_attention_mask: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        pairs = pair_up(rest)
        # TensorRT's parser takes no Attention that gives its weights too.
        attention = SourceAttention if self.weights else SourceNode
        source = attention(pairs[: self.crosses], encoder_attention_mask)
        cache = StaticCache(pairs[self.crosses :], past_lengths)
        return self.outputs(input_ids, cache, source, logit_rows)


class OrtTargetDecoder(TargetDecoder):
    def forward(
        self,
        input_ids: Tensor,
        past_lengths: Tensor,
        total_sequence_length: Tensor,
        logit_rows: Tensor,
        encoder_attention_mask: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        pairs = pair_up(rest)
        source = SourceAttention(pairs[: self.crosses], encoder_attention_mask)
        cache = GroupQueryCache(pairs[self.crosses :], past_lengths, total_sequence_length)
        return self.outputs(input_ids, cache, source, logit_rows)


def refuse_custom_parts(model: Transformer) -> Transformer:
    """Return the model; raise a ValueError that names any modules of the caller's own."""
    if own := model.custom_parts():
        raise ValueError(
            f"a Transformer with its own {' and '.join(own)} cannot be exported: no graph is known for it"
        )
    return model


class PortableEncoder(nn.Module):
    """An encoder whose results are flat tensors, as a graph needs it."""

    def __init__(
        self,
        model: Encoder,
        layers: tuple[int, ...],
        pooler_output: bool,
        computes_all_experts: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        choose_experts(model, computes_all_experts)
        self.layers = layers  # whose hidden states are outputs besides the last one; 0 is the embeddings
        self.pooler_output = pooler_output  # whether the pooler's result is an output too

    @property
    def encoder(self) -> Encoder:
        """Return the encoder that is written."""
        return self.model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Return the recipe's outputs; `rest` is token_type_ids and logit_rows, if the model has them."""
        encoder = self.encoder
        config = encoder.config
        others = list(rest)
        segments = others.pop(0) if config.type_vocab_size else None
        rows = others.pop(0) if "masked_lm" in config.output_heads else None
        states = encoder.hidden_states(input_ids, segments, encoder.make_attention(attention_mask))
        results = encoder.head_outputs(states[-1], attention_mask, input_ids, rows)
        outputs = [states[-1]]
        for head in config.output_heads:
            both_ends = head == "question_answering"
            outputs += results[head].unbind(-1) if both_ends else [results[head]]
        outputs += [results[name] for name in config.list_vectors()]
        outputs += [states[layer] for layer in self.layers]
        if self.pooler_output:
            outputs.append(results["pooler_output"])
        return tuple(outputs)


class QueryEncoder(PortableEncoder):
    """The encoder of queries, beside that of documents."""

    @property
    def encoder(self) -> Encoder:
        """Return the encoder that is written."""
        assert self.model.query is not None
        return self.model.query


def pair_up(flat: tuple[Tensor, ...]) -> list[KeyValue]:
    """Turn key, value, key, value, ... into a list of pairs."""
    return list(zip(flat[::2], flat[1::2], strict=True))
