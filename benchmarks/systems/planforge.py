"""PlanForge itself: exported without the comparison with PyTorch, run through its public interface.

A model that optimum exported is imported with it: only what is verified gets the fast path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..alike import digest
from ..engine_clock import EngineClock
from .system import MEAN, Session, Skip, System, Tick

MAX_BATCH = 32
OPENVINO = ("bf16", "w8a8")  # precisions that run in it
ROOT = Path(__file__).resolve().parents[2]


class PlanForge(System):
    """PlanForge; prepares "source", which `export` gets instead of the checkpoint's folder, and "verify".

    "graphs" is a folder that optimum wrote, to import.
    """

    name = "PlanForge"
    packages = ("planforge",)
    classes: Mapping[str, str] = {
        "fp32": "fp32",
        "bf16": "16-bit",
        "int8": "8-bit",
        "w8a8": "8-bit",
        "int4": "4-bit",
        "fp32-kv8": "fp32",
        "int8-kv8": "8-bit",
        "int4-kv8": "4-bit",
    }

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        from planforge.exporter import export
        from planforge.exporter.exporting import import_folder
        from planforge.runtime.errors import InputError

        if graphs := settings.get("graphs"):
            import_folder(graphs, out, source=checkpoint, precision=[precision], target=["cpu"], force=True)
            return
        try:
            export(
                settings.get("source", checkpoint),
                out,
                precision=[precision],
                target=["openvino" if precision in OPENVINO else "cpu"],
                max_batch=MAX_BATCH,
                verify=settings.get("verify", False),
                force=True,
            )
        except InputError as error:  # this version or processor does not have the precision
            raise Skip(f"{precision} can't be exported: {error}") from error

    def code_stamp(self) -> str:
        files = sorted(path for name in ("exporter", "models") for path in (ROOT / name).rglob("*.py"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return make_generator(
            settings, open_bundle(model, precision, threads, settings.get("prepared", False))
        )

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return Embedder(open_bundle(model, precision, threads))

    def translate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return Translator(open_bundle(model, precision, threads))


def open_bundle(model: Path, precision: str, threads: int, prepared: bool = False) -> Any:
    """Open a bundle; with `prepared` the first process prepares it, in a folder next to it."""
    from planforge.runtime import load

    if prepared:
        os.environ["PLANFORGE_CACHE"] = str(model.with_name("planforge-cache"))
    return load(model, precision=precision, threads=threads, prepared=prepared)


def make_generator(settings: Mapping[str, Any], model: Any) -> Generator:
    """Return a session; with the setting "engine_clock" it measures a token's time outside of the engine."""
    clock = EngineClock(model.decoder.program) if settings.get("engine_clock") else None
    return Generator(model, clock)


class Generator:
    """A greedy generator, in which no end token ends a row."""

    def __init__(self, model: Any, clock: EngineClock | None = None) -> None:
        self.model = model
        self.clock = clock

    def figures(self) -> Mapping[str, float]:
        return {} if self.clock is None else self.clock.find_medians()

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        texts: Sequence[str] = work["texts"]
        on_token = None  # costs time of its own
        if self.clock is None:
            on_token = make_on_token(tick, len(texts))
        else:
            self.clock.start()
        options = dict(work["options"])
        if work["dictated"]:
            options["logits_processor"] = self.dictation(texts[0], work["dictated"])
        self.answers = self.model.generate(
            list(texts),
            max_new_tokens=work["new_tokens"],
            ignore_eos=True,
            on_token=on_token,
            **options,
        )
        return [list(answer.token_ids) for answer in self.answers]

    def dictation(self, prompt: str, answer: str) -> Dictation:
        """Return the logits processor that makes a text follow a prompt."""
        tokens = self.model.tokenizer.encode(answer)
        return Dictation(len(self.model.tokenizer.encode(prompt)), tokens)

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        prompts = [self.model.tokenizer.encode(text) for text in work["texts"]]
        artifact = self.model.artifact
        last_row_only = any(spec.role == "logit_rows" for spec in artifact.inputs)
        return {
            "prompts": prompts,
            "beams": 1,
            "prefill_logit_rows": len(prompts) if last_row_only else sum(map(len, prompts)),
            "eos": "off",
            "cache": "int8" if artifact.precision.endswith("-kv8") else "fp32",
        }


def make_on_token(tick: Tick, rows: int) -> Callable[[Any], None]:
    """Return an `on_token` that calls `tick` whenever the next token of each of so many rows is known."""
    known = 0

    def note(chunk: Any) -> None:
        nonlocal known
        for _ in chunk.token_ids:
            known += 1
            if known % rows == 0:
                tick()

    return note


class Dictation:
    """A logits processor that makes the tokens of an answer the likeliest, one after the other.

    The model computes all that it would; behind the answer's end it chooses for itself.

    Args:
        prompt_tokens: how many tokens come before the answer.
        answer: its tokens.
    """

    def __init__(self, prompt_tokens: int, answer: Sequence[int]) -> None:
        self.prompt_tokens = prompt_tokens
        self.answer = answer

    def __call__(self, token_ids: Sequence[int], logits: Any) -> Any:
        place = len(token_ids) - self.prompt_tokens
        if place < len(self.answer):
            logits[self.answer[place]] = logits.max() + 1
        return logits


class Embedder:
    """An embedder by the mean of the last hidden states, normalized."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        return self.model.embed(work["texts"], pooling="mean", normalize=True)

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        most = self.model.defaults.max_length
        counts = [min(self.model.count_tokens(text), most) for text in work["texts"]]
        return {"texts_sha256": digest(work["texts"]), "tokens": sum(counts), **MEAN}


class Translator:
    """A beam search in which the end token can't be chosen."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        new = work["new_tokens"]
        found = self.model.translate(
            work["texts"], num_beams=work["beams"], min_new_tokens=new, max_new_tokens=new
        )
        return [list(translation.token_ids) for translation in found]

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        end = self.model.source_eos
        prompts = [[*self.model.source_tokenizer.encode(text), end] for text in work["texts"]]
        return {"prompts": prompts, "beams": work["beams"], "eos": "off"}


SYSTEM = PlanForge()
