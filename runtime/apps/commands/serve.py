"""`planforge serve`: an HTTP server of bundles, with OpenAI's routes and a page to talk to them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError
from .console import say
from .run_options import (
    IndexKeysOption,
    IndexOption,
    MaxMemoryOption,
    PrecisionOption,
    ThreadsOption,
    make_option,
    read_max_memory,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..server.settings import ServerSettings

limit_option = partial(make_option, panel="Limits")

BundlesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="BUNDLE",
        help="Bundle folders; NAME=FOLDER sets the model's name, by default the folder's name.",
        show_default=False,
    ),
]
HostOption = Annotated[
    str, make_option("The address to listen on; 0.0.0.0 means all interfaces.", show_default=True)
]
PortOption = Annotated[
    int, make_option("The port to listen on; 0 picks a free one.", show_default=True, minimum=0)
]
KeyFileOption = Annotated[
    Path | None,
    make_option("A file of API keys, one per line; requests must send one. PLANFORGE_API_KEY sets one too."),
]
ParallelOption = Annotated[
    int | None,
    limit_option("Requests that a text generator answers at the same time.", show_default="8", minimum=1),
]
ContextOption = Annotated[
    int | None,
    limit_option(
        "Most tokens of a request, prompt and answer together.",
        "--ctx-size",
        show_default="the model's",
        minimum=2,
    ),
]
PrefixOption = Annotated[
    int | None,
    limit_option(
        "Megabytes for the prefix cache, which requests with the same beginning reuse.",
        show_default="256",
        minimum=0,
    ),
]
SharePromptsOption = Annotated[
    bool | None,
    limit_option(
        "Share the prefix cache between API keys; response times may then reveal what others asked.",
        "--share-prompts/--no-share-prompts",
        show_default="off with several keys",
    ),
]
QueueOption = Annotated[
    int, limit_option("Most requests that may wait for a model.", show_default=True, minimum=1)
]
TimeoutOption = Annotated[float, limit_option("Seconds after which a request fails.", show_default=True)]
WriteTimeoutOption = Annotated[
    float,
    limit_option(
        "Seconds without progress after which a client that does not read its answer is cut off.",
        show_default=True,
    ),
]
GraceOption = Annotated[
    int,
    limit_option(
        "Seconds that running requests get to finish when the server stops; 0 stops at once.",
        show_default=True,
        minimum=0,
    ),
]
BodyOption = Annotated[int, limit_option("Largest request body, in megabytes.", show_default=True, minimum=1)]
ConnectionsOption = Annotated[int, limit_option("Most open connections.", show_default=True, minimum=1)]
OriginOption = Annotated[
    list[str] | None,
    make_option("An origin whose pages may call the server from a browser (CORS); may be repeated."),
]
NoPageOption = Annotated[bool, make_option("Do not serve the web page at /.", "--no-page")]


def serve(
    bundles: BundlesArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    api_key_file: KeyFileOption = None,
    cors_origin: OriginOption = None,
    no_page: NoPageOption = False,
    parallel: ParallelOption = None,
    ctx_size: ContextOption = None,
    prefix_memory: PrefixOption = None,
    share_prompts: SharePromptsOption = None,
    queue_size: QueueOption = 128,
    timeout: TimeoutOption = 600.0,
    write_timeout: WriteTimeoutOption = 60.0,
    grace: GraceOption = 30,
    max_body: BodyOption = 8,
    max_connections: ConnectionsOption = 512,
    threads: ThreadsOption = None,
    precision: PrecisionOption = None,
    max_memory: MaxMemoryOption = None,
    index: IndexOption = None,
    index_keys: IndexKeysOption = None,
) -> None:
    """Serve one or several bundles over HTTP: OpenAI-compatible routes, more tasks, and a web page."""
    from ..server import ServerSettings, make_app
    from ..server.auth import read_keys

    keys = read_keys(api_key_file)
    schedule = {"running": parallel, "context": ctx_size}
    if prefix_memory is not None:
        schedule["prefix_memory"] = prefix_memory * 1_000_000
    settings = ServerSettings(
        keys=keys,
        schedule={name: value for name, value in schedule.items() if value is not None},
        queue_size=queue_size,
        timeout=timeout,
        write_seconds=write_timeout,
        body_bytes=max_body * 2**20,
        connections=max_connections,
        grace=grace,
        share_prompts=share_prompts,
        hosts=() if keys else list_hosts(host),
        origins=tuple(cors_origin or ()),
        page=not no_page,
    )
    engine = {"threads": threads, "precision": precision, "memory_limit": read_max_memory(max_memory)}
    found = {"index": index, "index_keys": index_keys}
    folders = name_bundles(bundles)
    reading = find_reading(folders)
    if index is not None and not reading:
        raise InputError("--index is for a model that reads neighbours of its text, and none is served")
    if index is None and index_keys is not None:
        raise InputError("--index-keys is for an index; give --index too")
    loaders = {
        name: partial(open_model, name, folder, **engine, **(found if name in reading else {}))
        for name, folder in folders.items()
    }
    with contextlib.closing(open_socket(host, port)) as listener:
        if is_open(settings):
            say(f"warning: no API key is required, and other machines may reach {host}; see --api-key-file")
        run_server(make_app(loaders, settings), settings, listener)


def name_bundles(arguments: list[str]) -> dict[str, Path]:
    """Return the folders by their names; refuse two of one name, and what is no bundle."""
    from ...bundle.bundle import Bundle
    from ...tasks import PICTURES, refuse_others

    folders: dict[str, Path] = {}
    for argument in arguments:
        name, equals, folder = argument.partition("=")
        if not equals or Path(argument).exists():
            name = Path(argument).resolve().name
            folder = argument
        if not name:
            raise InputError(f"{argument!r} has no name before '='; give NAME=FOLDER or FOLDER")
        if name in folders:
            raise InputError(
                f"two bundles have the name {name!r}: {folders[name]} and {folder}; give one another name, as"
                f" in other={folder}"
            )
        opened = Bundle.open(folder)  # what is wrong with it is said before the server listens
        if opened.manifest.task != PICTURES:
            refuse_others(opened, "the server")
        folders[name] = Path(folder)
    return folders


def find_reading(folders: Mapping[str, Path]) -> set[str]:
    """Return the names of the models that read neighbours of their text."""
    from ...bundle.bundle import Bundle

    return {name for name, folder in folders.items() if Bundle.open(folder).manifest.retrieval is not None}


def open_model(name: str, folder: Path, **options: Any) -> Any:
    """Return the model of a bundle, and say what it is."""
    from ...load import load

    model = load(folder, **options)
    say(f"{name}: {model}")
    return model


def list_hosts(host: str) -> tuple[str, ...]:
    """Return the names by which a server may be called that this machine alone reaches; else any."""
    local = host == "localhost"
    with contextlib.suppress(ValueError):
        local = ipaddress.ip_address(host).is_loopback
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", host))) if local else ()


def is_open(settings: ServerSettings) -> bool:
    """Return whether whoever reaches the server may use it, from other machines too."""
    return not settings.keys and not settings.hosts


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens."""
    if port > 65_535:
        raise InputError(f"port={port} must be at most 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise InputError(f"host={host!r} is not an address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def run_server(app: Starlette, settings: ServerSettings, listener: socket.socket) -> None:
    """Answer requests until a signal asks to stop; raise what kept a model from being loaded."""
    from ..server.process import make_server

    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    say(f"listening on {url}")
    names = app.state.registry.names
    models = "1 model" if len(names) == 1 else f"{len(names)} models"

    def announce_ready() -> None:
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector would stop all threads to look at it again
        say(f"Ready: {models} at {url} (Ctrl-C stops it)")

    server = make_server(app, settings, announce_ready)
    with contextlib.suppress(KeyboardInterrupt):  # it has stopped in order; Terminated is one too
        asyncio.run(server.serve([listener]))
    if app.state.registry.loading:  # nothing ends its thread, for which Python's own exit would wait
        say("stopped while a model was loading")
        sys.stderr.flush()
        os._exit(0)
    if app.state.registry.failure is not None:
        raise app.state.registry.failure
