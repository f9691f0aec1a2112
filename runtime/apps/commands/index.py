"""`planforge index`: a database of texts for a model that reads neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InputError
from ..stage_progress import StageCounter
from .console import print_json, print_lines, say, show_stages
from .run_options import JsonOption, make_option
from .tables import format_size

if TYPE_CHECKING:
    from ...search.build import IndexCounts

UNITS = {"reading": "texts", "making keys": "parts"}

TextsArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Files .txt in UTF-8, or folders of them. Each file is a document.", show_default=False
    ),
]
OutputOption = Annotated[Path, make_option("The folder to write the index to.", "--output", "-o")]
ForOption = Annotated[Path, make_option("The bundle of the model that will read neighbours.", "--for")]
KeysOption = Annotated[
    Path | None,
    make_option("The bundle of an encoder that makes the keys.", "--keys", show_default="n-grams of tokens"),
]
ForceOption = Annotated[bool, make_option("Replace an index that is there.", "--force")]


def index(
    texts: TextsArgument,
    output: OutputOption,
    for_bundle: ForOption,
    keys: KeysOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write an index of texts, in which a model of text and neighbours finds what to read."""
    from ...bundle.bundle import Bundle
    from ...search.build import build_index, check_apart, check_output
    from ...search.shape import read_shape, read_tokenizer

    bundle = Bundle.open(for_bundle)
    shape = read_shape(bundle)
    files = list_files(texts)
    check_apart(output, (path for _, path in files))
    check_output(output, force)
    tokenizer, tokenizer_hash = read_tokenizer(bundle)
    with show_stages() as stages, ExitStack() as stack:
        encoder = None
        if keys is not None:
            from ...encode.text_encoder import TextEncoder

            encoder = stack.enter_context(TextEncoder.load(keys))
        counts = build_index(
            read_files(files),
            output,
            tokenizer=tokenizer,
            tokenizer_hash=tokenizer_hash,
            chunk_length=shape.chunk_length,
            neighbour_length=shape.neighbour_length,
            keys=encoder,
            force=force,
            progress=make_counter(stages, len(files)),
        )
    report(counts, output, as_json)


def make_counter(stages: Callable[[str], None], files: int) -> Callable[[str, int, int], None]:
    """Return what takes each stage's numbers and shows them; `files` are to be read."""
    counters: dict[str, StageCounter] = {}

    def count(stage: str, done: int, total: int) -> None:
        if stage not in counters:
            counters[stage] = StageCounter(stages, stage, UNITS[stage])
        counters[stage](done, files if stage == "reading" else total)

    return count


def report(counts: IndexCounts, output: Path, as_json: bool) -> None:
    """Print what was written."""
    if as_json:
        print_json({"index": str(output), **counts._asdict()})
        return
    print_lines(
        [
            f"{output}: {counts.documents:,} documents, {counts.chunks:,} chunks, {counts.tokens:,} tokens,"
            f" {format_size(counts.bytes)}"
        ]
    )


def list_files(texts: list[Path]) -> list[tuple[str, Path]]:
    """Return the files of what was typed, each with its name: of a folder's, the path below it."""
    found = []
    for path in texts:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*.txt") if file.is_file())
            if not files:
                raise InputError(f"{path} has no .txt files; give a folder that has some", option="texts")
            others = sum(file.is_file() for file in path.rglob("*")) - len(files)
            if others:
                say(f"{path}: files that are not .txt are left out: {others}")
            found += [(file.relative_to(path).as_posix(), file) for file in files]
        elif not path.is_file():
            raise InputError(f"{path} is neither a file nor a folder", option="texts")
        elif path.suffix.lower() != ".txt":
            raise InputError(f"{path} is not a .txt file; save its text as one", option="texts")
        else:
            found.append((path.name, path))
    return found


def read_files(files: list[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    for name, path in files:
        try:
            yield name, path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it"
                " as UTF-8",
                option="texts",
            ) from error
