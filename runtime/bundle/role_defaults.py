"""How a model reads queries and documents, and compares them, as a bundle's manifest records it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ManifestError
from .json_reader import FILE_NAME, Reader

QUERY = "query"
DOCUMENT = "document"
INPUT_TYPES = (QUERY, DOCUMENT)
# Functions that compare two vectors, by sentence-transformers' names; of tokens' vectors the last two.
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim")


@dataclass(frozen=True)
class Expansion:
    """Tokens behind a query, whose vectors count too.

    Attributes:
        length: tokens of a query with them.
        token: which they are.
        cut: whether a longer query is cut to this length.
        attend: whether the other tokens see them.
    """

    length: int
    token: int
    cut: bool = True
    attend: bool = False


@dataclass(frozen=True)
class RoleDefaults:
    """What differs between queries and documents.

    Attributes:
        similarity: how two vectors are compared, one of `SIMILARITIES`.
        query_length, document_length: tokens after which each is cut, special ones included; None for the
            longest that the model takes.
        expansion: of queries.
        skipped: tokens whose vectors are left out.
        skipped_of: of which texts, of `INPUT_TYPES`.
        kept: the tokens of documents whose vectors alone are kept; empty for all.
        max_active_dims: how many of a text's sparse weights are kept where a caller does not say.
        own_graph: whether queries have a graph of their own.
        plain_queries: whether queries have no special tokens around them.
        reads_empty: whether a text without tokens has a vector, of zeros.
        ranges: the lowest and the highest value of each number of a text's vector, on the texts of the
            export; empty where they are not known.
    """

    similarity: str = "cosine"
    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    skipped: tuple[int, ...] = ()
    skipped_of: tuple[str, ...] = (DOCUMENT,)
    kept: tuple[int, ...] = ()
    own_graph: bool = False
    max_active_dims: int | None = None
    plain_queries: bool = False
    reads_empty: bool = False
    ranges: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.similarity not in SIMILARITIES:
            raise ManifestError(f"similarity {self.similarity!r} is not one of {', '.join(SIMILARITIES)}")

    def limit_length(self, input_type: str | None) -> int | None:
        """Return the tokens after which a text is cut; None for the longest that the model takes."""
        if input_type != QUERY:
            return self.document_length if input_type == DOCUMENT else None
        is_cut = self.expansion is not None and self.expansion.cut
        return self.expansion.length if is_cut and self.expansion is not None else self.query_length

    @staticmethod
    def from_json(value: Any) -> RoleDefaults:
        r = Reader(value, "encoder.roles")
        expansion = None
        if r.value.get("expansion") is not None:
            e = Reader(r.value["expansion"], "encoder.roles.expansion")
            expansion = Expansion(
                e.get("length", int), e.get("token", int), e.flag("cut", True), e.flag("attend", False)
            )
        return RoleDefaults(
            similarity=r.get("similarity", str, "cosine"),
            query_length=r.get("query_length", int, None),
            document_length=r.get("document_length", int, None),
            expansion=expansion,
            skipped=r.list_of("skipped", int, ()),
            skipped_of=r.list_of("skipped_of", str, (DOCUMENT,)),
            kept=r.list_of("kept", int, ()),
            own_graph=r.flag("own_graph", False),
            max_active_dims=r.get("max_active_dims", int, None),
            plain_queries=r.flag("plain_queries", False),
            reads_empty=r.flag("reads_empty", False),
            ranges=read_ranges(r),
        )


def read_ranges(reader: Reader) -> tuple[tuple[float, ...], ...]:
    """Return the ranges of a vector's numbers; refuse others than two lists of one length."""
    given = reader.get("ranges", list, [])
    sides = [Reader({"ranges": side}, reader.what).list_of("ranges", float) for side in given]
    if len(sides) not in (0, 2) or len({len(side) for side in sides}) > 1:
        raise ManifestError(f"{FILE_NAME}: {reader.what}.ranges must be two lists of one length")
    return tuple(sides)
