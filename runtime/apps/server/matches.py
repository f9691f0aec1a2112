"""/v1/matches: which tokens of a query and of documents make up their scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from starlette.responses import Response

from ...encode.results import Match, MultiVector, SparseEmbedding
from ...errors import InputError
from .answers import Record
from .bodies import EncodeRequest, Many, Text, says
from .calls import Call
from .errors import find_api_error, refuse
from .tasks import list_match_kinds
from .text_sizes import measure_texts
from .vectors import answer_list, check_finite, run_task

QUERY_NAMES = {"texts": "query", "max_tokens": "truncate_prompt_tokens"}  # while the query is read
Kind = Annotated[
    Literal["sparse", "multi"],
    says("What is matched: weights of words, or vectors of tokens. Unless given, the model's first."),
]


class MatchesRequest(EncodeRequest, kw_only=True):
    """The body of /v1/matches."""

    query: Text
    documents: Many[Text]
    kind: Kind | None = None


class MatchesEntry(Record):
    """A document's score, the matches that sum to it, and how many of both texts' tokens were dropped."""

    index: int
    score: float
    matches: list[Match]
    dropped: int


async def find_matches(call: Call[MatchesRequest]) -> Response:
    """Return which tokens of each document match those of a query, and what each adds to the score."""
    model: Any = call.served.model  # a TextEncoder, as its capabilities say
    query, documents = call.body.query, call.body.documents
    kinds = list_match_kinds(model)
    kind = call.body.kind or kinds[0]
    if kind not in kinds:
        refuse("kind", f"must be {kinds[0]!r} with this model, not {kind!r}")
    measure_texts(call, [(query, document) for document in documents], ("query", "documents"))
    task = f"embed_{kind}"
    try:
        (own,), read = await run_task(call, task, [query], ("query", "query"), input_type="query")
    except InputError as error:
        raise find_api_error(error, QUERY_NAMES) from error
    results, tokens = await run_task(call, task, documents, ("documents", "documents"), input_type="document")

    def write(index: int, result: SparseEmbedding | MultiVector) -> MatchesEntry:
        score = float(model.similarity([own], [result])[0, 0])
        check_finite(score)
        return MatchesEntry(index, score, model.matches(own, result), own.dropped + result.dropped)

    return await answer_list(call, write, results, read + tokens)
