"""Names of a bundle's files and of its export, which follow from content.

So the same checkpoint, exported twice in the same way, gives the same bundle, byte for byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from ...runtime.apps.proof.evidence import PREFIX as EVIDENCE
from ...runtime.bundle.bundle import compute_sha256
from ...runtime.bundle.manifest import FileEntry, Manifest

DIGITS = 8  # of the content's sha256 in a name


def name_by_content(path: Path) -> tuple[Path, FileEntry]:
    """Rename a file from STEM.ENDING to STEM-HASH.ENDING; return its path, and its entry in a manifest."""
    entry = FileEntry(compute_sha256(path), path.stat().st_size)
    return path.replace(path.with_name(f"{path.stem}-{entry.sha256[:DIGITS]}{path.suffix}")), entry


def name_export(manifest: Manifest) -> Manifest:
    """Return a manifest with the id of all that its export decided: not of plans, default and evidence.

    Those may change later, and the export stays the same.
    """
    later = {name for plan in manifest.plans for name in plan.list_files()}
    later |= {name for name in manifest.files if name.startswith(EVIDENCE)}
    files = {name: entry for name, entry in manifest.files.items() if name not in later}
    decided = dataclasses.replace(
        manifest, export_id="", plans=(), default_precision=None, default_backend=None, files=files
    )
    export_id = hashlib.sha256(decided.to_json().encode()).hexdigest()[:32]
    return dataclasses.replace(manifest, export_id=export_id)
