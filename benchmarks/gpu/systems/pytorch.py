"""PyTorch on a GPU in fp16: transformers' own loops, eager or compiled with CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...systems.system import Session, System, Tick
from ...systems.transformers import Ticks
from .states import STATES, Rows


class PyTorch(System):
    """PyTorch, with the setting "compiled": whether torch.compile is used, with a static cache.

    For tests: "device", and the compiler's "backend".
    """

    name = "PyTorch"
    packages = ("torch", "transformers")
    classes: Mapping[str, str] = {"fp16": "fp16"}

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        from transformers import AutoModelForCausalLM

        return Generator(load_model(AutoModelForCausalLM, model, settings), loop_options(settings))

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import torch
        from transformers import AutoModel

        encoder = load_model(AutoModel, model, settings)
        run = encoder
        if settings.get("compiled"):
            run = torch.compile(encoder, **compiler_options(settings))
        return Encoder(run, encoder.device)

    def translate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        from transformers import AutoModelForSeq2SeqLM

        return Translator(load_model(AutoModelForSeq2SeqLM, model, settings), loop_options(settings))


def load_model(kind: Any, model: Path, settings: Mapping[str, Any]) -> Any:
    import torch

    return kind.from_pretrained(model, dtype=torch.float16).to(settings.get("device", "cuda")).eval()


def compiler_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of torch.compile: CUDA graphs ("reduce-overhead"); other backends have no modes."""
    return {"backend": settings["backend"]} if "backend" in settings else {"mode": "reduce-overhead"}


def loop_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of generate(), which compiles the decoding step if its cache has fixed slots."""
    if not settings.get("compiled"):
        return {}
    from transformers import CompileConfig

    options = compiler_options(settings)
    config: Any = CompileConfig(**{"mode": None, **options})
    config._compile_all_devices = True  # else on a CPU it would silently not compile
    return {"cache_implementation": "static", "compile_config": config}


class Generator:
    """A greedy generator, in which no token ends a row."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        self.model = model
        self.options = options
        self.rows = 0
        model.generation_config.eos_token_id = None

        def count(module: Any, given: Any, outputs: Any) -> None:
            """Count the first step; then remove the hook, so that it is never compiled."""
            self.rows = outputs.logits.shape[0] * outputs.logits.shape[1]
            hook.remove()

        hook = model.register_forward_hook(count)

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        import torch

        ids = torch.tensor(work["prompts"], device=self.model.device)
        tokens = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=work["new_tokens"],
            eos_token_id=None,
            pad_token_id=0,
            streamer=Ticks(tick),
            **self.options,
        )
        return tokens[:, ids.shape[1] :].tolist()

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompts": work["prompts"],
            "beams": 1,
            "prefill_logit_rows": self.rows,
            "eos": "off",
            "cache": str(self.model.dtype).replace("torch.float", "fp"),
        }


class Translator:
    """A greedy translator that cannot choose the end token."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        self.model = model
        self.options = options

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        import torch

        ids = torch.tensor(work["prompts"], device=self.model.device)
        new = work["new_tokens"]
        tokens = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            min_new_tokens=new,
            max_new_tokens=new,
            streamer=Ticks(tick),
            **self.options,
        )
        return tokens[:, 1:].tolist()

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompts": work["prompts"], "beams": 1, "eos": "off"}


class Encoder:
    """An encoder that runs a module's forward pass, and copies its result to host memory."""

    def __init__(self, run: Any, device: Any) -> None:
        self.forward = run
        self.device = device
        self.rows = Rows()

    def run(self, work: Mapping[str, Any], tick: Tick) -> np.ndarray[Any, Any]:
        import torch

        with torch.inference_mode():
            ids = torch.from_numpy(self.rows.of(work)).to(self.device)
            states = self.forward(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            return states.flatten(1).cpu().numpy()  # type: ignore[no-any-return]

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.rows.describe(), **STATES}


SYSTEM = PyTorch()
