"""Files of word vectors, against gensim's reading of them, and damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gensim
import numpy as np
import pytest
from gensim.models import KeyedVectors

from planforge.models.vector_files import read_vector_file
from planforge.models.word_vectors import WordVectorsConfig, save_word_vectors

from ..helpers.words import WORDS, make_vectors, write_glove

ONE_WORD = [word for word in WORDS if " " not in word]


@pytest.fixture(scope="module")
def keyed() -> KeyedVectors:
    keyed = KeyedVectors(32)
    keyed.add_vectors(ONE_WORD, make_vectors()[[WORDS.index(word) for word in ONE_WORD]])
    return keyed


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # gensim leaves GloVe's file open
@pytest.mark.parametrize(("binary", "header"), [(False, True), (True, True), (False, False)])
def test_what_gensim_writes_is_read_equally(
    keyed: KeyedVectors, tmp_path: Path, binary: bool, header: bool
) -> None:
    path = tmp_path / "vectors"
    keyed.save_word2vec_format(str(path), binary=binary, write_header=header)
    wanted = KeyedVectors.load_word2vec_format(str(path), binary=binary, no_header=not header)
    words, vectors = read_vector_file(path)
    assert words == wanted.index_to_key == ONE_WORD
    assert np.array_equal(vectors, wanted.vectors)


FOREIGN = {  # files that come with gensim, and whether they are binary and have a header
    "EN.1-10.cbow1_wind5_hs0_neg10_size300_smpl1e-05.txt": (False, True),
    "crime-and-punishment.vec": (False, True),
    "euclidean_vectors.bin": (True, True),
    "test_glove.txt": (False, False),
}


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # gensim leaves GloVe's file open
@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_are_read_as_gensim_reads_them(name: str) -> None:
    """They were trained and written elsewhere."""
    binary, header = FOREIGN[name]
    path = Path(gensim.__file__).parent / "test/test_data" / name
    wanted = KeyedVectors.load_word2vec_format(str(path), binary=binary, no_header=not header)
    words, vectors = read_vector_file(path)
    assert words == wanted.index_to_key
    assert np.array_equal(vectors, wanted.vectors)


def test_a_word_of_glove_may_hold_spaces(tmp_path: Path) -> None:
    write_glove(tmp_path / "vectors.txt")
    words, vectors = read_vector_file(tmp_path / "vectors.txt")
    assert words == WORDS
    assert np.array_equal(vectors, make_vectors())


def test_vectors_of_binary_files_may_end_with_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin"
    values = np.array([[1, 2.5], [-3, 0.1]], "<f4")
    path.write_bytes(b"2 2\na " + values[0].tobytes() + b"\nb\xc3\xa9 " + values[1].tobytes() + b"\n")
    words, vectors = read_vector_file(path)
    assert words == ["a", "bé"]
    assert np.array_equal(vectors, values)


@pytest.mark.parametrize("header", ["", "3 2\n"])
def test_words_may_be_numbers_or_end_with_one(header: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(f"{header}7 1 2\nwindows 98 3 4\na 5 6\n")
    words, vectors = read_vector_file(path)
    assert words == ["7", "windows 98", "a"]
    assert np.array_equal(vectors, np.array([[1, 2], [3, 4], [5, 6]], np.float32))


def pack(*vectors: tuple[bytes, list[float]], count: int = 2, size: int = 2) -> bytes:
    parts = [word + b" " + np.array(values, "<f4").tobytes() for word, values in vectors]
    return f"{count} {size}\n".encode() + b"".join(parts)


BAD: dict[str, tuple[bytes, str]] = {
    "fewer words": (b"3 2\na 1.25 2.5\nb 1.25 2.5\n", "the first line says 3 words, and the file has 2"),
    "more words": (b"1 2\na 1 2\nb 1 2\n", "the first line says 1 words, and the file has more"),
    "more words than bytes": (b"99 300\na 1 2\n", "99 words of 300 numbers take more than the 6 bytes"),
    "a wrong size": (b"2 3\na 1.25 2.5\nb 1.25 2.5\n", "line 2 is not a word and 3 numbers"),
    "no words": (b"0 5\n", "the first line says 0 words of 5 numbers"),
    "a size beyond any": (b"5 99999999999999999999\na 1\n", "the first line says 5 words of 99999"),
    "an empty file": (b"", "the file is empty"),
    "a word alone": (b"word\n", "the first line is b'word\\n'; a file begins with `count size`"),
    "a negative count": (b"-2 3\na 1 2 3\n", "a file begins with `count size`, two positive integers"),
    "a size in letters": (b"2 three\na 1 2 3\n", "a file begins with `count size`"),
    "a fraction": (b"2.0 3\na 1 2 3\n", "a file begins with `count size`"),
    "three sizes": (b"2 3 5\na 1 2 3\nb 1 2 3\n", "line 1 looks like a header"),
    "three sizes of few numbers": (b"2 3 5\na 1\n", "line 2 is not a word and 2 numbers, as line 1"),
    "a first line of fewer": (b"a 1 2\nb 1 2 3\nc 1 2 3\n", "line 1 has 2 numbers, and every other line"),
    "a size below that of all": (b"2 2\na 1 2 3\nb 1 2 3\n", "line 1 says 2 numbers a word, and every"),
    "a mark before the sizes": (b"\xef\xbb\xbf2 2\na 1 2\nb 1 2\n", "begins with a byte order mark"),
    "a mark before a word": (b"\xef\xbb\xbfa 1 2\nb 1 2\n", "begins with a byte order mark"),
    "tabs": (b"a\t1\t2\nb\t1\t2\n", "its columns are separated by tabs, where spaces are needed"),
    "tabs behind sizes": (b"2 2\na\t1\t2\nb\t1\t2\n", "line 2 is not a word and 2 numbers"),
    "no number": (b"a 1 2\nb 1 x\n", "line 2 has a number that is none"),
    "a shorter line": (b"a 1 2\nb 1\n", "line 2 is not a word and 2 numbers"),
    "NaN": (b"a 1 2\nb 1 nan\n", "line 2 has NaN or infinity"),
    "beyond float32": (b"a 1 2\nb 1 1e39\n", "line 2 has NaN or infinity"),
    "a word twice": (b"a 1 2\nb 1 2\na 3 4\n", "line 3 has the word 'a' again, which line 1 has"),
    "no word": (b"a 1 2\n 1 2\n", "line 2 has no word before its numbers"),
    "letters of another encoding": (b"a 1 2\nb\xe9 1 2\n", "line 2 has a word that is not UTF-8"),
    "a long line": (b"a 1 2\n" + b"b" * 5000 + b" 1 2\n", "line 2 has more than"),
    "a long word": (b"a 1 2\n" + b"b" * 4100 + b" 1 2\n", "a word of 4100 bytes; at most 4096"),
    "packed": (b"\x1f\x8b\x08rest", "is packed; gunzip it first"),
    "cut off": (pack((b"abc", [1, 2]), (b"b", [1, 2]))[:-1], "ends inside the vector of word 2 of 2"),
    "cut off before a word": (pack((b"a" * 9, [1, 2]))[:-1] + b"\1\2\n", "ends before word 2"),
    "a longer binary file": (pack((b"a", [1, 2]), (b"b", [1, 2]), count=1), "goes on behind the 1 words"),
    "a binary word twice": (pack((b"a", [1, 2]), (b"a", [1, 2])), "word 2 has the word 'a' again"),
    "binary infinity": (pack((b"a", [1, 2]), (b"b", [1, np.inf])), "word 2 has NaN or infinity"),
    "no spaces": (pack((b"a", [1, 2]), (b"b" * 5000, [1, 2])), "word 2 has more than 4096 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    path = tmp_path / "vectors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="vectors") as caught:
        read_vector_file(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a regular file"):
        read_vector_file(tmp_path)


SAVED: dict[str, tuple[Callable[[], object], str]] = {
    "a shape": (lambda: np.zeros((3, 4)), "2 words need"),
    "rank": (lambda: np.zeros(2), "2 words need"),
    "infinity": (lambda: np.array([[1.0], [np.inf]]), "the vector of 'b' has NaN or infinity"),
}


@pytest.mark.parametrize("name", SAVED)
def test_wrong_vectors_are_not_saved(name: str, tmp_path: Path) -> None:
    make, words = SAVED[name]
    with pytest.raises(ValueError, match=words):
        save_word_vectors(tmp_path / "new", ["a", "b"], make())
    with pytest.raises(ValueError, match="'a' is there twice"):
        save_word_vectors(tmp_path / "new", ["a", "a"], np.ones((2, 3)))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("sizes", [(0, 3), (3, 2**20), (True, 3)])
def test_sizes_out_of_range_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be an integer from 1 to"):
        WordVectorsConfig(*sizes)
