"""optimum's exporter, in a process and, where it must be, in an environment of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from ..errors import CheckpointError, ExportError

TASK = "text-generation-with-past"
VENV = "optimum-venv"
ENVIRONMENT = (
    f"python3 -m venv {VENV}, then {VENV}/bin/pip install optimum-onnx onnxruntime 'transformers<4.58'"
)


def export_with_optimum(checkpoint: Path, out: Path, python: str | None = None) -> None:
    """Writes a decoder's graph and tokenizer to a folder. Code that a checkpoint brings is never run.

    Args:
        python: of an environment that has optimum-onnx; by default this one.

    Raises:
        CheckpointError: the checkpoint asks for code of its own, or has pickles alone.
        ExportError: optimum is missing, with the two lines that install it, or does not export this model.
    """
    check(checkpoint)
    if python is None and importlib.util.find_spec("optimum") is None:
        raise ExportError(
            "this model is exported by optimum, which is not here, as it wants transformers < 4.58:"
            f" {ENVIRONMENT}; then --optimum-python {VENV}/bin/python"
        )
    command = [python or sys.executable, "-m", "optimum.commands.optimum_cli", "export", "onnx"]
    command += ["--model", str(checkpoint.resolve()), "--task", TASK, "--no-post-process", str(out.resolve())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=out.parent)
    except OSError as error:
        raise ExportError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        way_out = f"; {ENVIRONMENT}" if "No module named" in said else ""
        raise ExportError(f"optimum does not export {checkpoint}: {said}{way_out}")


def check(checkpoint: Path) -> None:
    """Refuses what optimum would not, or in its own words."""
    from ...models.folder import read_json

    try:
        config = read_json(checkpoint / "config.json")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if "auto_map" in config:
        raise CheckpointError(
            f"{checkpoint}: config.json asks for code of its own (auto_map), which is never run"
        )
    if not any(checkpoint.glob("*.safetensors")):
        pickles = sorted(path.name for path in checkpoint.glob("*.bin"))
        convert = (
            "; convert it: python -c \"from transformers import AutoModel as M; M.from_pretrained('FOLDER')"
            ".save_pretrained('NEW')\", and copy the tokenizer's files"
        )
        raise CheckpointError(
            f"{checkpoint} has no .safetensors file"
            + (f", only {pickles[0]}, a pickle, which is never read{convert}" if pickles else "")
        )
