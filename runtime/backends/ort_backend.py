"""Runs graphs on ONNX Runtime's CPU."""

from __future__ import annotations

from typing import Literal

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact
from .dialects import CPU_DIALECTS, choose_artifact
from .ort_prepared import open_prepared
from .ort_program import OrtProgram, import_onnxruntime, list_disabled
from .requirements import check_version, warn_if_slow
from .threads import choose_threads


class OrtCpuBackend:
    """Opens any ONNX graph of a bundle on the CPU.

    Args:
        threads: see `LoadOptions`, as for the others.
        verify: compare hashes of large files too.
        prepared: use what was prepared of a graph ("auto"), prepare it where it was not (True), or neither.
        spinning: threads that wait within a run spin, which takes CPU time; else they sleep. Those of a
            prepared graph always spin.
    """

    name = "ort-cpu"
    widens_half = True  # ONNX Runtime has no products in fp16 on a CPU
    openings = 2  # each by one thread, which takes seconds for large ones

    def __init__(
        self,
        threads: int | None = None,
        verify: bool = False,
        prepared: bool | Literal["auto"] = False,
        spinning: bool = True,
    ) -> None:
        import_onnxruntime()
        self.spinning = spinning
        self.threads = choose_threads(threads)
        self.verify = verify
        self.prepared = prepared
        self.uses_prepared = False

    def __str__(self) -> str:
        return f"{self.threads}; its weights were prepared" if self.uses_prepared else str(self.threads)

    def artifact(self, bundle: Bundle, graph: str, precision: str | None) -> Artifact:
        return choose_artifact(bundle, graph, precision, CPU_DIALECTS)

    def open(self, bundle: Bundle, artifact: Artifact) -> OrtProgram:
        check_version(artifact, import_onnxruntime().__version__)
        warn_if_slow(artifact)
        if self.prepared:
            make = self.prepared is True
            program = open_prepared(bundle, artifact, self.threads.count, verify=self.verify, make=make)
            if program is not None:
                self.uses_prepared = True
                return program
        path = bundle.path(artifact.file, verify=self.verify)
        with bundle.check_meanwhile(artifact.data, verify=self.verify):
            return OrtProgram(
                path,
                self.threads.count,
                disabled=list_disabled(artifact),
                spinning=self.spinning,
                may_saturate=artifact.may_saturate,
            )
