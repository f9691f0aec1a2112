"""What is written for OpenAI's API, against a server of the demo's bundles: `make clients`, by hand.

OpenAI's client for Node, LangChain and llm-comply have environments of their own in build/clients, which make
fills from the package registries; so this is no part of the suite, whose tests need no network. OpenAI's
client for Python is: tests/runtime/apps/server/test_clients.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ..helpers.paths import ROOT
from ..helpers.serving import serving, wait_until_ready

HERE = Path(__file__).parent
WORK = ROOT / "build" / "clients"
PYTHON = WORK / "venv" / "bin"
BUNDLES = {"llama": "llama-demo", "gpt": "gpt2-demo", "bert": "bert-demo"}
KEY = "a-key-of-the-clients"
# llm-comply's probes that fail, and why.
KNOWN = {
    "chat-error-handling": "it sends no model's name, which may be left out here",
    "chat-image-input": "no model here reads images",
    "chat-tool-calling": "llama-demo's template does not support tools",
}


def check_node(url: str) -> None:
    """OpenAI's client for Node."""
    subprocess.run(["node", HERE / "openai_node.mjs", url, KEY], cwd=WORK, check=True)


def check_langchain(url: str) -> None:
    """LangChain's OpenAI classes."""
    subprocess.run([PYTHON / "python", HERE / "langchain_openai_client.py", url, KEY], check=True)


def check_compliance(url: str) -> None:
    """llm-comply's probes of chats; those of `KNOWN` fail, and no others do."""
    options = ["--format", "openai-chat", "--base-url", f"{url}/v1", "--api-key", KEY, "--model", "llama"]
    done = subprocess.run([PYTHON / "llm-comply", *options, "--json"], capture_output=True, text=True)
    results = json.loads(done.stdout)["results"]
    print("llm-comply")
    for result in results:
        why = KNOWN.get(result["id"], "; ".join(result.get("errors", ())))
        print(f"  {result['id']}: {result['status']}{'' if result['status'] == 'passed' else f' ({why})'}")
    failed = {result["id"] for result in results if result["status"] == "failed"}
    if failed != set(KNOWN):
        sys.exit(f"of llm-comply's probes {sorted(failed)} failed, not {sorted(KNOWN)}")


CHECKS: list[Callable[[str], None]] = [check_node, check_langchain, check_compliance]


def main() -> None:
    """Run all checks against one server, whose queue is short, so that clients have to ask again."""
    bundles = [f"{name}={ROOT / 'build' / folder}" for name, folder in BUNDLES.items()]
    keys = WORK / "keys"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    limits = ["--precision", "fp32", "--parallel", "1", "--queue-size", "2"]
    with serving(*bundles, *limits, "--api-key-file", keys) as (_, url):
        wait_until_ready(url)
        for check in CHECKS:
            check(url)


if __name__ == "__main__":
    main()
