"""The files of prepared graphs: they are never stale, and belong to one graph, engine and processor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planforge.runtime.backends import ort_prepared, prepared
from planforge.runtime.backends.prepared import DATA, GRAPH, STAMP, PreparedGraph
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.cache_folder import find_cache_folder

from ...helpers.prepared import edit_without_a_trace, generate

pytestmark = pytest.mark.usefixtures("cache")


def cut(folder: Path) -> None:
    with (folder / DATA).open("r+b") as file:
        file.truncate(1000)


def touch(folder: Path) -> None:
    os.utime(folder / DATA)


def write_zeros(folder: Path) -> None:
    path = folder / DATA
    path.write_bytes(bytes(path.stat().st_size))


def edit_graph(folder: Path) -> None:
    path = folder / GRAPH
    state = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def lose_data(folder: Path) -> None:
    (folder / DATA).unlink()


def break_stamp(folder: Path) -> None:
    (folder / STAMP).write_text("[1]", encoding="utf-8")


def change_stamp(part: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        assert stamp["made_of"][part] != value
        stamp["made_of"][part] = value
        (folder / STAMP).write_text(json.dumps(stamp), encoding="utf-8")

    return change


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        edit_without_a_trace,
        edit_graph,
        lose_data,
        break_stamp,
        change_stamp("engine", {"onnxruntime": "1.30.0"}),
        change_stamp("processor", "x86_64 another"),
        change_stamp("format", 0),
    ],
    ids=["cut", "edited", "graph", "lost", "stamp", "engine", "processor", "format"],
)
def test_what_is_stale_is_refused_and_made_anew(
    whole_bundle: Path, cache: Path, damage: Callable[[Path], None]
) -> None:
    right = generate(whole_bundle, precision="int8", prepared=True)
    (folder,) = cache.iterdir()
    damage(folder)
    assert generate(whole_bundle, precision="int8") == right
    (again,) = cache.iterdir()
    assert again == folder
    bundle = Bundle.open(whole_bundle)
    graph = ort_prepared.find_prepared(bundle, bundle.manifest.artifact("decoder.ort.int8"))
    assert graph.is_current()
    assert graph.check_data(verify=True)


def test_large_weights_are_hashed_where_that_is_asked_for(
    whole_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = generate(whole_bundle, precision="int8", prepared=True)
    (folder,) = cache.iterdir()
    edit_without_a_trace(folder)
    monkeypatch.setattr(prepared, "ALWAYS_HASHED_BYTES", 1)
    assert generate(whole_bundle, precision="int8", verify=True) == right


@pytest.mark.parametrize("damage", [touch, write_zeros])
def test_what_has_another_time_is_hashed_however_large_it_is(
    whole_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    """Layers of images and archives keep whole seconds alone."""
    right = generate(whole_bundle, precision="int8", prepared=True)
    (folder,) = cache.iterdir()
    monkeypatch.setattr(prepared, "ALWAYS_HASHED_BYTES", 1)
    stamp = (folder / STAMP).read_text(encoding="utf-8")
    damage(folder)
    assert generate(whole_bundle, precision="int8") == right
    assert ((folder / STAMP).read_text(encoding="utf-8") == stamp) == (damage is touch)


def test_another_processor_or_engine_has_a_folder_of_its_own(
    whole_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(whole_bundle, precision="int8", prepared=True)
    monkeypatch.setattr(ort_prepared, "products_saturate", lambda: True)
    generate(whole_bundle, precision="int8", prepared=True)
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(prepared, "describe_processor", lambda: "x86_64 another")
    generate(whole_bundle, precision="int8", prepared=True)
    assert len(list(cache.iterdir())) == 3


def test_a_graph_of_a_new_export_is_another_one(whole_bundle: Path) -> None:
    bundle = Bundle.open(whole_bundle)
    artifact = bundle.manifest.artifact("decoder.ort.int8")
    other = bundle.manifest.artifact("decoder.ort.int4")
    folders = {PreparedGraph.of(bundle, each, {}).folder for each in (artifact, other)}
    assert len(folders) == 2


def test_a_processor_is_known_by_its_features(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    texts = ("flags : avx2\ncpu MHz : 2000\n", "flags : avx2\ncpu MHz : 3000\n", "flags : avx2 avx512f\n")
    found = []
    for text in texts:
        path.write_text(text, encoding="utf-8")
        found.append(prepared.describe_processor(path))
    assert found[0] == found[1] != found[2]
    assert prepared.describe_processor(tmp_path / "none")


def test_a_bundle_does_not_say_where_to_write(whole_bundle: Path, tmp_path: Path, cache: Path) -> None:
    """A manifest's words must neither lead out of the cache, nor let anything there be deleted."""
    victim = tmp_path / "victim" / ".old"
    victim.mkdir(parents=True)
    os.utime(victim, (0, 0))
    bundle = Bundle.open(whole_bundle)
    artifact = replace(bundle.manifest.artifact("decoder.ort.int8"), graph="../../victim/x")
    ort_prepared.make_prepared(bundle, artifact, ort_prepared.find_prepared(bundle, artifact))
    (folder,) = cache.iterdir()
    assert folder.parent == cache
    assert list(victim.parent.iterdir()) == [victim]


def test_of_two_that_prepare_at_once_one_is_kept(whole_bundle: Path, cache: Path) -> None:
    bundle = Bundle.open(whole_bundle)
    artifact = bundle.manifest.artifact("decoder.ort.int8")
    graph = ort_prepared.find_prepared(bundle, artifact)
    inner: list[int] = []

    def save(path: Path, data: str) -> None:
        if not inner:  # the other process begins later and ends first
            inner.append(1)
            ort_prepared.make_prepared(bundle, artifact, graph)
        path.write_bytes(b"the slower one's")
        path.with_name(data).write_bytes(b"")

    graph.make(0, save)
    assert graph.is_current()
    assert graph.graph.read_bytes() != b"the slower one's"
    assert [path.name for path in cache.iterdir()] == [graph.folder.name]


def test_what_a_killed_process_left_is_deleted_in_time(whole_bundle: Path, cache: Path) -> None:
    left = [cache / f".{digit * 32}.{digit * 12}" for digit in "ab"]
    whole = [cache / (digit * 32) for digit in "cd"]
    others = [cache / ".old", cache / "notes"]
    for path in (*left, *whole, *others):
        path.mkdir(parents=True)
    for path in whole:
        (path / STAMP).touch()
    for path in (left[0], whole[0] / STAMP, *others):
        os.utime(path, (0, 0))
    generate(whole_bundle, precision="int8", prepared=True)
    assert [path.exists() for path in left] == [False, True]
    assert [path.exists() for path in whole] == [False, True]  # of a bundle that nobody opens any more
    assert all(path.exists() for path in others)  # not ours


@pytest.mark.parametrize(
    ("environment", "system", "folder"),
    [
        ({"PLANFORGE_CACHE": "here", "XDG_CACHE_HOME": "/x"}, "linux", "here"),
        ({"XDG_CACHE_HOME": "/x"}, "linux", "/x/planforge"),
        ({"XDG_CACHE_HOME": "x"}, "linux", "~/.cache/planforge"),  # the XDG rules pass over relative ones
        ({}, "linux", "~/.cache/planforge"),
        ({}, "darwin", "~/Library/Caches/planforge"),
        ({"LOCALAPPDATA": "/a"}, "win32", "/a/planforge/cache"),
    ],
)
def test_the_cache_is_where_the_system_has_it(environment: dict[str, str], system: str, folder: str) -> None:
    assert find_cache_folder(environment, system) == Path(folder).expanduser()
