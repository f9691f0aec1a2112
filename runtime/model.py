"""The base of all models: how they are opened, printed and closed."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from .backends.backend import Backend, GraphRunner, LoadRequest
from .backends.select import open_on
from .backends.threads import Threads
from .bundle.bundle import Bundle
from .errors import InputError
from .opening import check_load_request, make_load_request
from .tasks import find_class, find_task

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .backends.placement import Placement
    from .bundle.manifest import Artifact
    from .memory_budget import MemoryBudget
    from .options import LoadOptions
    from .text.tokenizer import Tokenizer

C = TypeVar("C", bound="Model")
log = logging.getLogger("planforge")


class Model(ABC):
    """Base of the models. Each has a close(), for a with statement.

    Attributes:
        backend: the engine that runs it, such as "ort-cpu"; set by `load`.
        file: of the bundle, that the engine runs: the graph of `artifact`, or a plan of it; set by `load`.
        family: the model's family, such as "gpt2"; set by `load`.
        threads: how many the engine uses; None on a GPU.
        prepared: whether its weights are those that `planforge prepare` has kept.
        placements: where the nodes of each graph run, by its id; of ONNX Runtime on a GPU alone.
        bundle: what it was opened from; set by `load`.
        max_length: the most tokens that it reads, or reads and writes.
    """

    task: ClassVar[str]  # of the bundles that the class runs
    _MIN_BYTES = 65_536  # of a text that are always read: a few tokens may stand for very long words

    backend: str = ""
    file: str = ""
    family: str = ""
    threads: int | None = None
    prepared: bool = False
    placements: Mapping[str, Placement] = MappingProxyType({})
    bundle: Bundle
    max_length: int
    _is_closed = False

    @classmethod
    def load(cls: type[C], bundle: str | Path, **options: Unpack[LoadOptions]) -> C:
        """Open a bundle of this class.

        Args:
            bundle: the folder that `planforge export` wrote.
            **options: see `LoadOptions`.

        Raises:
            InputError: no such option, one out of range, or the bundle is for another class; names that one.
            PlanForgeError: what else `planforge.runtime.load` raises.
        """
        request = make_load_request(options)
        opened = Bundle.open(bundle)
        name = find_task(opened).class_name
        task = opened.manifest.task
        kind = cls if task == cls.task else find_class(opened)
        if not issubclass(kind, cls):
            raise InputError(
                f"{opened.folder} is a bundle for {task}, which {cls.__name__} does not support; open it with"
                f" {name}.load, or with load()"
            )
        return kind._load(opened, request)

    @classmethod
    def _load(cls: type[C], bundle: Bundle, request: LoadRequest) -> C:
        """Open a bundle of this class on the engine that was asked for, or on the best that works here."""
        check_load_request(request, bundle.manifest)
        engine, model = open_on(bundle, request, lambda engine: cls._open(bundle, engine, request))
        if engine.name == "ort-cpu" and model.artifact.precision == "bf16":
            log.warning("%s is computed in fp32: ONNX Runtime multiplies no bf16 on a CPU", model.artifact.id)
        model.backend = engine.name
        model.family = bundle.manifest.family
        plan = getattr(engine, "plans", {}).get(model.artifact.graph)
        model.file = model.artifact.file if plan is None else plan.file
        threads = getattr(engine, "threads", None)  # engines on a GPU have none
        model.threads = threads.count if isinstance(threads, Threads) else None
        model.prepared = getattr(engine, "uses_prepared", False)
        model.placements = getattr(engine, "placements", {})
        model.bundle = bundle
        return model

    @classmethod
    @abstractmethod
    def _open(cls: type[C], bundle: Bundle, engine: Backend, request: LoadRequest) -> C:
        """Open a bundle of this class on one engine."""

    @property
    @abstractmethod
    def _runner(self) -> GraphRunner:
        """What runs the graph; of several, the decoder's."""

    @property
    @abstractmethod
    def input_tokenizer(self) -> Tokenizer:
        """The tokenizer that reads texts."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compute one token or one text.

        Memory is allocated and touched then, and what cannot run is known before somebody waits for it.
        """

    def count_longest_text(self, tokens: int | None = None) -> int:
        """Return how many bytes a text may have: at least what `tokens` may spell, by default `max_length`.

        Longer ones need not be tokenized to know that they do not fit.
        """
        longest = measure_longest_token(self.input_tokenizer)
        return max((self.max_length if tokens is None else tokens) * longest, self._MIN_BYTES)

    @property
    def budget(self) -> MemoryBudget:
        """What counts the memory that the model may take."""
        return self._runner.budget

    @property
    def artifact(self) -> Artifact:
        """The graph that runs; of several, the decoder's."""
        return self._runner.artifact

    def close(self) -> None:
        """Free the engine. Later calls raise ClosedError; closing twice is fine."""
        self._close()  # wakes who waits for memory
        self._is_closed = True
        for close in self.__dict__.pop("_at_close", ()):
            close()

    def close_with(self, close: Callable[[], None]) -> None:
        """Call a function, which may be called twice, when the model is closed; at once if it is."""
        self.__dict__.setdefault("_at_close", []).append(close)
        if self._is_closed:
            close()

    @abstractmethod
    def _close(self) -> None:
        """Free the engine that answers."""

    def __repr__(self) -> str:
        parts = [self.family, self.artifact.id, self.backend]
        if self.threads is not None:
            parts.append(f"{self.threads} thread{'' if self.threads == 1 else 's'}")
        if self.prepared:
            parts.append("prepared weights")
        return f"{type(self).__name__}({', '.join(part for part in parts if part)})"

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def measure_longest_token(tokenizer: Tokenizer) -> int:
    """Return the bytes of the longest token's text."""
    pieces = map(tokenizer.find_piece, range(tokenizer.vocab_size))
    return max(len((piece or "").encode()) for piece in pieces)
