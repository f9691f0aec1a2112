"""PlanForge on one of the GPU's backends, by its public interface, except for encoders' graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from planforge.runtime import load
from planforge.runtime.apps.diagnostics import doctor
from planforge.runtime.apps.diagnostics.packages import DISTRIBUTIONS, find_package
from planforge.runtime.backends.ort_cuda_backend import OrtCudaProgram
from planforge.runtime.errors import BackendUnavailableError, InputError

from ...systems.planforge import PlanForge, make_on_token
from ...systems.system import Session, Skip, Tick
from .states import STATES, Rows

TARGETS = {"ort-cuda": "cuda", "tensorrt-rtx": "rtx", "tensorrt": "tensorrt"}  # of export, by backend
CACHES = {"float16": "fp16", "float32": "fp32", "int8": "int8"}
CLASSES = {"fp16": "fp16", "fp16-kv8": "fp16", "int8": "8-bit", "int8-kv8": "8-bit", "int4": "4-bit"}


class PlanForgeGpu(PlanForge):
    """PlanForge on a GPU; prepares "backend", "max_batch" and "candidates", if any; runs "backend"."""

    classes: Mapping[str, str] = CLASSES

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        require(settings["backend"])
        target = TARGETS[settings["backend"]]
        export_bundle(checkpoint, out, precision, target, settings["max_batch"])
        if count := settings.get("candidates"):
            from planforge.exporter import build
            from planforge.exporter.tensorrt.build import Options

            build(out, target=target, options=Options(candidates=count))

    def code_stamp(self) -> str:
        """Return a stamp that changes with the library's version, as plans belong to one version."""
        return " ".join([super().code_stamp(), *(str(find_package(module)) for module in DISTRIBUTIONS)])

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return Generator(open_bundle(model, precision, settings))

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return Encoder(open_bundle(model, precision, settings))

    def translate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return Translator(open_bundle(model, precision, settings))


def require(backend: str) -> None:
    """Raise Skip, with the doctor's words, where a backend does not run here."""
    state = next(state for state in doctor.diagnose().backends if state.backend == backend)
    if not state.available:
        raise Skip(f"{state.reason}; {state.remedy}" if state.remedy else state.reason)


def export_bundle(checkpoint: Path, out: Path, precision: str, target: str, max_batch: int) -> None:
    """Export a checkpoint, with weights rounded to the nearest, as the judge rounds them.

    Raises Skip, with the exporter's words, where it refuses the precision.
    """
    from planforge.exporter import export

    options: dict[str, Any] = {"max_batch": max_batch, "verify": False, "force": True, "quantizer": "rtn"}
    try:
        export(checkpoint, out, precision=[precision], target=[target], **options)
    except InputError as error:
        raise Skip(f"{precision} can't be exported: {error}") from error


def open_bundle(model: Path, precision: str, settings: Mapping[str, Any]) -> Any:
    try:
        return load(model, backend=settings["backend"], precision=precision)
    except BackendUnavailableError as error:
        raise Skip(str(error)) from error


def count_captures(*programs: Any) -> dict[str, int]:
    """Return how many CUDA graphs ONNX Runtime has captured of a session's programs; nothing for others."""
    own = [program for program in programs if isinstance(program, OrtCudaProgram)]
    captured = sum(program.graphs.count for program in own if program.captures_steps)
    return {"captured": captured} if own else {}


class Generator:
    """A greedy generator, in which no token ends a row."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def figures(self) -> Mapping[str, int]:
        return count_captures(self.model.decoder.program)

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        answers = self.model.generate(
            work["texts"],
            max_new_tokens=work["new_tokens"],
            ignore_eos=True,
            on_token=make_on_token(tick, len(work["texts"])),
        )
        return [list(answer.token_ids) for answer in answers]

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        artifact = self.model.artifact
        prompts = [self.model.tokenizer.encode(text) for text in work["texts"]]
        asks_for_rows = any(spec.role == "logit_rows" for spec in artifact.inputs)
        cache = next(spec.dtype for spec in artifact.inputs if spec.role.startswith("past."))
        return {
            "prompts": prompts,
            "beams": 1,
            "prefill_logit_rows": len(prompts) if asks_for_rows else sum(map(len, prompts)),
            "eos": "off",
            "cache": CACHES[cache],
        }


class Translator:
    """A greedy translator that cannot choose the end token."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def figures(self) -> Mapping[str, int]:
        return count_captures(self.model.encoder.program, self.model.decoder.program)

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        new = work["new_tokens"]
        translations = self.model.translate(
            work["texts"],
            num_beams=1,
            min_new_tokens=new,
            max_new_tokens=new,
            on_token=make_on_token(tick, len(work["texts"])),
        )
        return [list(translation.token_ids) for translation in translations]

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        model = self.model
        prompts = [[*model.source_tokenizer.encode(text), model.source_eos] for text in work["texts"]]
        return {"prompts": prompts, "beams": 1, "eos": "off"}


class Encoder:
    """An encoder that runs its graph once, as `TextEncoder` calls it for a batch: captured if it can be."""

    def __init__(self, model: Any) -> None:
        self.encoder = model.encoder
        self.rows = Rows()
        self.step: Any = None  # bound at the first work
        self.states = next(s.name for s in model.artifact.outputs if s.name == "last_hidden_state")

    def figures(self) -> Mapping[str, int]:
        return count_captures(self.encoder.program)

    def run(self, work: Mapping[str, Any], tick: Tick) -> np.ndarray[Any, Any]:
        ids = self.rows.of(work)
        values = {"ids": ids, "mask": np.ones_like(ids), "segments": np.zeros_like(ids)}
        inputs = {name: values[role] for role, name in self.encoder.inputs.items()}
        if self.step is None:
            fixed = self.encoder.find_captured_shape(*ids.shape) == ids.shape
            self.step = self.encoder.program.bind({}, [self.states], fixed=fixed)
        states: np.ndarray[Any, Any] = self.step(inputs)[self.states]
        return states.reshape(len(ids), -1)

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.rows.describe(), **STATES}


SYSTEM = PlanForgeGpu()
