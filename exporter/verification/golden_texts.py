"""Writes golden texts: the results of transformers, or tokenizers alone, for texts and chats at export."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from ...runtime.apps.check.golden_texts import (
    PREFIX,
    GoldenChat,
    GoldenInput,
    GoldenText,
    GoldenTexts,
    find_texts,
    read_texts,
)
from ...runtime.apps.check.texts import compare_with, describe_settings, hash_files, make_fixed_time
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.errors import InputError
from ...runtime.text.chat import Chat
from ...runtime.text.piece_tokenizer import PIECES
from ...runtime.text.tokenizer import Tokenizer, parse, wrap_tokenizer_errors
from ...runtime.text.wording import Wording
from ..bundle.names import name_by_content
from ..bundle.writer import list_file_entries
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tokenizers.classes import find_unknown_class
from ..checkpoints.tokenizers.files import lower_case, read_settings
from ..checkpoints.tokenizers.translation import OWN_FILES
from ..errors import VerificationError, shorten_error
from .golden_pairs import make_pair_inputs
from .golden_roles import make_typed_inputs
from .golden_samples import PAIRS, TEXTS, make_added_texts, make_chats, make_vocabulary_texts

log = logging.getLogger("planforge")
NOW = "strftime_now"
TRANSFORMERS = "transformers"
WAY_OUT = (
    "keep a copy of {folder}, and save its tokenizer there as transformers reads it: AutoTokenizer"
    ".from_pretrained(folder).save_pretrained(folder)"
)
ASKS_TIME = re.compile(NOW + r"\(\s*(['\"])(.*?)\1\s*\)")


class Reference(Protocol):
    """A source of the ids and texts that the runtime is compared with."""

    name: str
    unsure: frozenset[int]  # ids that it takes for other tokens than the model does

    def encode(self, text: str) -> list[int]:
        """Return a text's ids; special tokens that it spells are read as such."""

    def add_special_tokens(self, text: str, pair: str | None) -> list[int]:
        """Return the ids of a text or a pair with the special tokens around them."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""


class PlainReference:
    """A reference by the library tokenizers, with a tokenizer.json."""

    unsure: frozenset[int] = frozenset()

    def __init__(self, data: bytes, source: str) -> None:
        self.name = f"tokenizers {tokenizers.__version__}"
        self._tokenizer = parse(data, source)
        self._source = source

    def encode(self, text: str) -> list[int]:
        with wrap_tokenizer_errors(self._source):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def add_special_tokens(self, text: str, pair: str | None) -> list[int]:
        with wrap_tokenizer_errors(self._source):
            return self._tokenizer.encode(text, pair).ids

    def decode(self, ids: Sequence[int]) -> str:
        with wrap_tokenizer_errors(self._source):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class OwnReference:
    """A reference by the runtime's own tokenizer of pieces, where transformers is not available."""

    name = "PlanForge"
    unsure: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True)

    def add_special_tokens(self, text: str, pair: str | None) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class TransformersReference:
    """A reference by transformers' tokenizer of a checkpoint, on one of its two sides."""

    def __init__(self, tokenizer: Any, side: str) -> None:
        self.name = f"{TRANSFORMERS} {version(TRANSFORMERS)}"
        self._tokenizer = tokenizer
        self._side = side
        # MarianTokenizer with two vocabularies numbers special tokens by the source's, in the target's texts
        # too, and decodes by the target's alone.
        self.unsure: frozenset[int] = frozenset()
        self._source_pieces: dict[int, str] = {}
        own = getattr(tokenizer, "target_encoder", None)
        if own is not None and side == "target":
            added = tokenizer.added_tokens_decoder
            self.unsure = frozenset(index for index, token in added.items() if own.get(str(token)) != index)
        elif own is not None:
            self._source_pieces = {index: piece for piece, index in tokenizer.encoder.items()}

    def encode(self, text: str) -> list[int]:
        return self._encode(text, None, False)

    def add_special_tokens(self, text: str, pair: str | None) -> list[int]:
        return self._encode(text, pair, True)

    def decode(self, ids: Sequence[int]) -> str:
        text: str
        if self._source_pieces:
            special = set(self._tokenizer.all_special_ids)
            pieces = [self._source_pieces[index] for index in ids if index not in special]
            text = self._tokenizer.spm_source.decode_pieces(pieces).replace("▁", " ").strip()
            return text
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _encode(self, text: str, pair: str | None, with_frame: bool) -> list[int]:
        given = {"text_target": text} if self._side == "target" else {"text": text}
        if pair is not None:
            given["text_pair"] = pair
        # Unless told to be quiet, it warns of texts longer than the model reads, which nobody runs here.
        ids: list[int] = self._tokenizer(**given, add_special_tokens=with_frame, verbose=False)["input_ids"]
        return ids


def load_transformers_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a checkpoint; None where it is not installed or cannot read it.

    It lower-cases where sentence-transformers would.
    """
    if (folder / OWN_FILES[0]).is_file() or importlib.util.find_spec(TRANSFORMERS) is None:
        return None
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            found("a text")
    except Exception as error:  # whatever a file brings it to
        log.debug("transformers reads no tokenizer of %s: %s", folder, shorten_error(error))
        return None
    finally:
        transformers_logging.set_verbosity(before)
    if found.is_fast:
        lower_case(found.backend_tokenizer, folder)
    return found


def add_golden_texts(staging: Path, manifest: Manifest, checkpoint: Checkpoint) -> Manifest:
    """Write golden texts below `staging`, and return the manifest that lists them.

    Raises:
        VerificationError: the runtime makes something else of them; names the first text.
    """
    bundle = Bundle(staging, manifest)
    golden = make_golden_texts(bundle, checkpoint)
    comparisons, _ = compare_with(bundle, golden)
    faults = [f"{c.case}: {fault}" for c in comparisons for fault in c.failures]
    if faults:
        told = ["the runtime does not read the checkpoint's texts:", *faults]
        is_read_otherwise = any(c.failures for c in comparisons if c.case != "chats")
        if is_read_otherwise and golden.reference.startswith(TRANSFORMERS):
            told.append(WAY_OUT.format(folder=checkpoint.folder))
        raise VerificationError("\n  ".join(told))
    return write_golden_texts(staging, manifest, golden)


def write_golden_texts(staging: Path, manifest: Manifest, golden: GoldenTexts) -> Manifest:
    """Write the file, and return the manifest that lists it."""
    (staging / "checks").mkdir(exist_ok=True)
    path = staging / f"{PREFIX.rstrip('-')}.json"
    path.write_text(golden.to_json(), encoding="utf-8")
    name_by_content(path)
    return dataclasses.replace(manifest, files=list_file_entries(staging, known=manifest.files))


def carry_golden_texts(opened: Bundle, staging: Path, manifest: Manifest) -> Manifest:
    """Write the golden texts of another bundle with the same tokenizer, if it has any, for new settings."""
    file = find_texts(opened)
    if file is None:
        return manifest
    golden = dataclasses.replace(read_texts(file), settings=describe_settings(manifest))
    return write_golden_texts(staging, manifest, golden)


def make_golden_texts(bundle: Bundle, checkpoint: Checkpoint) -> GoldenTexts:
    """Ask the references for the ids, texts and chats of the golden set."""
    theirs = load_transformers_tokenizer(checkpoint.folder)
    if theirs is not None and checkpoint.prefix_tokens:  # as sentence-transformers does
        theirs.add_tokens(sorted(checkpoint.prefix_tokens), special_tokens=True)
    references = make_references(checkpoint, theirs)
    sides = []
    for reference, tokenizer in zip(references, checkpoint.tokenizers, strict=True):
        texts: list[str] = [*TEXTS, *make_added_texts(tokenizer), *make_vocabulary_texts(tokenizer)]
        made = [make_text(reference, text) for text in dict.fromkeys(texts)]
        sides.append(tuple(text for text in made if reference.unsure.isdisjoint(text.ids)))
    chat = Chat.of(bundle)
    chats: list[GoldenChat] = []
    chat_reference = ""
    if chat is not None:
        chat_reference, chats = make_golden_chats(chat, checkpoint, references[0], theirs)
    return GoldenTexts(
        reference=references[0].name,
        chat_reference=chat_reference,
        hashes=hash_files(bundle),
        settings=describe_settings(bundle.manifest),
        sides=tuple(sides),
        inputs=(
            *make_inputs(references[0], checkpoint),
            *make_typed_inputs(references[0], checkpoint),
            *make_pair_inputs(references[0], checkpoint, theirs),
        ),
        chats=tuple(chats),
    )


def make_references(checkpoint: Checkpoint, theirs: Any) -> list[Reference]:
    """Return the references of both sides: transformers' tokenizer, or the library where there is none.

    The library tokenizers reads what the exporter made of the files, and knows nothing of their settings.
    """
    found: list[Reference] = []
    for side, tokenizer in zip(("source", "target"), checkpoint.tokenizers, strict=False):
        if theirs is not None:
            found.append(TransformersReference(theirs, side))
        elif checkpoint.tokenizer_kind == PIECES:
            found.append(OwnReference(tokenizer))
        else:
            refuse_unknown_class(checkpoint.folder)
            data = list(checkpoint.tokenizer_files.values())[len(found)]
            found.append(PlainReference(data, str(checkpoint.folder)))
    return found


def refuse_unknown_class(folder: Path) -> None:
    """Refuse a tokenizer whose correct reading only transformers can tell."""
    name = find_unknown_class(folder, read_settings(folder))
    if name is not None:
        raise VerificationError(
            f"{folder} names the tokenizer class {name}, which can be checked only with transformers, but"
            " that is not installed, or cannot read it: pip install 'planforge[export]'"
        )


def make_text(reference: Reference, text: str) -> GoldenText:
    ids = reference.encode(text)
    return GoldenText(text, tuple(ids), reference.decode(ids))


def make_inputs(reference: Reference, checkpoint: Checkpoint) -> Iterator[GoldenInput]:
    """Yield texts with the tokens that the checkpoint puts around them."""
    encoder = checkpoint.encoder
    if checkpoint.images is not None or checkpoint.likeness is not None:
        for text in TEXTS:
            yield GoldenInput(text, None, tuple(reference.add_special_tokens(text, None)))
        return
    if encoder is None:
        end = None if checkpoint.generation is None else checkpoint.generation.source_eos
        for text in TEXTS:
            ids = reference.add_special_tokens(text, None)
            suffix = len(checkpoint.special_tokens.suffix)
            if end is None:
                ids = ids[: len(ids) - suffix]  # a prompt goes on
            elif ids[-1:] != [end]:
                ids = [*ids, end]
            if len(ids) > (end is not None) + len(checkpoint.special_tokens.prefix):
                yield GoldenInput(text, None, tuple(ids))
        return
    if checkpoint.frames is None:
        return
    before = encoder.prompts.get(encoder.default_prompt or "", "")
    if checkpoint.is_static:  # sentence-transformers adds no special tokens
        read = {text: tuple(reference.encode(before + text)) for text in TEXTS}
        yield from (GoldenInput(text, None, ids) for text, ids in read.items() if ids)
        return
    behind = ""  # transformers' users write the choice token
    if checkpoint.reads_choice_token:
        behind = checkpoint.tokenizers[0].spell(encoder.tokens["cls"])
    for text in TEXTS:
        yield GoldenInput(text, None, tuple(reference.add_special_tokens(before + text + behind, None)))
    for text, pair in PAIRS if encoder.pairs is None else ():
        yield GoldenInput(text, pair, tuple(reference.add_special_tokens(text, pair + behind)))


def make_golden_chats(
    chat: Chat, checkpoint: Checkpoint, reference: Reference, theirs: Any
) -> tuple[str, list[GoldenChat]]:
    """Return the chats as `theirs`, transformers' tokenizer, renders them if it can, and the renderer."""
    if theirs is not None and (theirs.chat_template is None or NOW in fix_time(str(theirs.chat_template))):
        theirs = None
    name = "PlanForge" if theirs is None else f"{TRANSFORMERS} {version(TRANSFORMERS)}"
    fixed = dataclasses.replace(chat, clock=make_fixed_time)
    chats = []
    for messages, tools in make_chats(checkpoint.tokenizers[0], chat.supports_tools):
        if theirs is None:
            rendered = render_here(fixed, messages, tools)
        else:
            rendered = render_there(theirs, messages, tools)
        ids = () if rendered is None else tuple(reference.encode(rendered))
        chats.append(GoldenChat(tuple(messages), tuple(tools), rendered, ids))
    return name, chats


def render_here(
    chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str | None:
    try:
        return chat.render(messages, Wording(tools))
    except InputError:
        return None


def render_there(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return a conversation as transformers renders it; None where the template refuses it."""
    try:
        rendered: str = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=fix_time(tokenizer.get_chat_template(tools=list(tools) or None)),
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception:  # jinja2's own, and Python's of what a template does
        return None
    return rendered


def fix_time(template: str) -> str:
    """Return a template with a fixed day where it asks for the time: transformers knows only today."""
    return ASKS_TIME.sub(lambda asked: repr(make_fixed_time(asked[2])), template)
