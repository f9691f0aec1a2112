"""Keeps evidence in a bundle: what `planforge prove` measured of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ...runtime.apps.proof.evidence import (
    PREFIX,
    Proof,
    add_proof,
    list_evidence_files,
    read_whole_evidence,
    write_evidence,
)
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from .names import name_by_content
from .writer import install_change, open_staging_folder


def record_proof(folder: Path, proof: Proof) -> None:
    """Add a proof to a bundle's evidence, in one step; the export stays the same."""
    opened = Bundle.open(folder)
    with open_staging_folder(opened.folder) as staging:

        def change(now: Manifest) -> Manifest:
            bundle = Bundle(opened.folder, now)
            return stage_evidence(bundle, now, add_proof(read_whole_evidence(bundle), proof), staging)

        install_change(staging, opened, change)


def prune_evidence(bundle: Bundle, pruned: Manifest, staging: Path) -> Manifest:
    """Return a pruned manifest without the evidence of what it lacks; what is left is staged."""
    proofs = read_whole_evidence(bundle)
    kept = [proof for proof in proofs if proof.file in pruned.files]
    if proofs and len(kept) == len(proofs):
        return pruned
    return stage_evidence(bundle, pruned, kept, staging)


def stage_evidence(bundle: Bundle, manifest: Manifest, proofs: Sequence[Proof], staging: Path) -> Manifest:
    """Stage a bundle's evidence; return the manifest with it in place of the bundle's."""
    old = list_evidence_files(bundle)
    files = {name: entry for name, entry in manifest.files.items() if name not in old}
    if proofs:
        path = staging / f"{PREFIX.rstrip('-')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(write_evidence(proofs), encoding="utf-8")
        path, entry = name_by_content(path)
        files[path.relative_to(staging).as_posix()] = entry
    return dataclasses.replace(manifest, files=files)
