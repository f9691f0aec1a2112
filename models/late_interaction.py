"""Reads how models of late interaction (ColBERT) read queries and documents.

Their settings are in sentence-transformers' modules since its version 6, in PyLate's
config_sentence_transformers.json, or in the artifact.metadata of Stanford's ColBERT. They mean here what
sentence-transformers 6 reads of them.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import read_json

QUERY = "query"
DOCUMENT = "document"
USUAL_LENGTH = 32  # of an expanded query, where a folder names none
STRATEGIES = ("fixed", "min")
METADATA = "artifact.metadata"
STANFORD = "HF_ColBERT"  # the class that its config.json names
PYLATE = "ColBERT"  # the model_type of PyLate's folders
# Settings of PyLate, any of which tells that a folder is one of its.
PYLATE_SETTINGS = (
    "query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens",
    "attend_to_mask_tokens", "query_prefix", "document_prefix", "skiplist_words",
)  # fmt: skip


@dataclass(frozen=True)
class Expansion:
    """Tokens behind a query, whose vectors count too.

    Attributes:
        length: tokens of a query with them.
        cut: whether a longer query is cut to this length.
        attend: whether the other tokens see them.
        token: how they are spelled; None for the mask token, or where there is none the end token.
    """

    length: int
    cut: bool = True
    attend: bool = False
    token: str | None = None


@dataclass(frozen=True)
class RoleSettings:
    """The settings that differ between queries and documents.

    Attributes:
        query_length, document_length: tokens after which each is cut; None for the model's context.
        expansion: of queries.
        skipped: tokens, as they are spelled, whose vectors are left out.
        skipped_of: of which texts, of "query" and "document".
        kept: ids of the tokens of documents whose vectors alone are kept; empty for all.
        prefixes: tokens before a text, by role, that PyLate and Stanford's ColBERT insert.
    """

    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    skipped: tuple[str, ...] = ()
    skipped_of: tuple[str, ...] = (DOCUMENT,)
    kept: tuple[int, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()


def read_expansion(value: Any, path: Path) -> Expansion | None:
    """Return the expansion of sentence-transformers' `query_expansion`."""
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) - {"strategy", "attend", "token", "length"}:
        raise ValueError(
            f"{path}: query_expansion={value!r:.80} must have strategy, attend, token and length"
        )
    strategy = value.get("strategy")
    attend = value.get("attend", False)
    token = value.get("token")
    if strategy not in STRATEGIES or not isinstance(attend, bool) or not isinstance(token, str | None):
        raise ValueError(
            f"{path}: query_expansion={value!r:.80} needs a strategy of {', '.join(STRATEGIES)}, attend of"
            " true or false, and the spelling of a token"
        )
    length = read_length(value, "length", path)
    if length is None:
        raise ValueError(f"{path}: query_expansion has no length")
    return Expansion(length, strategy == "fixed", attend, token)


def read_length(settings: Mapping[str, Any], name: str, path: Path) -> int | None:
    """Return a number of tokens; None where it is not set."""
    length = settings.get(name)
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"{path}: {name}={length!r:.80} must be an integer of at least 1")
    return length


def read_words(value: Any, name: str, path: Path) -> tuple[str, ...]:
    """Return a list of strings."""
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{path}: {name}={value!r:.80} must be a list of strings")
    return tuple(value)


def read_mask(folder: Path) -> dict[str, Any]:
    """Return the settings of `RoleSettings` that a MultiVectorMask has."""
    path = folder / "config.json"
    config = read_json(path, missing={})
    roles = [DOCUMENT] if config.get("skiplist_tasks") is None else config["skiplist_tasks"]
    kept = config.get("keep_only_token_ids") or []
    if not isinstance(kept, list) or not all(type(token) is int for token in kept):
        raise ValueError(f"{path}: keep_only_token_ids={kept!r:.80} must be a list of integers")
    return {
        "skipped": read_words(config.get("skiplist_words") or [], "skiplist_words", path),
        "skipped_of": read_words([roles] if isinstance(roles, str) else roles, "skiplist_tasks", path),
        "kept": tuple(kept),
    }


def read_lengths(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings of `RoleSettings` that a Transformer has since version 6."""
    length = read_length(settings, "query_length", path)
    expansion = read_expansion(settings.get("query_expansion"), path)
    if length is not None and expansion is not None and length < expansion.length:
        raise ValueError(
            f"{path}: query_length={length} is below the {expansion.length} tokens that queries are expanded"
            " to; leave it out"
        )
    return {
        "query_length": length,
        "document_length": read_length(settings, "document_length", path),
        "expansion": expansion,
    }


def read_pylate(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings of `RoleSettings` of PyLate's config_sentence_transformers.json."""
    if not any(name in settings for name in PYLATE_SETTINGS):
        return {}
    found: dict[str, Any] = {"document_length": read_length(settings, "document_length", path)}
    query_length = read_length(settings, "query_length", path)
    if "query_expansion" in settings:
        found["expansion"] = read_expansion(settings["query_expansion"], path)
        found["query_length"] = query_length
    elif settings.get("do_query_expansion") is False:
        found["query_length"] = query_length
    else:
        attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        found["expansion"] = Expansion(query_length or USUAL_LENGTH, attend=bool(attend))
    prefixes = [(role, settings.get(f"{role}_prefix")) for role in (QUERY, DOCUMENT)]
    found["prefixes"] = tuple((role, str(prefix)) for role, prefix in prefixes if prefix)
    if settings.get("model_type") == PYLATE:
        words = settings.get("skiplist_words")
        found["skipped"] = (
            tuple(string.punctuation) if words is None else read_words(words, "skiplist_words", path)
        )
    return found


def read_stanford(folder: Path) -> RoleSettings:
    """Return the settings of a folder of Stanford's ColBERT."""
    path = folder / METADATA
    metadata = read_json(path, missing={})
    tokens = ((QUERY, "query_token_id", "[unused0]"), (DOCUMENT, "doc_token_id", "[unused1]"))
    length = read_length(metadata, "query_maxlen", path) or USUAL_LENGTH
    return RoleSettings(
        document_length=read_length(metadata, "doc_maxlen", path),
        expansion=Expansion(length, attend=bool(metadata.get("attend_to_mask_tokens"))),
        skipped=tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
        prefixes=tuple((role, f"{metadata.get(name) or usual} ") for role, name, usual in tokens),
    )


def merge_settings(parts: Sequence[Mapping[str, Any]]) -> RoleSettings:
    """Return the settings of several files, of which earlier ones count before later ones."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= {name: value for name, value in part.items() if merged.get(name) in (None, ())}
    return RoleSettings(**merged)
