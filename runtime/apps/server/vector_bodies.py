"""The bodies of requests for vectors, sparse weights and scores of pairs."""

from __future__ import annotations

from typing import Annotated, Literal

from .bodies import (
    TOKEN_IDS,
    EncodeRequest,
    Many,
    Part,
    Size,
    Text,
    refusal,
    says,
)

PromptName = Annotated[str, says("A prompt of the checkpoint to put before each text.")]
InputType = Annotated[
    Literal["query", "document"], says("What the texts are, where a model reads them in two ways.")
]


class PairsRequest(EncodeRequest, kw_only=True):
    """What all bodies of pairs have that a model scores.

    Attributes:
        prompt_name: an instruction of the checkpoint.
        prompt: an instruction in its place.
    """

    prompt_name: PromptName | None = None
    prompt: Annotated[str, says('An instruction in the place of the checkpoint\'s; "" for none.')] | None = (
        None
    )


class EmbeddingsRequest(EncodeRequest, kw_only=True):
    """The body of /v1/embeddings."""

    input: Text | Many[Annotated[Text, refusal(TOKEN_IDS, "x-other-type")]]
    dimensions: Annotated[Size, says("Keep so many of a vector's first numbers.")] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: PromptName | None = None
    input_type: InputType | None = None
    normalize: Annotated[bool, says("To length 1; the checkpoint's choice unless given.")] | None = None


class Document(Part):
    """A document."""

    text: Text


class RerankRequest(PairsRequest, kw_only=True):
    """The body of /v1/rerank."""

    query: Text
    documents: Many[Text | Document]
    top_n: Annotated[Size, says("Return only so many documents.")] | None = None
    return_documents: Annotated[bool, says("Return their texts too.")] | None = None


class SparseRequest(EncodeRequest, kw_only=True):
    """The body of /embed_sparse, as TEI has it."""

    inputs: Text | Many[Text]
    truncate: Annotated[bool, says("Cut texts that are too long; refuse them otherwise.")] | None = None
    prompt_name: PromptName | None = None
    input_type: InputType | None = None
    max_active_dims: Annotated[Size, says("Return only so many of a text's weights, the largest.")] | None = (
        None
    )


class TextsRankRequest(PairsRequest, kw_only=True):
    """The body of /rerank, as TEI has it."""

    query: Text
    texts: Many[Text]
    truncate: Annotated[bool, says("Cut texts that are too long; refuse them otherwise.")] | None = None
    return_text: Annotated[bool, says("Return the texts too.")] | None = None


class ScoreRequest(PairsRequest, kw_only=True):
    """The body of /v1/score, as vLLM has it: one text and several, or as many of each."""

    text_1: Text | Many[Text]
    text_2: Text | Many[Text]
