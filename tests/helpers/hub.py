"""Lays a folder out as huggingface_hub's cache keeps what it downloads."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name


def write_hub_cache(folder: Path, cache: Path) -> Path:
    """Copy a folder into a cache; return its snapshot, in which every file is a link to a blob."""
    repository = cache / repo_folder_name(repo_id="someone/model", repo_type="model")
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "blobs").mkdir(parents=True)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot
