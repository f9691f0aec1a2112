"""ONNX Runtime on CUDA as in most scripts: `session.run`, numpy arrays in and out, the cache included.

B batch, P past tokens, T tokens of a step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact, TensorSpec

from ...systems.planforge import PlanForge
from ...systems.system import Session, Skip, Tick
from .planforge import CACHES, export_bundle, require
from .states import STATES, Rows

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


class Copies(PlanForge):
    """A system of PlanForge's `portable` graph; prepares "max_batch", and in tests a session's "provider"."""

    name = "onnxruntime-cuda"
    classes: Mapping[str, str] = {"fp16": "fp16"}

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        require("ort-cuda")
        export_bundle(checkpoint, out, precision, "portable", settings["max_batch"])

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return Generator(Graphs(Bundle.open(model), precision, settings.get("provider", CUDA)))

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return Encoder(Graphs(Bundle.open(model), precision, settings.get("provider", CUDA)))

    def translate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        return Translator(Graphs(Bundle.open(model), precision, settings.get("provider", CUDA)))


def preload_libraries() -> None:
    """Load CUDA's libraries out of pip's packages, where ONNX Runtime does not look by itself."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()


class Graphs:
    """A bundle's `portable` graphs of one precision in sessions of ONNX Runtime."""

    def __init__(self, bundle: Bundle, precision: str, provider: str) -> None:
        import onnxruntime

        if provider == CUDA:
            preload_libraries()
        self.manifest = bundle.manifest
        self.artifacts: dict[str, Artifact] = {
            artifact.graph: artifact
            for artifact in bundle.manifest.artifacts
            if (artifact.dialect, artifact.precision) == ("portable", precision)
        }
        self.sessions = {}
        for graph, artifact in self.artifacts.items():
            path = bundle.path(artifact.file)
            session = onnxruntime.InferenceSession(path, providers=list(dict.fromkeys((provider, CPU))))
            if session.get_providers()[0] != provider:  # it falls back without an error
                raise Skip(f"ONNX Runtime could not make its {provider}; its log says why")
            self.sessions[graph] = session

    def run(self, graph: str, values: Mapping[str, Any], roles: Sequence[str]) -> list[Any]:
        """Run a graph once, and return outputs by their roles, from inputs by theirs."""
        artifact = self.artifacts[graph]
        feeds = {spec.name: values[spec.role].astype(spec.dtype, copy=False) for spec in artifact.inputs}
        names = [artifact.output(role).name for role in roles]
        return self.sessions[graph].run(names, feeds)  # type: ignore[no-any-return]


class Greedy:
    """A greedy decoder whose cache goes out and in again with every step."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        decoder = graphs.artifacts["decoder"]
        self.past = [spec for spec in decoder.inputs if spec.role.startswith("past.")]

    def empty(self, spec: TensorSpec, B: int) -> npt.NDArray[Any]:
        """Return an empty cache."""
        lengths = {"batch": B, "past": 0}
        return np.zeros(
            [axis if isinstance(axis, int) else lengths[axis] for axis in spec.axis_names()], spec.dtype
        )

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        new: int,
        seen: Mapping[str, Any],
        banned: Sequence[int],
        tick: Tick,
    ) -> list[list[int]]:
        """Return the new tokens of each row.

        Args:
            prompts: of one length.
            new: how many.
            seen: of a translation, what every step sees of the source, by role.
            banned: tokens that are never chosen.
            tick: called when a token of every row is known.
        """
        ids = np.asarray(prompts, np.int64)
        B = len(ids)
        present = [spec.role.replace("past.", "present.") for spec in self.past]
        cache = [self.empty(spec, B) for spec in self.past]
        columns: list[npt.NDArray[np.int64]] = []
        P = 0
        for _ in range(new):
            T = ids.shape[1]
            values = {
                **seen,
                **{spec.role: array for spec, array in zip(self.past, cache, strict=True)},
                "ids": ids,
                "mask": np.ones((B, P + T), np.int64),
                "positions": np.broadcast_to(np.arange(P, P + T), (B, T)),
                "logit_rows": np.arange(B) * T + T - 1,
            }
            logits, *cache = self.graphs.run("decoder", values, ["logits", *present])
            if banned:
                logits[:, list(banned)] = -np.inf
            ids = logits.argmax(-1)[:, None]
            columns.append(ids)
            P += T
            tick()
        return np.concatenate(columns, 1).tolist()  # type: ignore[no-any-return]


class Generator:
    """A greedy generator, in which no token ends a row."""

    def __init__(self, graphs: Graphs) -> None:
        self.loop = Greedy(graphs)

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        return self.loop.tokens(work["prompts"], work["new_tokens"], {}, (), tick)

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompts": work["prompts"],
            "beams": 1,
            "prefill_logit_rows": len(work["prompts"]),
            "eos": "off",
            "cache": CACHES[self.loop.past[0].dtype],
        }


class Translator:
    """A greedy translator that cannot choose the end token."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.loop = Greedy(graphs)
        defaults = graphs.manifest.generation
        assert defaults is not None and defaults.decoder_start is not None
        self.start = defaults.decoder_start
        self.banned = (*defaults.eos, *defaults.suppressed)
        encoder = graphs.artifacts["encoder"]
        self.cross = [spec.role for spec in encoder.outputs]

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        ids = np.asarray(work["prompts"], np.int64)
        mask = np.ones_like(ids)
        cross = self.graphs.run("encoder", {"ids": ids, "mask": mask}, self.cross)
        seen = {"source_mask": mask, **dict(zip(self.cross, cross, strict=True))}
        starts = [[self.start]] * len(ids)
        return self.loop.tokens(starts, work["new_tokens"], seen, self.banned, tick)

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompts": work["prompts"], "beams": 1, "eos": "off"}


class Encoder:
    """An encoder that runs its graph once."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.rows = Rows()
        outputs = graphs.artifacts["encoder"].outputs
        self.states = next(spec.role for spec in outputs if spec.name == "last_hidden_state")

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        ids = self.rows.of(work)
        values = {"ids": ids, "mask": np.ones_like(ids), "segments": np.zeros_like(ids)}
        (states,) = self.graphs.run("encoder", values, [self.states])
        return states.reshape(len(ids), -1)

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.rows.describe(), **STATES}


SYSTEM = Copies()
