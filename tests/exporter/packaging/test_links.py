"""How a bundle's files get into a package: as reflinks, copies or hard links, and what is told of it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from planforge.exporter.packaging.folder import measure_files
from planforge.exporter.packaging.links import FilePlacer

CONTENT = b"weights" * 1000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "bundle/weights.data"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "package"


def test_a_file_of_the_package_is_its_own(source: Path, package: Path) -> None:
    """Whatever this file system has: writing to one of the two does not change the other."""
    placer = FilePlacer()
    placer.place(source, package / "onnx/w.data")
    assert not source.samefile(package / "onnx/w.data")
    assert measure_files(package, placer) == (0 if placer.shared else len(CONTENT))
    (package / "onnx/w.data").write_bytes(b"other")
    assert source.read_bytes() == CONTENT


@pytest.mark.skipif(sys.platform != "linux", reason="reflinks are asked of Linux")
def test_a_reflink_is_asked_for_and_told_of(
    source: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the request is that of linux/fs.h: _IOW(0x94, 9, int)."""
    import fcntl

    def clone(target: object, request: int, data: int) -> int:
        assert request == 1 << 30 | 4 << 16 | 0x94 << 8 | 9
        os.write(target.fileno(), os.read(data, len(CONTENT)))  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    placer = FilePlacer()
    placer.place(source, package / "w.data")
    (package / "own").write_bytes(b"1234")
    assert (package / "w.data").read_bytes() == CONTENT
    assert placer.shared == {package / "w.data"} and measure_files(package, placer) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="reflinks are asked of Linux")
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_without_reflinks_gets_a_copy(
    source: Path, package: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    import fcntl

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    placer = FilePlacer()
    placer.place(source, package / "w.data")
    assert (package / "w.data").read_bytes() == CONTENT and not placer.shared


def test_hard_links_are_second_names_where_they_can_be(
    source: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placer = FilePlacer(hard_links=True)
    placer.place(source, package / "w.data")
    assert source.samefile(package / "w.data") and placer.shared == {package / "w.data"}

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    placer.place(source, package / "other.data")
    assert (package / "other.data").read_bytes() == CONTENT and len(placer.shared) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_a_file_that_is_a_link_is_placed_as_what_it_leads_to(source: Path, package: Path) -> None:
    """As a hub's cache keeps files; the link's own second name would lead elsewhere."""
    link = source.with_name("link.data")
    link.symlink_to(source.name)
    for hard_links in (False, True):
        FilePlacer(hard_links).place(link, package / f"{hard_links}.data")
        assert not (package / f"{hard_links}.data").is_symlink()
        assert (package / f"{hard_links}.data").read_bytes() == CONTENT
