"""Makes golden queries and documents: what sentence-transformers' modules read of the same texts.

Their rules are written down here once more, from the folder's own settings: what the manifest has of them is
what is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...models.late_interaction import DOCUMENT, QUERY
from ...runtime.apps.check.golden_texts import GoldenInput
from ..checkpoints.tokenizers.files import find_special_tokens
from .golden_samples import TEXTS

if TYPE_CHECKING:
    from ...models.sentence_transformers import SentenceModules
    from ..checkpoints.checkpoint import Checkpoint
    from .golden_texts import Reference

PROMPTS = {QUERY: ("query",), DOCUMENT: ("document", "passage", "corpus")}
LONG = " ".join(TEXTS)  # is cut wherever a length is


def make_typed_inputs(reference: Reference, checkpoint: Checkpoint) -> Iterator[GoldenInput]:
    """Yield texts as queries and as documents, where a folder of modules embeds them."""
    modules = checkpoint.modules
    if modules is None or not (modules.sentence or modules.sparse or modules.token_vectors):
        return
    for input_type in (QUERY, DOCUMENT):
        chain = modules.query if input_type == QUERY and modules.query is not None else modules
        for text in (*TEXTS, LONG):
            ids = read_ids(reference, checkpoint, chain, find_prompt(modules, input_type) + text, input_type)
            if ids:
                yield make_input(text, ids, input_type, checkpoint)


def find_prompt(modules: SentenceModules, input_type: str) -> str:
    """Return what stands before a text: the prefix of its type, and the prompt that encode_query chooses."""
    prefix = dict(modules.roles.prefixes).get(input_type, "")
    own = next((modules.prompts[name] for name in PROMPTS[input_type] if name in modules.prompts), None)
    if prefix:
        named = modules.prompts.get(input_type, "")
        return prefix + named.removeprefix(prefix)
    if own is not None:
        return own
    return "" if modules.default_prompt is None else modules.prompts[modules.default_prompt]


def read_ids(
    reference: Reference, checkpoint: Checkpoint, chain: SentenceModules, text: str, input_type: str
) -> list[int]:
    """Return a text's ids with the special tokens around them, cut as a tokenizer cuts: before its end."""
    if chain.is_static:
        return reference.encode(text)[: checkpoint.choices.max_length]
    ids = reference.add_special_tokens(text, None)
    roles = chain.roles
    length = checkpoint.choices.max_length
    if input_type == DOCUMENT and roles.document_length is not None:
        length = min(length, roles.document_length)
    elif input_type == QUERY and roles.expansion is not None and roles.expansion.cut:
        length = min(length, roles.expansion.length)
    elif input_type == QUERY and roles.query_length is not None:
        length = min(length, roles.query_length)
    if len(ids) <= length:
        return ids
    end = ids[len(ids) - len(checkpoint.special_tokens.suffix) :]
    return ids[: length - len(end)] + end


def make_input(text: str, ids: list[int], input_type: str, checkpoint: Checkpoint) -> GoldenInput:
    """Return a golden text with its expansion, and the places of the vectors and weights that count."""
    modules = checkpoint.modules
    assert modules is not None
    roles = modules.roles
    tokenizer = checkpoint.tokenizers[0]
    seen = len(ids)
    if input_type == QUERY and roles.expansion is not None:
        special = find_special_tokens(checkpoint.folder, tokenizer)
        spelled = roles.expansion.token
        token = special.get("mask", special.get("eos")) if spelled is None else tokenizer.find_id(spelled)
        assert token is not None
        ids = ids + [token] * (min(roles.expansion.length, checkpoint.choices.max_length) - len(ids))
        seen = len(ids) if roles.expansion.attend else seen
    left_out: set[int | None] = set()
    if input_type in roles.skipped_of:
        left_out = {tokenizer.find_id(word) for word in roles.skipped} - {None, tokenizer.unknown}
    if "token_vectors" in modules.extra_heads:
        left_out = {ids[0]}
    kept = roles.kept if input_type == DOCUMENT else ()
    counted = (
        place for place, token in enumerate(ids) if token not in left_out and (not kept or token in kept)
    )
    weighted = None
    if "sparse" in modules.extra_heads:
        named = find_special_tokens(checkpoint.folder, tokenizer)
        around = {named.get(name) for name in ("cls", "bos", "eos", "sep", "pad", "unk")}
        weighted = tuple(place for place, token in enumerate(ids) if token not in around)
    return GoldenInput(text, None, tuple(ids), input_type, seen, tuple(counted), weighted)
