"""What MODEL names: hub ids and their revisions, asked for once."""

from __future__ import annotations

import json
import ntpath
import os
import socket
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from planforge.exporter import export, exporting
from planforge.exporter.checkpoints.source import Source, find_recorded, resolve_source
from planforge.exporter.errors import CheckpointError, SourceError
from planforge.exporter.imported import candidates
from planforge.runtime.bundle.export_again import is_recorded_place, name_origin, restore_argument

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """What the hub is asked for, its config.json first; it has a model for optimum, at one commit."""
    asked: list[tuple[str, str | None]] = []
    snapshot = tmp_path / "hub" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "electra"}))
    (snapshot / "tokenizer.json").write_text("{}")

    def download(hub_id: str, *, revision: str | None = None, **_: Any) -> str:
        asked.append((hub_id, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize(
    ("argument", "asked"),
    [
        ("org/name", ("org/name", None)),
        ("org/name@v1.0", ("org/name", "v1.0")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        (f"name@{COMMIT}", ("name", COMMIT)),
    ],
)
def test_a_hub_id_may_name_a_revision_and_its_commit_is_recorded(
    argument: str, asked: tuple[str, str | None], calls: list[Any], tmp_path: Path
) -> None:
    source = resolve_source(argument)
    assert calls == [asked, (asked[0], COMMIT)]  # both from one commit, even where the branch moves on
    assert source.kind == "hub" and source.commit == COMMIT
    entry = source.describe(tmp_path / "bundle")
    assert entry["argument"] == argument and entry["commit"] == COMMIT
    # What is recorded is found again even where the branch has moved on.
    assert restore_argument(entry, tmp_path / "bundle") == f"{asked[0]}@{COMMIT}"


def test_what_cannot_be_exported_is_not_downloaded(calls: list[Any], tmp_path: Path) -> None:
    config = {"model_type": "granitemoe", "num_local_experts": 8}
    (tmp_path / "hub" / "snapshots" / COMMIT / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"org/name: granitemoe is a mixture of experts"):
        resolve_source("org/name")
    assert calls == [("org/name", None)]


@pytest.mark.parametrize("has_fp32", [True, False])
def test_of_a_diffusers_folder_only_what_is_read_is_downloaded(
    has_fp32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own rule for patterns chooses among the files of a published folder."""
    weights = [
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    half = [name.replace(".safetensors", ".fp16.safetensors") for name in weights]
    settings = [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/merges.txt",
        "tokenizer/vocab.json",
        *(f"{part}/config.json" for part in ("text_encoder", "unet", "vae")),
    ]
    others = [
        "v1-5-pruned.safetensors",
        "v1-5-pruned.ckpt",
        "safety_checker/model.safetensors",
        "unet/diffusion_pytorch_model.non_ema.safetensors",
        "unet/diffusion_pytorch_model.bin",
        "text_encoder/pytorch_model.bin",
        "README.md",
    ]
    published = [*settings, *others, *half, *(weights if has_fp32 else [])]
    fetched: list[set[str]] = []
    snapshot = tmp_path / COMMIT

    def download(hub_id: str, **options: Any) -> str:
        found = set(
            filter_repo_objects(
                published,
                allow_patterns=options["allow_patterns"],
                ignore_patterns=options["ignore_patterns"],
            )
        )
        fetched.append(found)
        for name in found:
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).write_text("{}")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_source("org/sd").folder == snapshot
    assert fetched[0] == {"model_index.json"}
    assert fetched[-1] == {*settings, *(weights if has_fp32 else half)}


@pytest.mark.parametrize("argument", ["org/name@", "org/name@../../etc", "org/name@a b"])
def test_a_revision_that_is_none_is_named(argument: str, calls: list[Any]) -> None:
    with pytest.raises(SourceError, match=r"give a branch, a tag or a commit, as in org/name@main"):
        resolve_source(argument)
    assert not calls


def test_a_folder_whose_name_has_an_at_is_a_folder(tmp_path: Path, calls: list[Any]) -> None:
    folder = tmp_path / "model@home"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    source = resolve_source(str(folder))
    assert (source.kind, source.commit) == ("folder", "") and not calls
    assert "commit" not in source.describe(tmp_path / "bundle")


def test_the_hub_is_asked_once_in_an_export_that_is_traced(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[Source] = []

    def write_graphs(checkpoint: Path, out: Path, *options: Any) -> None:
        del checkpoint, options
        out.mkdir()

    def stop(folder: Path) -> Any:
        raise CheckpointError(f"{folder.name} is read")

    def resolve(model: Any) -> Source:
        sources.append(resolve_source(model))
        return sources[-1]

    monkeypatch.setattr(exporting, "export_with_transformers", write_graphs)
    monkeypatch.setattr(candidates, "read_folder", stop)
    monkeypatch.setattr(exporting, "resolve_source", resolve)
    with pytest.raises(CheckpointError, match="graphs is read"):
        export("org/name@v1.0", tmp_path / "bundle")
    assert calls == [("org/name", "v1.0"), ("org/name", COMMIT)]
    assert [(source.argument, source.commit) for source in sources] == [("org/name@v1.0", COMMIT)]


def test_offline_the_hubs_own_error_is_told_with_the_revision() -> None:
    with pytest.raises(SourceError, match=r"'org/name' at 'v1\.0' is neither .* hub cannot be reached"):
        resolve_source("org/name@v1.0")


def test_what_a_manifest_names_is_sought_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's manifest must not make verification download what it names."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket, "socket", None)  # whoever opens a connection fails with a TypeError
    recorded = {"kind": "hub", "argument": "org/name", "commit": COMMIT, "sha256": "0"}
    with pytest.raises(SourceError, match="pass --source org/name to download it"):
        find_recorded(recorded, tmp_path)
    repository = tmp_path / "cache" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    # A config that an export would refuse is no reason to end: the hashes are compared first.
    (snapshot / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    found = find_recorded(recorded, tmp_path)
    assert (found.folder, found.commit) == (snapshot, COMMIT)


@pytest.mark.parametrize(
    "recorded",
    [
        {"kind": "folder", "argument": "name"},
        {"kind": "demo", "argument": "org/name"},
        {"kind": "hub", "argument": "../name"},
        {"argument": "org/name"},
    ],
)
def test_a_manifest_that_names_nothing_here_asks_no_hub(
    recorded: dict[str, str], calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError):
        find_recorded(recorded, Path("bundle"))
    assert calls == []


def test_a_checkpoint_on_another_drive_is_named_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows has no relative path from drive to drive: ntpath raises, as it does there."""

    def relpath(path: Path, start: Path) -> str:
        return ntpath.relpath(f"D:{path}", f"C:{start}")

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    source = resolve_source(str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "relpath", relpath)
        with pytest.raises(ValueError, match="on mount"):
            os.path.relpath(folder, tmp_path / "bundle")
        recorded = source.describe(tmp_path / "bundle")
    assert recorded["argument"] == folder.resolve().as_posix()
    assert is_recorded_place("D:/checkpoint")
    # On Windows a bundle's path and another drive's whole one join to the latter.
    assert PureWindowsPath("C:/bundle") / "D:/checkpoint" == PureWindowsPath("D:/checkpoint")
    assert source.describe(tmp_path / "bundle")["argument"] == "../checkpoint"


@pytest.mark.parametrize(
    "argument",
    [
        r"\\host\share",
        "//host/share",
        r"\\?\UNC\host\share",
        r"\\.\pipe\name",
        "/net/host/share",
        r"\checkpoint",
        "C:checkpoint",
    ],
)
@pytest.mark.parametrize("kind", ["folder", "demo", None])
def test_a_place_that_no_export_records_is_not_touched(
    argument: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows even asking whether a share is a folder reaches its host, with the user's name."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", None)  # whoever asks for a file fails with a TypeError
        patch.setattr(Path, "is_dir", None)
        with pytest.raises(SourceError, match="not one that an export records; pass --source MODEL"):
            find_recorded({"kind": kind, "argument": argument}, tmp_path)
        manifest = SimpleNamespace(source={"kind": kind, "argument": argument, "exporter": "optimum"})
        named = name_origin(SimpleNamespace(manifest=manifest, folder=tmp_path))  # type: ignore[arg-type]
    assert named[:-1] == ["import", "FOLDER", "--source"]
    assert kind != "folder" or "/" not in named[-1]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_in_the_place_of_a_recorded_checkpoints_file_is_not_waited_for(
    name: str, tmp_path: Path
) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("has no pipes among its files")
    (tmp_path / "checkpoint").mkdir()
    os.mkfifo(tmp_path / "checkpoint" / name)
    source = find_recorded({"kind": "folder", "argument": "checkpoint"}, tmp_path)
    with pytest.raises(SourceError, match=f"{name} is not a regular file"):
        source.compute_sha256()
