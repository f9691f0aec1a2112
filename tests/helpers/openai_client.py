"""OpenAI's client for Python, connected to a server of the tests."""

from __future__ import annotations

from typing import Any

import openai

from .serving import Address


def connect_openai(server: Address, key: str = "none", **options: Any) -> openai.OpenAI:
    """Return a client that ignores the proxies of this machine, and asks no second time unless told to."""
    http = openai.DefaultHttpxClient(trust_env=False)
    options = {"max_retries": 0, "http_client": http, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, **options)
