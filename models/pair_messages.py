"""Reads how a CrossEncoder makes messages of a query and a document, which its chat template writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

FORMATS = ("flat", "structured")  # of a content: the text itself, or a list of parts
MESSAGES = "message"  # the name of messages among the inputs that a transformer reads
TEMPLATE = "chat_template"  # the name of a template, and of the settings for it

Messages: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class MessageSettings:
    """How a query and a document become messages.

    Attributes:
        format: one of `FORMATS`; None where the folder does not say whether there are messages: then there
            are where the tokenizer has a chat template.
        template: the name of the chat template, or its text; None for the tokenizer's usual one.
        options: variables of the template beside the messages.
    """

    format: str | None = None
    template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def make_messages(self, query: str, document: str, prompt: str = "") -> Messages:
        """Return the messages of a pair; a prompt is the system's, before them."""
        texts = {"system": prompt, "query": query, "document": document}
        return [
            {"role": role, "content": text if self.format == "flat" else [{"type": "text", "text": text}]}
            for role, text in texts.items()
            if role != "system" or text
        ]


def read_messages(settings: Mapping[str, Any], path: Path, output: str) -> MessageSettings | None:
    """Return how pairs become messages by a Transformer's settings; None where they stay texts.

    Args:
        settings: of the module.
        path: their file.
        output: the name of what the transformer gives.

    Raises:
        ValueError: a setting that we don't implement; names it.
    """
    modalities = settings.get("modality_config")
    if modalities is None:
        return MessageSettings()
    if MESSAGES not in modalities:
        return None
    given = modalities[MESSAGES]
    wanted = [{"method": "forward", "method_output_name": output, "format": name} for name in FORMATS]
    if given not in wanted:
        raise ValueError(
            f"{path}: modality_config has {MESSAGES}={given!r:.200}; supported is {wanted[0]}, or the format"
            f" {FORMATS[1]!r}: load the model with sentence-transformers 6, and save it again"
        )
    processing = settings.get("processing_kwargs") or {}
    options = dict(processing.get(TEMPLATE) or {})
    template = options.pop(TEMPLATE, None)
    others = [name for name, value in processing.items() if name != TEMPLATE and value]
    others += [name for name, value in options.items() if not isinstance(value, str | int | float)]
    if others or not isinstance(template, str | None):
        raise ValueError(
            f"{path}: processing_kwargs sets {', '.join(others) or TEMPLATE}, which is not supported beside a"
            " chat template; leave it out: variables of the template, and its name, are supported"
        )
    return MessageSettings(given["format"], template, options)
