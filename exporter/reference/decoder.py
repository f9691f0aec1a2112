"""A decoder's reference outputs in PyTorch, which every engine is compared with.

T tokens of one prompt and its continuation, N rows, V vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...models import GPT2, GrowingCache, KeyValue
from ...models.attention import empty_past
from ...runtime.decoding.decoder import pad
from ...runtime.diagnostics.metrics import Logits, measure
from ..limits import Gaps
from .decoder_samples import Expectation
from .passages import measure_text
from .rounding import RoundedCache, Rounding


def reference_of(model: Any, rounding: Rounding | None = None) -> Reference:
    """Return the reference for our own GPT-2, for transformers' model, or for optimum's graph.

    Args:
        rounding: what a precision does to keys and values; `Rounding.applied` rounds the rest.
    """
    if isinstance(model, GPT2):
        return Reference(model, rounding)
    from .onnx_reference import OnnxDecoder, OnnxGraphs

    if isinstance(model, OnnxGraphs):
        return OnnxDecoder(model)
    return HubReference(model)


class Reference:
    """The model in PyTorch, in fp32.

    Args:
        model: the model.
        rounding: how to round keys and values; None keeps them as they are.
    """

    def __init__(self, model: GPT2, rounding: Rounding | None = None) -> None:
        self.model: Any = model
        self.config: Any = model.config
        self.cache: Callable[..., GrowingCache] = GrowingCache
        if rounding is not None and rounding.cache_scales:
            self.cache = partial(RoundedCache, rounding.cache_scales)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], rows: slice | list[int]) -> Logits:
        """Return the logits (N, V) of `rows` of one sequence, computed at once and without a past."""
        ids = torch.tensor([list(tokens)])
        config = self.config
        past = empty_past(config.n_layer, 1, config.n_head, config.head_size, self.model.wte.weight)
        x = self.model.hidden_states(ids, self.cache(past, torch.ones_like(ids)))
        logits: Logits = self.model.lm_head(x[0, rows]).numpy()
        return logits

    @torch.no_grad()
    def compute_keys_values(self, tokens: Sequence[int]) -> list[KeyValue]:
        """Return each layer's keys and values (1, H, T, D) of one sequence."""
        return self.model(torch.tensor([list(tokens)]))[1]  # type: ignore[no-any-return]

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        """Return the likeliest continuation of each prompt, token by token through the cache."""
        padded, valid = pad(prompts, "left")
        ids = torch.from_numpy(padded)
        mask = torch.from_numpy(valid).long()
        past = None
        tokens = []
        for _ in range(steps):
            logits, past = self.model(ids, past, mask)
            ids = logits[:, -1].argmax(-1, keepdim=True)  # (B, 1)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            tokens.append(ids)
        return torch.cat(tokens, dim=1).tolist()

    def gaps(self, expected: Expectation, rounding: Rounding) -> Gaps:
        """Compare the rounded model with itself unrounded.

        For fp16, rounding the weights alone is not enough: a checkpoint in fp16 would allow no difference.
        A case has some of the samples, or the context: the mean KL is that of the worst of them.
        """
        rounded = type(self)(self.model, rounding)
        samples = expected.samples
        passages = expected.passages
        last = expected.context_logits
        with rounding.apply(self.model):
            got = []
            for s in samples:
                logits = rounded.logits([*s.prompt, *s.continuation[:-1]], slice(len(s.prompt) - 1, None))
                got.append(logits[list(s.steps)])
            got.append(rounded.logits(expected.context, slice(-len(last), None)))
            texts = (rounded.logits(passage.tokens[:-1], slice(None)) for passage in passages)
            text: Gaps = {"text": measure_text(texts, passages)} if passages else {}
        want = [*(s.logits for s in samples), last]
        worst = max(measure(a, b).mean_kl for a, b in zip(got, want, strict=True))
        return {"": replace(measure(np.concatenate(got), np.concatenate(want)), mean_kl=worst), **text}


class HubReference(Reference):
    """A decoder of transformers."""

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], rows: slice | list[int]) -> Logits:
        ids = torch.tensor([list(tokens)])
        wanted = torch.arange(len(tokens))[rows]
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            kept = self.model(ids, use_cache=False, logits_to_keep=wanted).logits[0]
        else:  # those of a whole context may take gigabytes
            kept = self.model(ids, use_cache=False).logits[0, wanted]
        found: Logits = kept.numpy()
        return found

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        return [self.continuation(prompt, steps) for prompt in prompts]

    def continuation(self, prompt: Sequence[int], steps: int) -> list[int]:
        """Return one prompt's continuation, through the model's own cache."""
        ids = torch.tensor([list(prompt)])
        past = None
        tokens = []
        for _ in range(steps):
            out = self.model(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values  # (1, 1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
        return tokens
