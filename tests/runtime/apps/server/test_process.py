"""`planforge serve` as a process: what it says, how it stops; and what /openapi.json says."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from planforge.runtime.apps.commands.serve import is_open, list_hosts, name_bundles, open_socket
from planforge.runtime.apps.server import ServerSettings
from planforge.runtime.apps.server.endpoints import ENDPOINTS
from planforge.runtime.apps.server.openapi import describe_api
from planforge.runtime.errors import InputError

from ....helpers.cli import planforge
from ....helpers.patience import wait_until
from ....helpers.serving import SECONDS, serving, wait_until_ready

COMPLETE = "/v1/completions"


# A server whose answers wait at their fifth tokens until a file is there.
HELD = """
import pathlib, sys, time
from planforge.exporter.commands.app import main
from planforge.runtime.generate.row import Row

go_on = pathlib.Path(sys.argv.pop(1))
take = Row.take

def take_when_let(row, *arguments):
    while len(row.token_ids) == 4 and not go_on.exists():
        time.sleep(0.01)
    take(row, *arguments)

Row.take = take_when_let
main()
"""


def is_stopping(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False, timeout=SECONDS).status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_it_stops_in_order(demo_bundle: Path, tmp_path: Path) -> None:
    """What runs and waits is answered whole, what comes then is not, and it ends as if told to by a user."""
    body = {"prompt": "And it", "max_tokens": 240, "ignore_eos": True, "seed": 1, "n": 3}
    options = ("--precision", "fp32", "--parallel", "1")  # so that two of the three answers wait
    go_on = tmp_path / "go-on"
    held = (sys.executable, "-c", HELD, str(go_on))
    with serving(f"gpt={demo_bundle}", *options, command=held) as (process, url):
        wait_until_ready(url)
        go_on.touch()
        expected = httpx.post(url + COMPLETE, json=body, trust_env=False, timeout=SECONDS).json()["choices"]
        go_on.unlink()
        lines: list[str] = []

        def read() -> None:
            with httpx.stream(
                "POST", url + COMPLETE, json={**body, "stream": True}, trust_env=False, timeout=SECONDS
            ) as response:
                lines.extend(line for line in response.iter_lines() if line)

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: bool(lines))
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_stopping(url))
        with contextlib.suppress(httpx.TransportError):  # it may have ceased to listen
            late = httpx.post(url + COMPLETE, json=body, trust_env=False, timeout=SECONDS)
            assert late.status_code == 503
            assert late.json()["error"]["code"] == "closing" and late.headers["retry-after"]
        assert "data: [DONE]" not in lines  # so far
        go_on.touch()
        reader.join(SECONDS)
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        choices = [choice for event in events for choice in event["choices"]]
        for index, choice in enumerate(expected):
            text = "".join(one["text"] for one in choices if one["index"] == index)
            assert text == choice["text"]
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert "gpt: TextGenerator(gpt2" in said
        assert f"Ready: 1 model at {url} (Ctrl-C stops it)" in said
        assert "Traceback" not in said and "rror" not in said


LOADING = """
import threading
from planforge.runtime.apps.commands.serve import open_socket, run_server
from planforge.runtime.apps.server import ServerSettings, make_app
settings = ServerSettings(grace=0)
with open_socket("127.0.0.1", 0) as listener:
    run_server(make_app({"late": threading.Event().wait}, settings), settings, listener)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_sigterm_ends_it_while_a_model_loads() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADING], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[-1]
            wait_until(
                lambda: httpx.get(f"{url}/health", trust_env=False, timeout=SECONDS).status_code == 200
            )
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
        finally:
            process.kill()


def test_a_model_that_cannot_be_loaded_ends_it(demo_bundle: Path) -> None:
    done = planforge("serve", demo_bundle, "--precision", "int2", "--port", "0")
    assert done.returncode == 2
    assert "int2" in done.stderr and "Traceback" not in done.stderr


def test_settings_out_of_range() -> None:
    for seconds in (0, -1, float("nan"), float("inf")):
        for name in ("timeout", "write_seconds"):
            with pytest.raises(InputError, match=name):
                ServerSettings(**{name: seconds})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="grace=-1"):
        ServerSettings(grace=-1)


def test_names_of_bundles(demo_bundle: Path) -> None:
    assert name_bundles([f"mine={demo_bundle}", str(demo_bundle)]) == {
        "mine": demo_bundle,
        demo_bundle.name: demo_bundle,
    }
    with pytest.raises(InputError, match="two bundles have the name"):
        name_bundles([str(demo_bundle), str(demo_bundle)])


def test_a_server_for_this_machine_answers_to_its_names_alone() -> None:
    assert list_hosts("127.0.0.1") == ("localhost", "127.0.0.1", "[::1]")
    assert "127.0.0.2" in list_hosts("127.0.0.2")
    assert list_hosts("0.0.0.0") == list_hosts("192.168.1.5") == ()
    assert is_open(ServerSettings(hosts=list_hosts("0.0.0.0")))
    assert not is_open(ServerSettings(hosts=list_hosts("localhost")))
    assert not is_open(ServerSettings(keys=("k",)))


def test_answers_are_sent_without_delay() -> None:
    """asyncio turns Nagle's algorithm, which costs 40 ms, off where a socket's protocol is said."""
    with contextlib.closing(open_socket("127.0.0.1", 0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_every_parameter_is_described() -> None:
    api = describe_api(ENDPOINTS, has_keys=True)
    assert api["openapi"].startswith("3.1")
    for endpoint in ENDPOINTS:
        operation = api["paths"][endpoint.path]["post"]
        assert operation["summary"] and set(operation["responses"]) >= {"200", "400", "401", "429", "504"}
        content = operation["requestBody"]["content"]["application/json"]
        name = endpoint.body.__name__  # of the type by which requests are decoded
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
        described = api["components"]["schemas"][name]["properties"]
        assert set(described) == set(endpoint.body.__struct_fields__)
    assert api["security"] == [{"key": []}]
