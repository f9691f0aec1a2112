"""onnxruntime-genai: built by its own model builder, run by its own generator, which is given token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .system import Session, System, Tick


class OnnxruntimeGenai(System):
    """onnxruntime-genai, whose quantized weights have its defaults: symmetric, blocks of 32, int8 inputs."""

    name = "onnxruntime-genai"
    packages: tuple[str, ...] = ("onnxruntime-genai", "onnxruntime", "transformers", "torch")
    classes: Mapping[str, str] = {"fp32": "fp32", "int8": "8-bit", "int4": "4-bit"}

    def gathered_tables(self, precision: str) -> int:
        return 1 if precision == "int8" else 0  # it shares a table of fp32 and of int4 only

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        from onnxruntime_genai.models.builder import create_model, parse_extra_options

        cache = str(out / "cache")
        # Only the last token's logits of a prompt, as the other systems compute them.
        options = ["prune_lm_head=true", "hf_token=false"]
        options = parse_extra_options("", str(checkpoint), str(out), precision, "cpu", cache, options)
        create_model("", str(checkpoint), str(out), precision, "cpu", cache, **options)

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(model))
        session_options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session_options}}}))
        return Generator(onnxruntime_genai.Model(config))


class Generator:
    """A greedy generator; its least length is its most, so that the end token can't be chosen."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        import onnxruntime_genai

        prompts = np.array(work["prompts"], np.int32)
        length = prompts.shape[1] + work["new_tokens"]
        params = onnxruntime_genai.GeneratorParams(self.model)
        params.set_search_options(
            batch_size=len(prompts), min_length=length, max_length=length, do_sample=False
        )
        generator = onnxruntime_genai.Generator(self.model, params)
        generator.append_tokens(prompts)
        found = []
        for _ in range(work["new_tokens"]):
            generator.generate_next_token()
            found.append(generator.get_next_tokens())
            tick()
        return np.stack(found, axis=1).tolist()

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompts": work["prompts"],
            "beams": 1,
            "prefill_logit_rows": len(work["prompts"]),
            "eos": "off",
            "cache": "fp32",
        }


SYSTEM = OnnxruntimeGenai()
