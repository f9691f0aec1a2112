"""A bundle as it is staged, and whether one is whole."""

from __future__ import annotations

from pathlib import Path

from planforge.exporter.bundle.writer import install, list_file_entries, open_staging_folder
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.defaults import GenerationDefaults
from planforge.runtime.bundle.manifest import Manifest


def stage(folder: Path, export_id: str) -> Manifest:
    """A small bundle's files, named after its export."""
    for name in (
        f"onnx/a-{export_id}.onnx",
        f"onnx/w-{export_id}.data",
        f"tokenizer/t-{export_id}.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{export_id} {name}".encode() * 100)
    return Manifest(
        family="gpt2",
        task="text-generation",
        export_id=export_id,
        config={},
        generation=GenerationDefaults(),
        tokenizer={"files": [f"tokenizer/t-{export_id}.json"]},
        files=list_file_entries(folder),
        artifacts=(),
    )


def install_stage(output: Path, export_id: str) -> None:
    """Put a small bundle where an export would."""
    with open_staging_folder(output) as staging:
        install(staging, stage(staging, export_id), output)


def whole(output: Path) -> str:
    """The export_id of a bundle all of whose files are right."""
    bundle = Bundle.open(output)
    bundle.verify_files()
    return bundle.manifest.export_id
