"""CTranslate2: converted and run by its own classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .system import Session, System, Tick

COMPUTE_TYPES = {"fp32": "float32", "int8": "int8_float32"}


class CTranslate2(System):
    """CTranslate2, which reads tokens rather than ids: they are spelled by its own vocabulary."""

    name = "CTranslate2"
    packages = ("ctranslate2",)
    classes: Mapping[str, str] = {"fp32": "fp32", "int8": "8-bit"}

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]

        TransformersConverter(str(checkpoint)).convert(
            str(out), quantization=COMPUTE_TYPES[precision], force=True
        )

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import ctranslate2  # type: ignore[import-not-found]

        wanted = COMPUTE_TYPES[precision]
        generator = ctranslate2.Generator(
            str(model), compute_type=wanted, inter_threads=1, intra_threads=threads
        )
        if generator.compute_type != wanted:  # it takes another one where the processor lacks instructions
            raise RuntimeError(f"computes in {generator.compute_type}, not in {wanted}")
        return Generator(generator, json.loads((model / "vocabulary.json").read_text(encoding="utf-8")))


class Generator:
    """A greedy generator; its least length is its most, so that the end token can't be chosen."""

    def __init__(self, generator: Any, vocabulary: list[str]) -> None:
        self.generator = generator
        self.vocabulary = vocabulary

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        def on_token(step: Any) -> bool:
            if step.batch_id == 0:
                tick()
            return False

        found = self.generator.generate_batch(
            [[self.vocabulary[token] for token in prompt] for prompt in work["prompts"]],
            max_length=work["new_tokens"],
            min_length=work["new_tokens"],
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=on_token,
        )
        return [answer.sequences_ids[0] for answer in found]

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompts": work["prompts"],
            "beams": 1,
            "prefill_logit_rows": len(work["prompts"]),
            "eos": "off",
            "cache": "fp32",
        }


SYSTEM = CTranslate2()
