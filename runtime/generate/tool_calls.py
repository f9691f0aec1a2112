"""Reads the calls of tools that an answer asks for, in the wordings of model families.

A call stands between marks at any place of an answer, or the whole answer is one: behind a mark, or as JSON
alone. Sources: the chat templates of Hermes, Qwen, Llama 3, Mistral, Phi-4-mini, Granite and OLMo 3.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..text.stream import count_overlap

CALL = "<tool_call>"
# Marks that begin calls at any place of an answer, and those that end them.
BLOCKS = {CALL: "</tool_call>", "<|tool_call|>": "<|/tool_call|>", "<function_calls>": "</function_calls>"}
# Marks that begin calls at the start of an answer alone, as an object does.
STARTS = ("[TOOL_CALLS]", "<|python_tag|>")
BLOCK = re.compile("|".join(map(re.escape, BLOCKS)))
START = re.compile(rf"\s*(?:{'|'.join(map(re.escape, STARTS))})")
# Mistral's: name[ARGS]{...}, which may have an id; what tokenizers leave out of texts may be missing.
NAMED = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
ID_LENGTH = 9  # of the ids of its calls
BEHIND_NAME = re.compile(rf"[a-zA-Z0-9]{{0,{ID_LENGTH}}}\s*(?:\Z|[{{\[])")
BETWEEN = re.compile(r"[\s;]*")
JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_CALLS_TEXT = 2**16  # characters of calls in Python's syntax, which is parsed as a whole

Call: TypeAlias = "tuple[str, dict[str, Any]]"


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)


@dataclass(frozen=True)
class Block:
    """A mark with the calls behind it.

    Attributes:
        begin: where the mark begins in the answer.
        end: where what belongs to it ends.
        calls: the names and arguments.
    """

    begin: int
    end: int
    calls: list[Call]


def read_calls(text: str, names: Collection[str]) -> list[Call]:
    """Return the calls of an answer in order; none where one is unreadable or names no tool.

    Args:
        text: the whole answer.
        names: of the tools.
    """
    try:
        if BLOCK.search(text):
            calls = [call for block in find_blocks(text) for call in block.calls]
        else:
            calls = read_whole(text, names)
    except (ValueError, RecursionError, MemoryError, SyntaxError):
        return []
    return calls if all(name in names for name, _ in calls) else []


def find_blocks(text: str) -> Iterator[Block]:
    """Yield the calls between marks; ValueError where they cannot be read."""
    place = 0
    while (mark := BLOCK.search(text, place)) is not None:
        end = BLOCKS[mark[0]]
        if mark[0] == "<function_calls>":
            calls, place = read_python_calls(text, mark.end(), end)
        else:
            values, place = read_values(text, mark.end())
            calls = [read_object(value) for value in values]
            place = skip_end(text, place, end)
        yield Block(mark.start(), place, calls)


def read_whole(text: str, names: Collection[str]) -> list[Call]:
    """Return the calls of an answer that is nothing else."""
    if NAMED.match(text) is not None:
        return read_named(text, names)
    start = START.match(text)
    values, place = read_values(text, 0 if start is None else start.end())
    if place < len(text):
        raise ValueError("there is more than calls")
    return [read_object(value) for value in values]


def read_named(text: str, names: Collection[str]) -> list[Call]:
    """Return calls in Mistral's newer wording, in which an id may follow a name without its mark."""
    calls = []
    place = 0
    while place < len(text):
        named = NAMED.match(text, place)
        if named is None:
            raise ValueError("no name of a tool")
        arguments, place = DECODER.raw_decode(text, named.end())
        name = named[1] if named[1] in names else named[1][:-ID_LENGTH]
        calls.append((name, arguments))
        place = skip(text, place)
    return calls


def read_values(text: str, place: int) -> tuple[list[Any], int]:
    """Return objects, or lists of them, that stand one behind the other, and where they end."""
    values: list[Any] = []
    place = skip(text, place)
    while text.startswith(("{", "["), place):
        value, place = DECODER.raw_decode(text, place)
        values += value if isinstance(value, list) else [value]
        place = skip(text, place)
    if not values:
        raise ValueError("no JSON")
    return values, place


def read_object(value: Any) -> Call:
    """Return the call that an object of JSON asks for."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no name and arguments")
    return name, arguments


def read_python_calls(text: str, begin: int, end: str) -> tuple[list[Call], int]:
    """Return calls in Python's syntax, one a line, and where their block ends; a text may hold its mark."""
    if len(text) - begin > MAX_CALLS_TEXT:
        raise ValueError("too long")
    place = text.find(end, begin)
    while place >= 0:
        try:
            return parse_python(text[begin:place]), place + len(end)
        except SyntaxError:
            place = text.find(end, place + 1)
    return parse_python(text[begin:]), len(text)


def parse_python(source: str) -> list[Call]:
    calls = []
    for statement in ast.parse(source.strip()).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            raise ValueError("no call with named arguments")
        arguments = {word.arg: read_literal(word.value) for word in call.keywords if word.arg is not None}
        if not all(map(is_json, arguments.values())):
            raise ValueError("an argument is not JSON")
        calls.append((ast.unparse(call.func), arguments))
    return calls


def read_literal(node: ast.expr) -> Any:
    """Return a literal's value; names of JSON's constants count as literals."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in JSON_NAMES:
            part.id = repr(JSON_NAMES[part.id])
    return ast.literal_eval(ast.unparse(node))


def is_json(value: Any) -> bool:
    """Tell whether JSON has a value: it has no sets, bytes, complex numbers and infinities."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def skip(text: str, place: int) -> int:
    """Return where white space and semicolons between calls end."""
    between = BETWEEN.match(text, place)
    return place if between is None else between.end()


def skip_end(text: str, place: int, end: str) -> int:
    """Return the place behind a mark that ends calls; at the end of a text and before calls it may lack."""
    if text.startswith(end, place):
        return place + len(end)
    if place < len(text) and BLOCK.match(text, place) is None:
        raise ValueError("calls without an end")
    return place


def split_call(text: str, names: Collection[str], *, is_start: bool) -> tuple[str, str]:
    """Return what is no call of a tool in the text so far, and the rest, which is one or may become one.

    Args:
        text: what came of an answer.
        names: of the tools.
        is_start: whether the answer begins with it.
    """
    if is_start and may_begin_call(text, names):
        return "", text
    mark = BLOCK.search(text)
    place = len(text) - max(count_overlap(text, begin) for begin in BLOCKS) if mark is None else mark.start()
    return text[:place], text[place:]


def may_begin_call(text: str, names: Collection[str]) -> bool:
    """Return whether an answer that is a call may begin so: by a mark, a tool's name or an object."""
    start = text.lstrip()
    for name in names:  # of Mistral's wording, whose marks tokenizers leave out of texts
        if name.startswith(start) or (start.startswith(name) and BEHIND_NAME.match(start, len(name))):
            return True
    if any(mark.startswith(start) or start.startswith(mark) for mark in (*BLOCKS, *STARTS)):
        return True
    return re.match(r"\[?\s*(\{|\Z)", start) is not None


def cut_calls(text: str) -> str:
    """Return what an answer that calls tools says beside its calls; space behind the first is left out."""
    if BLOCK.search(text) is None:
        return ""
    parts = []
    place = 0
    for block in find_blocks(text):
        parts.append(text[place : block.begin])
        place = block.end
    parts.append(text[place:])
    before, *others = parts
    return before + "".join(part for part in others if part.strip())
