"""What words a conversation beside its messages: tools, the template's variables, a message that goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..suggest import did_you_mean
from .special_tokens import MARK

if TYPE_CHECKING:
    from .chat_template import ChatTemplate

OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "strftime_now")
# What templates compare with words of their own. No mark may stand there: the message would count as none.
WORDS = {
    *("role", "system", "developer", "user", "assistant", "tool", "ipython", "observation", "environment"),
    *("model", "context", "document", "documents"),
    *("content", "type", "text", "name", "reasoning_content", "thinking"),
    *("tool_calls", "tool_call_id", "id", "function", "arguments", "description", "parameters"),
    *("properties", "required", "items", "enum", "object", "array", "string", "number", "integer", "boolean"),
}
NAMING = ("role", "type")  # keys of such words
END = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own, as templates may trim what is behind a text


@dataclass(frozen=True)
class Wording:
    """How a conversation is worded.

    Attributes:
        tools: that the model may call.
        options: variables of the template by name.
        continues: the model goes on with the last message instead of beginning one.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False


PLAIN = Wording()


def check_options_of_template(options: Any) -> None:
    """Refuse what are no variables of a template."""
    if options is not None and not (
        isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    ):
        raise InputError(
            f"template_options={options!r:.80} must be a mapping of names to values, such as"
            ' {"enable_thinking": False}',
            option="template_options",
        )


def copy_options(
    options: Mapping[str, Any], template: ChatTemplate, own: Collection[str], mark: Callable[[str], str]
) -> dict[str, Any]:
    """Return the values of a template's variables in plain types; refuse those that it does not read."""
    known = sorted(template.variables.difference(own))
    for name in options:
        if name in own:
            raise InputError(
                f"template_options: {name!r} is set by the conversation; leave it out",
                option="template_options",
            )
        if name not in known:
            hint = did_you_mean(name, known)
            reads = f"it uses {', '.join(known)}" if known else "it uses none; leave template_options out"
            raise InputError(
                f"template_options: the chat template does not use {name!r:.80}{hint}; {reads}",
                option="template_options",
            )
    try:
        plain = {
            name: copy_plain(value, f"template_options[{name!r}]", mark) for name, value in options.items()
        }
    except RecursionError as error:
        raise InputError(
            "template_options are nested too deep, or contain themselves", option="template_options"
        ) from error
    return plain


def mark_end(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of which the last has a tag behind its text, from where a model is to go on."""
    *others, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*others, {**last, "content": content + END}]
    *before, part = content
    return [*others, {**last, "content": [*before, {**part, "text": part["text"] + END}]}]


def cut_at_end(rendered: str, messages: Sequence[dict[str, Any]]) -> str:
    """Return what a template rendered up to the tag behind the last message's text."""
    content = messages[-1]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    place = rendered.rfind(END.strip())
    if place < 0 or text.replace(MARK, "").strip() not in rendered.replace(MARK, ""):
        raise InputError(
            "continue_final_message: the chat template leaves out parts of the last message, so it cannot be"
            " continued; leave continue_final_message out, or change the message",
            option="continue_final_message",
        )
    if rendered.startswith(END, place):
        return rendered[:place]
    return rendered[:place].rstrip()  # the template trims


def check_last(message: Mapping[str, Any]) -> None:
    """Refuse a last message that a model cannot go on with."""
    if message.get("role") != "assistant":
        raise InputError(
            "continue_final_message continues an assistant's message, but the last message has the"
            f" role {message.get('role')!r:.80}; add an assistant's message with the beginning of the answer",
            option="continue_final_message",
        )
    if message.get("content") is None or message.get("tool_calls"):
        raise InputError(
            "continue_final_message continues a text, but the last message has none, or calls tools",
            option="continue_final_message",
        )


def copy_plain(value: Any, name: str, mark: Callable[[str], str]) -> Any:
    """Copy a value to plain types, which have no methods of its own for a template to call."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return mark(str.__str__(value))
    if isinstance(value, list | tuple):
        return [copy_plain(item, f"{name}[{i}]", mark) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {
            key if key in WORDS else mark(key): (
                item if key in NAMING and item in WORDS else copy_plain(item, f"{name}[{key!r}]", mark)
            )
            for key, item in value.items()
        }
    raise InputError(
        f"{name} is {type(value).__name__}; it must be a text, a number, or a list or mapping of these",
        option=name.partition("[")[0],
    )
