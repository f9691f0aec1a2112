"""The tokens that were added to a tokenizer's vocabulary, with their flags, as transformers adds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ....runtime.errors import TokenizerError
from ....runtime.text.tokenizer import WAY_OUT
from .read_files import read_json_object

FLAGS = ("lstrip", "rstrip", "single_word")


@dataclass(frozen=True)
class Added:
    """Tokens by the ids that a file gives them."""

    path: Path  # of that file
    tokens: Mapping[int, AddedToken]


def read_added(
    folder: Path, settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, special: Sequence[AddedToken]
) -> Added:
    """Return the added tokens of a folder.

    Those of tokenizer_config.json count alone, if it lists any; else those of added_tokens.json, of which
    `special` are special, and of tokenizer.json, which `tokenizer` has read.
    """
    if isinstance(settings.get("added_tokens_decoder"), dict):
        path = folder / "tokenizer_config.json"
        entries = settings["added_tokens_decoder"]
        own = {}
    else:
        path = folder / "added_tokens.json"
        names = {token.content for token in special}
        entries = {
            str(index): {"content": text, "special": text in names}
            for text, index in read_json_object(path).items()
        }
        own = tokenizer.get_added_tokens_decoder()
    if not all(index.isdecimal() for index in entries):
        raise TokenizerError(f"{path}: the ids of added tokens must be integers; {WAY_OUT}")
    return Added(path, {int(index): read_token(entries[index], index, path) for index in entries} | own)


def read_token(entry: Any, index: str, path: Path) -> AddedToken:
    """Return an added token with the flags that a file gives it; one without a text is refused."""
    fields = entry if isinstance(entry, dict) else {"content": entry}
    content = fields.get("content")
    if not isinstance(content, str) or not content:
        raise TokenizerError(f"{path}: added token {index} has no text; {WAY_OUT}")
    flags = {name: fields.get(name) is True for name in FLAGS}
    special = fields.get("special") is True
    normalized = fields.get("normalized", not special) is True
    return AddedToken(content, normalized=normalized, special=special, **flags)


def add_tokens(tokenizer: tokenizers.Tokenizer, added: Added, special: Sequence[AddedToken]) -> None:
    """Add tokens at the ids that they were given; those that have a role are special.

    Args:
        tokenizer: gets them; of its own tokens, those of the same text get the new flags.
        added: the tokens.
        special: those that have a role, with the flags for those that were not added.
    """
    before = tokenizer.get_added_tokens_decoder()
    always = {token.content for token in (*special, *(t for t in before.values() if t.special))}
    for index, token in sorted(added.tokens.items(), key=lambda item: item[0]):
        if token.content in always:
            token.special = True
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != index:
            raise TokenizerError(
                f"{added.path} gives {token.content!r} the id {index}, but after the vocabulary it would be "
                f"{tokenizer.token_to_id(token.content)}; {WAY_OUT}"
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    # A token without an id is left out: a new id would have no row in the model.
    new = [t for t in special if t.content not in known and tokenizer.token_to_id(t.content) is not None]
    tokenizer.add_tokens(new)
