"""A checkpoint's chat templates, and the special tokens that they may name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.errors import BundleError
from ...runtime.text.chat import Chat, check_template_size
from .tokenizers.files import read_named_tokens, read_settings

log = logging.getLogger("planforge")


FILES = {"default": "file", "tool_use": "tool_use"}  # transformers' names of templates, and the manifest's


@dataclass(frozen=True)
class TemplateFile:
    """The chat templates that a bundle keeps.

    Attributes:
        contents: in UTF-8: of "file", the usual one, and where there is one of "tool_use", that for tools.
        tokens: special tokens by the names that a template has for them, such as bos_token.
    """

    contents: Mapping[str, bytes]
    tokens: Mapping[str, str]


def read_chat_template(folders: Iterable[Path]) -> TemplateFile | None:
    """Return the templates of the first folder that has any; a warning says why they cannot be used."""
    for folder in folders:
        settings = read_settings(folder)
        try:
            texts = find_templates(folder, settings)
            if not texts:
                continue
            contents = {FILES[name]: text.encode() for name, text in texts.items()}
            for content in contents.values():
                check_template_size(len(content))
            tokens = read_named_tokens(settings)
            chat = Chat(texts["default"], tokens, str(folder), tool_template=texts.get("tool_use"))
            _ = (chat.compiled, chat.compiled_for_tools)
        except (BundleError, ValueError) as error:
            log.warning("%s: the chat template is left out: %s", folder, error)
            return None
        return TemplateFile(contents, tokens)
    return None


def find_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the template "default", and where there is one "tool_use"; none of a folder without any."""
    found = list_templates(folder, settings)
    if not found:
        return {}
    if "default" not in found:
        raise ValueError(f"of the templates {sorted(map(str, found))} none is 'default'")
    return {name: check_is_text(found[name]) for name in FILES if name in found}


def check_is_text(template: Any) -> str:
    """Return a template; refuse one that is no text."""
    if not isinstance(template, str):
        raise ValueError(f"a chat_template must be a string, not {type(template).__name__}")
    return template


def list_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all templates by name, from where transformers reads them, as they are.

    Files in jinja2 come before tokenizer_config.json; chat_template.json, which older processors wrote, last.
    """
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        paths["default"] = path
    if paths:
        return {name: read_text(path) for name, path in paths.items()}
    source = "tokenizer_config.json"
    found: Any = settings.get("chat_template")
    if found is None and (path := folder / "chat_template.json").is_file():
        source = path.name
        legacy = json.loads(read_text(path))
        found = legacy.get("chat_template") if isinstance(legacy, dict) else legacy
    if found is None:
        return {}
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    elif isinstance(found, str):
        found = {"default": found}
    else:
        raise ValueError(f"{source}'s chat_template must be a string, not {type(found).__name__}")
    return dict(found)


def read_text(path: Path) -> str:
    check_template_size(path.stat().st_size)
    return path.read_text(encoding="utf-8")
