"""Damages files as strangers and bad luck do: bytes, JSON, npz archives, safetensors headers, protobuf."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

DEEP = 100_000  # levels, more than any parser's stack
HUGE = 10**12  # of what a header claims, never of what is written
NAMES = (
    "../outside/weights.data",
    "../outside/tokenizer.json",
    "onnx/../../outside/secret.txt",
    "/etc/passwd",
    "C:\\Windows\\win.ini",
    "..\\outside\\secret.txt",
    "onnx/a\0b",
    "onnx/" + "a" * 300,
    "",
    ".",
    "onnx",
    "onnx/\u202egnp.exe",
    "onnx/\x1b[31mred\x1b[0m",
    "onnx/two\nlines",
    "manifest.json",
    "\ud800",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    HUGE,
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "a",
    "a" * 100_000,
    "\u202e\u0000\x1b[2J",
    [],
    [[]],
    [None],
    list(range(1000)),
    {},
    {"": None},
    {"a": {"b": [1]}},
    *NAMES,
)


class Mutator:
    """Makes damaged copies of files, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def change_bytes(self, data: bytes) -> bytes:
        """Flip, cut, repeat, insert or overwrite bytes at some places."""
        content = bytearray(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 8))):
            place = self.random.randrange(len(content) + 1)
            length = self.random.choice((1, 1, 2, 4, 8, 64))
            kind = self.random.randrange(6)
            if kind == 0 and place < len(content):
                content[place] ^= 1 << self.random.randrange(8)
            elif kind == 1:
                del content[place : place + length]
            elif kind == 2:
                content[place:place] = content[place : place + length]
            elif kind == 3:
                content[place : place + length] = self.random.randbytes(length)
            elif kind == 4:
                content[place : place + length] = self.random.choice((b"\xff", b"\0", b"\x7f")) * length
            else:
                del content[place:]
        return bytes(content)

    def change_head(self, data: bytes) -> bytes:
        """Change the beginning of a large file, or, now and then, any of it."""
        if self.random.randrange(4) == 0:
            return self.change_bytes(data)
        return self.change_bytes(data[:2048]) + data[2048:]

    def change_json(self, data: bytes) -> bytes:
        """Change a JSON document at some places, or, now and then, its text."""
        kind = self.random.randrange(20)
        if kind < 2 or data.lstrip()[:1] != b"{":  # vocab.txt is none
            return self.change_bytes(data)
        if kind == 2:
            return self.nest(json.loads(data))
        if kind == 3:
            return self.double_a_key(data)
        value = json.loads(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            value = self.change_value(value)
        return json.dumps(value).encode()  # half a surrogate pair and NaN too, as Python writes them

    def change_value(self, value: Any) -> Any:
        """Change a JSON value at one place in it."""
        places = list_places(value)
        if not places:
            return copy.deepcopy(self.random.choice(VALUES))
        owner, key = self.choose_place(value) if self.random.randrange(2) else self.random.choice(places)
        kind = self.random.randrange(8)
        if kind < 4:
            owner[key] = copy.deepcopy(self.random.choice(VALUES))
        elif kind == 4:
            del owner[key]
        elif kind == 5:
            other, other_key = self.random.choice(places)
            owner[key] = copy.deepcopy(other[other_key])
        elif kind == 6 and isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
            owner[key] = self.change_number(owner[key])
        elif kind == 6 and isinstance(owner[key], str):
            owner[key] = self.change_text(owner[key])
        elif isinstance(owner, dict):
            owner[str(self.random.choice(NAMES))] = owner.pop(key)
        else:
            owner.insert(key, copy.deepcopy(self.random.choice(VALUES)))
        return value

    def choose_place(self, value: Any) -> tuple[Any, Any]:
        """Choose a place by going down: long lists are chosen no more often than what stands beside them."""
        while True:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            key = self.random.choice(keys)
            inner = value[key]
            if not isinstance(inner, dict | list) or not inner or self.random.randrange(6) == 0:
                return value, key
            value = inner

    def change_number(self, number: float) -> float:
        third = number / 3 if abs(number) < 2**1000 else number // 3  # which no float is
        return self.random.choice((-number, number + 1, number - 1, number * 2, number * 1000, third))

    def change_text(self, text: str) -> str:
        place = self.random.randrange(len(text) + 1)
        piece = self.random.choice(("\0", "\u202e", "\ud800", "\x1b[2J", "\n", "/../", "é", text))
        return text[:place] + piece + text[place + self.random.randrange(2) :]

    def nest(self, value: Any) -> bytes:
        """Put thousands of brackets at one place."""
        places = list_places(value)
        if places:
            owner, key = self.random.choice(places)
            owner[key] = "HERE"
        depth = self.random.choice((100, 500, 2000, DEEP))
        left, right = self.random.choice((("[", "]"), ('{"a":', "}")))
        deep = left * depth + "1" + right * depth
        return json.dumps(value).replace('"HERE"', deep, 1).encode()

    def double_a_key(self, data: bytes) -> bytes:
        """Give an object a key twice, with another value."""
        key = self.random.choice(list(json.loads(data)) or [""])
        value = json.dumps(self.random.choice(VALUES))
        return data.rstrip().removesuffix(b"}") + f", {json.dumps(key)}: {value}}}".encode()

    def change_npz(self, data: bytes) -> bytes:
        """Change an archive of arrays: its bytes, an array's header, its members, or how it is packed."""
        kind = self.random.randrange(6)
        if kind == 0:
            return self.change_bytes(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = self.random.choice(sorted(members))
        if kind == 1:
            members[name] = self.change_bytes(members[name])
        elif kind == 2:
            del members[name]
        elif kind == 3:
            members[name] = members[self.random.choice(sorted(members))]
        elif kind == 4:
            members[name] = make_npy_header(self.random.choice(SHAPES), self.random.choice(TYPES))
        else:
            members[name] = self.change_array(members[name])
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        return out.getvalue()

    def change_array(self, data: bytes) -> bytes:
        """Give an array another shape, type or numbers; its limits other JSON."""
        array = np.load(io.BytesIO(data), allow_pickle=False)
        if array.dtype.kind == "U":
            array = np.array(self.change_json(str(array).encode()).decode(errors="replace"))
        else:
            kind = self.random.randrange(5)
            flat = array.reshape(-1)
            if kind == 0:
                array = flat[: self.random.randrange(flat.size + 1)]
            elif kind == 1:
                array = array[..., None]
            elif kind == 2:
                array = array.astype(self.random.choice(("f8", "i1", "u8", "U4", "c8", "?")))
            elif flat.size:
                array = array.copy()
                extreme = self.random.choice((-1, 2**31 - 1, 2**62, float("nan"), float("inf")))
                with np.errstate(all="ignore"):
                    array.reshape(-1)[self.random.randrange(flat.size)] = np.array(extreme).astype(
                        array.dtype
                    )
        out = io.BytesIO()
        np.save(out, array)
        return out.getvalue()

    def change_safetensors(self, data: bytes) -> bytes:
        """Change the header of a safetensors file, the header's length, or any byte."""
        kind = self.random.randrange(8)
        (length,) = struct.unpack("<Q", data[:8])
        header, body = data[8 : 8 + length], data[8 + length :]
        if kind == 0:
            return self.change_bytes(data)
        if kind == 1:
            claimed = self.random.choice((0, 1, length - 1, length + 1, HUGE, 2**63, 2**64 - 1))
            return struct.pack("<Q", claimed) + header + body
        if kind == 2:
            return data[: self.random.randrange(len(data))]
        header = self.change_json(header)
        return struct.pack("<Q", len(header)) + header + body

    def change_onnx(self, data: bytes) -> bytes:
        """Change an ONNX file: its bytes, or a field of its graph."""
        import onnx

        if self.random.randrange(3) == 0:
            return self.change_bytes(data)
        model = onnx.ModelProto.FromString(data)
        for _ in range(self.random.choice((1, 1, 2, 5))):
            self.random.choice(GRAPH_CHANGES)(self, model)
        return bytes(model.SerializeToString())


SHAPES = ((HUGE,), (2**31, 2**31), (-1,), (2**62, 4), (0,) * 40, (), (0, HUGE))
TYPES = ("<f4", "<i8", "|O", "<U1000000000", "|V99999999999", "<f4,<f4", "junk")


def make_npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return an .npy file that claims a shape and type, with next to no content."""
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 64


def list_places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value: its owner and the key or index there."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        owner = waiting.pop()
        items = (
            owner.items() if isinstance(owner, dict) else enumerate(owner if isinstance(owner, list) else ())
        )
        for key, inner in items:
            places.append((owner, key))
            waiting.append(inner)
    return places


def choose_node(mutator: Mutator, model: Any) -> Any:
    nodes = model.graph.node
    return mutator.random.choice(nodes) if nodes else model.graph.node.add()


def rename_operator(mutator: Mutator, model: Any) -> None:
    operators = ("MatMul", "Reshape", "Gather", "If", "Loop", "Scan", "Expand", "Tile", "Pad", "", "Nothing")
    choose_node(mutator, model).op_type = mutator.random.choice(operators)


def rewire(mutator: Mutator, model: Any) -> None:
    node = choose_node(mutator, model)
    other = choose_node(mutator, model)
    names = [*other.output, *other.input, "nowhere", ""]
    if node.input:
        node.input[mutator.random.randrange(len(node.input))] = mutator.random.choice(names)


def change_inputs(mutator: Mutator, model: Any) -> None:
    node = choose_node(mutator, model)
    if mutator.random.randrange(2) and node.input:
        del node.input[-1]
    else:
        node.input.append("nowhere")


def change_attribute(mutator: Mutator, model: Any) -> None:
    node = choose_node(mutator, model)
    attribute = mutator.random.choice(node.attribute) if node.attribute else node.attribute.add(name="axis")
    attribute.i = mutator.random.choice((-1, 2**31, -(2**63), 2**63 - 1, 7))
    if mutator.random.randrange(2):
        attribute.type = mutator.random.randrange(15)


def change_weight(mutator: Mutator, model: Any) -> None:
    weights = model.graph.initializer
    weight = mutator.random.choice(weights) if weights else weights.add(name="w")
    kind = mutator.random.randrange(5)
    if kind == 0:
        weight.dims.append(mutator.random.choice((-1, 0, 2, HUGE, 2**62)))
    elif kind == 1 and weight.dims:
        weight.dims[0] = mutator.random.choice((-1, 0, HUGE, 2**63 - 1))
    elif kind == 2:
        weight.data_type = mutator.random.choice((0, 1, 7, 8, 10, 11, 16, 22, 99))
    elif kind == 3 and weight.raw_data:
        weight.raw_data = weight.raw_data[: mutator.random.randrange(len(weight.raw_data))]
    else:
        change_place(mutator, weight)


def change_place(mutator: Mutator, weight: Any) -> None:
    """Let a weight lie elsewhere: in a file outside, behind the file's end, or below nothing."""
    weight.data_location = 1  # EXTERNAL
    places = {entry.key: entry.value for entry in weight.external_data}
    names = [name for name in NAMES if "\ud800" not in name]
    numbers = ("-1", "0", str(2**63), str(2**64), "1e9", "", "a", "18446744073709551615", str(HUGE))
    key = mutator.random.choice(("location", "offset", "length"))
    places[key] = mutator.random.choice(names if key == "location" else numbers)
    places.setdefault("location", "weights.data")
    del weight.external_data[:]
    for name, value in places.items():
        weight.external_data.add(key=name, value=value)


def change_value_info(mutator: Mutator, model: Any) -> None:
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    if not values:
        return
    kind = mutator.random.choice(values).type.tensor_type
    if kind.shape.dim and mutator.random.randrange(2):
        mutator.random.choice(kind.shape.dim).dim_value = mutator.random.choice((-1, 0, 3, HUGE, 2**62))
    else:
        kind.elem_type = mutator.random.choice((0, 1, 7, 8, 10, 16, 99))


def change_opset(mutator: Mutator, model: Any) -> None:
    if model.opset_import:
        found = mutator.random.choice(model.opset_import)
        found.version = mutator.random.choice((-1, 0, 1, 9, 999, 2**62))
        found.domain = mutator.random.choice((found.domain, "", "com.microsoft", "nobody"))


def nest_graphs(mutator: Mutator, model: Any) -> None:
    """Put graphs into one another's attributes, some hundred levels deep."""
    graph = model.graph
    for _ in range(mutator.random.choice((3, 90, 30))):
        node = graph.node.add(op_type="If", input=["x"], output=["y"])
        attribute = node.attribute.add(name="then_branch", type=5)
        graph = attribute.g


def remove_part(mutator: Mutator, model: Any) -> None:
    graph = model.graph
    part = mutator.random.choice(
        (graph.node, graph.initializer, graph.input, graph.output, model.opset_import)
    )
    if part:
        del part[mutator.random.randrange(len(part))]


GRAPH_CHANGES: tuple[Callable[[Mutator, Any], None], ...] = (
    rename_operator,
    rewire,
    change_inputs,
    change_attribute,
    change_weight,
    change_weight,
    change_value_info,
    change_opset,
    nest_graphs,
    remove_part,
)
