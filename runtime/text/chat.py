"""Turns the messages of a conversation into the tokens of a prompt, and cuts one that is too long."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..bundle.bundle import Bundle
from ..bundle.json_reader import Reader
from ..errors import BackendUnavailableError, BundleError, InputError, suggest_install
from .special_tokens import SpecialTokenEscaper
from .template_limits import Watch, keep
from .tokenizer import Tokenizer
from .wording import OWN, PLAIN, Wording, check_last, copy_options, copy_plain, cut_at_end, mark_end

if TYPE_CHECKING:
    from .chat_template import ChatTemplate

MAX_BYTES = 2**20  # of a template
TEMPLATE_FILES = ("file", "tool_use")  # as the manifest names them: the usual one, and that for tools
SYSTEM = ("system", "developer")  # roles whose messages are never dropped

Message: TypeAlias = Mapping[str, object]
"""One message of a conversation: "role", "content", and what else its chat template reads."""


@dataclass
class Chat:
    """A bundle's chat template; safe to use from several threads. Needs jinja2 when it is used."""

    template: str
    tokens: Mapping[str, str]  # special ones by the names that the template has for them, such as bos_token
    source: str  # what errors call the template
    clock: Callable[[str], str] | None = None  # in place of the machine's: the time in a format of strftime
    tool_template: str | None = None  # in place of `template` for conversations with tools

    @classmethod
    def of(cls, bundle: Bundle) -> Chat | None:
        """Return the template of a bundle, if it has one."""
        if "chat_template" not in bundle.manifest.tokenizer:
            return None
        r = Reader(bundle.manifest.tokenizer["chat_template"], "tokenizer.chat_template")
        path = bundle.path(r.get("file", str))
        tool_use = None
        if "tool_use" in r.value:
            tool_use = read_template(bundle.path(r.get("tool_use", str)))
        return cls(read_template(path), r.texts("tokens"), str(path), tool_template=tool_use)

    @cached_property
    def compiled(self) -> ChatTemplate:
        """The template, ready to be rendered."""
        return compile_template(self.template, self.source)

    @cached_property
    def compiled_for_tools(self) -> ChatTemplate:
        """The template of conversations with tools."""
        if self.tool_template is None:
            return self.compiled
        return compile_template(self.tool_template, f"{self.source} (tool_use)")

    @property
    def text_for_tools(self) -> str:
        """The text of the template of conversations with tools."""
        return self.template if self.tool_template is None else self.tool_template

    @property
    def supports_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return re.search(r"\btools\b", self.text_for_tools) is not None

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        parse_special: bool = False,
        wording: Wording = PLAIN,
    ) -> list[int]:
        """Return the tokens of a conversation, up to where the model is to answer.

        The template's own special tokens are read as such. Those that a message spells are plain text, so
        that a user cannot end his turn and speak as another; with `parse_special` they are read too, as
        transformers does by default.
        """
        escaper = SpecialTokenEscaper(() if parse_special else tokenizer.special_tokens)
        if wording.tools and not self.supports_tools:
            raise InputError(
                f"the chat template does not support tools ({self.source}); leave tools out", option="tools"
            )
        watch = keep if parse_special else escaper.mark_made
        rendered = self._render(messages, wording, escaper.mark, watch)
        if not rendered:
            raise InputError(
                f"the chat template renders these messages as an empty text; see {self.source}",
                option="messages",
            )
        return escaper.encode(rendered, tokenizer)

    def render(self, messages: Sequence[Message], wording: Wording = PLAIN) -> str:
        """Return the text of a conversation, up to where the model is to answer."""
        return self._render(messages, wording, str, keep)

    def _render(
        self, messages: Sequence[Message], wording: Wording, mark: Callable[[str], str], watch: Watch
    ) -> str:
        """Render contents that are lists of parts as lists, or as texts where the template reads texts."""
        checked = check_messages(messages, mark)
        if wording.continues:
            check_last(messages[-1])
        checked = [message if message["content"] else join_parts(message) for message in checked]
        template = self.compiled_for_tools if wording.tools else self.compiled
        options = copy_options(wording.options, template, [*OWN, *self.tokens], mark)
        tools = [copy_plain(tool, f"tools[{i}]", mark) for i, tool in enumerate(wording.tools)]
        given = {
            "documents": None,
            **options,
            **self.tokens,
            "tools": tools or None,
            "add_generation_prompt": not wording.continues,
        }
        if self.clock is not None:
            given["strftime_now"] = self.clock

        def render(messages: list[dict[str, Any]]) -> str:
            if not wording.continues:
                return template.render({**given, "messages": messages}, watch)
            text = template.render({**given, "messages": mark_end(messages)}, watch)
            return cut_at_end(text, messages)

        parts = [part for m in checked if isinstance(m["content"], list) for part in m["content"]]
        try:
            rendered = render(checked)
        except InputError:
            if not parts:
                raise
        else:
            # A template that reads texts alone may write a list as Python would.
            if not any(repr(part) in rendered for part in parts):
                return rendered
        return render([join_parts(message) for message in checked])


def read_template(path: Path) -> str:
    """Return the text of a bundle's template."""
    try:
        check_template_size(path.stat().st_size)
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise BundleError(f"{path} is not a valid chat template: {error}; export the bundle again") from error


def compile_template(text: str, source: str) -> ChatTemplate:
    """Return a template that is ready to be rendered."""
    try:
        from .chat_template import ChatTemplate
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"chat templates need {error.name}: {suggest_install('chat')}"
        ) from error
    return ChatTemplate(text, source)


def check_messages(messages: Sequence[Message], mark: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return the messages in plain types, every text through `mark`; keys without a value are left out."""
    form = 'a list of {"role": "user", "content": "..."}'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InputError(f"messages must be {form}, not {type(messages).__name__}", option="messages")
    if not messages:
        raise InputError(f"messages is empty; it must be {form}", option="messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(
                f"messages[{number}] is {type(message).__name__}; messages must be {form}",
                option=f"messages[{number}]",
            )
        for key in ("role", "content"):
            value = message.get(key)
            if key == "content" and value is None and message.get("tool_calls"):
                continue  # an assistant's message that calls tools may say nothing else
            if key == "content" and isinstance(value, list | tuple):
                check_parts(value, f"messages[{number}]['content']")
            elif not isinstance(value, str):
                got = type(value).__name__ if key in message else "missing"
                raise InputError(
                    f"messages[{number}]: {key!r} must be a text, but is {got}",
                    option=f"messages[{number}].{key}",
                )
    try:
        read = [copy_plain(message, f"messages[{i}]", str) for i, message in enumerate(messages)]
        read_arguments(read)
        copies = [copy_plain(message, f"messages[{i}]", mark) for i, message in enumerate(read)]
    except RecursionError as error:
        raise InputError("messages are nested too deep, or contain themselves", option="messages") from error
    return [
        {"content": "", **{key: value for key, value in copy.items() if value is not None}} for copy in copies
    ]


def read_arguments(messages: list[dict[str, Any]]) -> None:
    """Turn the arguments of tool calls from JSON into objects, which templates write as JSON again."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(function, dict) and isinstance(arguments, str):
                try:
                    function["arguments"] = json.loads(arguments)
                except (ValueError, RecursionError) as error:
                    raise InputError(
                        f"a tool call's arguments are not valid JSON: {arguments:.80}", option="messages"
                    ) from error


def check_parts(parts: Sequence[Any], name: str) -> None:
    """Refuse a content's parts that are not texts."""
    form = '{"type": "text", "text": "..."}'
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise InputError(
                f"{name}[{number}] is {type(part).__name__}; a content's parts must be {form}",
                option="messages",
            )
        if part.get("type") != "text":
            raise InputError(
                f"{name}[{number}] has the type {part.get('type')!r}; the model reads text only: give parts"
                f" {form}",
                option="messages",
            )
        if not isinstance(part.get("text"), str):
            got = type(part["text"]).__name__ if "text" in part else "missing"
            raise InputError(f"{name}[{number}]: 'text' must be a text, but is {got}", option="messages")


def join_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text: its parts', one behind the other."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def check_template_size(size: int) -> None:
    """Refuse a template of more than 1 MiB by a ValueError."""
    if size > MAX_BYTES:
        raise ValueError(f"it has {size} bytes; at most {MAX_BYTES} are allowed")


@dataclass(frozen=True)
class CutChat:
    """A conversation as far as it fits."""

    tokens: list[int]  # of the messages that are left
    dropped_messages: int
    dropped_tokens: int  # by how many the conversation became shorter


def cut_chat(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], limit: int
) -> CutChat:
    """Drop as few of a conversation's oldest turns as make it fit in `limit` tokens.

    A turn is a user's message and all that follows until the next user's. The last turn stays, and so do
    the system's messages, whether or not what is left fits.
    """
    whole = encode(messages)
    turns = split_turns(messages)
    if len(whole) <= limit or len(turns) < 2:
        return CutChat(whole, 0, 0)

    def encode_without(count: int) -> list[int]:
        dropped = {index for turn in turns[:count] for index in turn}
        return encode([message for index, message in enumerate(messages) if index not in dropped])

    fewest = 1
    most = len(turns) - 1
    while fewest < most:  # a conversation that lost more turns is shorter
        middle = (fewest + most) // 2
        if len(encode_without(middle)) <= limit:
            most = middle
        else:
            fewest = middle + 1
    tokens = encode_without(fewest)
    return CutChat(tokens, sum(map(len, turns[:fewest])), len(whole) - len(tokens))


def split_turns(messages: Sequence[Message]) -> list[list[int]]:
    """Return the places of the messages of each turn, without the system's.

    What is said before the first user's message is a turn of its own.
    """
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role in SYSTEM:
            continue
        if role == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    return turns
