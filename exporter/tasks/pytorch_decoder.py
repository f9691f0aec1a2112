"""Computes a decoder's reference outputs: by our model, transformers', or the graphs that optimum wrote.

T tokens of one prompt and its continuation, N rows, V vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...models import DynamicCache, KeyValue
from ...models.language_model import LanguageModel
from ...runtime.apps.check.metrics import Logits
from ...runtime.decoding.decoder import pad
from ..reference_model import OnnxGraphs
from .piecewise import PiecewiseCache
from .random_cases import CONTEXT_ROWS
from .rounding import RoundedCache, Rounding

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

LONG_CONTEXT = 2048  # tokens; of longer ones a part is read
READ_TOKENS = 512
PIECE_BYTES = 128 * 2**20  # of logits that are computed at once


class Reference:
    """The model in PyTorch, in fp32; of a rounding only keys and values are rounded here."""

    repeats = True  # whether keys and values of what is read can fill a longer context

    def __init__(self, model: Any, rounding: Rounding | None = None) -> None:
        self.model = model
        self.cache: Callable[..., DynamicCache] = PiecewiseCache
        if rounding is not None and rounding.cache_scales:
            self.cache = partial(RoundedCache, rounding.cache_scales)

    def use(self, adapters: Sequence[int]) -> AbstractContextManager[None]:
        """Let the rows of a batch be read by these adapters inside the context; 0 is none."""
        choice = getattr(self.model, "adapters", None)
        return nullcontext() if choice is None else choice.use(adapters)

    @torch.no_grad()
    def compute_logits(self, tokens: Sequence[int], rows: slice | list[int]) -> Logits:
        """Return the logits (N, V) of `rows` of one sequence, computed at once and without a past."""
        ids = torch.tensor([list(tokens)])
        x = self.model.hidden_states(ids, self.cache(self.model.empty_past(1), torch.ones_like(ids)))
        logits: Logits = self.model.logits(x[0, rows]).numpy()
        return logits

    def compute_columns(self, tokens: Sequence[int], columns: Sequence[int]) -> Logits:
        """Return the logits (T, K) of K tokens behind each token of a sequence."""
        with keep_columns(self.model.lm_head, columns):
            return self.compute_logits(tokens, slice(None))

    @torch.no_grad()
    def compute_keys_values(self, tokens: Sequence[int]) -> list[KeyValue]:
        """Return each layer's keys and values (1, H, T, D) of one sequence."""
        ids = torch.tensor([list(tokens)])
        cache = self.cache(self.model.empty_past(1), torch.ones_like(ids))
        self.model.hidden_states(ids, cache)
        return cache.present

    def count_read(self, context: int) -> int:
        """Return about how many tokens of a context are read, whose keys and values are then repeated.

        Reading all of a long one would take longer than all else. What a window sees is read whole.
        """
        if context <= LONG_CONTEXT:
            return context
        windows = [window for window in self.model.config.windows if window is not None]
        return max(READ_TOKENS, max(windows, default=0) + CONTEXT_ROWS)

    @torch.no_grad()
    def continue_repeated(
        self, pairs: Sequence[KeyValue], repeats: int, tail: Sequence[int], rows: int
    ) -> Logits:
        """Return the logits (N, V) of the last rows of tokens behind repeated keys and values."""
        times = (1, 1, repeats, 1)
        past = [(keys.repeat(times), values.repeat(times)) for keys, values in pairs]
        ids = torch.tensor([list(tail)])
        mask = torch.ones(1, past[0][0].shape[2] + len(tail), dtype=torch.long)
        x = self.model.hidden_states(ids, self.cache(past, mask))
        logits: Logits = self.model.logits(x[0, -rows:]).numpy()
        return logits

    def compute_repeated(
        self, text: Sequence[int], places: Iterable[tuple[int, int]], tail: int, columns: Sequence[int]
    ) -> dict[tuple[int, int], Logits]:
        """Return the logits (T, K) of K tokens behind each of a text's next T tokens.

        Args:
            text: what is read.
            places: the length of a beginning, and how often its keys and values are there.
            tail: how many tokens follow the beginning.
            columns: the K tokens.
        """
        places = list(places)
        if not places:
            return {}
        pairs = self.compute_keys_values(text[: max(length for length, _ in places)])
        found = {}
        with keep_columns(self.model.lm_head, columns):
            for length, repeats in places:
                known = [(keys[:, :, :length], values[:, :, :length]) for keys, values in pairs]
                found[length, repeats] = self.continue_repeated(
                    known, repeats, text[length : length + tail], tail
                )
        return found

    @torch.no_grad()
    def continue_greedily(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        """Return the likeliest continuation of each prompt, token by token through the cache."""
        padded, valid = pad(prompts, "left")
        ids = torch.from_numpy(padded)
        mask = torch.from_numpy(valid).long()
        past = self.model.empty_past(len(prompts))
        tokens = []
        for _ in range(steps):
            cache = PiecewiseCache(past, mask)
            x = self.model.hidden_states(ids, cache)
            past = cache.present
            ids = self.model.logits(x[:, -1]).argmax(-1, keepdim=True)  # (B, 1)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            tokens.append(ids)
        return torch.cat(tokens, dim=1).tolist()


class WholeReference(Reference):
    """A decoder whose keys and values cannot be given or read; sequences are read whole."""

    repeats = False

    def count_read(self, context: int) -> int:
        return context

    def compute_columns(self, tokens: Sequence[int], columns: Sequence[int]) -> Logits:
        """Return the same as `Reference`, in bounded memory: nothing else sees the head's results."""
        found: list[Logits] = []
        done = 0
        rows = 1  # until the size of the vocabulary is known
        while done < len(tokens):
            logits = self.compute_logits(tokens[: done + rows], slice(done, None))
            found.append(logits[:, list(columns)])
            done += len(logits)
            rows = max(1, PIECE_BYTES // logits[0].nbytes)
        return np.concatenate(found)


class HubReference(WholeReference):
    """A decoder of transformers."""

    @torch.no_grad()
    def compute_logits(self, tokens: Sequence[int], rows: slice | list[int]) -> Logits:
        ids = torch.tensor([list(tokens)])
        wanted = torch.arange(len(tokens))[rows]
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            kept = self.model(ids, use_cache=False, logits_to_keep=wanted).logits[0]
        else:  # those of a whole context may take gigabytes
            kept = self.model(ids, use_cache=False).logits[0, wanted]
        found: Logits = kept.numpy()
        return found

    @torch.no_grad()
    def continue_greedily(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        continued: list[list[int]] = [[] for _ in prompts]
        for prompt, tokens in zip(prompts, continued, strict=True):
            ids = torch.tensor([list(prompt)])
            past = None
            for _ in range(steps):
                out = self.model(ids, past_key_values=past, use_cache=True)
                past = out.past_key_values
                ids = out.logits[:, -1].argmax(-1, keepdim=True)  # (1, 1)
                tokens.append(int(ids))
        return continued


class OnnxDecoder(WholeReference):
    """A decoder's graph; sequences are computed at once and without a past."""

    def compute_logits(self, tokens: Sequence[int], rows: slice | list[int]) -> Logits:
        found: Logits = self.model.run({"input_ids": np.array([list(tokens)])})["logits"][0, rows]
        return found

    def continue_greedily(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        rows = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(steps):
                tokens.append(int(self.compute_logits(tokens, [-1]).argmax()))
            rows.append(tokens[len(prompt) :])
        return rows


def open_reference(model: ReferenceModel, rounding: Rounding | None = None) -> Reference:
    """Return the reference that answers for a decoder; a rounding applies to keys and values alone."""
    if isinstance(model, LanguageModel):
        return Reference(model, rounding)
    return OnnxDecoder(model) if isinstance(model, OnnxGraphs) else HubReference(model)


@contextmanager
def keep_columns(head: nn.Linear, columns: Sequence[int]) -> Iterator[None]:
    """Let a model's head compute the logits of these tokens alone, with its hooks in place."""
    whole = head.weight
    head.weight = nn.Parameter(whole[list(columns)], requires_grad=False)
    try:
        yield
    finally:
        head.weight = whole
