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

CALL = "<tool_call>"
# Marks that begin calls at any place of an answer, and those that end them.
BLOCKS = {CALL: "</tool_call>", "<|tool_call|>": "<|/tool_call|>", "<function_calls>": "</function_calls>"}
# Marks that begin calls at the start of an answer alone, as an object does.
STARTS = ("[TOOL_CALLS]", "<|python_tag|>")
BLOCK = re.compile("|".join(map(re.escape, BLOCKS)))
START = re.compile(rf"\s*(?:{'|'.join(map(re.escape, STARTS))})")
# Mistral's: name[ARGS]{...}, which may have an id; what tokenizers leave out of texts may be missing.
NAMED = re.compile(r"\s*(?:\[TOOL_CALLS\]\s*)?([\w.-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
ID = re.compile("[A-Za-z0-9]{9}")  # Mistral's, which follows the name where its mark is missing
FIRST = re.compile(r"\s*(?=[{\[])")
# What begins calls in Python's syntax: a comment, or a name and a parenthesis, which lines may break.
FIRST_PYTHON = re.compile(r"[\s\\(]*(?:#|[\w.]+\s*[\\(])")
BETWEEN = re.compile(r"[\s;]*")
JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_CALLS_TEXT = 2**16  # characters of calls in Python's syntax, which is parsed as a whole
# Strings and comments of Python, which may hold the mark that ends calls, and that mark. A string that
# nothing closes ends with its line, or with the text.
PYTHON_PART = re.compile(
    r'''"""(?:[^"\\]|\\.|"(?!""))*(?:""")?'''
    r"""|'''(?:[^'\\]|\\.|'(?!''))*(?:''')?"""
    r"""|"(?:[^"\\\n]|\\.)*"?"""
    r"""|'(?:[^'\\\n]|\\.)*'?"""
    r"|#(?:(?!</function_calls>)[^\n])*"
    r"|(?P<end></function_calls>)",
    re.DOTALL,
)
# A prefix that makes backslashes of the string behind it plain, and escapes of strings that are not raw.
RAW = re.compile(r"[rR][bBfF]?\Z")
ESCAPE = re.compile(r"\\(?:(?P<octal>[4-7][0-7]{2})|(?P<known>[\n\r\\'\"abfnrtvxNuU0-7])|.)", re.DOTALL)
UNREADABLE = (ValueError, RecursionError, MemoryError, SyntaxError)

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
        calls = [call for block in list_blocks(text, names) for call in block.calls]
    except UNREADABLE:
        return []
    return calls if all(name in names for name, _ in calls) else []


def list_blocks(text: str, names: Collection[str]) -> list[Block]:
    """Return all calls of an answer, the whole of which may be one block; raise one of UNREADABLE."""
    try:
        return [Block(0, len(text), read_whole(text, names))]
    except UNREADABLE:  # its text may still have calls between marks
        return list(find_blocks(text))


def find_blocks(text: str) -> Iterator[Block]:
    """Yield the calls between marks; ValueError where they cannot be read.

    A mark behind which no call begins is text.
    """
    place = 0
    while (mark := BLOCK.search(text, place)) is not None:
        is_python = mark[0] == "<function_calls>"
        if (FIRST_PYTHON if is_python else FIRST).match(text, mark.end()) is None:
            place = mark.end()
        elif is_python:
            calls, place = read_python_calls(text, mark.end())
            yield Block(mark.start(), place, calls)
        else:
            values, place = read_values(text, mark.end())
            place = skip_end(text, place, BLOCKS[mark[0]])
            yield Block(mark.start(), place, [read_object(value) for value in values])


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
    """Return calls in Mistral's newer wording."""
    calls = []
    place = 0
    while place < len(text):
        named = NAMED.match(text, place)
        if named is None:
            raise ValueError("no name of a tool")
        arguments, place = DECODER.raw_decode(text, named.end())
        calls.append((drop_id(named[1], names), arguments))
        place = skip(text, place)
    return calls


def drop_id(word: str, names: Collection[str]) -> str:
    """Return the name of a tool without the id of the call, which may follow it without a mark."""
    name = word[:-9]
    return name if word not in names and name in names and ID.fullmatch(word[-9:]) else word


def read_values(text: str, place: int) -> tuple[list[Any], int]:
    """Return objects, or lists of them, that stand one behind the other, and where they end."""
    values: list[Any] = []
    first = FIRST.match(text, place)
    if first is None:
        raise ValueError("no JSON")
    place = first.end()
    while text.startswith(("{", "["), place):
        value, place = DECODER.raw_decode(text, place)
        if value == []:
            raise ValueError("no calls")
        values += value if isinstance(value, list) else [value]
        place = skip(text, place)
    return values, place


def read_object(value: Any) -> Call:
    """Return the call that an object of JSON asks for; arguments may be JSON in a string, as OpenAI's."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no name and arguments")
    return name, arguments


def read_python_calls(text: str, begin: int) -> tuple[list[Call], int]:
    """Return calls in Python's syntax, one a line, and where their block ends; its mark may lack."""
    parts = PYTHON_PART.finditer(text, begin)
    mark = next((part for part in parts if part["end"]), None)
    end = len(text) if mark is None else mark.start()
    if end - begin > MAX_CALLS_TEXT:
        raise ValueError("too long")
    return parse_python(text[begin:end]), end if mark is None else mark.end()


def parse_python(source: str) -> list[Call]:
    calls = []
    for statement in ast.parse(PYTHON_PART.sub(spell_string, source).strip()).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            raise ValueError("no call with named arguments")
        arguments: dict[str, Any] = {}
        for word in call.keywords:
            if word.arg is None or word.arg in arguments:
                raise ValueError("an argument has no name, or one that another has")
            arguments[word.arg] = read_literal(word.value)
        if not all(map(is_json, arguments.values())):
            raise ValueError("an argument is not JSON")
        calls.append((ast.unparse(call.func), arguments))
    return calls


def spell_string(part: re.Match[str]) -> str:
    """Return a string or a comment of Python without escapes that Python warns of, of the same value.

    Whether its warnings are errors is set for the whole process, which is not ours.
    """
    before = part.string[max(0, part.start() - 2) : part.start()]
    return part[0] if part[0].startswith("#") or RAW.search(before) else ESCAPE.sub(spell_escape, part[0])


def spell_escape(escape: re.Match[str]) -> str:
    """Return an escape that Python knows: a backslash before another letter is a backslash."""
    if escape["octal"]:
        return f"\\u{int(escape['octal'], 8):04x}"
    return escape[0] if escape["known"] else "\\" + escape[0]


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
