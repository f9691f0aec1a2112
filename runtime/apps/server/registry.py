"""The models of a server by their names: they load one after the other while it answers already."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NoReturn, TypeAlias

from ...errors import InputError
from ...model import Model
from ...suggest import did_you_mean
from ...tasks import refuse_others
from .answers import ModelEntry, State
from .errors import ApiError
from .metrics import Metrics
from .settings import ServerSettings
from .tasks import NEEDS, TASKS

log = logging.getLogger("planforge")

OWNER = "planforge"

Loader: TypeAlias = Callable[[], Model]


@dataclass(frozen=True)
class ServedModel:
    """A model that is loaded.

    Attributes:
        capabilities: what it can be asked for: the last words of the routes that it answers.
        fingerprint: another model, version or precision has another one.
        context: tokens of a request to a text generator; 0 of other models.
        max_bytes: of a prompt or a text: more are not tokenized.
        adapter: of the model, which answers for this name.
    """

    name: str
    model: Model
    capabilities: tuple[str, ...]
    created: int
    fingerprint: str
    context: int = 0
    max_bytes: int = 0
    adapter: str | None = None

    @property
    def model_name(self) -> str:
        """The name of the model, without that of an adapter."""
        return self.name if self.adapter is None else self.name.removesuffix(f":{self.adapter}")

    def to_json(self) -> ModelEntry:
        """Return its entry in /v1/models."""
        model = self.model
        return ModelEntry(
            id=self.name,
            created=self.created,
            owned_by=OWNER,
            capabilities=list(self.capabilities),
            status="ready",
            family=model.family,
            precision=model.artifact.precision,
            backend=model.backend,
            context_length=self.context or model.max_length,
            **TASKS[model.task].describe(model),
        )


class Registry:
    """The models of a server; `closing` is true once it was told to stop, `loading` while one is loaded."""

    def __init__(self, models: Mapping[str, Model | Loader], settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics(self.count_requests)
        self.names = list(models)
        self.created = int(time.time())
        self.loaded: dict[str, ServedModel] = {}
        self.failure: Exception | None = None
        self._failed: str | None = None  # the model that could not be loaded
        self.closing = False
        self.closed = False
        self.loading = False
        self._lock = threading.Lock()  # of what is loaded, and of the end
        self._loaders: dict[str, Loader] = {}
        for name, model in models.items():
            if isinstance(model, Model):
                self.loaded[name] = self._schedule(name, model)
            else:
                self._loaders[name] = model

    @property
    def ready(self) -> bool:
        """Whether every model is loaded, and the server goes on."""
        return len(self.loaded) == len(self.names) and not self.closing

    def find_state(self, name: str) -> State:
        """Return "ready", "loading" or "failed"."""
        if name == self._failed:
            return "failed"
        return "ready" if name in self.loaded else "loading"

    def describe(self, name: str) -> ModelEntry:
        """Return a model's entry in /v1/models, which has its place there while it loads too."""
        if (served := self._find_loaded(name)) is not None:
            return served.to_json()
        if name not in self.names:
            self._refuse_unknown(name)
        return ModelEntry(
            id=name, created=self.created, owned_by=OWNER, capabilities=[], status=self.find_state(name)
        )

    def count_requests(self) -> list[tuple[str, int, int]]:
        """Return for each loaded model its name, how many requests wait, and how many run."""
        counts = []
        for name, served in list(self.loaded.items()):  # the loading thread may add one meanwhile
            waiting, running = served.model.count_requests()  # type: ignore[attr-defined]  # of all classes
            counts.append((name, waiting, running))
        return counts

    def load(self) -> None:
        """Load the models that are not loaded yet; what fails is kept in `failure`."""
        self.loading = True
        try:
            self._load_all()
        finally:
            self.loading = False

    def _load_all(self) -> None:
        for name, loader in self._loaders.items():
            if self.closing:
                return
            try:
                self._load(name, loader)
            except Exception as error:
                log.error("the model %s could not be loaded: %s", name, error)
                self.failure = error
                self._failed = name
                return

    def close(self) -> None:
        """Free the models that it loaded; those that it was given are their owner's."""
        self.closing = True
        with self._lock:
            self.closed = True
        for name in self._loaders:
            if name in self.loaded:
                self.loaded[name].model.close()

    def find(self, name: str | None, capability: str = "") -> ServedModel:
        """Return the model of a name that can do something; without a name the only one that can."""
        if self.closing:
            raise ApiError(503, "the server is stopping", code="closing", retry=True)
        if name is None:
            return self._find_only(capability)
        if (served := self._find_loaded(name)) is not None:
            check_capability(served, capability)
            return served
        if name == self._failed:
            raise ApiError(
                503,
                f"the model {name!r} could not be loaded; see the server's log",
                param="model",
                code="not_loaded",
            )
        if name in self.names:
            raise ApiError(503, f"the model {name!r} is loading", param="model", code="loading", retry=True)
        self._refuse_unknown(name)

    def list_names(self) -> list[str]:
        """Return the names of all models, and behind each loaded one those of its adapters."""
        return [name for model in self.names for name in (model, *self._name_adapters(model))]

    def _name_adapters(self, name: str) -> list[str]:
        model: Any = self.loaded[name].model if name in self.loaded else None
        return [f"{name}:{adapter}" for adapter in getattr(model, "adapters", ())]

    def _find_loaded(self, name: str) -> ServedModel | None:
        """Return a loaded model by its name, or by that with an adapter's behind it."""
        if name in self.names:
            return self.loaded.get(name)
        model, _, adapter = name.rpartition(":")
        if name not in self._name_adapters(model):
            return None
        served = self.loaded[model]
        return replace(served, name=name, adapter=adapter, fingerprint=f"{served.fingerprint}_{adapter}")

    def _refuse_unknown(self, name: str) -> NoReturn:
        known = ", ".join(map(repr, self.list_names()))
        raise ApiError(
            404,
            f"there is no model {name!r:.200}; there are: {known}{did_you_mean(name, self.list_names())}",
            param="model",
            code="model_not_found",
        )

    def _find_only(self, capability: str) -> ServedModel:
        able = [
            served
            for served in list(self.loaded.values())
            if not capability or capability in served.capabilities
        ]
        if len(able) == 1 and len(self.loaded) == len(self.names):
            return able[0]
        if len(self.loaded) < len(self.names):
            raise ApiError(503, "the models are loading", code="loading", retry=True)
        if not able:
            others = sorted({one for served in list(self.loaded.values()) for one in served.capabilities})
            raise ApiError(
                400,
                f"no model of this server supports {capability!r}{NEEDS.get(capability, '')}; its models"
                f" support {', '.join(others)}",
                param="model",
                code="wrong_model",
            )
        names = ", ".join(repr(served.name) for served in able)
        message = f"model is missing; models that support this: {names}"
        raise ApiError(400, message, param="model", code="invalid_value")

    def _load(self, name: str, loader: Loader) -> None:
        """Load a model and let it run once, so that its first request finds all in its place."""
        model = loader()
        try:
            served = self._schedule(name, model)
            with suppress(InputError):  # says something of this text, not of the model
                model.warm_up()
        except BaseException:
            model.close()
            raise
        with self._lock:
            if not self.closed:
                self.loaded[name] = served
                return
        model.close()  # the server has stopped meanwhile

    def _schedule(self, name: str, model: Model) -> ServedModel:
        """Say how requests share a model."""
        settings = self.settings
        several = settings.has_several_clients
        options: dict[str, Any] = {"queue_size": settings.queue_size, "divide_queue": several}

        def observe(measure: str, value: float) -> None:
            if name in self.loaded:  # the warm-up is no request
                self.metrics.observe(name, measure, value)

        if model.task not in TASKS:
            refuse_others(model.bundle, "the server")
        context = 0
        if TASKS[model.task].shares_steps:
            shares = not several if settings.share_prompts is None else settings.share_prompts
            options |= {"share_prompts": shares, **settings.schedule}
            context = settings.schedule.get("context", model.max_length)
        model.schedule(**options, observe=observe)  # type: ignore[attr-defined]  # of all classes
        return ServedModel(
            name=name,
            model=model,
            capabilities=list_capabilities(model),
            created=int(time.time()),
            fingerprint=make_fingerprint(model),
            context=context,
            max_bytes=model.count_longest_text(context or None),
        )


def list_capabilities(model: Model) -> tuple[str, ...]:
    """Return what a model can be asked for."""
    explains = ("explanations",) if model.bundle.manifest.explanations else ()
    return TASKS[model.task].list_capabilities(model) + explains


def check_capability(served: ServedModel, capability: str) -> None:
    """Refuse what a model cannot do."""
    if capability and capability not in served.capabilities:
        able = ", ".join(served.capabilities)
        needs = NEEDS.get(capability, "")
        message = f"the model {served.name!r} does not support {capability!r}; it supports: {able}{needs}"
        raise ApiError(400, message, param="model", code="wrong_model")


def make_fingerprint(model: Model) -> str:
    """Return a short text that differs between models, precisions, engines and versions of PlanForge."""
    words = f"{model.artifact.id} {model.artifact.file} {model.backend} {version('planforge')}"
    return f"fp_{hashlib.sha256(words.encode()).hexdigest()[:10]}"
