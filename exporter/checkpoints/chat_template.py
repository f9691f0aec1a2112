"""A checkpoint's chat template, and the special tokens that it may name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.errors import BundleError
from ...runtime.text.chat import Chat, check_template_size
from .tokenizers.files import read_named_tokens, read_settings

log = logging.getLogger("planforge")


@dataclass(frozen=True)
class TemplateFile:
    """The chat template that a bundle keeps."""

    content: bytes  # in UTF-8
    tokens: Mapping[str, str]  # special tokens by the names that a template has for them, such as bos_token


def read_chat_template(folders: Iterable[Path]) -> TemplateFile | None:
    """Return the template of the first folder that has one; a warning says why one cannot be used."""
    for folder in folders:
        settings = read_settings(folder)
        try:
            text = find_template(folder, settings)
            if text is None:
                continue
            content = text.encode()
            check_template_size(len(content))
            tokens = read_named_tokens(settings)
            _ = Chat(text, tokens, str(folder)).compiled
        except (BundleError, ValueError) as error:
            log.warning("%s: the chat template is left out: %s", folder, error)
            return None
        return TemplateFile(content, tokens)
    return None


def find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the text of chat_template.jinja, else tokenizer_config.json's, of several "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        check_template_size(path.stat().st_size)
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        if "default" not in named:
            raise ValueError(
                f"tokenizer_config.json has templates {sorted(map(str, named))}, none is 'default'"
            )
        found = named["default"]
    if found is not None and not isinstance(found, str):
        raise ValueError(f"tokenizer_config.json's chat_template is {type(found).__name__}, not a text")
    return found
