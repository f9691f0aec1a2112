"""The real text that exports are verified with."""

from __future__ import annotations

from pathlib import Path

from ...runtime.apps.encoding import remove_mark
from ...runtime.errors import InputError
from ..errors import PromptsError

PROMPTS = Path(__file__).with_name("prompts.txt")


def read_prompts(path: str | Path | None, checkpoint: Path | None = None) -> list[str]:
    r"""Return the prompts of a file, one a line; \n stands for a line break.

    Without a file they are the checkpoint's own prompts.txt, or the built-in texts where it has none.
    """
    if path is None:
        own = PROMPTS if checkpoint is None else checkpoint / PROMPTS.name
        path = own if own.is_file() else PROMPTS
    try:
        lines = remove_mark(Path(path).read_bytes(), "the file").decode().splitlines()
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise PromptsError(f"the prompts of {path} cannot be read: {error}") from error
    prompts = [line.replace("\\n", "\n") for line in lines if line.strip()]
    if not prompts:
        raise PromptsError(f"{path} contains no prompts; write one per line")
    return prompts
