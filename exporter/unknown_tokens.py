"""Special tokens that a tokenizer has beyond its model's vocabulary, such as BART-large-cnn's <mask>."""

from __future__ import annotations

import json
import logging

from ..runtime.text.tokenizer import parse

log = logging.getLogger("planforge")


def without_unknown(data: bytes, vocab_size: int, source: str) -> bytes:
    """A tokenizer.json without the special tokens that the model has no embedding of; a warning names them.

    They stay where the tokenizer puts them around texts by itself, and tokens that are not special stay too.

    Args:
        data: of a tokenizer.json.
        vocab_size: the model's.
        source: what the warning calls it.
    """
    if parse(data, source).get_vocab_size() <= vocab_size:
        return data
    written = json.loads(data)
    template = json.dumps(written.get("post_processor"), ensure_ascii=False)
    unknown = {
        str(token["content"])
        for token in written["added_tokens"]
        if token["special"] and token["id"] >= vocab_size and json.dumps(token["content"]) not in template
    }
    if not unknown:
        return data
    written["added_tokens"] = [t for t in written["added_tokens"] if t["content"] not in unknown]
    vocabulary = written["model"]["vocab"]
    if isinstance(vocabulary, dict):
        written["model"]["vocab"] = {token: i for token, i in vocabulary.items() if token not in unknown}
    else:  # a Unigram's, whose ids are places
        while len(vocabulary) > vocab_size and vocabulary[-1][0] in unknown:
            vocabulary.pop()
    log.warning(
        "the tokenizer of %s has %s, which the model does not know; the bundle's is without",
        source,
        ", ".join(sorted(unknown)),
    )
    return json.dumps(written, ensure_ascii=False).encode()
