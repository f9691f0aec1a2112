"""Describes folders that are searched, for `planforge inspect`: stores of vectors, and indexes of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...runtime.apps.commands.tables import format_size
from ...runtime.search.layout import INDEX, FileRecord, KeysRecord, read_layout
from ...runtime.search.vector_store import STORE, StoreRecord
from .findings import Inspection, make_file_section

SHORT = 8  # digits of a hash, as the errors of what does not fit have them


def inspect_store(folder: Path) -> Inspection:
    """Say how many vectors a store has, and which model, prompts and options they are of."""
    record = StoreRecord.read(folder)
    sizes = measure_files(folder, STORE.file, record.files)
    options = [f"{name} {value}" for name, value in record.options.items() if value is not None]
    rows = [
        ("documents", f"{record.rows:,}"),
        ("width", f"{record.size:,} numbers in float32"),
        ("compared by", record.similarity),
        ("made by", f"export {record.export_id[:SHORT]} in {record.precision}"),
        ("prompts", record.prompts[:SHORT]),
        ("options", ", ".join(options) or "none"),
        ("size", describe_sizes(sizes)),
    ]
    sections = [(f"{folder}: a store of vectors", ("", ""), rows), make_file_section(folder, record.files)]
    return Inspection({**json.loads(record.to_json()), "bytes": sizes}, sections)


def inspect_index(folder: Path) -> Inspection:
    """Say how many chunks an index of texts has, which tokenizer made them, and what their keys are."""
    layout = read_layout(folder)
    sizes = measure_files(folder, INDEX.file, layout.files)
    chunks = int(layout.chunk_mask.sum())
    tokens = int(layout.token_counts.sum())
    rows = [
        ("documents", f"{len(layout.documents):,}"),
        ("chunks", f"{chunks:,} of {layout.chunk_length} tokens"),
        ("neighbours", f"a chunk and what follows it, {layout.neighbour_length} tokens"),
        ("tokens", f"{tokens:,}"),
        ("keys", describe_keys(layout.keys)),
        ("tokenizer", f"{layout.tokenizer[:SHORT]}, {layout.vocab_size:,} tokens"),
        ("size", describe_sizes(sizes)),
    ]
    sections = [(f"{folder}: an index of texts", ("", ""), rows), make_file_section(folder, layout.files)]
    value = {**json.loads(layout.to_json()), "chunks": chunks, "tokens": tokens, "bytes": sizes}
    return Inspection(value, sections)


def describe_keys(keys: KeysRecord) -> str:
    """Return what makes the keys of an index."""
    if keys.kind == "tfidf":
        return "n-grams of tokens"
    made_by = f"export {keys.export_id[:SHORT]} in {keys.precision}, {keys.folder}"
    return f"{keys.size:,} numbers of an encoder: {made_by}"


def measure_files(folder: Path, listing: str, files: Mapping[str, FileRecord]) -> dict[str, int]:
    """Return the bytes of each file that is listed, and of the listing."""
    sizes = {name: record.bytes for name, record in sorted(files.items())}
    return {**sizes, listing: (folder / listing).stat().st_size}


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Return the size of all files, and of each."""
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in sizes.items())
    return f"{format_size(sum(sizes.values()))}: {parts}"
