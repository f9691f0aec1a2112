"""LangChain's OpenAI classes against a running server: python langchain_openai_client.py URL KEY."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

NAMES = ["Abraham", "Isaac", "Jacob"]
SCHEMA: dict[str, Any] = {
    "title": "person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": NAMES},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = "And God said, Let there be light"


def main(url: str, key: str) -> None:
    where = {"base_url": f"{url}/v1", "api_key": key}
    for check in (check_chat, check_structure, check_completion, check_embeddings, check_errors):
        check(where)
        print(f"  {check.__name__}: passed")


def check_chat(where: dict[str, Any]) -> None:
    chat = ChatOpenAI(model="llama", temperature=0, max_completion_tokens=12, **where)
    whole = chat.invoke(QUESTION)
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == whole.content
    questions = [QUESTION, "Who was Abraham?", "Who made the heaven?"]
    batch = chat.batch(questions, config={"max_concurrency": 3})
    assert [answer.content for answer in batch] == [chat.invoke(question).content for question in questions]


def check_structure(where: dict[str, Any]) -> None:
    chat = ChatOpenAI(model="llama", temperature=1, seed=1, max_completion_tokens=200, **where)
    person = chat.with_structured_output(SCHEMA, method="json_schema").invoke("Who was Abraham?")
    assert set(person) == {"name", "age"}
    assert person["name"] in NAMES
    assert 0 <= person["age"] <= 150


def check_completion(where: dict[str, Any]) -> None:
    completion = OpenAI(model="gpt", temperature=0, max_tokens=12, **where)
    text = completion.invoke("And it came to pass")
    assert text
    assert "".join(completion.stream("And it came to pass")) == text


def check_embeddings(where: dict[str, Any]) -> None:
    # Texts are sent as texts; else it would send token ids of a tokenizer of OpenAI's.
    embeddings = OpenAIEmbeddings(model="bert", check_embedding_ctx_length=False, **where)
    vectors = embeddings.embed_documents(["Birds can fly.", "The baker sells bread."])
    query = embeddings.embed_query("Who sells food?")
    assert len(query) == 384
    birds, bread = (sum(a * b for a, b in zip(vector, query, strict=True)) for vector in vectors)
    assert bread > birds


def check_errors(where: dict[str, Any]) -> None:
    chat = ChatOpenAI(model="llama", max_retries=0, **where)
    unknown = ChatOpenAI(model="gpt-4", max_retries=0, **where)
    stranger = ChatOpenAI(model="llama", max_retries=0, **{**where, "api_key": "wrong"})
    for model, options, error in (
        (unknown, {}, openai.NotFoundError),
        (stranger, {}, openai.AuthenticationError),
        (chat, {"presence_penalty": 3}, openai.BadRequestError),
    ):
        try:
            model.invoke(QUESTION, **options)
        except error:
            continue
        raise AssertionError(f"{model} was answered with {options}, without {error}")


if __name__ == "__main__":
    print(f"langchain-openai {version('langchain-openai')}, openai {version('openai')}")
    main(*sys.argv[1:])
