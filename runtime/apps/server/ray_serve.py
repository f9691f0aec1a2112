"""The server as a deployment of Ray Serve: replicas on a cluster, as many as the requests need."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ray import serve

from ...errors import BackendError, InputError
from ...load import load
from ...option_checks import check_whole
from ...suggest import did_you_mean
from .app import make_app
from .settings import ServerSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ...options import LoadOptions

RUNNING = 8  # requests that a replica has, on average, before there is another one
MAX_REPLICAS = 4
HEALTH_SECONDS = 10.0  # between two looks at a replica
LOADING_SECONDS = 0.05  # between two looks at whether its models are loaded


class Replica:
    """One server of the models; Ray Serve makes it, and asks whether it works."""

    app: Starlette  # of the class that serve.ingress makes of this one

    async def check_health(self) -> None:
        """Return when every model is loaded; raise what kept one from it."""
        registry = self.app.state.registry
        while not registry.ready:
            if registry.failure is not None:
                raise BackendError(f"a model could not be loaded: {registry.failure}")
            if registry.closing:
                raise BackendError("the server is stopping")
            await asyncio.sleep(LOADING_SECONDS)


def deployment(
    bundles: str | Path | Mapping[str, str | Path],
    *,
    settings: ServerSettings | None = None,
    load_options: LoadOptions | None = None,
    threads: int = 1,
    gpus: float = 0,
    autoscaling: Mapping[str, Any] | None = None,
) -> serve.Application:
    """Return an application for `serve.run`: the server of `planforge serve`, on replicas of a cluster.

    Ray Serve sends a replica requests when its models are loaded, replaces one that dies, and lets the
    answers of one that is to go come to their end, for `settings.grace` seconds.

    Args:
        bundles: a folder, or folders by the names of their models; at the same paths on every machine.
        settings: see `ServerSettings`. What it says of connections, headers and hosts is the business of Ray
            Serve's own proxy here.
        load_options: see `LoadOptions`.
        threads: of each replica, and CPUs that it takes of the cluster.
        gpus: of each replica.
        autoscaling: Ray Serve's `autoscaling_config`; unless given, one to four replicas, so that each has
            eight requests, waiting or running.

    Raises:
        InputError: an option that cannot be used.

    Example:
        >>> serve.run(deployment({"gpt2": "build/gpt2-demo"}), route_prefix="/")
    """
    named = bundles if isinstance(bundles, Mapping) else {Path(bundles).resolve().name: bundles}
    if not named:
        raise InputError("bundles is empty; give at least one folder", option="bundles")
    check_whole("threads", threads, 1)
    settings = settings or ServerSettings()
    engine = {} if gpus else {"backend": "ort-cpu"}
    options = cast("LoadOptions", {**engine, **(load_options or {}), "threads": threads})
    loaders = {name: partial(load, Path(folder).absolute(), **options) for name, folder in named.items()}

    def build() -> Starlette:
        return make_app(loaders, settings)

    scaling = {"min_replicas": 1, "max_replicas": MAX_REPLICAS, "target_ongoing_requests": RUNNING}
    served = serve.deployment(
        name="planforge",
        autoscaling_config=dict(autoscaling or scaling),
        max_ongoing_requests=settings.queue_size + RUNNING,
        max_queued_requests=settings.queue_size,
        graceful_shutdown_timeout_s=settings.grace,
        health_check_period_s=HEALTH_SECONDS,
        ray_actor_options={"num_cpus": threads, "num_gpus": gpus},
    )(serve.ingress(build)(Replica))
    return served.bind()


def build_app(arguments: dict[str, Any]) -> serve.Application:
    """Return the application of a file of `serve deploy`, whose `args` are the arguments of `deployment`.

    Its `settings` are a mapping.
    """
    check_names("args", arguments, ("bundles", "settings", "load_options", "threads", "gpus", "autoscaling"))
    given = dict(arguments)
    if "bundles" not in given:
        raise InputError("args: bundles is missing; give the folders of the bundles", option="bundles")
    settings = given.get("settings", {})
    check_names("settings", settings, tuple(field.name for field in fields(ServerSettings)))
    return deployment(**{**given, "settings": ServerSettings(**settings)})


def check_names(what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a name that is not known."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or "."
            raise InputError(f"{what}: there is no {name!r}{hint} There are: {', '.join(known)}", option=name)
