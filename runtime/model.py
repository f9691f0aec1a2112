"""The base of all models: how they are opened, printed and closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from .backends.backend import Backend
from .backends.ladder import open_on
from .backends.threads import Threads
from .bundle.bundle import Bundle
from .errors import InputError, ManifestError
from .opening import LoadRequest

if TYPE_CHECKING:
    from .bundle.manifest import Artifact

C = TypeVar("C", bound="Model")


CLASS_NAMES = {  # by the task that a bundle is for
    "text-generation": "TextGenerator",
    "text-encoding": "TextEncoder",
    "translation": "Translator",
}


class Model(ABC):
    """Base of the models. Each has a close(), for a with statement.

    Attributes:
        backend: the engine that runs it, such as "ort-cpu"; set by `load`.
        family: the model's family, such as "gpt2"; set by `load`.
        threads: how many the engine uses; None on a GPU.
    """

    _TASK: ClassVar[str]  # of the bundles that the class runs

    backend: str = ""
    family: str = ""
    threads: int | None = None

    @classmethod
    def load(
        cls: type[C],
        bundle: str | Path,
        *,
        backend: str = "auto",
        precision: str | None = None,
        threads: int | None = None,
        max_length: int | None = None,
        memory_limit: int | None = None,
        verify: bool = False,
        device: int = 0,
    ) -> C:
        """Open a bundle of this class.

        Args:
            bundle: the folder that `planforge export` wrote.
            backend: "tensorrt-rtx", "tensorrt", "ort-cuda", "ort-cpu" or "auto"; this argument and the
                following are those of `planforge.runtime.load`.
            precision: of the graph to run.
            threads: cores to use.
            max_length: context in tokens.
            memory_limit: bytes for weights, and the caches, or batches and outputs that are read ahead, of
                all calls that run at one time; see `planforge.runtime.load`.
            verify: compare the hash of files above 256 MiB too.
            device: the GPU's number.

        Raises:
            InputError: an argument out of range, or the bundle is for another class; names that one.
            PlanForgeError: what else `planforge.runtime.load` raises.
        """
        request = LoadRequest(
            backend=backend,
            precision=precision,
            threads=threads,
            max_length=max_length,
            memory_limit=memory_limit,
            verify=verify,
            device=device,
        )
        opened = Bundle.open(bundle)
        cls._check_task(opened)
        return cls._load(opened, request)

    @classmethod
    def _check_task(cls, bundle: Bundle) -> None:
        """Refuse a bundle that another class runs, and name that one."""
        task = bundle.manifest.task
        if task not in CLASS_NAMES:
            raise ManifestError(f"{bundle.folder} is for {task!r}, which this version does not run")
        if task != cls._TASK:
            raise InputError(
                f"{bundle.folder} is a bundle for {task}, which {cls.__name__} does not do; open it with"
                f" {CLASS_NAMES[task]}.load, or with load()"
            )

    @classmethod
    def _load(cls: type[C], bundle: Bundle, request: LoadRequest) -> C:
        """Open a bundle of this class on the engine that was asked for, or on the best that works here."""
        request.check(bundle.manifest)
        engine, model = open_on(
            request.backend,
            bundle,
            lambda engine: cls._open(bundle, engine, request),
            request.precision,
            request.threads,
            request.verify,
            request.device,
            request.max_length,
        )
        model.backend = engine.name
        model.family = bundle.manifest.family
        threads = getattr(engine, "threads", None)  # engines on a GPU have none
        model.threads = threads.count if isinstance(threads, Threads) else None
        return model

    @classmethod
    @abstractmethod
    def _open(cls: type[C], bundle: Bundle, engine: Backend, request: LoadRequest) -> C:
        """Open a bundle of this class on one engine."""

    @property
    @abstractmethod
    def artifact(self) -> Artifact:
        """The graph that runs; of several, the decoder's."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine."""

    def __repr__(self) -> str:
        parts = [self.family, self.artifact.id, self.backend]
        if self.threads is not None:
            parts.append(f"{self.threads} thread{'' if self.threads == 1 else 's'}")
        return f"{type(self).__name__}({', '.join(part for part in parts if part)})"

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
