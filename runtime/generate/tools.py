"""Tools that a model may call: what holds an answer to a call, and the calls that answers have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, SchemaError
from ..suggest import did_you_mean
from ..text.tokenizer import Tokenizer
from .json_schema import JSON_OPTIONS, read_schema
from .schema_references import move_schema, resolve_references
from .structure import MAX_LENGTH, Structure, check_length
from .tool_calls import read_calls

CHOICES = ("auto", "none", "required")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
SURROGATE = re.compile("[\ud800-\udfff]")
FORM = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that an answer asks for.

    Attributes:
        name: of the function.
        arguments: a JSON object.
    """

    name: str
    arguments: str


def write_arguments(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON that UTF-8 can hold: half a surrogate pair stays escaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    return SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


@dataclass(frozen=True)
class Tools:
    """The tools of a conversation.

    Attributes:
        definitions: as the template gets them.
        parameters: of each function the JSON schema of its arguments; where calls are forced, its references
            are resolved.
        forced: the functions of which the answer must call one; empty where it need not.
    """

    definitions: tuple[dict[str, Any], ...]
    parameters: dict[str, dict[str, Any]]
    forced: tuple[str, ...]

    def find_calls(self, text: str) -> tuple[ToolCall, ...]:
        """Return the calls in an answer, in any wording that `tool_calls` reads."""
        return tuple(
            ToolCall(name, write_arguments(arguments))
            for name, arguments in read_calls(text, self.parameters)
        )

    def write_structure(self, template: str, tokenizer: Tokenizer) -> Structure:
        """Return what holds an answer to a call, in the wording that a chat template teaches.

        A mark that is a special token comes as that token.
        """

        def spell(mark: str) -> str:
            special = mark in tokenizer.special_tokens
            return f"<[{tokenizer.find_id(mark)}]>" if special else json.dumps(mark)

        if "[TOOL_CALLS]" in template and "[ARGS]" in template:
            call_id = f"{spell('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/ " if "[CALL_ID]" in template else ""
            lines = [
                f"start: {spell('[TOOL_CALLS]')} ({' | '.join(f'f{i}' for i in range(len(self.forced)))})"
            ]
            for number, name in enumerate(self.forced):
                schema = write_guided(move_schema(self.parameters[name], "#"))
                lines.append(f"f{number}: {json.dumps(name)} {call_id}{spell('[ARGS]')} a{number}")
                lines.append(f"a{number}: %json {schema}")
            return Structure("grammar", "\n".join(lines), "tools")
        if "<tool_call>" in template:
            start = f'{spell("<tool_call>")} "\\n" call "\\n" {spell("</tool_call>")}'
        elif "<|tool_call|>" in template:
            end = spell("<|/tool_call|>") if "<|/tool_call|>" in template else ""
            start = f'{spell("<|tool_call|>")} "[" call "]" {end}'
        elif "[TOOL_CALLS]" in template:
            start = f'{spell("[TOOL_CALLS]")} "[" call "]"'
        else:
            return Structure("json_schema", json.dumps(self._write_schema("parameters")), "tools")
        schema = write_guided(self._write_schema("arguments"))
        return Structure("grammar", f"start: {start}\ncall: %json {schema}", "tools")

    def _write_schema(self, key: str) -> dict[str, Any]:
        """Return the schema of a call of one of the forced functions."""
        definitions: dict[str, Any] = {}
        calls = []
        for number, name in enumerate(self.forced):
            definitions[str(number)] = move_schema(self.parameters[name], f"#/$defs/{number}")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{number}"}},
                    "required": ["name", key],
                    "additionalProperties": False,
                }
            )
        return {"anyOf": calls, "$defs": definitions}


def write_guided(schema: Mapping[str, Any]) -> str:
    """Return a schema as a grammar of llguidance has it."""
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def read_tools(tools: Any, choice: Any) -> Tools | None:
    """Return the tools of a call's options; None where there are none, or none may be called."""
    if tools is None or (isinstance(tools, Sequence) and not tools):
        if choice not in (None, "auto", "none"):
            raise InputError(
                f"tool_choice={choice!r:.80} needs tools; give tools too, or leave it out",
                option="tool_choice",
            )
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InputError(f"tools={tools!r:.80} must be a list of {FORM}", option="tools")
    parameters: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        name, schema = read_tool(tool, number)
        if name in parameters:
            raise InputError(
                f"tools[{number}]: a function {name!r} is already given; rename or remove one",
                option=f"tools[{number}].function.name",
            )
        parameters[name] = schema
    if choice == "none":
        return None
    forced = read_choice(choice, parameters)
    if not forced:
        check_not_strict(tools)
    for number, name in enumerate(parameters if forced else ()):
        with naming_tool(number, name):
            parameters[name] = resolve_references(parameters[name])
    return Tools(tuple(map(dict, tools)), parameters, forced)


def check_not_strict(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tools whose arguments are to be valid for sure where the model need not call one."""
    for number, tool in enumerate(tools):
        if tool["function"].get("strict"):
            raise InputError(
                f"tools[{number}].function.strict=True is only supported where the model must call a tool."
                " Leave"
                ' strict out, or give tool_choice="required" or a function\'s name',
                option=f"tools[{number}].function.strict",
            )


def read_tool(tool: Any, number: int) -> tuple[str, dict[str, Any]]:
    """Return a tool's name, and the schema of its arguments."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InputError(f"tools[{number}]={tool!r:.80} must be {FORM}", option=f"tools[{number}]")
    with naming_tool(number, name):
        text = read_schema(function.get("parameters") or NO_ARGUMENTS, MAX_LENGTH)
    check_length(f"tools[{number}].function.parameters", text)
    schema: dict[str, Any] = json.loads(text)
    return name, schema


@contextmanager
def naming_tool(number: int, name: str) -> Iterator[None]:
    """Say in errors of a schema which tool's it is."""
    try:
        yield
    except SchemaError as error:
        place = "/".join(part for part in (f"tools/{number}/function/parameters", error.path) if part)
        option = f"tools[{number}].function.parameters"
        raise SchemaError(f"tools[{number}], {name}: {error}", path=place, option=option) from error


def read_choice(choice: Any, names: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the functions of which one must be called."""
    if choice in (None, "auto"):
        return ()
    if choice == "required":
        return tuple(names)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        form = '{"type": "function", "function": {"name": "..."}}'
        raise InputError(
            f"tool_choice={choice!r:.80} must be one of {', '.join(CHOICES)}, or {form}", option="tool_choice"
        )
    if name not in names:
        hint = did_you_mean(name, list(names)) or f"; there are {', '.join(names)}"
        raise InputError(
            f"tool_choice names {name!r:.80}, which is not one of the tools{hint}", option="tool_choice"
        )
    return (name,)
