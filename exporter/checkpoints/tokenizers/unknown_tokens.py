"""Special tokens that a tokenizer has beyond its model's vocabulary, such as BART-large-cnn's <mask>."""

from __future__ import annotations

import json
import logging

from ....runtime.text.tokenizer import count_ids, parse

log = logging.getLogger("planforge")

SHOWN = 5  # names in a warning


def remove_unknown_tokens(data: bytes, vocab_size: int, source: str) -> bytes:
    """Remove special tokens that the model has no embedding of from a tokenizer.json; a warning names them.

    Tokens that the tokenizer puts around texts or in the place of unknown words stay, like all that are not
    special: then the vocabulary does not fit.
    """
    if count_ids(parse(data, source)) <= vocab_size:
        return data
    written = json.loads(data)
    vocabulary = written["model"]["vocab"]
    used = json.dumps([written.get("post_processor"), written["model"].get("unk_token")])
    if isinstance(vocabulary, list) and written["model"].get("unk_id") is not None:
        used += json.dumps(vocabulary[written["model"]["unk_id"]])
    special = [token for token in written.get("added_tokens") or [] if token["special"]]
    unknown = {
        str(token["content"])
        for token in special
        if token["id"] >= vocab_size and json.dumps(token["content"]) not in used
    }
    if not unknown:
        return data
    written["added_tokens"] = [t for t in written["added_tokens"] if t["content"] not in unknown]
    if isinstance(vocabulary, dict):
        written["model"]["vocab"] = {token: i for token, i in vocabulary.items() if token not in unknown}
    else:  # a Unigram's, whose ids are places
        while len(vocabulary) > vocab_size and vocabulary[-1][0] in unknown:
            vocabulary.pop()
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    log.warning(
        "the tokenizer of %s has %s%s, which the model's vocabulary lacks; they are left out of the bundle",
        source,
        ", ".join(sorted(unknown)[:SHOWN]),
        more,
    )
    return json.dumps(written, ensure_ascii=False).encode()
