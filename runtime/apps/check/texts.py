"""Compares golden texts, which are kept at export (ids, texts, rendered chats), with the runtime's own.

They come from transformers or from the library tokenizers, not from the runtime that is compared with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...bundle.bundle import Bundle
from ...bundle.json_reader import Reader
from ...bundle.manifest import Manifest
from ...encode.requests import RequestReader
from ...errors import BackendUnavailableError, InputError, TokenizerError
from ...generate.grammar import Grammars
from ...generate.row_reader import RowReader
from ...text.chat import TEMPLATE_FILES, Chat
from ...text.long_text import fit
from ...text.tokenizer import Tokenizer
from ...text.wording import Wording
from ...translate.sources import SourceReader, open_tokenizers
from .cases import Skipped
from .differences import describe_differences
from .golden_texts import GoldenChat, GoldenInput, GoldenText, GoldenTexts, find_texts, read_texts
from .outcome import Comparison

FILES = "manifest and tokenizer"  # in the place of a graph's id
READING = "the runtime"  # in the place of an engine
AT_EXPORT = "at export it was"
NO_LIMIT = 10**9  # tokens
MOST = 3  # texts of a case that are told
MOST_TOKENS = 8  # at a text's end that are told
SHOWN = 40  # characters of a text


def make_fixed_time(form: str) -> str:
    """Return a day and hour in which every chat of golden texts is rendered, whatever the day is."""
    from datetime import datetime

    return datetime(2026, 2, 3, 16, 5, 6).strftime(form)


def open_text_tokenizers(bundle: Bundle) -> list[Tokenizer]:
    """Return a bundle's tokenizers: one, or the source's and the target's."""
    if bundle.manifest.task == "translation":
        return list(open_tokenizers(bundle))
    return [Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))]


def describe_settings(manifest: Manifest) -> dict[str, Any]:
    """Return, as plain JSON, what decides beside files how texts are read and answers are written."""
    names = ("generation", "encoder", "images", "likeness", "words")
    kinds: dict[str, Any] = {name: getattr(manifest, name) for name in names}
    template = manifest.tokenizer.get("chat_template")
    settings = {
        "family": manifest.family,
        "task": manifest.task,
        "tokenizer": {name: manifest.tokenizer.get(name) for name in ("kind", "vocab_size")},
        "chat_template": None if template is None else {"tokens": read_template_tokens(template)},
        **{kind: asdict(defaults) for kind, defaults in kinds.items() if defaults is not None},
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    plain.get("encoder", {}).get("roles", {}).pop("ranges", None)  # of vectors, measured afterwards
    return plain


def read_template_tokens(template: Any) -> dict[str, str]:
    """Return the special tokens of a manifest's chat template by the names that it has for them."""
    return dict(Reader(template, "tokenizer.chat_template").texts("tokens"))


def hash_files(bundle: Bundle) -> tuple[str, ...]:
    """Return the sha256 of the tokenizers' files and of the chat template, as they are."""
    paths = [bundle.path(name) for name in list_files(bundle.manifest)]
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)


def list_files(manifest: Manifest) -> list[str]:
    names = [str(name) for name in manifest.tokenizer["files"]]
    template = manifest.tokenizer.get("chat_template")
    chat = [str(template[key]) for key in TEMPLATE_FILES if key in template] if template else []
    return names + chat


def compare_texts(bundle: Bundle) -> tuple[list[Comparison], list[Skipped]]:
    """Compare the runtime with a bundle's golden texts, and say which cannot be compared here."""
    if bundle.manifest.words is not None:  # its words are looked up, and no text is cut into tokens
        return [], []
    file = find_texts(bundle)
    if file is None:
        return [], [Skipped(FILES, "texts and chats", "the bundle has no golden texts; export it again")]
    return compare_with(bundle, read_texts(file))


def compare_with(bundle: Bundle, golden: GoldenTexts) -> tuple[list[Comparison], list[Skipped]]:
    """Compare the runtime with golden texts."""
    comparisons = [make_comparison("files and settings", "settings", *compare_settings(bundle, golden))]
    tokenizers = open_text_tokenizers(bundle)
    names = ("",) if len(golden.sides) == 1 else ("source's ", "target's ")
    for name, tokenizer, texts in zip(names, tokenizers, golden.sides, strict=False):
        faults = list(filter(None, (compare_ids(tokenizer, text, golden.reference) for text in texts)))
        comparisons.append(make_comparison(f"{name}texts to ids", "texts", len(texts), faults))
        faults = list(filter(None, (compare_decoded(tokenizer, text, golden.reference) for text in texts)))
        comparisons.append(make_comparison(f"{name}ids to texts", "texts", len(texts), faults))
    read_input = make_input_reader(bundle.manifest, tokenizers[0])
    plain = golden.plain_inputs
    faults = [compare_input(read_input, one, tokenizers[0], golden.reference) for one in plain]
    comparisons.append(
        make_comparison("texts as the model reads them", "texts", len(faults), list(filter(None, faults)))
    )
    if bundle.manifest.encoder is not None and len(plain) < len(golden.inputs):
        reader = RequestReader(tokenizers[0], bundle.manifest.encoder)
        typed = [one for one in golden.inputs if one.input_type is not None]
        faults = list(filter(None, (compare_typed(reader, one, golden.reference) for one in typed)))
        comparisons.append(make_comparison("queries and documents", "texts", len(typed), faults))
    if not golden.chats:
        return comparisons, []
    try:
        faults = compare_chats(bundle, tokenizers[0], golden)
    except BackendUnavailableError as error:  # no jinja2
        return comparisons, [Skipped(FILES, f"{len(golden.chats)} chats", str(error))]
    comparisons.append(make_comparison("chats", "texts", len(golden.chats), faults))
    return comparisons, []


def make_comparison(case: str, unit: str, count: int, faults: Sequence[str]) -> Comparison:
    """Return what comparing so many texts or settings has found; `MOST` faults are told."""
    told = list(faults) if len(faults) <= MOST else [*faults[:MOST], f"and {len(faults) - MOST} more like it"]
    return Comparison({unit: count}, {}, tuple(told), artifact=FILES, backend=READING, case=case)


def compare_settings(bundle: Bundle, golden: GoldenTexts) -> tuple[int, list[str]]:
    """Compare the manifest's settings, and the files' hashes, with those of the export."""
    settings = describe_settings(bundle.manifest)
    # Of settings that a later version has, an earlier one wrote nothing.
    known = {
        part: {name: value[name] for name in value if name in golden.settings[part]}
        if isinstance(value, Mapping) and isinstance(golden.settings.get(part), Mapping)
        else value
        for part, value in settings.items()
        if part in golden.settings
    }
    faults = describe_differences(known, golden.settings, AT_EXPORT)
    names = list_files(bundle.manifest)
    hashes = hash_files(bundle)
    if len(hashes) != len(golden.hashes):
        faults.append(f"{len(hashes)} files read and write texts, {AT_EXPORT} {len(golden.hashes)}")
    for name, got, expected in zip(names, hashes, golden.hashes, strict=False):
        if got != expected:
            faults.append(f"{name} is another file than at export, though the manifest lists its hash")
    return len(settings) + len(hashes), faults


def compare_ids(tokenizer: Tokenizer, golden: GoldenText, reference: str) -> str:
    """Return how a text's ids differ, or ""."""
    try:
        got = tokenizer.encode(golden.text, parse_special=True)
    except (InputError, TokenizerError) as error:
        return f"{show(golden.text)} has no ids here: {error}"
    return describe_ids(golden.text, got, golden.ids, tokenizer, reference)


def describe_ids(
    text: str, got: Sequence[int], expected: Sequence[int], tokenizer: Tokenizer, reference: str
) -> str:
    """Return which token of a text is the first that is another one, or ""."""
    if tuple(got) == tuple(expected):
        return ""

    def spell(token: int) -> str:
        return repr(tokenizer.spell(token)) if 0 <= token < tokenizer.vocab_size else "no token"

    place = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
    if place is None:
        shorter, longer = sorted((got, expected), key=len)
        more = " ".join(map(spell, longer[len(shorter) :][:MOST_TOKENS]))
        which = "with" if longer is expected else "without"
        told = f"{reference} gives {len(expected)}, {which} {more} at the end"
        return f"{show(text)} has {len(got)} tokens; {told}"
    here, there = (f"{ids[place]} ({spell(ids[place])})" for ids in (got, expected))
    return f"token {place} of {show(text)} is {here}; {reference} gives {there}"


def compare_decoded(tokenizer: Tokenizer, golden: GoldenText, reference: str) -> str:
    """Return how the text of ids differs, or ""."""
    try:
        got = tokenizer.decode(golden.ids)
    except (InputError, TokenizerError) as error:
        return f"the ids of {show(golden.text)} have no text here: {error}"
    if got == golden.decoded:
        return ""
    return (
        f"the ids of {show(golden.text)} are the text {show(got)}; {reference} gives {show(golden.decoded)}"
    )


def compare_input(
    read_input: Callable[[GoldenInput], list[int]], golden: GoldenInput, tokenizer: Tokenizer, reference: str
) -> str:
    """Return how the ids that the model reads of a text differ, or ""."""
    try:
        got = read_input(golden)
    except (InputError, TokenizerError) as error:
        return f"{show(golden.text)} is not read: {error}"
    return describe_ids(golden.text, got, golden.ids, tokenizer, reference)


def compare_typed(reader: RequestReader, golden: GoldenInput, reference: str) -> str:
    """Return how a query, a document, or a pair of a chat template, is read otherwise, or ""."""
    try:
        if golden.pair is None:
            piece = reader.read_text(golden.text, golden.input_type)
        else:
            piece = reader.read_pair(golden.text, golden.pair, golden.prompt)
    except (InputError, TokenizerError) as error:
        return f"the {golden.input_type} {show(golden.text)} is not read: {error}"
    told = describe_ids(golden.text, piece.ids, golden.ids, reader.tokenizer, reference)
    if told:
        return f"as a {golden.input_type}, {told}"
    if golden.pair is not None:
        return ""
    seen = len(piece) - piece.unseen
    if seen != golden.seen:
        return f"of the {golden.input_type} {show(golden.text)} {seen} tokens are seen, not {golden.seen}"
    places = [("vectors", reader.find_counted(piece.ids, golden.input_type), golden.counted)]
    if golden.weighted is not None:
        places.append(("weights", reader.find_weighted(piece), golden.weighted))
    for name, got, expected in places:
        if got != list(expected):
            return (
                f"of the {golden.input_type} {show(golden.text)} the {name} at {got} count, not those at"
                f" {list(expected)}"
            )
    return ""


def make_input_reader(manifest: Manifest, tokenizer: Tokenizer) -> Callable[[GoldenInput], list[int]]:
    """Return what gives all ids that a model reads of a text, as its class does."""
    if manifest.prompts is not None:
        special = manifest.prompts.special_tokens

        def read_prompt(one: GoldenInput) -> list[int]:
            ids = tokenizer.encode(one.text, parse_special=True)
            fitted = fit(ids, None, max_length=NO_LIMIT, special_tokens=special, truncation=None)
            return fitted.pieces[0].ids

        return read_prompt
    if manifest.encoder is not None:
        defaults = manifest.encoder
        before = defaults.prompts.get(defaults.default_prompt or "", "")

        def read_encoder_input(one: GoldenInput) -> list[int]:
            first = tokenizer.encode(one.text, parse_special=True)
            if one.pair is None:
                (first,) = tokenizer.encode_prompted(before, [one.text])
            second = None if one.pair is None else tokenizer.encode(one.pair, parse_special=True)
            fitted = fit(
                first,
                second,
                max_length=NO_LIMIT,
                special_tokens=defaults.make_special_tokens(is_pair=second is not None),
                truncation=None,
            )
            return fitted.pieces[0].ids

        return read_encoder_input
    generation = manifest.generation
    assert generation is not None  # what is no encoder has it
    if manifest.task == "translation":
        reader = SourceReader(tokenizer, generation, NO_LIMIT, truncation=None, parse_special=True)
        return lambda one: reader.read(one.text).tokens
    vocabulary = tokenizer.vocab_size
    rows = RowReader(
        tokenizer, generation, NO_LIMIT, vocabulary, None, Grammars(tokenizer, generation.eos, vocabulary)
    )
    return lambda one: rows.encode_prompt(one.text, parse_special=True)


def compare_chats(bundle: Bundle, tokenizer: Tokenizer, golden: GoldenTexts) -> list[str]:
    """Return which conversations are rendered otherwise, or become other ids."""
    chat = Chat.of(bundle)
    if chat is None:
        return [f"there is no chat template, {AT_EXPORT} there"]
    fixed = replace(chat, clock=make_fixed_time)
    return list(filter(None, (compare_chat(fixed, tokenizer, one, golden) for one in golden.chats)))


def compare_chat(chat: Chat, tokenizer: Tokenizer, one: GoldenChat, golden: GoldenTexts) -> str:
    """Return how a conversation is rendered otherwise, or ""."""
    name = f"the chat that ends with {show(str(one.messages[-1].get('content')))}"
    try:
        wording = Wording(one.tools)
        rendered = chat.render(one.messages, wording)
        ids = chat.encode(one.messages, tokenizer, parse_special=True, wording=wording)
    except InputError as error:
        return "" if one.rendered is None else f"{name} is refused here: {error}"
    if one.rendered is None:
        return f"{name} is rendered, {golden.chat_reference} refused it"
    if rendered == one.rendered:
        told = describe_ids(one.rendered, ids, one.ids, tokenizer, golden.reference)
        return told or compare_guarded(chat, tokenizer, one)
    pairs = enumerate(zip(rendered, one.rendered, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(rendered), len(one.rendered)))
    begin = max(0, place - 10)
    return (
        f"{name} is from character {begin} on {show(rendered[begin:])};"
        f" {golden.chat_reference} gives {show(one.rendered[begin:])}"
    )


def compare_guarded(chat: Chat, tokenizer: Tokenizer, one: GoldenChat) -> str:
    """Return how a conversation is read otherwise where special tokens that texts spell stay text, or ""."""
    wording = Wording(one.tools)
    said = json.dumps([one.messages, one.tools], ensure_ascii=False)
    if any(token.lower() in said.lower() for token in tokenizer.special_tokens):
        return ""
    ids = chat.encode(one.messages, tokenizer, wording=wording)
    if tuple(ids) == one.ids:
        return ""
    last = show(str(one.messages[-1].get("content")))
    return f"the chat that ends with {last} is read otherwise where special tokens of users stay plain text"


def show(text: str) -> str:
    """Return a text as messages quote it, cut where it is long."""
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}..."
