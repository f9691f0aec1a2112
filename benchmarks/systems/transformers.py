"""transformers on PyTorch, eager, as checkpoints are run where they were trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..alike import digest
from .system import MEAN, Session, System, Tick


class Transformers(System):
    """transformers with its own generate() and default attention (scaled_dot_product_attention)."""

    name = "transformers"
    packages = ("transformers", "torch")

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        # In fp32, whatever its files hold.
        return Generator(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        encoder = AutoModel.from_pretrained(model).eval()

        def states(inputs: Mapping[str, np.ndarray]) -> Any:
            with torch.inference_mode():
                found = encoder(**{name: torch.from_numpy(array) for name, array in inputs.items()})
            return found.last_hidden_state.numpy()

        return Embedder(states, AutoTokenizer.from_pretrained(model), settings["max_length"])

    def translate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import torch
        from transformers import AutoModelForSeq2SeqLM

        torch.set_num_threads(threads)
        return Translator(AutoModelForSeq2SeqLM.from_pretrained(model).eval())


class Ticks:
    """A streamer that only looks at the clock; its first call is for the prompt."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self.started = False

    def put(self, value: Any) -> None:
        if self.started:
            self.tick()
        self.started = True

    def end(self) -> None:
        pass


class Generator:
    """A greedy generator, by the generate() of transformers, which optimum's models inherit."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model.generation_config.eos_token_id = None
        self.rows = 0
        forward = model.forward

        @functools.wraps(forward)  # generate() reads its signature
        def count_rows(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            self.rows = self.rows or outputs.logits.shape[0] * outputs.logits.shape[1]
            return outputs

        model.forward = count_rows

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        import torch

        ids = torch.tensor(work["prompts"])
        self.rows = 0
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=work["new_tokens"],
            eos_token_id=None,
            pad_token_id=0,
            streamer=Ticks(tick),
        )
        return found[:, ids.shape[1] :].tolist()

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompts": work["prompts"],
            "beams": 1,
            "prefill_logit_rows": self.rows,
            "eos": "off",
            "cache": "fp32",
        }


class Translator:
    """A greedy or beam search, by the generate() of transformers, which optimum's models inherit."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        import torch

        ids = torch.tensor(work["prompts"])
        new = work["new_tokens"]
        found = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=work["beams"],
            min_new_tokens=new,
            max_new_tokens=new,
        )
        return found[:, 1:].tolist()

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompts": work["prompts"], "beams": work["beams"], "eos": "off"}


class Embedder:
    """An embedder by mean pooling, as users write it: batches of 32, sorted by length, padded to the longest.

    Args:
        states: from a tokenizer's arrays to the last hidden states, (B, T, E).
        tokenizer: of transformers.
        max_length: longer texts lose their end.
    """

    BATCH = 32

    def __init__(self, states: Callable[[Mapping[str, Any]], Any], tokenizer: Any, max_length: int) -> None:
        self.states = states
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.tokens = 0

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        texts = work["texts"]
        self.tokens = 0
        rows = []
        vectors = []
        for chosen in self.batches(texts):
            inputs = self.tokenizer(
                [texts[i] for i in chosen],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="np",
            )
            mask = inputs["attention_mask"][..., None].astype(np.float32)
            self.tokens += int(mask.sum())
            summed = (self.states(inputs) * mask).sum(1)
            vectors.append(summed / np.linalg.norm(summed, axis=1, keepdims=True))
            rows += chosen
        return np.concatenate(vectors)[np.argsort(rows)]

    def batches(self, texts: Sequence[str]) -> Iterator[list[int]]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), self.BATCH):
            yield order[start : start + self.BATCH]

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {"texts_sha256": digest(work["texts"]), "tokens": self.tokens, **MEAN}


SYSTEM = Transformers()
