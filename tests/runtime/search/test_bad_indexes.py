"""Indexes that are damaged, made for another model, or made up; and texts that make none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime.errors import (
    BundleError,
    BundleNotFoundError,
    InputError,
    IntegrityError,
    ManifestError,
)

from ...helpers.search import M, list_chunks, make_index, make_texts, make_tokenizer, open_index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_index(tmp_path / "index")
    return tmp_path / "index"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    change(value)
    (folder / "index.json").write_text(json.dumps(value), encoding="utf-8")


def replace_array(folder: Path, name: str, array: Any) -> None:
    """Replace a file, and say its new size."""
    np.save(folder / name, array)
    size = (folder / name).stat().st_size
    edit(folder, lambda value: value["files"][name].update(bytes=size))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer_hash": "b" * 64}, "is an index of another tokenizer: its sha256 is .*; make one"),
        ({"chunk_length": 8}, "has chunks of 16 tokens and neighbours of 32, and the model reads 8 and 32"),
        ({"neighbour_length": 64}, "and the model reads 16 and 64; make one for this model"),
        ({"keys": "somewhere"}, "has keys of n-grams, which no encoder made; leave index_keys out"),
    ],
)
def test_an_index_of_another_model(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        open_index(folder, **options)


def test_no_index_at_all(tmp_path: Path) -> None:
    with pytest.raises(BundleNotFoundError, match=r"is not an index: it has no index\.json"):
        open_index(tmp_path)
    with pytest.raises(BundleNotFoundError, match=r"there is no folder .*nowhere"):
        open_index(tmp_path / "nowhere")


def test_a_file_in_an_indexs_place(folder: Path) -> None:
    words = f"index.json is a file, and an index is a folder; give the one that .* wrote, {folder}$"
    with pytest.raises(BundleNotFoundError, match=words):
        open_index(folder / "index.json")
    with pytest.raises(BundleNotFoundError, match=r"give the one that `planforge index` wrote$"):
        open_index(folder / "tokens.npy")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff", "is not UTF-8"),
        (b"[]", "must be an object"),
        (b"{}", "is not that of an index"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_an_index_json_that_is_none(folder: Path, content: bytes, words: str) -> None:
    (folder / "index.json").write_bytes(content)
    with pytest.raises(ManifestError, match=words):
        open_index(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(format=2), "has format 2; this version of PlanForge reads format 1"),
        (lambda v: v.update(chunk_length=10**9), "chunk_length is 1000000000, and must be 2 to 65536"),
        (lambda v: v.update(chunk_length=True), "chunk_length must be int"),
        (lambda v: v.update(vocab_size=2**40), "vocab_size is"),
        (lambda v: v.update(tokenizer="x"), "tokenizer is not a sha256"),
        (lambda v: v["keys"].update(kind="hnsw"), "has keys of the kind 'hnsw'"),
        (lambda v: v["keys"].pop("kind"), "keys.kind must be str, but is missing"),
        (lambda v: v.update(documents=[]), "the index is empty"),
        (lambda v: v["documents"][0].update(tokens=0), "tokens is 0, and must be 1"),
        (lambda v: v["documents"][0].update(tokens=2**40), "more than"),
        (lambda v: v["documents"][0].update(tokens=2**30), "tokens.npy has fewer"),
        (lambda v: v["documents"][1].update(name="0.txt"), "names a document twice"),
        (lambda v: v["files"]["tokens.npy"].update(bytes=-1), "bytes is -1"),
    ],
)
def test_wrong_fields(folder: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    edit(folder, change)
    with pytest.raises(ManifestError, match=words):
        open_index(folder)


@pytest.mark.parametrize("name", ["../tokens.npy", "/etc/passwd", "a/b.npy", "c:x.npy", "x.pkl"])
def test_no_name_leads_out_of_the_folder(folder: Path, name: str) -> None:
    edit(folder, lambda value: value["files"].update({name: value["files"]["tokens.npy"]}))
    with pytest.raises(IntegrityError, match="which is not a file of an array"):
        open_index(folder)


def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "norms.npy").rename(tmp_path / "norms.npy")
    try:
        (folder / "norms.npy").symlink_to(tmp_path / "norms.npy")
    except OSError:
        pytest.skip("no links here")
    with pytest.raises(IntegrityError, match="is a link that leaves the folder"):
        open_index(folder)


@pytest.mark.parametrize("name", ["tokens", "starts", "places", "frequent", "counts", "offsets", "norms"])
def test_every_file_is_needed_whole(folder: Path, name: str) -> None:
    path = folder / f"{name}.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(IntegrityError, match=f"{name}.npy has .* bytes, and index.json says"):
        open_index(folder)
    path.unlink()
    with pytest.raises(IntegrityError, match=f"{name}.npy is missing"):
        open_index(folder)
    edit(folder, lambda value: value["files"].pop(f"{name}.npy"))
    with pytest.raises(BundleError, match=f"does not list {name}.npy|tokens.npy has fewer"):
        open_index(folder)
    edit(folder, lambda value: value["files"].update({f"{name}.npy": {"bytes": 4, "sha256": "a" * 64}}))
    path.write_bytes(b"junk")
    with pytest.raises(BundleError, match=r"cannot be read|tokens\.npy has fewer"):
        open_index(folder)


@pytest.mark.parametrize("name", ["starts", "places", "frequent", "counts", "offsets", "norms"])
def test_arrays_of_another_type_or_shape(folder: Path, name: str) -> None:
    array = np.load(folder / f"{name}.npy")
    for wrong in (array.astype(np.float64), array[None], np.array([{}], object)):
        replace_array(folder, f"{name}.npy", wrong)
        with pytest.raises(IntegrityError, match=r"index\.json needs|cannot be read"):
            open_index(folder)


def test_an_archive_in_an_arrays_place(folder: Path) -> None:
    with (folder / "norms.npy").open("wb") as file:
        np.savez(file, np.zeros(3))
    size = (folder / "norms.npy").stat().st_size
    edit(folder, lambda value: value["files"]["norms.npy"].update(bytes=size))
    with pytest.raises(IntegrityError, match="is not the file of an array"):
        open_index(folder)


def test_lists_that_do_not_fit_each_other(folder: Path) -> None:
    starts = np.load(folder / "starts.npy")
    replace_array(folder, "starts.npy", starts[::-1])
    with pytest.raises(IntegrityError, match="do not fit each other"):
        open_index(folder)


def test_places_beyond_the_tokens(folder: Path) -> None:
    places = np.load(folder / "places.npy")
    replace_array(folder, "places.npy", np.full_like(places, 255))
    chunks = [ids for _, _, ids in list_chunks(make_texts()) if len(ids) == M]
    with open_index(folder) as index, pytest.raises(IntegrityError, match="do not fit each other"):
        index.find(chunks, 2)


@pytest.mark.parametrize("number", [0, 60_000])
def test_ids_beyond_the_vocabulary_do_not_reach_a_model(number: int, folder: Path) -> None:
    """Zero more than the vocabulary is the padding, which stands only behind a text."""
    tokens = np.load(folder / "tokens.npy")
    tokens[4, 3] = make_tokenizer().vocab_size + number
    replace_array(folder, "tokens.npy", tokens)
    words = r"index: tokens\.npy has the id \d+, beyond a vocabulary of \d+ tokens; make the index again"
    chunks = [ids for _, _, ids in list_chunks(make_texts())]
    with open_index(folder) as index, pytest.raises(IntegrityError, match=words):
        index.find([chunks[4][:M]], 3)


def test_a_changed_file_is_found_by_its_hash(folder: Path) -> None:
    content = bytearray((folder / "tokens.npy").read_bytes())
    content[-50] ^= 1
    (folder / "tokens.npy").write_bytes(content)
    with open_index(folder) as index, pytest.raises(IntegrityError, match=r"tokens\.npy has changed"):
        index.check()


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({}, "there are no texts"),
        ({"a.txt": " \n"}, "a.txt is empty"),
        ({"a.txt": "Amen."}, "the texts have no chunk: each has less than half of 16 tokens"),
        ({"a\udcff.txt": "word " * 20}, "is not UTF-8; rename the file"),
        ([("a.txt", 7)], r"pairs of str, a name and a text, not of \('str', 'int'\)"),
        ([("a.txt", "word " * 20), ("a.txt", "word " * 20)], "two texts have the name 'a.txt'"),
    ],
)
def test_texts_that_make_no_index(texts: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        make_index(tmp_path / "index", texts)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_when_asked_and_only_an_index(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists; pass --force"):
        make_index(folder)
    counts = make_index(folder, {"new.txt": "word " * 40}, force=True)
    assert counts.documents == 1
    with open_index(folder) as index:
        assert index.documents == ("new.txt",)
    (folder / "tokens.npy").unlink()  # a damaged one is still one
    make_index(folder, force=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "index.json").write_text("{}")
    with pytest.raises(InputError, match="is not an index that this version reads, so it is left alone"):
        make_index(other, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "other"]


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "vectors.npy", "norms.npy"])
def test_what_is_no_file_of_an_index_is_not_lost(name: str, folder: Path) -> None:
    if name == "norms.npy":  # of a folder that has the name of a file
        (folder / name).unlink()
        (folder / name).mkdir()
    else:
        (folder / name).write_text("mine")
    before = sorted(folder.iterdir())
    words = f"has '{name}', which is no file of an index and would be lost; move it out, or choose another"
    with pytest.raises(InputError, match=words):
        make_index(folder, {"new.txt": "word " * 40}, force=True)
    assert sorted(folder.iterdir()) == before


def test_what_came_in_meanwhile_is_not_lost(folder: Path, tmp_path: Path) -> None:
    def read() -> Iterator[tuple[str, str]]:
        yield "new.txt", "word " * 40
        (folder / "notes.txt").write_text("mine")

    with pytest.raises(InputError, match=r"has 'notes\.txt', which is no file of an index"):
        make_index(folder, read(), force=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_link_to_an_index_stays_one(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    try:
        link.symlink_to(folder, target_is_directory=True)
    except OSError:
        pytest.skip("no links here")
    make_index(link, {"new.txt": "word " * 40}, force=True)
    assert link.is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == ["index", "link"]
    with open_index(folder) as index:
        assert index.documents == ("new.txt",)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, PermissionError])
@pytest.mark.parametrize("number", [1, 2])
def test_the_old_index_stays_where_it_cannot_be_replaced(
    number: int,
    failure: type[BaseException],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before and between the two steps that replace it."""
    rename = Path.rename
    calls: list[Path] = []

    def fail(own: Path, target: Path) -> Path:
        calls.append(own)
        if len(calls) == number:
            raise failure
        return rename(own, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises((KeyboardInterrupt, InputError)):
        make_index(folder, {"new.txt": "word " * 40}, force=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    with open_index(folder) as index:
        assert len(index.documents) == 10


def test_an_index_that_fails_leaves_the_old_one(folder: Path, tmp_path: Path) -> None:
    class BrokenEncoder:
        def embed(self, *texts: Any, **options: Any) -> Any:
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="cannot be written: No space left on device; nothing was changed"):
        make_index(folder, {"new.txt": "word " * 40}, force=True, keys=BrokenEncoder())
    with open_index(folder) as index:
        assert len(index.documents) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_vocabulary_of_another_size(folder: Path) -> None:
    edit(folder, lambda value: value.update(vocab_size=make_tokenizer().vocab_size - 1))
    with pytest.raises(InputError, match="is an index of another tokenizer"):
        open_index(folder)
