"""The King James Bible, as text to train a demo model on.

The text comes from the `bible` program (Debian package bible-kjv) and is in the public domain. Whole books
are held out: neither the tokenizer nor a model sees any of their verses.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
END_ID = 0  # the first special token comes first in the vocabulary
HELD_OUT = (  # names as `bible` abbreviates them; history, wisdom, prophets, gospel, letters
    ["Ruth", "Est", "Eccl", "Lam", "Dan", "Hos", "Jonah", "Zec", "John", "Rom", "Jas"]
)
VOCAB_SIZE = 2048
VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")

Chapter = list[str]  # of verses
Book = list[Chapter]


def read_bible() -> str:
    """Return the whole King James Bible, a verse per line after its reference."""
    program = shutil.which("bible")
    if program is None:
        sys.exit("error: the program `bible` is missing; install the Debian package bible-kjv")
    command = [program, "-f", "gen1:1-rev22:21"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse_books(raw: str) -> dict[str, Book]:
    """Return each book's chapters, without references."""
    chapters: dict[str, dict[int, Chapter]] = {}
    for line in raw.splitlines():
        match = VERSE.match(line)
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        book, chapter, _, text = match.groups()
        chapters.setdefault(book, {}).setdefault(int(chapter), []).append(text.strip())
    return {book: list(numbered.values()) for book, numbered in chapters.items()}


def split_books(books: dict[str, Book]) -> tuple[list[Book], list[Book]]:
    """Return the training books and the held-out books."""
    missing = set(HELD_OUT) - set(books)
    if missing or len(books) != 66:
        raise ValueError(f"expected the 66 books, got {len(books)}; missing: {sorted(missing)}")
    training = [book for name, book in books.items() if name not in HELD_OUT]
    return training, [books[name] for name in HELD_OUT]


def text_of(book: Book) -> str:
    """Return a book as one text: a chapter per paragraph, its verses flowing."""
    return "".join(" ".join(verses) + "\n" for verses in book)


def train_tokenizer(texts: list[str], special_tokens: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """Return the tokens of END, then of every text followed by END."""
    stream = [END_ID]
    for text in texts:
        stream += [*tokenizer.encode(text).ids, END_ID]
    return stream


def char_stream(texts: list[str]) -> list[int]:
    """Return the same as `token_stream`, but of characters; all are ASCII, so 256 stands for END."""
    stream = [256]
    for text in texts:
        stream += [*text.encode("ascii"), 256]
    return stream
