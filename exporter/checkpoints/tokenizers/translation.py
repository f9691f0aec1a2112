"""The two tokenizers of an encoder-decoder's folder, whichever way it keeps them."""

from __future__ import annotations

from pathlib import Path

from ....runtime.text.piece_tokenizer import PIECES, PLAIN
from ....runtime.text.tokenizer import parse, read
from ...errors import CheckpointError
from .files import build_tokenizer_json
from .marian import build_marian_tokenizers

OWN_FILES = ("tokenizer.source.json", "tokenizer.target.json")
SHARED_FILE = "tokenizer.json"


def build_translation_tokenizers(folder: Path) -> tuple[str, tuple[bytes, bytes]]:
    """Return the tokenizers' kind, and the source's and the target's as tokenizer.json."""
    if (folder / "source.spm").is_file():
        return PIECES, build_marian_tokenizers(folder)
    if (folder / SHARED_FILE).is_file():
        both = build_tokenizer_json(folder)
        return PLAIN, (both, both)
    if missing := [name for name in OWN_FILES if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder} has no {missing[0]}; an encoder-decoder needs {' and '.join(OWN_FILES)}, or one"
            f" {SHARED_FILE} for both, or source.spm, target.spm and vocab.json"
        )
    source, target = (parse(read(folder / name), str(folder / name)).to_str().encode() for name in OWN_FILES)
    return PLAIN, (source, target)
