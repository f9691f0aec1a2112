"""A stand-in for the server, for tests of its page: streams go on when the test says so."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from .paths import ROOT

PAGE = ROOT / "runtime" / "apps" / "server" / "page"
EXPLANATIONS = ROOT / "runtime" / "apps" / "explain" / "page"  # at /explain/
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}
ENCODER = ["embeddings", "rerank", "classify", "tags", "answers", "fill-mask"]
MODELS: list[dict[str, Any]] = [
    {"id": "llama-demo", "capabilities": ["chat", "completions"], "context_length": 512},
    {"id": "gpt2-demo", "capabilities": ["completions", "explanations"], "context_length": 256},
    {"id": "bert-demo", "capabilities": ENCODER, "mask_token": "[MASK]"},
    {"id": "transformer-demo", "capabilities": ["translations"], "alignments": True},
    {"id": "sd-demo", "capabilities": ["images/generations", "images/edits"], "image_size": "32x32"},
]
END = "end of the stream"
CUT = "end of the connection"
PATIENCE = 60.0


class StandIn(ThreadingHTTPServer):
    """Speaks the routes that the page asks.

    Attributes:
        models: what /v1/models tells.
        pieces: what streams next: a piece of text, an event, `END` or `CUT`. A stream waits for each.
        answers: what a route answers, by its path: a body, (status, body), or a list of a stream's events.
        bodies: what was asked: (path, body) each.
        key: what a client must know, if anything.
        loading: models that are not loaded yet.
        left: set when a client left while it was being answered.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: list[Any] = [dict(model) for model in MODELS]
        self.pieces: queue.Queue[str | dict[str, Any]] = queue.Queue()
        self.answers: dict[str, Any] = {}
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.key: str | None = None
        self.loading: list[str] = []
        self.left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def stream(self, *pieces: str | dict[str, Any]) -> None:
        """Let a stream go on with these pieces."""
        for piece in pieces:
            self.pieces.put(piece)


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/v1/models":
            self.answer({"object": "list", "data": self.server.models})
            return
        if path == "/ready":
            self.answer({"models": dict.fromkeys(self.server.loading, "loading")}, is_open=True)
            return
        name = path.lstrip("/") or "index.html"
        folder = EXPLANATIONS if name.startswith("explain/") else PAGE
        name = name.removeprefix("explain/")
        file = folder / name
        if "/" in name or not file.is_file():
            self.send_error(404)
            return
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", f"{TYPES[file.suffix]}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for header, value in HEADERS.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        answer = self.server.answers.get(self.path)
        if isinstance(answer, list):
            self.server.stream(*answer, END)
        elif answer is not None:
            self.answer(answer)
            return
        if body.get("stream"):
            self.send_stream(chat=self.path.startswith("/v1/chat"))
        else:
            self.answer((404, {"error": {"message": f"{self.path} has no answer here."}}))

    def answer(self, answer: Any, is_open: bool = False) -> None:
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        if not is_open and self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            status, body = 401, {"error": {"message": "The key is wrong.", "code": "invalid_api_key"}}
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_stream(self, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        count = 0
        while (piece := self.next_piece()) not in (END, CUT, None):
            if isinstance(piece, str):
                count += 1
                text: dict[str, Any] = {"delta": {"content": piece}} if chat else {"text": piece}
                piece = {"choices": [{"index": 0, **text, "finish_reason": None}]}
            self.send_event(json.dumps(piece))
        if piece == END and self.path.startswith("/v1/images"):
            self.send_event("[DONE]")
        elif piece == END:
            text = {"delta": {}} if chat else {"text": ""}
            self.send_event(json.dumps({"choices": [{"index": 0, **text, "finish_reason": "stop"}]}))
            self.send_event(json.dumps({"choices": [], "usage": {"completion_tokens": count}}))
            self.send_event("[DONE]")

    def next_piece(self) -> str | dict[str, Any] | None:
        """Return what to send next; None once the client has left."""
        while True:
            try:
                return self.server.pieces.get(timeout=0.05)
            except queue.Empty:
                self.send_event(None)
            if self.server.left.is_set():
                return None

    def send_event(self, text: str | None) -> None:
        """Send an event, or a comment that shows whether the client still listens."""
        try:
            self.wfile.write(b": still here\n\n" if text is None else f"data: {text}\n\n".encode())
        except OSError:
            self.server.left.set()


@contextmanager
def stand_in() -> Generator[StandIn, None, None]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.left.set()
            server.shutdown()
            thread.join(PATIENCE)
