"""Serves a bundle by Ray Serve: starts, answers, grows, drains, and says why a model cannot be loaded.

test_ray.py runs it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve

from planforge.runtime import TextGenerator
from planforge.runtime.apps.server.ray_serve import build_app

from ....helpers.paths import ROOT
from ....helpers.patience import PATIENCE, wait_until

PROMPT = "In the beginning"
EXAMPLE = ROOT / "docs/examples/serve.yaml"


def open_request(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a request, to be read."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=data, headers={"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=PATIENCE)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a request, as JSON."""
    with open_request(port, path, body) as answer:
        return json.load(answer)


def make_body(tokens: int) -> dict[str, Any]:
    return {"model": "gpt2-demo", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}


def complete(port: int, tokens: int) -> Any:
    return ask(port, "/v1/completions", make_body(tokens))


def count_replicas() -> int:
    """Replicas that take requests."""
    status = serve.status().applications["planforge"].deployments["planforge"]
    return sum(count for state, count in status.replica_states.items() if state == "RUNNING")


def has_route(port: int) -> bool:
    """Whether the proxy knows of the service: `serve.run` does not wait for that."""
    try:
        return "/" in ask(port, "/-/routes")
    except urllib.error.HTTPError:  # it knows of nothing yet
        return False


def check_answers(port: int, bundle: str) -> None:
    """What the service answers is what the model does."""
    assert ask(port, "/ready")["models"] == {"gpt2-demo": "ready", "bert-demo": "ready"}
    with TextGenerator.load(bundle, threads=1) as model:
        assert complete(port, 12)["choices"][0]["text"] == model.generate(PROMPT, max_new_tokens=12).text
    assert len(ask(port, "/v1/embeddings", {"model": "bert-demo", "input": "wings"})["data"]) == 1


def check_scaling(port: int) -> None:
    """Requests that wait start a second replica."""
    assert count_replicas() == 1
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            complete(port, 200)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: count_replicas() == 2, "a second replica")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def check_draining(port: int) -> None:
    """An answer that is being made when the service is deleted comes to its end."""
    begun = threading.Event()
    lines: list[str] = []

    def read() -> None:
        with open_request(port, "/v1/completions", {**make_body(240), "stream": True}) as answer:
            for line in answer:
                lines.append(line.decode().strip())
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(PATIENCE)
    serve.delete("planforge")
    thread.join()
    assert lines[-2:] == ["data: [DONE]", ""]


def main() -> None:
    warnings.simplefilter("error", DeprecationWarning)  # imports of Ray's own use what pydantic deprecates
    generator, encoder, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    (application,) = yaml.safe_load(EXAMPLE.read_text())["applications"]
    assert application["import_path"] == f"{build_app.__module__}:{build_app.__name__}"
    arguments = application["args"]
    arguments["bundles"] = {"gpt2-demo": generator, "bert-demo": encoder}
    arguments["autoscaling"] |= {"target_ongoing_requests": 2, "upscale_delay_s": 0.5, "max_replicas": 2}
    # Deprecated for a variable of the environment that Ray does not read yet; else it is told every 10 s.
    warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
    arguments["autoscaling"]["metrics_interval_s"] = 0.5
    serve.start(http_options={"port": port})
    serve.run(build_app(arguments), name="planforge", route_prefix="/")
    wait_until(lambda: has_route(port), "the proxy's route")
    check_answers(port, generator)
    check_scaling(port)
    check_draining(port)
    try:
        serve.run(
            build_app({"bundles": {"none": str(Path(generator) / "none")}}),
            name="broken",
            route_prefix="/broken",
        )
    except RuntimeError:
        state = serve.status().applications["broken"].deployments["planforge"]
        print(state.message)
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


if __name__ == "__main__":
    main()
