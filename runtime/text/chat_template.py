"""Renders a checkpoint's chat template as transformers does, in jinja2's sandbox and within limits.

A template is data from elsewhere. It reaches no file, no attribute that begins with "_" and no method that
changes what it was given; loops in loops, and text that doubles again and again, end in an error. What one
call of a filter or method makes is limited by memory alone.
Needs jinja2, which nothing else of the runtime loads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import BackendUnavailableError, BundleError, InputError
from .tokenizer import join_lines

LEAST_VERSION = (3, 1, 6)  # those before have known ways out of the sandbox
MAX_STEPS = 1_000_000  # turns of loops, and calls, which take as long as so many turns:
CALL_STEPS = 10
MAX_LENGTH = 2**24  # characters of what is rendered, elements of what operators make
MAX_BITS = 4096  # of integers that operators make
# Filters that no template can name: they stand between loops or `~` and their operands.
COUNTED = "counted steps"
JOINED = "joined texts"


class ChatTemplate:
    """A compiled template, which errors call `source`; safe to use from several threads."""

    def __init__(self, text: str, source: str) -> None:
        found = version("jinja2")
        if tuple(int(number) for number in found.split(".")[:3] if number.isdecimal()) < LEAST_VERSION:
            raise BackendUnavailableError(
                f"chat templates need jinja2 3.1.6, this is {found}: pip install 'planforge[chat]'"
            )
        self.source = source
        self._environment = Sandbox()
        self._lock = threading.Lock()  # one count of steps
        try:
            self._template = self._environment.from_string(text)
        except Exception as error:  # the compiler's own, and Python's of what it made of the template
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise BundleError(
                f"{source}{line}: the chat template is no template of jinja2 ({join_lines(error)}); mend it"
                " in the checkpoint, and export again"
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation; variables hold nothing but texts, numbers, lists and dicts."""
        pieces = []
        length = 0
        try:
            with self._lock:
                self._environment.steps = 0
                for piece in self._template.generate(variables):
                    length += len(piece)
                    check_size("what is rendered", length, MAX_LENGTH, "characters")
                    pieces.append(piece)
        except (SecurityError, OverflowError, MemoryError, RecursionError) as error:
            raise BundleError(f"{self.source}: the chat template is stopped: {join_lines(error)}") from error
        except Refused as error:
            raise InputError(
                f"the chat template refuses the messages: {join_lines(error)}", option="messages"
            ) from error
        except Exception as error:  # whatever its operators and filters raise
            raise InputError(
                f"the chat template cannot render these messages: {join_lines(error)}; give them the roles"
                f" and keys that {self.source} reads",
                option="messages",
            ) from error
        return "".join(pieces)


class Refused(jinja2.TemplateError):
    """A template's own raise_exception."""


class Sandbox(ImmutableSandboxedEnvironment):
    """transformers' environment, which counts steps."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.steps = 0  # since a rendering began
        self.filters |= {"tojson": write_json, COUNTED: self.count_steps, JOINED: join_texts}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": format_now,
            "dict": make_dict,
            "namespace": PublicNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        bounded: nodes.Template = Bounds().visit(super()._parse(source, name, filename))
        bounded.set_environment(self)
        return bounded

    def step(self, count: int = 1) -> None:
        self.steps += count
        check_size("its work", self.steps, MAX_STEPS, "steps")

    def count_steps(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.step(CALL_STEPS)
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            most = sum(bits)
            if operator == "**":
                most = bits[0] * abs(right)
            elif operator == "+":
                most = max(bits)
            check_size(f"a number from {operator!r}", most, MAX_BITS, "bits")
        elif operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            check_size("'+'", len(left) + len(right), MAX_LENGTH, "elements")
        elif operator == "*":
            for values, times in ((left, right), (right, left)):
                if isinstance(values, Sequence) and isinstance(times, int):
                    check_size("'*'", len(values) * times, MAX_LENGTH, "elements")
        return super().call_binop(context, operator, left, right)


class Bounds(NodeTransformer):
    """Puts filters that count between a template's loops and `~`, and their operands."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2's way to name them)
        self.generic_visit(node)
        node.iter = add_filter(node.iter, COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return add_filter(nodes.List(node.nodes, lineno=node.lineno), JOINED)


def add_filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Generation(Extension):
    """The tag {% generation %}, which marks what a model was trained to say: rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PublicNamespace(Namespace):
    """`namespace(...)` whose names never begin with "_"."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace's {name!r} begins with '_'")


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return `dict(...)`: a template gets no type, nor what can be reached from it."""
    return dict(*args, **kwargs)


def join_texts(values: Sequence[Any]) -> str:
    """Join the operands of `~`."""
    texts = [str(value) for value in values]
    check_size("'~'", sum(map(len, texts)), MAX_LENGTH, "characters")
    return "".join(texts)


def write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: Any) -> NoReturn:
    raise Refused(str(message))


def format_now(form: str) -> str:
    return datetime.now().strftime(form)


def check_size(what: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise SecurityError(f"{what} has more than {most} {unit}")
