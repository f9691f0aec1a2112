"""The two tokenizers of a translation."""

from __future__ import annotations

from ..bundle.bundle import Bundle
from ..bundle.json_reader import Reader
from ..opening import tokenizer_files
from ..text.kinds import open_tokenizer
from ..text.tokenizer import Tokenizer, read


def open_tokenizers(bundle: Bundle) -> tuple[Tokenizer, Tokenizer]:
    """Return the source's tokenizer and the target's; some models have one for both."""
    manifest = bundle.manifest
    kind = Reader(manifest.tokenizer, "tokenizer").get("kind", str)
    config = Reader(manifest.config, "config")
    names = tokenizer_files(manifest, 2)
    opened = {}
    for name, side in zip(names, ("source", "target"), strict=True):
        if name not in opened:
            path = bundle.path(name)
            opened[name] = open_tokenizer(read(path), str(path), kind, config.get(f"{side}_vocab_size", int))
    return opened[names[0]], opened[names[1]]
