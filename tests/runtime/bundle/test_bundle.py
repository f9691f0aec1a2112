from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime.bundle import bundle as bundle_module
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BundleError, IntegrityError, ManifestError

CONTENTS = {
    "onnx/decoder.onnx": b"graph" * 10,
    "onnx/weights.data": b"weights" * 20,
    "plans/a.plan": b"plan" * 10,
    "tokenizer.json": b"{}" * 10,
    "golden.npz": b"",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle whose manifest and hashes are written here, not by the code under test."""
    folder = tmp_path / "bundle"
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest: dict[str, Any] = {
        "format": 1,
        "family": "gpt2",
        "task": "text-generation",
        "export_id": "1",
        "config": {},
        "generation": {"max_length": 8},
        "tokenizer": {"files": ["tokenizer.json"]},
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in CONTENTS.items()
        },
        "artifacts": [],
        "plans": [],
        "source": {},
        "tools": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_an_untouched_bundle_passes(folder: Path) -> None:
    bundle = Bundle.open(str(folder))
    bundle.verify_files()
    for name, content in CONTENTS.items():
        assert bundle.path(name).read_bytes() == content


def test_unlisted_files_are_ignored(folder: Path) -> None:
    (folder / "onnx" / "left-over.onnx").write_bytes(b"x")
    Bundle.open(folder).verify_files()


@pytest.mark.parametrize("name", [name for name, content in CONTENTS.items() if content])
def test_a_changed_byte_is_refused_by_name(folder: Path, name: str) -> None:
    bundle = Bundle.open(folder)
    change_a_byte(folder / name)
    with pytest.raises(IntegrityError, match=f"{name} has changed"):
        bundle.path(name, verify=False)  # small files are hashed whatever is asked
    with pytest.raises(IntegrityError, match=f"{name} has changed"):
        bundle.verify_files()


@pytest.mark.parametrize("name", CONTENTS)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(IntegrityError, match=f"{name} is missing; export the bundle again"):
        Bundle.open(folder).path(name)
    (folder / name).mkdir()  # a folder in a file's place
    with pytest.raises(IntegrityError, match=name):
        Bundle.open(folder).path(name)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("size", [0, 49, 51])
def test_a_wrong_size_is_refused_with_both_sizes(folder: Path, verify: bool, size: int) -> None:
    (folder / "onnx/decoder.onnx").write_bytes((CONTENTS["onnx/decoder.onnx"] + b"x")[:size])
    with pytest.raises(IntegrityError, match=f"has {size} bytes, the manifest says 50"):
        Bundle.open(folder).path("onnx/decoder.onnx", verify=verify)


def test_a_file_that_no_manifest_lists_is_not_handed_out(folder: Path) -> None:
    (folder / "other.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"other\.json"):
        Bundle.open(folder).path("other.json")


def test_a_link_that_leaves_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "tokenizer.json"
    (folder / "tokenizer.json").rename(outside)
    (folder / "tokenizer.json").symlink_to(outside)
    with pytest.raises(IntegrityError, match=r"tokenizer\.json is a link that leaves the bundle"):
        Bundle.open(folder).path("tokenizer.json")


def test_a_bundle_in_the_cache_of_a_hub_links_to_its_own_blobs_alone(folder: Path, tmp_path: Path) -> None:
    """As huggingface_hub lays a model out: every file of a snapshot is a link to a blob."""
    repository = tmp_path / "models--someone--bundle"
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    snapshot = repository / "snapshots" / ("a" * 40)
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    Bundle.open(snapshot).verify_files()
    other = tmp_path / "models--someone--other" / "blobs"
    other.mkdir(parents=True)
    blob = (snapshot / "tokenizer.json").resolve()
    blob.rename(other / "0")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(other / "0")
    with pytest.raises(IntegrityError, match=r"leaves the bundle; .*local_dir"):
        Bundle.open(snapshot).path("tokenizer.json")


def test_a_manifest_that_is_a_link_to_itself_is_missing(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("manifest.json")
    with pytest.raises(BundleError):
        Bundle.open(folder)


def test_a_linked_folder_that_leaves_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "onnx").rename(tmp_path / "onnx")
    (folder / "onnx").symlink_to(tmp_path / "onnx")
    with pytest.raises(IntegrityError, match="leaves the bundle"):
        Bundle.open(folder).path("onnx/decoder.onnx")


def test_a_bundle_may_be_reached_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(folder)
    Bundle.open(tmp_path / "current").verify_files()


def test_above_the_limit_onnx_is_hashed_only_when_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module, "ALWAYS_HASHED_BYTES", 100)
    bundle = Bundle.open(folder)
    for name in ("onnx/decoder.onnx", "onnx/weights.data"):
        change_a_byte(folder / name)
    with pytest.raises(IntegrityError):  # 50 bytes
        bundle.path("onnx/decoder.onnx", verify=False)
    assert bundle.path("onnx/weights.data", verify=False).is_file()  # 140 bytes
    with pytest.raises(IntegrityError):
        bundle.path("onnx/weights.data", verify=True)
    with pytest.raises(IntegrityError):
        bundle.path("onnx/weights.data")
    with pytest.raises(IntegrityError):
        bundle.verify_files()


@pytest.mark.parametrize("name", ["plans/a.plan", "tokenizer.json"])
def test_above_the_limit_everything_else_is_hashed_anyway(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(bundle_module, "ALWAYS_HASHED_BYTES", 1)
    change_a_byte(folder / name)
    with pytest.raises(IntegrityError, match="has changed"):
        Bundle.open(folder).path(name, verify=False)


def test_exactly_at_the_limit_is_hashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "ALWAYS_HASHED_BYTES", 140)
    change_a_byte(folder / "onnx/weights.data")
    with pytest.raises(IntegrityError):
        Bundle.open(folder).path("onnx/weights.data", verify=False)


def test_the_limit_is_256_mib() -> None:
    assert bundle_module.ALWAYS_HASHED_BYTES == 268_435_456


def test_what_is_no_bundle_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"nowhere is not a folder; `planforge export"):
        Bundle.open(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="is not a folder"):
        Bundle.open(folder / "manifest.json")
    with pytest.raises(BundleError, match=r"not a bundle: manifest\.json cannot be read"):
        Bundle.open(tmp_path)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read"):
        Bundle.open(tmp_path)


def test_a_huge_manifest_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (folder / "manifest.json").stat().st_size
    monkeypatch.setattr(bundle_module, "MAX_BYTES", size)
    Bundle.open(folder)
    monkeypatch.setattr(bundle_module, "MAX_BYTES", size - 1)
    with pytest.raises(BundleError, match=f"more than {size - 1} bytes"):
        Bundle.open(folder)


def test_a_manifest_that_is_not_utf8_is_refused(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_bytes(text.replace("gpt2", "\xe9").encode("latin-1"))
    with pytest.raises(BundleError, match="is not UTF-8"):
        Bundle.open(folder)


def test_a_malformed_manifest_is_refused_when_opened(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1')
    with pytest.raises(ManifestError, match="not valid JSON"):
        Bundle.open(folder)


def test_a_name_too_long_for_the_file_system_is_missing(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    name = "x" * 300
    manifest["files"][name] = manifest["files"].pop("golden.npz")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IntegrityError, match=name):
        Bundle.open(folder).verify_files()


def test_a_file_is_hashed_once_unless_somebody_writes_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    compute_sha256 = bundle_module.compute_sha256

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return compute_sha256(path)

    monkeypatch.setattr(bundle_module, "compute_sha256", counting)
    bundle = Bundle.open(folder)
    for _ in range(3):
        bundle.path("onnx/weights.data")
        with bundle.check_meanwhile(["onnx/weights.data", "onnx/decoder.onnx"]):
            pass
    assert sorted(hashed) == ["decoder.onnx", "weights.data"]
    change_a_byte(folder / "onnx/weights.data")
    with pytest.raises(IntegrityError, match="has changed"):
        bundle.path("onnx/weights.data")


def test_a_wrong_file_is_reported_whatever_became_of_the_work_beside(folder: Path) -> None:
    change_a_byte(folder / "onnx/weights.data")
    bundle = Bundle.open(folder)
    worked = False
    with (
        pytest.raises(IntegrityError, match=r"weights\.data has changed"),
        bundle.check_meanwhile(["onnx/weights.data"]),
    ):
        worked = True
    assert worked
    with pytest.raises(IntegrityError, match="has changed"), bundle.check_meanwhile(["onnx/weights.data"]):
        raise RuntimeError("the engine could not read it")


def test_the_work_begins_only_with_files_that_are_there(folder: Path) -> None:
    (folder / "onnx/weights.data").write_bytes(b"short")
    with (
        pytest.raises(IntegrityError, match="has 5 bytes"),
        Bundle.open(folder).check_meanwhile(["onnx/weights.data"]),
    ):
        raise AssertionError("not reached")
