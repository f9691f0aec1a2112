"""The same model in transformers, for verification. It needs any version of transformers that knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CheckpointError, VerificationError, first_line


def model_of_transformers(folder: Path) -> Any:
    """A decoder with its weights in fp32.

    Raises:
        VerificationError: transformers is not installed.
        CheckpointError: it cannot read the folder; in its words.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as progress
    except ImportError as error:
        raise VerificationError(
            "an imported model is read with transformers too: pip install transformers"
        ) from error
    import torch

    progress.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # transformers raises whatever a file brings it to
        raise CheckpointError(f"transformers cannot load {folder}: {first_line(error)}") from error
    return model.eval().requires_grad_(False)
