"""Keeps what an engine makes of a graph when it opens it, in the user's cache folder, for the next time.

Each prepared graph is a folder: the optimized graph, its packed weights, and a stamp that says what it was
made of, where, and by what. A folder whose stamp or files are not as they should be is deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bundle.bundle import ALWAYS_HASHED_BYTES, Bundle, compute_sha256
from ..bundle.manifest import Artifact
from ..cache_folder import find_cache_folder
from ..errors import BackendError, PlanForgeError
from .requirements import CPUINFO

log = logging.getLogger("planforge")

FORMAT = 1  # counted up when what is kept of a graph changes
STAMP = "prepared.json"
GRAPH = "model.onnx"
DATA = "model.data"
FOLDER_NAME = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.[0-9a-f]{12}")  # whole, or being written
ABANDONED = 3600  # seconds; a folder that has been half written for so long is nobody's any more
UNUSED = 60 * 86400  # seconds; what nobody has opened for so long is deleted
SPARE_BYTES = 64 * 2**20  # that stay free on the disk
PROCESSOR_LINES = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")


def describe_processor(cpuinfo: Path = CPUINFO) -> str:
    """Return what decides how weights are packed: the processor's model and features, hashed."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = {line for line in text.splitlines() if line.startswith(PROCESSOR_LINES)}
    return f"{platform.machine()} {hashlib.sha256(repr(sorted(lines)).encode()).hexdigest()}"


@dataclass(frozen=True)
class PreparedGraph:
    """Where one graph of a bundle is kept for this processor, and what it must have been made of.

    Attributes:
        folder: of this graph on this processor; it need not be there.
        made_of: the hashes of the graph and its weights, the engine's version and settings, the processor.
    """

    folder: Path
    made_of: Mapping[str, Any]

    @classmethod
    def of(cls, bundle: Bundle, artifact: Artifact, engine: Mapping[str, Any]) -> PreparedGraph:
        """Return the place of one graph. `engine` is its version and the settings that change what it makes.

        Raises a BackendError where the user has no cache folder.
        """
        files = bundle.manifest.files
        source = {name: files[name].sha256 for name in (artifact.file, *artifact.data)}
        made_of = {
            "format": FORMAT,
            "hashes": sorted(source.values()),
            "processor": describe_processor(),
            "engine": dict(engine),
        }
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
        # Nothing of the manifest's own words is in the name: a bundle does not say where to write.
        return cls(find_cache_folder() / "prepared" / key[:32], made_of)

    @property
    def graph(self) -> Path:
        return self.folder / GRAPH

    def exists(self) -> bool:
        """Return whether there is something, right or stale."""
        return self.folder.is_dir()

    def is_current(self) -> bool:
        """Return whether its stamp is right, and no file was cut; the weights' hash is `check_data`'s."""
        try:
            stamp = json.loads((self.folder / STAMP).read_text(encoding="utf-8"))
            if stamp["made_of"] != self.made_of or set(stamp["files"]) != {GRAPH, DATA}:
                return False
            for name, file in stamp["files"].items():
                if (self.folder / name).stat().st_size != file["bytes"]:
                    return False
            return bool(compute_sha256(self.graph) == stamp["files"][GRAPH]["sha256"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False

    def check_data(self, verify: bool) -> bool:
        """Return whether the weights have the right hash.

        Above 256 MiB it is compared only with `verify`, or where the file's time is not that of its making.
        """
        path = self.folder / DATA
        try:
            file = json.loads((self.folder / STAMP).read_text(encoding="utf-8"))["files"][DATA]
            is_untouched = path.stat().st_mtime_ns == file["mtime_ns"]
            if file["bytes"] > ALWAYS_HASHED_BYTES and is_untouched and not verify:
                return True
            return bool(compute_sha256(path) == file["sha256"])
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def count_bytes(self) -> int:
        """Return its size on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def make(self, weight_bytes: int, save: Callable[[Path, str], object]) -> None:
        """Let `save` write a graph, and weights under a name beside it, in a new folder; then rename that.

        Raises a BackendError where there is no room, the folder cannot be written, or the engine cannot save
        the graph.
        """
        partial = self.folder.with_name(f".{self.folder.name}.{secrets.token_hex(6)}")
        try:
            partial.mkdir(mode=0o700, parents=True)
            check_room(partial, 2 * weight_bytes + weight_bytes // 2)
            save(partial / GRAPH, DATA)
            (partial / DATA).touch()  # a graph of small weights has all in itself
            self.write_stamp(partial)
            self.publish(partial)
        except (OSError, PlanForgeError) as error:
            raise BackendError(
                f"the prepared graph cannot be saved in {self.folder.parent}: {error}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            remove_unused(self.folder.parent)

    def write_stamp(self, partial: Path) -> None:
        """Write what the files are and were made of, after all else."""
        files = {}
        for name in (GRAPH, DATA):
            path = partial / name
            with path.open("r+b") as file:
                os.fsync(file.fileno())  # a hash in a stamp must not outlive the bytes it was made of
            state = path.stat()
            files[name] = {
                "bytes": state.st_size,
                "mtime_ns": state.st_mtime_ns,
                "sha256": compute_sha256(path),
            }
        stamp = {"made_of": self.made_of, "files": files}
        (partial / STAMP).write_text(json.dumps(stamp, indent=1), encoding="utf-8")

    def publish(self, partial: Path) -> None:
        """Give a finished folder its name; where another process was quicker, its folder stays."""
        try:
            partial.rename(self.folder)
        except OSError:
            if not self.is_current():
                raise

    def note_use(self) -> None:
        """Keep it from being taken for one that nobody opens any more."""
        with suppress(OSError):
            os.utime(self.folder / STAMP)

    def remove(self) -> bool:
        """Delete it; return whether it is gone. On Windows it stays while a program has it open."""
        shutil.rmtree(self.folder, ignore_errors=True)
        return not self.folder.exists()


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin what would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise BackendError(
            f"{folder.parent} has {free / 1e6:.0f} MB free, and {(needed + SPARE_BYTES) / 1e6:.0f} MB are"
            " needed; make room, or set PLANFORGE_CACHE to a folder on another disk"
        )


def remove_unused(folder: Path) -> None:
    """Delete what killed processes have left half written, and what nobody has opened for long.

    The latter is of bundles that were exported again, and of engines that were replaced.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            if FOLDER_NAME.fullmatch(path.name):
                stamp = path / STAMP
                seconds = time.time() - (stamp if stamp.exists() else path).stat().st_mtime
                if seconds > (UNUSED if stamp.exists() and path.name[0] != "." else ABANDONED):
                    shutil.rmtree(path, ignore_errors=True)
