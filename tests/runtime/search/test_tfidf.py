"""Neighbours by n-grams of tokens against scikit-learn's TF-IDF, and what a neighbour is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from planforge.runtime.bundle.retrieval_defaults import RetrievalDefaults
from planforge.runtime.errors import ClosedError, InputError
from planforge.runtime.search import tfidf
from planforge.runtime.search.neighbour_index import NeighbourIndex

from ...helpers.search import (
    LENGTH,
    M,
    choose_neighbours,
    list_chunks,
    make_index,
    make_text,
    make_texts,
    make_tokenizer,
    measure_cosines,
    open_index,
)

ROUNDING = 1e-5  # of sums of some forty weights in float32
TEXTS = make_texts()
CHUNKS = list_chunks(TEXTS)


def make_queries() -> list[list[int]]:
    """Chunks of texts that no index has, of one that it has, of rare tokens, and one token many times."""
    ids = make_tokenizer().encode(make_text(99, 300))
    queries = [ids[start : start + M] for start in range(0, 12 * M, M)]
    queries += [CHUNKS[5][2], list(range(1900, 1900 + M)), [ids[0]] * M]
    return queries


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "index"
    make_index(folder)
    return folder


@pytest.fixture
def index(folder: Path) -> Iterator[NeighbourIndex]:
    with open_index(folder) as opened:
        yield opened


def test_neighbours_are_those_of_scikit_learn(index: NeighbourIndex) -> None:
    queries = make_queries()
    cosines = measure_cosines([ids for _, _, ids in CHUNKS], queries)
    for found, row in zip(index.find(queries, 5), cosines, strict=True):
        wanted = choose_neighbours(CHUNKS, row, 5)
        assert [1 - near.distance for near in found] == pytest.approx(row[wanted], abs=ROUNDING)
        for near in found:
            place = [chunk[:2] for chunk in CHUNKS].index((near.document, near.start))
            assert 1 - near.distance == pytest.approx(row[place], abs=ROUNDING)


@pytest.mark.parametrize("frequent", [True, False])
def test_both_ways_to_store_places_give_the_same(
    frequent: bool, index: NeighbourIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of one place every token is frequent, or none is, and masks are for all tokens or none."""
    wanted = index.find(make_queries(), 3)
    monkeypatch.setattr(tfidf, "BLOCK", 255 if frequent else 1)
    monkeypatch.setattr(tfidf, "FEW_ROWS", 10**6 if frequent else 0)
    make_index(tmp_path / "index")
    with open_index(tmp_path / "index") as other:
        assert other.find(make_queries(), 3) == wanted
    assert (len(np.load(tmp_path / "index" / "frequent.npy")) > 0) is frequent


def test_places_that_are_forgotten_are_read_again(
    index: NeighbourIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = index.find(make_queries(), 3)
    monkeypatch.setattr(tfidf, "KEPT_BYTES", 2000)
    assert index.find(make_queries(), 3) == wanted


def test_a_neighbour_says_what_its_text_says(index: NeighbourIndex) -> None:
    name, start, ids = CHUNKS[5]
    ((near,),) = index.find([ids], 1)
    whole = make_tokenizer().encode(TEXTS[name])
    assert (near.document, near.start) == (name, start)
    assert near.distance == pytest.approx(0, abs=ROUNDING)
    assert near.token_ids == tuple(whole[start : start + LENGTH])
    assert near.text == make_tokenizer().decode(near.token_ids)


def test_at_the_end_of_a_text_a_neighbour_is_shorter(index: NeighbourIndex) -> None:
    lasts = {name: (start, ids) for name, start, ids in CHUNKS}
    for name, (start, ids) in lasts.items():
        if len(ids) == M:
            found = index.find([ids], len(CHUNKS))[0]
            (near,) = [near for near in found if (near.document, near.start) == (name, start)]
            assert near.token_ids == tuple(make_tokenizer().encode(TEXTS[name])[start:])


def test_documents_are_left_out(index: NeighbourIndex) -> None:
    name, _, ids = CHUNKS[5]
    left = [document for document in index.documents if document not in (name, "2.txt")]
    found = index.find([ids], 500, without=[name, "2.txt", "unknown"])[0]
    assert {near.document for near in found} <= set(left) - {"tiny.txt"}
    assert index.find([ids], 3, without=index.documents) == [[]]


def test_all_neighbours_of_an_index_do_not_overlap(index: NeighbourIndex) -> None:
    found = index.find([CHUNKS[5][2]], 10 * len(CHUNKS))[0]
    distances = [near.distance for near in found]
    assert distances == sorted(distances)
    for document in index.documents:
        starts = sorted(near.start for near in found if near.document == document)
        assert all(step >= LENGTH for step in np.diff(starts))
    assert "tiny.txt" not in {near.document for near in found}


def test_what_an_index_has(index: NeighbourIndex) -> None:
    assert len(index) == len(CHUNKS)
    assert index.documents == tuple(TEXTS)
    index.check()


def test_threads_find_the_same(index: NeighbourIndex) -> None:
    queries = make_queries()
    wanted = index.find(queries, 3)
    with ThreadPoolExecutor(8) as pool:
        assert all(found == wanted for found in pool.map(lambda _: index.find(queries, 3), range(24)))


def test_ids_beyond_the_vocabulary_are_in_no_chunk(index: NeighbourIndex) -> None:
    """A model may have more rows than its tokenizer has tokens; the first id is the index's padding."""
    padding = make_tokenizer().vocab_size
    assert all(near.distance == 1 for near in index.find([[padding] * M], 3)[0])
    assert all(near.distance == 1 for near in index.find([[10**9] * M], 3)[0])


def test_questions_that_cannot_be(index: NeighbourIndex) -> None:
    with pytest.raises(InputError, match=r"chunks\[1\] has 3 tokens, and those of the index have 16"):
        index.find([[1] * M, [1] * 3], 2)
    with pytest.raises(InputError, match="count=0 must be an integer of at least 1"):
        index.find([[1] * M], 0)
    assert index.find([], 2) == []
    index.close()
    index.close()
    with pytest.raises(ClosedError):
        index.find([[1] * M], 2)


def test_an_index_that_is_closed_during_a_search(index: NeighbourIndex) -> None:
    class Closing(list[list[int]]):
        def __len__(self) -> int:
            index.close()  # as another thread would
            return super().__len__()

    assert len(index.find(Closing([CHUNKS[5][2]]), 2)[0]) == 2
    with pytest.raises(ClosedError):
        index.find([CHUNKS[5][2]], 2)


def test_chunks_may_be_as_long_as_a_bundle_says(tmp_path: Path) -> None:
    longest = RetrievalDefaults.from_json({"chunk_length": 2**16, "neighbours": 1, "neighbour_length": 2**16})
    lengths = {"chunk_length": longest.chunk_length, "neighbour_length": longest.neighbour_length}
    text = make_text(1, 50_000)
    make_index(tmp_path / "index", {"long.txt": text}, **lengths)
    ids = np.resize(make_tokenizer().encode(text), longest.chunk_length).tolist()
    with open_index(tmp_path / "index", **lengths) as index:
        assert index.find([ids], 1)[0][0].document == "long.txt"


def test_overlap_counts_chunks_that_are_nearly_copied(tmp_path: Path) -> None:
    """A copy counts wherever it begins, and with another last token; with another middle it does not."""
    make_index(tmp_path / "index")
    ids = make_tokenizer().encode(TEXTS["7.txt"])
    with open_index(tmp_path / "index") as index:
        assert index.measure_overlap(ids[5 : 5 + 10 * M]) == 1
        assert index.measure_overlap(make_tokenizer().encode(make_text(99, 300))) == 0
        changed = [*ids[5 : 5 + M - 1], 1999]
        spoiled = [*ids[5 + M : 5 + M + 7], 1998, *ids[5 + M + 8 : 5 + 2 * M]]
        assert index.measure_overlap(changed + spoiled) == 0.5
        assert index.measure_overlap([]) == 0
