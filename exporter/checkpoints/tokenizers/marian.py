"""MarianMT's tokenizer files (source.spm, target.spm, vocab.json) -> a tokenizer.json per language."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from ....runtime.errors import TokenizerError
from ....runtime.text.piece_tokenizer import ID_ONLY, PIECE_ONLY, SPACE, Charsmap
from ....runtime.text.tokenizer import join_lines, read
from ...errors import CheckpointError, raise_checkpoint_errors
from .files import find_role_names, list_special_names, read_settings
from .read_files import read_json_object

WAY_OUT = "take the file from the checkpoint once more"
NAMES = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}

# Fields of sentencepiece_model.proto, whose own package brings a runtime of its own.
PIECES = 1
TRAINER = 2
NORMALIZER = 3
DENORMALIZER = 5
PIECE = 1
SCORE = 2
TYPE = 3
MODEL_TYPE = 3
SUFFIX_SPACE = 24
BYTE_FALLBACK = 35
CHARSMAP = 2
DUMMY_PREFIX = 3
TRIM = 4
ESCAPE = 5
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM = 1
MODEL_TYPES = {2: "BPE", 3: "word", 4: "char"}

T = TypeVar("T", int, bytes)
Message = dict[int, list[Any]]


@dataclass(frozen=True)
class SentencePieces:
    """The contents of a .spm file."""

    scores: dict[str, float]  # of each piece that a text can be cut into
    reserved: frozenset[str]  # pieces that decode to nothing, such as <s>
    charsmap: bytes  # normalization rules; empty for none
    prefixes: bool  # whether a text begins with a space that it does not have
    trims: bool  # whether spaces in a row are one, and those at the ends none


@raise_checkpoint_errors(TokenizerError)
def build_marian_tokenizers(folder: Path) -> tuple[bytes, bytes]:
    """Return the source's and the target's tokenizer.json, for planforge.runtime's PieceTokenizer.

    Both number their tokens as vocab.json does, or the target's as target_vocab.json where
    tokenizer_config.json has separate_vocabs, which may also rename special ones.
    """
    source, target = (read_spm(folder / name) for name in ("source.spm", "target.spm"))
    vocab = read_marian_vocabulary(folder / "vocab.json")
    sides = [("source.spm", source, vocab, source), ("target.spm", target, vocab, source)]
    if has_separate_vocabularies(folder):
        sides[1] = ("target.spm", target, read_marian_vocabulary(folder / "target_vocab.json"), target)
    texts = []
    for name, pieces, ids, decoding in sides:
        special = _find_special(folder, ids, is_target=ids is not vocab)
        # Of one vocabulary decoding goes by the source's pieces for both languages, as in transformers.
        added = {text: text in special for text in ids if text in special | decoding.reserved}
        if clash := sorted(set(added) & set(pieces.scores)):
            raise CheckpointError(f"{folder / name}: {clash[0]!r} is a special token and an ordinary piece")
        content = _build_tokenizer_json(ids, pieces, added, ids[_read_names(folder)["unk"]])
        texts.append(json.dumps(content, ensure_ascii=False, allow_nan=False).encode())
    return texts[0], texts[1]


def has_separate_vocabularies(folder: Path) -> bool:
    """Return whether the target has a vocabulary of its own; refuse one that no setting names.

    Without the setting, transformers reads both languages by vocab.json, whatever the model was trained with.
    """
    settings = read_settings(folder)
    path = folder / "target_vocab.json"
    if settings.get("separate_vocabs"):
        return True
    has_own_words = read_json_object(folder / "config.json").get("share_encoder_decoder_embeddings") is False
    if has_own_words and path.is_file() and read_json_object(path) != read_json_object(folder / "vocab.json"):
        raise CheckpointError(
            f"{path} exists, but tokenizer_config.json does not set separate_vocabs, so transformers would"
            " use vocab.json for the target. Set separate_vocabs to true if the model was trained with both"
            " vocabularies; otherwise remove target_vocab.json"
        )
    return False


def read_marian_vocabulary(path: Path) -> dict[str, int]:
    """Return the ids of a vocabulary, in their order."""
    if not path.is_file():
        raise CheckpointError(f"{path} cannot be read: {os.strerror(errno.ENOENT)}; {WAY_OUT}")
    vocab = read_json_object(path)
    if not all(type(index) is int for index in vocab.values()):
        raise CheckpointError(f"{path}: a token's id is not an integer; {WAY_OUT}")
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise CheckpointError(
            f"{path}: the ids of {len(vocab)} tokens must be 0 to {len(vocab) - 1}, each once"
        )
    if marked := [token for token in vocab if token.startswith((ID_ONLY, PIECE_ONLY))]:
        raise CheckpointError(f"{path}: {marked[0]!a} begins with a character not allowed in a token")
    for name in _read_names(path.parent).values():
        if name not in vocab:
            raise CheckpointError(f"{path} has no {name!r}, which every MarianMT model needs; {WAY_OUT}")
    return dict(sorted(vocab.items(), key=lambda item: int(item[1])))


def read_spm(path: Path) -> SentencePieces:
    """Read a unigram model of SentencePiece."""
    data = read(path)
    try:
        model = _parse_message(data)
        pieces = [_parse_message(piece) for piece in model.get(PIECES, [])]
        spelled = [_read_last(piece, PIECE, b"").decode() for piece in pieces]
        bits = [_read_last(piece, SCORE, 0) for piece in pieces]
        scores = struct.unpack(f"<{len(bits)}f", struct.pack(f"<{len(bits)}I", *bits))
        types = [_read_last(piece, TYPE, NORMAL) for piece in pieces]
        if len(set(spelled)) != len(spelled) or "" in spelled:
            raise ValueError("a piece is empty, or there twice")
        if NORMAL not in types or UNKNOWN not in types or not all(map(math.isfinite, scores)):
            raise ValueError("it has no ordinary piece, no unknown one, or one without a score")
        unsupported = _find_unsupported(model, set(types))
        spec = _read_part(model, NORMALIZER)
        charsmap = _read_last(spec, CHARSMAP, b"")
        if charsmap:
            Charsmap(charsmap)
        prefixes = bool(_read_last(spec, DUMMY_PREFIX, 1))
        trims = bool(_read_last(spec, TRIM, 1))
    except (DecodeError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path} is not a SentencePiece model: {join_lines(error)}; {WAY_OUT}"
        ) from error
    if any(text.startswith((ID_ONLY, PIECE_ONLY)) for text in spelled):
        unsupported.append("pieces that begin with U+10FFFE or U+10FFFF")
    if unsupported:
        raise CheckpointError(
            f"{path} has {', '.join(unsupported)}; only plain unigram models are supported, as MarianMT's are"
        )
    typed = list(zip(spelled, scores, types, strict=True))
    return SentencePieces(
        scores={text: score for text, score, kind in typed if kind == NORMAL},
        reserved=frozenset(text for text, _, kind in typed if kind in (UNKNOWN, CONTROL)),
        charsmap=charsmap,
        prefixes=prefixes,
        trims=trims,
    )


def _find_unsupported(model: Message, types: set[int]) -> list[str]:
    trainer = _read_part(model, TRAINER)
    spec = _read_part(model, NORMALIZER)
    kind = _read_last(trainer, MODEL_TYPE, UNIGRAM)
    found = {
        f"the model type {MODEL_TYPES.get(kind, kind)}": kind != UNIGRAM,
        "user-defined symbols": USER_DEFINED in types,
        "byte fallback": BYTE in types or _read_last(trainer, BYTE_FALLBACK, 0),
        "spaces at the ends of pieces": _read_last(trainer, SUFFIX_SPACE, 0),
        "spaces that are not escaped": not _read_last(spec, ESCAPE, 1),
        "a denormalizer": _read_last(_read_part(model, DENORMALIZER), CHARSMAP, b""),
    }
    return [name for name, is_there in found.items() if is_there]


def _build_tokenizer_json(
    vocab: Mapping[str, int], pieces: SentencePieces, added: Mapping[str, bool], unknown: int
) -> dict[str, Any]:
    own = {text: score for text, score in pieces.scores.items() if text not in vocab}
    entries = [
        [text if text in pieces.scores or text in added else ID_ONLY + text, pieces.scores.get(text, 0.0)]
        for text in vocab
    ]
    entries += [[PIECE_ONLY + text, score] for text, score in own.items()]
    normalizers: list[dict[str, Any]] = []
    if pieces.charsmap:
        encoded = base64.b64encode(pieces.charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if pieces.trims:
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    scheme = "always" if pieces.prefixes else "never"
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocab[text], "content": text, **flags, "special": special}
            for text, special in added.items()
        ],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": metaspace,
        "post_processor": None,
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": entries, "byte_fallback": False},
    }


def _read_names(folder: Path) -> dict[str, str]:
    roles = find_role_names(read_settings(folder))
    return {role: roles.get(role, default) for role, default in NAMES.items()}


def _find_special(folder: Path, vocab: Mapping[str, int], is_target: bool) -> frozenset[str]:
    """Return the special tokens that have an id; refuse settings that would change ids or texts."""
    settings = read_settings(folder)
    path = folder / "tokenizer_config.json"
    _check_processor(path, settings.get("sp_model_kwargs"))
    added = settings.get("added_tokens_decoder", {})
    if not isinstance(added, dict) or not all(isinstance(entry, dict) for entry in added.values()):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object of objects; {WAY_OUT}")
    for index, entry in added.items():
        if not is_target and str(vocab.get(entry.get("content"))) != index:
            raise CheckpointError(
                f"{path} adds {entry.get('content')!r} as token {index}, which vocab.json does not have; "
                "tokens that were added to a vocabulary later are not supported"
            )
    names = {*_read_names(folder).values(), *list_special_names(settings)}
    names |= {entry["content"] for entry in added.values() if entry.get("special") is True}
    return frozenset(names & set(vocab))


def _check_processor(path: Path, options: object) -> None:
    """Refuse options of SentencePiece that change what texts are cut into."""
    if not isinstance(options, dict):
        options = {} if not options else {"sp_model_kwargs": options}
    if options.get("enable_sampling") is False:
        options = {name: value for name, value in options.items() if name not in ("nbest_size", "alpha")}
    if changing := {name: value for name, value in options.items() if value}:
        raise CheckpointError(
            f"{path}: sp_model_kwargs has {changing}, which is not supported: it changes the tokenization"
        )


def _parse_message(data: bytes) -> Message:
    """Return the fields of a protobuf message: numbers as int, everything else as bytes."""
    fields: Message = {}
    for field in UnknownFieldSet(Empty.FromString(data)):  # without a schema every field is unknown
        fields.setdefault(field.field_number, []).append(field.data)
    return fields


def _read_part(message: Message, field: int) -> Message:
    return _parse_message(_read_last(message, field, b""))


def _read_last(message: Message, field: int, default: T) -> T:
    """Return a field's value; of several the last, as in protobuf."""
    value = message.get(field, [default])[-1]
    if not isinstance(value, type(default)):
        raise ValueError(f"field {field} is {value!r}")
    return value
