"""Neighbours by an encoder's vectors against numpy's full product, and faiss where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from planforge.runtime import TextEncoder
from planforge.runtime.errors import BackendUnavailableError, InputError
from planforge.runtime.search import encoder_keys

from ...helpers.models import tiny_bert, write_mean_pooling, write_wordpiece
from ...helpers.search import (
    M,
    choose_neighbours,
    list_chunks,
    make_index,
    make_text,
    make_texts,
    make_tokenizer,
    open_index,
)

ROUNDING = 1e-5
CHUNKS = list_chunks(make_texts())
QUERIES = [make_tokenizer().encode(make_text(99, 300))[start : start + M] for start in range(0, 40 * 5, 5)]


def export_encoder(folder: Path, seed: int) -> Path:
    from planforge.exporter import export

    tiny_bert(folder / "checkpoint", seed=seed)
    write_wordpiece(folder / "checkpoint")
    write_mean_pooling(folder / "checkpoint")
    export(folder / "checkpoint", folder / "bundle", precision=["fp32"], target=["cpu"], verify=False)
    return folder / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_encoder(tmp_path_factory.mktemp("encoder"), 0)


@pytest.fixture
def encoder(bundle: Path) -> Iterator[TextEncoder]:
    with TextEncoder.load(bundle) as opened:
        yield opened


@pytest.fixture
def folder(encoder: TextEncoder, tmp_path: Path) -> Path:
    make_index(tmp_path / "index", keys=encoder)
    return tmp_path / "index"


def multiply_all(encoder: TextEncoder) -> npt.NDArray[np.float64]:
    """The cosine of each query with each chunk, of vectors whose lengths numpy divides by."""
    tokenizer = make_tokenizer()
    keys, wanted = (
        encoder.embed([tokenizer.decode(ids) for ids in many]).astype(np.float64)
        for many in ([ids for _, _, ids in CHUNKS], QUERIES)
    )
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    return np.asarray(wanted @ keys.T)


def check_neighbours(found: Any, cosines: npt.NDArray[np.float64]) -> None:
    places = [chunk[:2] for chunk in CHUNKS]
    for neighbours, row in zip(found, cosines, strict=True):
        wanted = row[choose_neighbours(CHUNKS, row, 4)]
        assert [1 - near.distance for near in neighbours] == pytest.approx(wanted, abs=ROUNDING)
        own = [row[places.index((near.document, near.start))] for near in neighbours]
        assert own == pytest.approx(wanted, abs=ROUNDING)


@pytest.mark.parametrize(("rows", "piece"), [(7, 17), (512, 16_384)])
def test_neighbours_are_those_of_the_full_product(
    rows: int, piece: int, folder: Path, encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block, and in many of which the last is shorter; the queries are more than run together."""
    monkeypatch.setattr(encoder_keys, "BLOCK_ROWS", rows)
    monkeypatch.setattr(encoder_keys, "PIECE_ROWS", piece)
    with open_index(folder) as index:
        check_neighbours(index.find(QUERIES, 4), multiply_all(encoder))
        assert "tiny.txt" not in {near.document for near in index.find(QUERIES[:1], 500)[0]}
        assert {near.document for near in index.find(QUERIES, 9, without=["1.txt"])[0]}.isdisjoint({"1.txt"})


def test_faiss_finds_the_same_where_it_probes_all_lists(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_keys, "MOST_EXACT_ROWS", 10)
    monkeypatch.setattr(encoder_keys, "LISTED_ROWS", 40)
    make_index(tmp_path / "index", keys=encoder)
    assert not (tmp_path / "index" / "keys.npy").exists()
    with open_index(tmp_path / "index") as index:
        check_neighbours(index.find(QUERIES, 4), multiply_all(encoder))
        assert {near.document for near in index.find(QUERIES, 9, without=["1.txt"])[0]}.isdisjoint({"1.txt"})


def test_without_faiss_a_large_index_says_what_to_install(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    monkeypatch.setattr(encoder_keys, "MOST_EXACT_ROWS", 10)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'planforge\[faiss\]'"):
        make_index(tmp_path / "index", keys=encoder)
    assert list(tmp_path.iterdir()) == []


def test_the_encoder_may_lie_elsewhere_but_is_no_other(folder: Path, bundle: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    bundle.rename(moved)
    try:
        with pytest.raises(InputError, match="whose encoder made the keys, is not there; say where"):
            open_index(folder)
        with open_index(folder, keys=moved) as index:
            assert len(index.find(QUERIES[:1], 2)[0]) == 2
        other = export_encoder(tmp_path / "other", 1)
        with pytest.raises(InputError, match="has keys of another encoder than"):
            open_index(folder, keys=other)
    finally:
        moved.rename(bundle)


def test_the_encoder_runs_as_the_model_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    open_it = TextEncoder.load

    def load(bundle: Path, **options: Any) -> TextEncoder:
        given.append(options)
        return open_it(bundle, **options)

    monkeypatch.setattr(TextEncoder, "load", load)
    with open_index(folder, backend="ort-cpu", device=1, threads=1) as index:
        assert index._keys._threads._max_workers == 1  # type: ignore[union-attr]
        assert len(index.find(QUERIES[:1], 2)[0]) == 2
    with open_index(folder):
        pass
    assert given[0] == {"precision": "fp32", "backend": "ort-cpu", "device": 1, "threads": 1}
    assert given[1] == {"precision": "fp32", "backend": "auto", "device": 0, "threads": None}


def test_a_wrong_place_of_the_encoder_is_named_as_the_option(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="say where it is by index_keys") as caught:
        open_index(folder, keys=tmp_path / "nowhere")
    assert caught.value.option == "index_keys"
