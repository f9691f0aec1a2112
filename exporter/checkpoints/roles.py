"""How a sentence-transformers checkpoint reads queries and documents, by its tokenizer's ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.bundle.role_defaults import INPUT_TYPES, SIMILARITIES, Expansion, RoleDefaults
from ...runtime.text.tokenizer import Tokenizer
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ...models.sentence_transformers import SentenceModules

log = logging.getLogger("planforge")


def read_roles(
    modules: SentenceModules, tokenizer: Tokenizer, tokens: Mapping[str, int], max_length: int
) -> RoleDefaults:
    """Return what differs between queries and documents.

    Args:
        modules: the checkpoint's.
        tokenizer: reads its texts.
        tokens: the ids of special tokens, by their roles.
        max_length: the most tokens of a text.

    Raises:
        CheckpointError: a token that is not in the vocabulary, or a function that is not known.
    """
    roles = modules.roles
    folder = modules.transformer
    similarity = choose_similarity(modules)
    expansion = None
    if roles.expansion is not None:
        named = roles.expansion.token
        token = tokens.get("mask", tokens.get("eos")) if named is None else tokenizer.find_id(named)
        if token is None:
            spelled = "a mask or end token" if named is None else repr(named)
            raise CheckpointError(
                f"{folder}: queries are expanded by {spelled}, which the vocabulary does not have"
            )
        length = min(roles.expansion.length, max_length)
        expansion = Expansion(length, token, roles.expansion.cut, roles.expansion.attend)
    skipped = find_skipped(roles.skipped, tokenizer)
    skipped_of = roles.skipped_of
    if "token_vectors" in modules.extra_heads:  # BGE-M3 has no vector of the first token
        skipped = (tokens["cls"],)
        skipped_of = INPUT_TYPES
    return RoleDefaults(
        similarity=similarity,
        query_length=roles.query_length,
        document_length=roles.document_length,
        expansion=expansion,
        skipped=skipped,
        skipped_of=skipped_of,
        kept=roles.kept,
        own_graph=modules.query is not None,
        max_active_dims=modules.max_active_dims,
        plain_queries=modules.query is not None and modules.query.is_static,
        reads_empty=modules.is_static,
    )


def choose_similarity(modules: SentenceModules) -> str:
    """Return the function that compares two embeddings: the folder's, else the usual one of its kind.

    As in sentence-transformers, vectors of tokens are compared by MaxSim whatever an older folder names.
    """
    name = modules.similarity
    if modules.token_vectors is not None and modules.sentence is None:
        return "meanmaxsim" if name == "meanmaxsim" else "maxsim"
    if name is None:
        return "dot" if modules.sparse is not None and modules.sentence is None else "cosine"
    if name not in SIMILARITIES:
        raise CheckpointError(
            f"{modules.transformer}: similarity_fn_name={name!r:.80} is not one of {', '.join(SIMILARITIES)}"
        )
    return name


def find_skipped(words: Iterable[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of words whose vectors are left out; those that are no token are told, and kept."""
    found: list[int] = []
    unknown: list[str] = []
    for word in words:
        token = tokenizer.find_id(word)
        if token is None or token == tokenizer.unknown:
            unknown.append(word)
        else:
            found.append(token)
    if unknown:
        log.warning("the tokens of %s are not left out: the vocabulary has none of them", " ".join(unknown))
    return tuple(sorted(found))


def warn_of_pickles(modules: SentenceModules) -> None:
    """Say which layers are left out as they are pickles, and how to convert them."""
    for path in modules.pickled_heads:
        log.warning(
            "%s is a pickle, which is never opened: the bundle embeds texts without it. To have it, convert"
            ' it: python -c "import torch; from safetensors.torch import save_file;'
            " save_file(torch.load('%s', weights_only=True), '%s')\"",
            path,
            path,
            path.with_suffix(".safetensors"),
        )


def compose_prompts(modules: SentenceModules) -> dict[str, str]:
    """Return the prompts by name; a prefix stands before that of its role, which may have it already."""
    prompts = dict(modules.prompts)
    for role, prefix in modules.roles.prefixes:
        prompts[role] = prefix + prompts.get(role, "").removeprefix(prefix)
    return prompts


def check_query_tokenizer(data: bytes, other: bytes, folder: Path, rows: int, is_static: bool) -> None:
    """Refuse an encoder of queries whose tokenizer is another than that of documents, or that has fewer rows.

    A table reads queries without special tokens around them, so what stands around documents' may differ.
    """
    own, theirs = (json.loads(one) for one in (data, other))
    around = () if is_static else ("post_processor",)
    for part in ("model", "normalizer", "pre_tokenizer", "added_tokens", *around):
        if own.get(part) != theirs.get(part):
            raise CheckpointError(
                f"{folder}: queries have another tokenizer than documents ({part} differs), which is not"
                " supported; export the two encoders as two bundles"
            )
    size = Tokenizer(data).vocab_size
    if rows < size:
        raise CheckpointError(f"{folder} has {rows} rows, and the tokenizer {size} tokens")


def find_prefix_tokens(data: bytes, prefixes: Iterable[str]) -> dict[str, int]:
    """Return the prefixes, or their first words, that a tokenizer.json's vocabulary has, with their ids.

    As ordinary text "[unused0]" is several tokens: sentence-transformers makes such ones special. Prefixes
    that the vocabulary does not have stay text.
    """
    tokenizer = Tokenizer(data)
    found: dict[str, int] = {}
    for prefix in prefixes:
        tokens = {content: tokenizer.find_id(content) for content in (prefix, *prefix.split()[:1])}
        found |= dict([(content, token) for content, token in tokens.items() if token is not None][:1])
    return found


def add_special_tokens(data: bytes, tokens: Mapping[str, int]) -> bytes:
    """Make tokens of the vocabulary special ones of a tokenizer.json."""
    written = json.loads(data)
    added = {str(token["content"]): token for token in written.get("added_tokens") or []}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for content, token in tokens.items():
        added[content] = {"id": token, "content": content, **flags, "special": True}
    written["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    return json.dumps(written, ensure_ascii=False).encode()
