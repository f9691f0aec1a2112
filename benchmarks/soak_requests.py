"""The requests of the soak: their content, and how their answers are read and compared."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
EMBED = "/v1/embeddings"
RANK = "/v1/rerank"
TRANSLATE = "/v1/translations"
TOLERANCE = 1e-5  # of vectors and scores, in fp32

QUESTIONS = ("Who made the heaven?", "And what of the earth?", "Who dwelt in the city?", "What did he say?")
SUBJECTS = ("Abraham", "the ark", "the king of Judah", "the sea", "the prophets", "the wilderness")
PROMPTS = ("And it came to pass", "In the beginning", "The sons of Levi", "My son, keep", "Then answered Job")
TEXTS = (
    "Wings lift the plane.",
    "The baker sells bread.",
    "Birds can fly.",
    "A ship crosses the sea in three days.",
    "The river rises in spring, when the snow melts. " * 8,
    "He plays the violin in the evening.",
)
DATES = ("the 3rd of May, 1998", "July 9 2007", "1 Jan 1970", "29th of February, 2000", "Oct 31, 1517")
ARK = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "days"],
    "additionalProperties": False,
}
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "ark", "schema": ARK}}},
    {"regex": "[0-9]{2} [a-z]{3,8}"},
    {"choices": list(SUBJECTS)},
)


@dataclass(frozen=True)
class Answer:
    """The part of an answer that is compared: texts must be equal, numbers equal up to rounding."""

    texts: tuple[str, ...]
    numbers: tuple[float, ...] = ()

    def differs_from(self, other: Answer) -> str:
        """Return how it differs from the right answer, or an empty text."""
        if self.texts != other.texts:
            return f"{self.texts!r:.300} instead of {other.texts!r:.300}"
        if len(self.numbers) != len(other.numbers):
            return f"{len(self.numbers)} numbers instead of {len(other.numbers)}"
        gap = float(np.abs(np.subtract(self.numbers, other.numbers)).max(initial=0))
        return "" if gap <= TOLERANCE else f"numbers that differ by {gap:g}"


@dataclass(frozen=True)
class Request:
    """One of the requests that clients choose from.

    Attributes:
        kind: under which its answers are counted.
        status: of the answer, 200 but for requests that are wrong.
        leaves_after: events of a stream after which the client closes its connection; 0 reads it all.
        answer: the right one, as the request gets it alone.
    """

    kind: str
    path: str
    body: dict[str, Any]
    status: int = 200
    leaves_after: int = 0
    answer: Answer = Answer(())


class Client:
    """A client that asks a server over one connection, which it opens again where it was closed."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, request: Request) -> tuple[int, Answer]:
        """Return the status and the answer; of a stream that it leaves, or a refusal, an empty one."""
        content = json.dumps(request.body)
        self.connection.request("POST", request.path, content, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        if response.status != 200:
            error = json.loads(response.read())["error"]
            return response.status, Answer((f"{error['code']} {error['param']}",))
        if not request.body.get("stream"):
            return 200, read_answer(request.path, json.loads(response.read()))
        if not request.leaves_after:
            return 200, read_stream(response)
        for _, _ in zip(range(2 * request.leaves_after), response, strict=False):
            pass  # an event is a line and an empty one
        self.connection.close()
        return 200, Answer(())

    def close(self) -> None:
        self.connection.close()


def read_answer(path: str, answer: Any) -> Answer:
    """Return the part of an answer that is compared."""
    if path in (CHAT, COMPLETE):
        choices = answer["choices"]
        texts = [one["text"] if path == COMPLETE else one["message"]["content"] for one in choices]
        reasons = [one["finish_reason"] for one in choices]
        return Answer((*texts, *reasons))
    if path == EMBED:
        return Answer((), tuple(number for one in answer["data"] for number in read_vector(one["embedding"])))
    if path == RANK:
        rows = answer["results"]
        return Answer(tuple(str(row["index"]) for row in rows), tuple(row["relevance_score"] for row in rows))
    data = answer["data"]
    return Answer(tuple(one["text"] for one in data), tuple(one["score"] for one in data))


def read_vector(embedding: Any) -> list[float]:
    if isinstance(embedding, str):
        vector: list[float] = np.frombuffer(base64.b64decode(embedding), "<f4").tolist()
        return vector
    return list(embedding)


def read_stream(response: http.client.HTTPResponse) -> Answer:
    """Return the joined text of a stream's events; an error unless it ends with [DONE]."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    last = b""
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"a stream failed: {event['error']}")
            for choice in event["choices"]:
                delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + (delta or "")
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        if line.strip():
            last = line.strip()
    if last != b"data: [DONE]":
        raise RuntimeError(f"a stream ended with {last!r:.200}")
    return Answer((*(texts[key] for key in sorted(texts)), *(reasons[key] for key in sorted(reasons))))


def make_plain_requests() -> Iterator[Request]:
    """Yield completions, structured answers, vectors, ranks, translations and wrong requests."""
    body: dict[str, Any]
    for number, prompt in enumerate(PROMPTS):
        body = {"model": "gpt", "prompt": prompt, "seed": number, "max_tokens": 40, "n": 1 + number % 2}
        yield Request("completion", COMPLETE, body)
        yield Request("completion streamed", COMPLETE, {**body, "stream": True})
        long = {**body, "max_tokens": 200, "ignore_eos": True, "stream": True}
        yield Request("stream left", COMPLETE, long, leaves_after=2 + number)
    for number, subject in enumerate(SUBJECTS):
        said = [{"role": "user", "content": f"Tell of {subject}."}]
        structure = STRUCTURES[number % len(STRUCTURES)]
        chat = {"model": "llama", "messages": said, "temperature": 1, "seed": number, "max_tokens": 80}
        yield Request("structured", CHAT, {**chat, **structure, "stream": number > 2})
    for number in range(len(TEXTS)):
        form = ("float", "base64")[number % 2]
        texts = [*TEXTS[number:], *TEXTS[:number]][: 1 + number]
        cut = {"truncate_prompt_tokens": -1}  # some of the texts are longer than a model reads
        yield Request("embeddings", EMBED, {"model": "bert", "input": texts, "encoding_format": form, **cut})
        yield Request("rank", RANK, {"model": "ranker", "query": TEXTS[number], "documents": texts, **cut})
    for number, date in enumerate(DATES):
        body = {"model": "dates", "input": [date, *DATES[:number]], "num_beams": 1 + number % 4}
        yield Request("translation", TRANSLATE, body)
    for status, path, body in (
        (404, COMPLETE, {"model": "nobody", "prompt": "a"}),
        (400, COMPLETE, {"model": "gpt", "prompt": "word " * 2000}),
        (400, COMPLETE, {"model": "gpt", "prompt": "a", "temperature": 1e300}),
        (400, CHAT, {"model": "llama", "messages": []}),
        (400, CHAT, {"model": "llama", "messages": [{"role": "user", "content": "a"}], "regex": "(a"}),
        (400, EMBED, {"model": "bert", "input": [[1, 2, 3]]}),
        (400, TRANSLATE, {"model": "dates", "input": ""}),
    ):
        yield Request("wrong", path, body, status=status)


def make_chats(client: Client) -> Iterator[Request]:
    """Yield conversations turn by turn: each begins with the earlier turns, as they were answered."""
    for subject in SUBJECTS:
        said: list[dict[str, str]] = []
        for number, question in enumerate(QUESTIONS):
            said = [*said, {"role": "user", "content": f"{question} Tell of {subject}."}]
            body = {"model": "llama", "messages": said, "temperature": 0, "max_tokens": 24}
            kind = "chat streamed" if number % 2 else "chat"
            request = Request(kind, CHAT, {**body, "stream": bool(number % 2)})
            yield request
            _, answer = client.ask(request)
            said = [*said, {"role": "assistant", "content": answer.texts[0]}]


def answer_alone(port: int) -> Sequence[Request]:
    """Return all requests with the answers that they get one by one."""
    client = Client(port)
    answered = []
    for request in [*make_plain_requests(), *make_chats(client)]:
        status, answer = client.ask(request)
        if status != request.status:
            raise RuntimeError(f"{request.path} {request.body!r:.300}: {status} {answer}")
        answered.append(replace(request, answer=answer))
    client.close()
    return answered
