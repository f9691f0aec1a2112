"""Reads the names of one TensorRT release out of NVIDIA's public sources, into VERSION.json beside this file.

The folders are those of github.com/NVIDIA/TensorRT at the release's branch: `include`, `python`, and for
NvOnnxParser.h `parsers/onnx`, a submodule; since 10.14 that header lies in `include` too.

    python read_sources.py 10.16 TensorRT/python TensorRT/include [TensorRT/parsers/onnx]

A method or enumerator that the Python bindings take the address of, and no header declares, is printed.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

HEADERS = (
    "NvInfer.h",
    "NvInferLegacyDims.h",
    "NvInferRuntime.h",
    "NvInferRuntimeBase.h",
    "NvInferRuntimeCommon.h",
    "NvInferVersion.h",
    "NvOnnxParser.h",
)
BINDINGS = ("src/infer/py*.cpp", "src/parsers/py*.cpp", "src/pyTensorRT.cpp")
PACKAGES = ("packaging/tensorrt/__init__.py", "packaging/bindings_wheel/tensorrt/__init__.py")

NEVER_BUILT = re.compile(r"#if ENABLE_INETWORK_SERIALIZE.*?#endif", re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\w+|::|->|\S', re.DOTALL)
NO_METHOD = re.compile(r"TRT_\w+|noexcept|decltype|operator|static_assert|alignas|sizeof")
CLOSING = {"(": ")", "{": "}", "<": ">"}
VECTOR = {"append", "clear", "extend", "insert", "pop"}  # of every py::bind_vector


@dataclass
class Headers:
    """What headers declare: classes with their bases and public methods, enums with their numbers."""

    bases: dict[str, list[str]] = field(default_factory=dict)
    methods: dict[str, set[str]] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)

    def lacks(self, owner: str, name: str) -> bool:
        """Whether an enum, or an interface and its bases, were read and do not have this name."""
        if name.startswith("k"):
            enums = [members for key, members in self.enums.items() if key.split("::")[-1] == owner]
            return bool(enums) and not any(name in members for members in enums)
        if not re.match(r"I[A-Z]", owner) or owner not in self.methods:
            return False
        others = (base for base in self.bases[owner] if base in self.methods and base != owner)
        return name not in self.methods[owner] and all(self.lacks(base, name) for base in others)


@dataclass
class Scope:
    """A class that is being read, and whether in its public part; or a namespace."""

    owner: str | None
    public: bool = False


@dataclass
class Bindings:
    """What Python sees, and the C++ names that it is bound to, as (class, method or enumerator)."""

    classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    enums: dict[str, list[str]] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    bound: set[tuple[str, str]] = field(default_factory=set)


def tokens_of(text: str) -> list[str]:
    """C++ as a list of tokens, without comments and preprocessor lines."""
    text = DIRECTIVE.sub("", NEVER_BUILT.sub("", text))
    return [token for token in TOKEN.findall(text) if not token.startswith(("//", "/*"))]


def end_of(tokens: Sequence[str], start: int) -> int:
    """The index behind the bracket that closes the one at `start`."""
    opening = tokens[start]
    closing = CLOSING[tokens[start]]
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i] == opening) - (tokens[i] == closing)
        if depth == 0:
            return i + 1
    raise ValueError(f"{opening!r} is never closed: {' '.join(tokens[start : start + 20])}")


def read_header(text: str, into: Headers) -> None:
    """Adds a header's classes and enums; a class of an inline version, such as v_1_0, by its bare name."""
    tokens = tokens_of(text)
    parser = "nvonnxparser::" if "namespace nvonnxparser" in text else ""
    scopes: list[Scope] = []
    start = i = 0
    while i < len(tokens):
        pending = tokens[start:i]
        token = tokens[i]
        if token == "{" and "enum" in pending:
            i = end_of(tokens, i)
            name = [*until(pending, ":")][-1]
            name = parser + name if name in into.enums else name  # each library has an ErrorCode
            into.enums[name] = enumerators(tokens[start + len(pending) + 1 : i - 1])
        elif token == "{" and {"namespace", "extern"} & set(pending[:2]):
            scopes.append(Scope(None))
        elif token == "{" and {"class", "struct"} & set(pending[:1]):
            name = [word for word in until(pending, ":") if word != "final"][-1]
            scopes.append(Scope(name, public=pending[0] == "struct"))
            into.methods.setdefault(name, set())
            into.bases.setdefault(name, []).extend(last_names(pending[len([*until(pending, ":")]) + 1 :]))
        elif token == "{":
            i = end_of(tokens, i)
            add_method(pending, scopes, into)
            if tokens[i] != ",":  # else the next member of a constructor's list
                start = i
            continue
        elif token == ";":
            add_method(pending, scopes, into)
        elif token == ":" and pending in (["public"], ["protected"], ["private"]):
            scopes[-1].public = pending == ["public"]
        elif token == "}":
            scopes.pop()
        else:
            i += 1
            continue
        i = max(i, start + len(pending) + 1)
        start = i


def until(tokens: Sequence[str], stop: str) -> Iterator[str]:
    """The tokens before `stop`."""
    for token in tokens:
        if token == stop:
            return
        yield token


def last_names(tokens: Sequence[str]) -> list[str]:
    """The classes in a list such as `public nvinfer1::IA, public IB`, without their namespaces."""
    return [part.split()[-1] for part in " ".join(tokens).replace("::", " ").split(",") if part.split()]


def enumerators(tokens: Sequence[str]) -> dict[str, int]:
    """An enum's members and their numbers."""
    members: dict[str, int] = {}
    for part in " ".join(tokens).split(","):
        if words := part.split():
            number = re.search(r"= (\d+)[uUlL]*(?: < < (\d+))?$", part.strip())
            last = [*members.values()][-1] if members else -1
            members[words[0]] = int(number[1]) << int(number[2] or 0) if number else last + 1
    return members


def add_method(pending: Sequence[str], scopes: Sequence[Scope], into: Headers) -> None:
    """Adds what a declaration in a class names, if it is a public method."""
    owner = scopes[-1].owner if scopes and scopes[-1].public else None
    if owner is None or {"friend", "using"} & set(pending[:1]):
        return
    called = (a for a, b in pairwise(pending) if b == "(" and a.isidentifier())
    name = next((name for name in called if not NO_METHOD.fullmatch(name)), owner)
    if name != owner:
        into.methods[owner].add(name)


def read_bindings(texts: Sequence[str]) -> Bindings:
    """All that the pybind11 sources of one release define, in the order in which they are given."""
    found = Bindings()
    python_names: dict[str, str] = {}  # of a C++ class
    arguments: dict[str, list[str]] = {}  # of a Python class's py::class_<...>
    for text in texts:
        tokens = tokens_of(text)
        variables: dict[str, str] = {}
        i = 0
        while i < len(tokens):
            if tokens[i : i + 2] == ["py", "::"] and tokens[i + 2] in ("class_", "enum_", "bind_vector"):
                i = read_binding(tokens, i + 2, found, variables, python_names, arguments)
            elif tokens[i] in variables and tokens[i + 1] == ".":
                i = read_chain(tokens, i + 1, variables[tokens[i]], found)
            elif tokens[i : i + 4] == ["m", ".", "def", "("] and tokens[i + 4][0] == '"':
                found.functions.add(tokens[i + 4].strip('"'))
            elif tokens[i : i + 4] == ["m", ".", "attr", "("] and tokens[i + 6] == "=" != tokens[i + 7]:
                read_attribute(tokens, i, found)
            i += 1
    for name, parts in arguments.items():
        found.classes[name]["bases"] = [python_names[part] for part in parts if part in python_names]
    return found


def read_binding(
    tokens: Sequence[str],
    i: int,
    found: Bindings,
    variables: dict[str, str],
    python_names: dict[str, str],
    arguments: dict[str, list[str]],
) -> int:
    """Reads `py::class_<IA, IBase> variable{m, "A"}.def(...)` from `class_` on; returns where it ends."""
    kind = tokens[i]
    close = end_of(tokens, i + 1)
    types = ["".join(part) for part in arguments_of(tokens[i + 2 : close - 1])]
    variable = tokens[close] if tokens[close] not in CLOSING else ""
    opening = close + bool(variable)
    end = end_of(tokens, opening)
    scope, *rest = arguments_of(tokens[opening + 1 : end - 1])
    name = rest[0][0].strip('"')
    if scope[-1] in variables:
        name = f"{variables[scope[-1]]}.{name}"
    if variable:
        variables[variable] = name
    if kind == "enum_":
        found.enums[name] = []
    else:
        methods = set(VECTOR) if kind == "bind_vector" else set()
        found.classes[name] = {"bases": [], "methods": methods, "properties": set()}
    if kind == "class_":
        types = [part.removeprefix("nvinfer1::").removeprefix("nvonnxparser::") for part in types]
        python_names[types[0]] = name
        arguments[name] = types[1:]
    return read_chain(tokens, end, name, found)


def arguments_of(tokens: Sequence[str]) -> list[list[str]]:
    """The arguments between two brackets, each as its tokens."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in "({[<") - (token in ")}]>")
        if token == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def read_chain(tokens: Sequence[str], i: int, name: str, found: Bindings) -> int:
    """Reads `.def("x", ...).value("Y", ...)`, which belongs to `name`; returns where it ends."""
    while tokens[i] == ".":
        verb = tokens[i + 1]
        opening = i + 2 if tokens[i + 2] == "(" else end_of(tokens, i + 2)
        i = end_of(tokens, opening)
        inside = tokens[opening + 1 : i - 1]
        add_bound(inside, found)
        if verb == "export_values":
            found.classes[name.rpartition(".")[0]]["properties"].update(found.enums[name])
        elif verb == "value":
            found.enums[name].append(inside[0].strip('"'))
        elif name in found.classes and inside[:3] == ["py", "::", "init"]:
            found.classes[name]["methods"].add("__init__")
        elif name in found.classes and inside[0][0] == '"' and inside[0] != '"__del__"':
            kind = "methods" if verb in ("def", "def_static") else "properties"
            found.classes[name][kind].add(inside[0].strip('"'))
    return i


def add_bound(tokens: Sequence[str], found: Bindings) -> None:
    """Adds every `&IA::method` and every `Enum::kMEMBER`."""
    for i in range(len(tokens) - 2):
        owner, colons, name = tokens[i : i + 3]
        if colons == "::" and ((i and tokens[i - 1] == "&") or re.fullmatch(r"k[A-Z0-9_]+", name)):
            found.bound.add((owner, name))


def read_attribute(tokens: Sequence[str], i: int, found: Bindings) -> None:
    """Reads `m.attr("x") = ...;`: another name of an enum, or a constant."""
    name = tokens[i + 4].strip('"')
    value = tokens[i + 7 : i + 13]
    if value[:4] == ["m", ".", "attr", "("]:
        found.enums[name] = found.enums[value[4].strip('"')]
    elif not name.startswith("_"):
        found.constants.add(name)


def read_package(text: str, into: Bindings) -> None:
    """Adds what the package's __init__.py defines, and what it gives to the bindings' classes."""
    into.functions.update(re.findall(r"^def ([a-z]\w*)", text, re.MULTILINE))
    for owner, name in re.findall(r"^\s*([A-Z]\w*)\.(\w+) = ", text, re.MULTILINE):
        if owner in into.classes:
            into.classes[owner]["methods" if name.startswith("__") else "properties"].add(name)


def read_release(version: str, python: Path, folders: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """All names of a release, and the C++ names that the bindings use and the headers lack."""
    headers = {name: text for folder in folders for name, text in texts_of(folder, HEADERS).items()}
    bindings = texts_of(python, BINDINGS)
    package = texts_of(python, PACKAGES)
    declared = Headers()
    for text in headers.values():
        read_header(text, declared)
    found = read_bindings([*bindings.values()])
    for text in package.values():
        read_package(text, found)
    number = r"#define (?:NV_TENSORRT|TRT)_(?:MAJOR|MINOR|PATCH)(?:_ENTERPRISE)? (\d+)"
    names = {
        "version": version,
        "release": ".".join(re.findall(number, "".join(headers.values()))),
        "sources": {
            name: hashlib.sha256(text.encode()).hexdigest()
            for name, text in {**headers, **bindings, **package}.items()
        },
        "headers": {name: sorted(methods) for name, methods in declared.methods.items() if methods},
        "enums": declared.enums,
        "python": {
            "classes": {
                name: {key: value if key == "bases" else sorted(value) for key, value in parts.items()}
                for name, parts in found.classes.items()
            },
            "enums": found.enums,
            "functions": sorted(found.functions),
            "constants": sorted(found.constants),
        },
    }
    lost = sorted("::".join(pair) for pair in found.bound if declared.lacks(*pair))
    return names, lost


def texts_of(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    """A folder's files that fit a pattern, by their path from the folder's name on."""
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    parent = folder.resolve().parent
    return {path.resolve().relative_to(parent).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def compact(names: Mapping[str, Any]) -> str:
    """JSON with each class, enum and list on a line of its own."""

    def lines(value: Any, depth: int) -> str:
        if not isinstance(value, dict) or depth == 0 or not value:
            return json.dumps(value, separators=(",", ":"))
        inner = (f"{json.dumps(key)}:{lines(part, depth - 1)}" for key, part in sorted(value.items()))
        return "{\n" + ",\n".join(inner) + "\n}"

    parts = (f"{json.dumps(key)}:{lines(value, 2 if key == 'python' else 1)}" for key, value in names.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(version: str, python: str, *folders: str) -> None:
    names, lost = read_release(version, Path(python), [Path(folder) for folder in folders])
    Path(__file__).with_name(f"{version}.json").write_text(compact(names), encoding="utf-8")
    for name in lost:
        print(f"TensorRT {version}: bound in Python, but in no header: {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
