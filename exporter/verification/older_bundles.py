"""Finds values that an earlier PlanForge may have read differently from transformers."""

from __future__ import annotations

from ...runtime.apps.check.cases import Skipped
from ...runtime.apps.check.golden_texts import find_texts, read_texts
from ...runtime.apps.check.texts import FILES
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import SpecialTokens
from ...runtime.text.tokenizer import read
from ..checkpoints.tokenizers.files import find_frames


def find_doubts(opened: Bundle) -> list[Skipped]:
    """Return the settings that only a new export can tell, as an earlier version read each wrongly."""
    doubts = []
    file = find_texts(opened)
    if file is not None and read_texts(file).reference.startswith("tokenizers"):
        reason = (
            "at export transformers was not asked, and earlier versions overlooked some of them; export the"
            " checkpoint again where transformers is installed"
        )
        doubts.append(Skipped(FILES, "the settings of tokenizer_config.json", reason))
    encoder = opened.manifest.encoder
    if encoder is not None and encoder.framed == "all":
        path = opened.path(str(opened.manifest.tokenizer["files"][0]))
        if find_frames(read(path), str(path)) == (SpecialTokens(), SpecialTokens()):
            reason = (
                f"{path.name} puts none there and the bundle does, as earlier versions decided; export the"
                " checkpoint again"
            )
            doubts.append(Skipped(FILES, "special tokens around texts", reason))
    return doubts
