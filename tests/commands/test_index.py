"""`planforge index` as a user types it, for a bundle whose model reads neighbours."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime.bundle.retrieval_defaults import RetrievalDefaults
from planforge.runtime.search import shape

from ..helpers.cli import error_line, planforge
from ..helpers.manifests import LITERAL
from ..helpers.retro import PROMPT, write_index
from ..helpers.search import FILE, HASH, LENGTH, M, make_texts, make_tokenizer, open_index


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of gpt2-demo's tokenizer, without its graphs."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    shutil.copy(FILE, folder / "tokenizer.json")
    manifest: dict[str, Any] = copy.deepcopy(LITERAL)
    manifest["tokenizer"] = {"files": ["tokenizer.json"], "vocab_size": make_tokenizer().vocab_size}
    manifest["files"]["tokenizer.json"] = {"sha256": HASH, "bytes": FILE.stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    monkeypatch.setattr(shape, "read_shape", lambda bundle: RetrievalDefaults(M, 2, LENGTH))
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of texts, some of them in a folder of its own, and a file that is no text."""
    folder = tmp_path / "texts"
    for name, text in make_texts().items():
        path = folder / ("inner/" + name if name < "4" else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "notes.md").write_text("# Notes")
    return folder


def test_an_index_of_a_folder_and_a_file(texts: Path, bundle: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.txt"
    alone.write_bytes(b"\xef\xbb\xbf" + "Bethléhem ".encode() * 20)
    output = tmp_path / "index"
    done = planforge("index", texts, alone, "-o", output, "--for", bundle)
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in output.iterdir())
    with open_index(output) as index:
        line = f"{output}: 11 documents, {len(index):,} chunks, "
        assert done.stdout.startswith(line) and done.stdout.endswith(f" tokens, {size / 1e3:,.1f} kB\n")
        assert f"{texts}: files that are not .txt are left out: 1" in done.stderr
        assert {"inner/0.txt", "7.txt", "alone.txt"} <= set(index.documents)
        assert len(done.stdout.splitlines()) == 1
        ids = make_tokenizer().encode("Bethléhem " * 20)[:M]
        ((near,),) = index.find([ids], 1)
        assert (near.document, near.start) == ("alone.txt", 0)
    assert "making keys" in done.stderr


def test_an_index_as_json_again(texts: Path, bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    arguments = ("index", texts, "-o", output, "--for", bundle)
    assert planforge(*arguments).returncode == 0
    assert f"error: {output} exists; pass --force" in error_line(*arguments)
    done = planforge(*arguments, "--force", "--json")
    answer = json.loads(done.stdout)
    with open_index(output) as index:
        assert answer["chunks"] == len(index) and answer["documents"] == 10
    assert answer["bytes"] == sum(path.stat().st_size for path in output.iterdir())
    assert answer["index"] == str(output)


def test_texts_in_the_index_that_is_replaced_are_not_lost(texts: Path, bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    assert planforge("index", texts, "-o", output, "--for", bundle).returncode == 0
    (output / "mine.txt").write_text("word " * 40)
    line = error_line("index", output, "-o", output, "--for", bundle, "--force")
    assert f"the text {output / 'mine.txt'} lies in {output}, where the index will be; choose another" in line
    line = error_line("index", texts, "-o", output, "--for", bundle, "--force")
    assert "has 'mine.txt', which is no file of an index and would be lost" in line
    assert (output / "mine.txt").read_text() == "word " * 40


def test_keys_of_an_encoder(texts: Path, bundle: Path, minilm_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    done = planforge("index", texts, "-o", output, "--for", bundle, "--keys", minilm_bundle)
    assert done.returncode == 0, done.stderr
    with open_index(output) as index:
        assert index.layout.keys.kind == "encoder" and index.layout.keys.size == 384
        ids = make_tokenizer().encode(make_texts()["5.txt"])[3 * M : 4 * M]
        ((near,),) = index.find([ids], 1)
        assert (near.document, near.start) == ("5.txt", 3 * M)
        assert near.distance == pytest.approx(0, abs=1e-5)


def test_options_are_named_as_they_are_typed(retro_bundle: Path, tmp_path: Path) -> None:
    index = write_index(retro_bundle, tmp_path / "index")
    arguments = ("run", retro_bundle, PROMPT, "--index")
    line = error_line(*arguments, index, "--index-keys", tmp_path)
    assert "has keys of n-grams, which no encoder made; leave --index-keys out" in line
    line = error_line(*arguments, index / "index.json")
    assert (
        f"index.json is a file, and an index is a folder; give the one that `planforge index` wrote, {index}"
        in line
    )


def write_bad(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "latin.txt").write_bytes("Bethl\xe9hem".encode("latin-1"))
    (folder / "blank.txt").write_text("\n \n")
    (folder / "short.txt").write_text("Amen.")
    (folder / "page.html").write_text("<p>")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "nowhere is neither a file nor a folder"),
        ("empty", "empty has no .txt files"),
        ("page.html", "page.html is not a .txt file"),
        ("latin.txt", "latin.txt is not UTF-8: byte 5 is 0xe9; save it as UTF-8"),
        ("blank.txt", "blank.txt is empty"),
        ("short.txt", "the texts have no chunk: each has less than half of 16 tokens"),
    ],
)
def test_bad_texts_are_one_line(name: str, words: str, bundle: Path, tmp_path: Path) -> None:
    write_bad(tmp_path)
    assert words in error_line("index", tmp_path / name, "-o", tmp_path / "index", "--for", bundle)
    assert not (tmp_path / "index").exists()


def test_bad_bundles_and_outputs_are_one_line(
    texts: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = ("-o", tmp_path / "index")
    assert "is not a folder" in error_line("index", texts, *output, "--for", tmp_path / "nowhere")
    line = error_line("index", texts, "-o", bundle, "--for", bundle, "--force")
    assert "exists and is not an index that this version reads, so it is left alone" in line
    line = error_line("index", texts, *output, "--for", bundle, "--keys", bundle)
    assert "is a bundle for text-generation, which TextEncoder does not support" in line
    monkeypatch.undo()
    line = error_line("index", texts, *output, "--for", bundle)
    assert "is a bundle whose model reads no neighbours" in line
    assert not (tmp_path / "index").exists()
